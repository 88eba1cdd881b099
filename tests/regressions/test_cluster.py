"""Faults of the cluster layer, each with the smallest sequence that shows it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpurt.cluster.bus import NodeDown, NodeUp
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import BusClosed, InvalidName
from gpurt.cluster.inbox import Inbox
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.keys import LIVE, STATE, node_key
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.records import NodeState
from gpurt.cluster.view import MasterView
from gpurt.cluster.zenoh_callbacks import SessionCallbacks
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_settings import check_endpoint
from tests.cluster.support import E1, HOST_A, device, free_port, result, until


async def engine(bus: InProcessBus) -> InProcessEngine:
    made = InProcessEngine(bus)
    await made.start()
    return made


async def test_a_slow_subscriber_does_not_hear_last_that_a_live_node_is_gone() -> None:
    bus = InProcessBus("test", buffer_items=1)
    node = await engine(bus)
    subscription = await (await engine(bus)).subscribe()
    await node.join("n1", b"state")
    await node.leave()  # only the latest word on a node is kept
    assert await anext(subscription) == NodeDown("n1", left=True)
    await node.leave()
    await node.join("n1", b"state")
    assert await anext(subscription) == NodeUp("n1")
    with pytest.raises(TimeoutError):  # nothing more to hear
        async with asyncio.timeout(0):
            await anext(subscription)


async def test_a_node_that_appears_while_the_inbox_is_emptied() -> None:
    class Hurried(dict[str, Any]):
        """The bus's thread gets its turn between two steps of the consumer."""

        def __iter__(self) -> Iterator[str]:
            iterator = super().__iter__()
            self["late"] = NodeUp("late")
            return iterator

    inbox = Inbox(asyncio.get_running_loop())
    inbox._membership = Hurried()  # pyright: ignore[reportPrivateUsage]
    inbox.post(NodeUp("n1"))
    inbox.post(NodeDown("n2"))
    inbox.close()
    assert {item.node async for item in inbox} >= {"n1", "n2"}


async def test_a_publisher_that_left_may_join_again() -> None:
    bus = InProcessBus("test")
    view, node = MasterView(), await engine(bus)
    publisher = NodePublisher(node, "n1", host=HOST_A, epoch=E1)

    def state() -> NodeState | None:
        record = view.node("n1")
        return record and record.state

    watching = asyncio.create_task(ClusterObserver(await engine(bus), view).run())
    try:
        for _ in range(2):
            await publisher.start(result(device()))
            await until(lambda: state() is NodeState.HEALTHY, "the node to be healthy")
            assert list(view.snapshot().available_devices) == [("n1", "GPU-a")]
            await publisher.leave()
            await until(lambda: state() is NodeState.LEFT, "the node to have left")
    finally:
        watching.cancel()


@pytest.mark.parametrize("same_observer", [True, False])
async def test_a_node_that_died_while_nobody_watched_is_not_healthy(same_observer: bool) -> None:
    bus = InProcessBus("test")
    view, dying, staying, master = MasterView(grace_s=0.05), *[await engine(bus) for _ in range(3)]
    for node, name in ((dying, "dying"), (staying, "staying")):
        await NodePublisher(node, name, host=HOST_A, epoch=E1).start(result(device(name)))

    def states() -> dict[str, NodeState]:
        return {name: record.state for name, record in view.snapshot().nodes.items()}

    observer = ClusterObserver(master, view)
    watching = asyncio.create_task(observer.run())
    await until(lambda: states() == {"dying": NodeState.HEALTHY, "staying": NodeState.HEALTHY})
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await dying.close()
    observer = observer if same_observer else ClusterObserver(master, view)
    watching = asyncio.create_task(observer.run())
    try:
        await until(lambda: states() == {"dying": NodeState.LOST, "staying": NodeState.HEALTHY})
    finally:
        watching.cancel()


@pytest.fixture
def endpoint() -> str:
    return f"tcp/127.0.0.1:{free_port()}"


