"""While the hub is away nodes are unknown, never lost; and a node that a hub does not take says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.cluster.answering import Answering
from gpurt.cluster.bus import HubAway, HubBack, NodeUp
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.errors import BusUnavailable
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.records import NodeState
from gpurt.cluster.view import HUB_GRACE_S, MasterView
from gpurt.cluster.worker import WorkerConfig, run_worker, why_refused
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_hub import MAX_ADMISSION_BYTES, Admission, admission_of
from gpurt.cluster.zenoh_subscription import ZenohSubscription
from tests.cluster.support import FakeClock, device, free_port, snapshot, until
from tests.stories.chaos_proxy import ChaosProxy

NODES = ("n1", "n2", "n3")

steps = st.lists(
    st.one_of(
        st.sampled_from(["away", "back"]).map(lambda word: (word, "", 0.0)),
        st.tuples(st.sampled_from(["up", "down", "left", "answer"]), st.sampled_from(NODES), st.just(0.0)),
        st.tuples(st.just("wait"), st.just(""), st.floats(0.1, 15.0)),
    ),
    max_size=40,
)


def run(taken: list[tuple[str, str, float]]) -> None:
    """Whatever happens in whatever order, with the hub away nobody becomes suspect or lost, and nobody who is back with
    it, or has left, is believed to be away."""
    clock = FakeClock()
    view = MasterView(clock=clock)
    up: set[str] = set()
    away = False
    for word, node, seconds in taken:
        before = {name: record.state for name, record in view.snapshot().nodes.items()}
        match word:
            case "away":
                away = True
                up.clear()
                view.hub_away()
            case "back":
                if not away:
                    up.clear()
                away = False
                view.hub_back()
            case "up" if not away:
                up.add(node)
                view.node_up(node)
            case "down" | "left":
                up.discard(node)
                view.node_down(node, left=word == "left")
            case "answer" if not away and node in up:
                view.apply_snapshot(snapshot(device(), node=node), sole=True)
            case "wait":
                clock.now += seconds
                while (due := view.deadline) is not None and due <= clock.now:
                    view.tick()
            case _:
                pass
        for name, record in view.snapshot().nodes.items():
            if away:
                assert record.state is not NodeState.SUSPECT
                assert record.state is not NodeState.LOST or before.get(name) is NodeState.LOST
                assert record.state is not NodeState.HEALTHY
            if record.state is not NodeState.HEALTHY:
                assert not any(each.available for each in record.devices.values())
            if record.state is NodeState.HEALTHY:
                assert name in up


@given(steps)
def test_with_the_hub_away_nobody_is_lost(taken: list[tuple[str, str, float]]) -> None:
    run(taken)


def test_who_does_not_come_back_with_the_hub_is_lost() -> None:
    clock = FakeClock()
    view = MasterView(clock=clock)
    for name in NODES:
        view.node_up(name)
        view.apply_snapshot(snapshot(device(), node=name))
    view.node_down("n1")  # the end of its token may come before that of the connection is noticed
    view.hub_away()
    clock.now += 3600
    assert view.deadline is None
    view.tick()
    assert {record.state for record in view.snapshot().nodes.values()} == {NodeState.UNKNOWN}
    view.hub_back()
    for name in ("n1", "n2"):
        view.node_up(name)
        view.node_answered(name, view.snapshot().nodes[name].epoch)
    assert view.deadline == clock.now + HUB_GRACE_S
    clock.now += HUB_GRACE_S
    view.tick()
    states = {name: record.state for name, record in view.snapshot().nodes.items()}
    assert states == {"n1": "healthy", "n2": "healthy", "n3": "lost"}


@asynccontextmanager
async def watched(endpoint: str) -> AsyncIterator[MasterView]:
    view, ready = MasterView(), asyncio.Event()
    config = MasterConfig("test", endpoint, listen=False)
    task = asyncio.create_task(run_master(config, view, on_ready=lambda _: ready.set()))
    await ready.wait()
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def working(config: WorkerConfig) -> AsyncIterator[None]:
    task = asyncio.create_task(run_worker(config))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.wide
async def test_nodes_are_unknown_until_the_hub_is_back(tmp_path: Path) -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    hub = ZenohEngine(cluster="test", endpoint=endpoint, listen=True)
    await hub.start()
    config = WorkerConfig("w1", "test", endpoint, registry_path=tmp_path / "r.json", simulate="h100", links=False)
    async with watched(endpoint) as view, working(config):
        await until(lambda: view.snapshot().available_devices)
        changes = view.changes()
        await hub.close()
        await until(lambda: view.snapshot().nodes["w1"].state is NodeState.UNKNOWN)
        assert not view.snapshot().available_devices
        await asyncio.sleep(2 * view.grace_s)
        assert view.snapshot().nodes["w1"].state is NodeState.UNKNOWN
        await hub.start()
        await until(lambda: view.snapshot().available_devices)
        changes.close()
        kinds = [change.kind async for change in changes if change.kind.startswith("node_")]
        assert ChangeKind.NODE_LOST not in kinds
        assert kinds.index(ChangeKind.NODE_UNKNOWN) < kinds.index(ChangeKind.NODE_BACK)
    await hub.close()


# Who is not taken


async def test_a_mistyped_cluster_is_recognised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    hub = ZenohEngine(cluster="lab2", endpoint=endpoint, listen=True)
    await hub.start()
    config = WorkerConfig("w1", "lab", endpoint, registry_path=tmp_path / "r.json", simulate="h100", links=False)
    with caplog.at_level(logging.WARNING):
        async with working(config):
            await until(lambda: "another cluster is there: 'lab2', not 'lab'" in caplog.text)
    assert "--cluster lab2" in caplog.text
    await hub.close()


def test_what_a_worker_says_of_a_refusal() -> None:
    config = WorkerConfig("w1", "lab")
    assert why_refused(config, None) is None
    assert why_refused(config, Admission("lab", listed=True)) is None
    assert "'lab2'" in (why_refused(config, Admission("lab2", listed=True)) or "")
    refused = why_refused(config, Admission("lab", listed=False)) or ""
    assert "not on the hub's roster" in refused
    assert "gpurt cluster enrol" in refused


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"cluster":1}',
        b'{"cluster":"A B","listed":true}',
        b"[" * MAX_ADMISSION_BYTES,
        b"\xff",
    ],
    ids=lambda payload: str(payload[:20]),
)
def test_what_is_no_answer_of_a_hub(payload: bytes) -> None:
    assert admission_of(payload) is None


async def test_after_a_return_of_the_hub_each_node_that_is_there_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what zenoh tells of tokens by itself has come too early."""
    by_itself, told = True, ZenohSubscription._on_token  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(ZenohSubscription, "_on_token", lambda self, sample: told(self, sample) if by_itself else None)
    port = free_port()
    proxy = await ChaosProxy(port, "0").open()
    engines = [
        ZenohEngine(cluster="lab", endpoint=f"tcp/127.0.0.1:{at}", listen=listen)
        for at, listen in ((port, True), (port, False), (proxy.port, False))
    ]
    for each in engines:
        await each.start()
    _, node, watcher = engines
    await node.join("n1", b"state")
    subscription = await watcher.subscribe()
    async with asyncio.timeout(30):
        assert await anext(subscription) == NodeUp("n1")
        by_itself = False
        proxy.cut()
        assert isinstance(await anext(subscription), HubAway | HubBack)
        while await anext(subscription) != NodeUp("n1"):
            pass
    await asyncio.gather(*(each.close() for each in engines))
    await proxy.close()


async def test_an_answer_that_cannot_be_sent_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The connection may end while a node works on a command."""

    async def work(payload: bytes) -> bytes:
        return payload

    async def lost(payload: bytes, error: bool) -> None:
        raise BusUnavailable("the connection has ended")

    answering = Answering(work)
    with caplog.at_level(logging.INFO):
        answering.take(b"ping", lost)
        await until(lambda: "could not be sent" in caplog.text)
    assert "never retrieved" not in caplog.text