@pytest.mark.parametrize("key", ["*", "BAD"])
async def test_an_answer_under_a_name_that_is_none_harms_nobody(endpoint: str, key: str) -> None:
    hub, node = (ZenohEngine(cluster="test", endpoint=endpoint, listen=listen) for listen in (True, False))
    await hub.start()
    view = MasterView()
    observer = ClusterObserver(hub, view)
    watching = asyncio.create_task(observer.run())
    answered = threading.Event()
    try:
        await node.start()
        session: Any = node._session  # pyright: ignore[reportPrivateUsage]

        def lie(query: Any) -> None:
            with query:
                query.reply(f"gpurt/v1/test/node/{key}/state", b"{}")
            answered.set()

        asked = "evil" if key == "*" else key
        declared = [
            await asyncio.to_thread(session.declare_queryable, f"gpurt/v1/test/node/{asked}/{STATE}", lie),
            await asyncio.to_thread(session.liveliness().declare_token, node_key("test", "evil", LIVE)),
        ]
        async with asyncio.timeout(20):
            while not answered.is_set():  # the hub knows of the queryable a moment after it was declared
                assert await hub.snapshot("*", timeout=1) == ()
        await NodePublisher(node, "good", host=HOST_A, epoch=E1).start(result(device()))
        await until(lambda: view.node("good"), "the good node")
        assert not watching.done()
        del declared
    finally:
        watching.cancel()
        await node.close()
        await hub.close()


async def test_a_start_that_was_cancelled_takes_nothing_from_the_next(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, node = (ZenohEngine(cluster="test", endpoint=endpoint, listen=listen) for listen in (True, False))
    await hub.start()
    opening, go_on = threading.Event(), threading.Event()

    def lanes() -> int:
        return sum(thread.name == "gpurt:zenoh:test" for thread in threading.enumerate())

    original = ZenohEngine._open_session  # pyright: ignore[reportPrivateUsage]

    def slow(engine: ZenohEngine, *args: Any) -> Any:
        first = not opening.is_set()
        opened = original(engine, *args)
        if first:
            opening.set()
            go_on.wait(5)
        return opened

    monkeypatch.setattr(ZenohEngine, "_open_session", slow)
    first = asyncio.create_task(node.start())
    await asyncio.to_thread(opening.wait, 5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    try:
        await node.start()
        go_on.set()
        await until(lambda: lanes() <= 2, "the first lane's end")
        await node.join("n1", b"state")
        async with asyncio.timeout(5):
            while not (replies := await hub.snapshot("n1")):  # the hub may hear of the node a moment later
                await asyncio.sleep(0.01)
        assert [reply.payload for reply in replies] == [b"state"]
    finally:
        go_on.set()
        await node.close()
        await hub.close()


async def test_two_starts_at_once_both_wait_for_the_session(endpoint: str) -> None:
    bus = ZenohEngine(cluster="test", endpoint=endpoint, listen=True)
    first = asyncio.create_task(bus.start())
    await asyncio.sleep(0)
    try:
        await bus.start()
        await bus.join("n1", b"state")
    finally:
        await first
        await bus.close()


async def test_a_close_ends_a_start_that_waits_and_says_why(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    node = ZenohEngine(cluster="test", endpoint=endpoint)
    with caplog.at_level(logging.INFO):
        starting = asyncio.create_task(node.start())
        await until(lambda: "waiting for a master" in caplog.text, "the word that there is no master")
        await node.close()
    with pytest.raises(BusClosed):
        await starting
    assert caplog.text.count("waiting for a master") == 1


@pytest.mark.parametrize(
    "address",
    ["tcp/127.0.0.1:99999", "tcp/127.0.0.1:65536", "tcp/127.0.0.1:00", "tcp/host", "tcp/a:b", "tcp/:7447", "tcp/a:-5"],
)
def test_an_address_that_never_works_is_refused_and_not_tried_for_ever(address: str) -> None:
    with pytest.raises(InvalidName, match="port 1 to 65535"):
        check_endpoint(address)


@pytest.mark.parametrize(
    "address", ["tcp/host:7447", "tcp/[::1]:65535", "tls/h:1#root_ca_certificate=/ca.pem", "unixsock-stream//run/x"]
)
def test_addresses_that_may_work(address: str) -> None:
    assert check_endpoint(address) == address


async def test_a_goodbye_arrives_before_the_token_ends(endpoint: str) -> None:
    hub, node = (ZenohEngine(cluster="test", endpoint=endpoint, listen=listen) for listen in (True, False))
    await hub.start()
    await node.start()
    view = MasterView()
    changes = view.changes()
    watching = asyncio.create_task(ClusterObserver(hub, view).run())

    def state() -> NodeState | None:
        record = view.node("n1")
        return record and record.state

    try:
        for run in range(1, 9):
            publisher = NodePublisher(node, "n1", host=HOST_A, epoch=Epoch.new(run))
            await publisher.start(result(device()))
            await until(lambda: state() is NodeState.HEALTHY, "the node to be healthy")
            await publisher.leave()
            await until(lambda: state() is NodeState.LEFT, "the node to have left")
        changes.close()
        assert "node_suspect" not in [change.kind async for change in changes]
    finally:
        watching.cancel()
        await node.close()
        await hub.close()


def test_the_package_exports_what_users_need() -> None:
    import gpurt.cluster as cluster

    for name in cluster.__all__:
        assert getattr(cluster, name).__name__ == name
    assert {"NodePublisher", "MasterView"} <= set(dir(cluster))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        cluster.Nothing  # noqa: B018
    code = "import sys, gpurt.cluster; sys.exit(any(m.startswith('gpurt.cluster.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


async def test_a_closed_bus_leaves_no_callback_that_would_abort_the_process(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of zenoh that wants the GIL while the interpreter ends makes the C library abort: Ctrl-C gave -6."""
    wrap, made = SessionCallbacks.wrap, dict[int, SessionCallbacks]()
    ended: list[int] = []

    def slowly(self: SessionCallbacks, call: Any, *, on_end: Any = None) -> Any:
        made[id(self)] = self

        def late() -> None:
            if on_end is not None:
                on_end()
            time.sleep(0.02)  # on zenoh's thread: who does not wait is gone by then
            ended.append(1)

        return wrap(self, call, on_end=late)

    monkeypatch.setattr(SessionCallbacks, "wrap", slowly)
    # A busy machine needs longer than a worker may.
    monkeypatch.setattr(SessionCallbacks.wait, "__defaults__", (20.0,))

    async def answer(payload: bytes) -> bytes:
        return payload

    hub, node = (ZenohEngine(cluster="test", endpoint=endpoint, listen=listen) for listen in (True, False))
    await hub.start()
    await node.start()
    seen = await hub.subscribe()
    await node.join("n1", b"state", answer)
    while not isinstance(await anext(seen), NodeUp):  # only then does the hub know where commands go
        continue
    assert await hub.command("n1", b"ping") == b"ping"
    await node.leave()
    await node.close()
    await hub.close()
    assert [callbacks.wait(0) for callbacks in made.values()] == [True, True]
    # The node's state and commands, its watch of the hub and its flush; the hub's tokens, question and door. The thread
    # that takes out events has ended as well, or it would still be counted.
    assert len(ended) == 7


async def test_a_start_that_is_given_up_leaves_no_thread_inside_zenoh(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, inside = ZenohEngine._open_session, threading.Event()  # pyright: ignore[reportPrivateUsage]

    def watched(engine: ZenohEngine, *args: Any) -> Any:
        inside.set()
        try:
            return original(engine, *args)
        finally:
            inside.clear()

    monkeypatch.setattr(ZenohEngine, "_open_session", watched)
    monkeypatch.setattr("gpurt.cluster.zenoh_engine.END_TIMEOUT_S", 20.0)
    starting = asyncio.create_task(ZenohEngine(cluster="test", endpoint=endpoint).start())
    await until(inside.is_set, "the open")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not inside.is_set()
