"""The bus over a real NATS server, which is killed, frozen and robbed of its store."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from gpurt.cluster.bus import EventReceived, EventsDropped, HubAway, HubBack, NodeDown, NodeUp
from gpurt.cluster.endpoints import check_endpoint, engine_at
from gpurt.cluster.envelope import MAX_EVENT_BYTES
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import BusClosed, BusUnavailable, InvalidName, NoAnswer
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.nats_engine import NatsEngine
from gpurt.cluster.nats_link import NatsLink
from gpurt.cluster.nats_outbox import _trouble  # pyright: ignore[reportPrivateUsage]
from gpurt.cluster.nats_settings import NatsSettings, stream_name
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import WorkerConfig
from gpurt.cluster.zenoh_engine import ZenohEngine
from tests.cluster.nats_server import NatsServer, find_nats_server
from tests.cluster.support import Child, device, event_bytes, free_port, snapshot, until


@pytest.fixture
def server() -> Iterator[NatsServer]:
    made = NatsServer().start()
    yield made
    made.end()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()


@asynccontextmanager
async def running(task: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def started(server: NatsServer, count: int = 2, **settings: Any) -> AsyncIterator[list[NatsEngine]]:
    made = [
        NatsEngine(cluster="test", endpoint=server.endpoint, settings=NatsSettings(**settings)) for _ in range(count)
    ]
    await asyncio.gather(*(engine.start() for engine in made))
    try:
        yield made
    finally:
        await asyncio.gather(*(engine.close() for engine in made))


def client_of(engine: NatsEngine) -> Any:
    return engine._client  # pyright: ignore[reportPrivateUsage]


async def test_a_killed_node_is_suspect_within_a_quarter_second_then_lost_then_back(
    server: NatsServer, children: list[Child]
) -> None:
    view = MasterView(grace_s=0.3)
    async with running(asyncio.create_task(run_master(MasterConfig("test", server.endpoint), view))):
        children.append(Child("node", server.endpoint, "n1"))
        children.append(Child("node", server.endpoint, "n2"))
        await asyncio.gather(*(child.ready() for child in children))

        def state(node: str) -> NodeState | None:
            record = view.node(node)
            return record and record.state

        await until(lambda: state("n1") is state("n2") is NodeState.HEALTHY, "both nodes")
        children[0].process.kill()
        taken = await until(lambda: state("n1") is NodeState.SUSPECT, "the suspicion")
        assert taken < 0.25
        await until(lambda: state("n1") is NodeState.LOST)
        assert state("n2") is NodeState.HEALTHY
        children.append(await Child("node", server.endpoint, "n1").ready())
        await until(lambda: state("n1") is NodeState.HEALTHY, "the return")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this platform cannot freeze a process")
async def test_a_frozen_node_is_suspect_after_the_lease_and_comes_back(
    server: NatsServer, children: list[Child]
) -> None:
    view = MasterView(grace_s=60)
    async with running(asyncio.create_task(run_master(MasterConfig("test", server.endpoint), view))):
        children.append(await Child("node", server.endpoint, "n1").ready())
        await until(lambda: view.node("n1"))
        children[0].process.send_signal(signal.SIGSTOP)
        taken = await until(lambda: view.node("n1").state is NodeState.SUSPECT)  # type: ignore[union-attr]
        assert taken < 2.5
        children[0].process.send_signal(signal.SIGCONT)
        await until(lambda: view.node("n1").state is NodeState.HEALTHY)  # type: ignore[union-attr]


async def server_is_killed(server: NatsServer, *, events: int, outages: int) -> None:
    """Events go out while the server is killed and started again; everybody else lives."""
    seen: list[int] = []
    view = MasterView(grace_s=30)
    async with started(server) as (node, watcher):
        observer = ClusterObserver(watcher, view, on_event=lambda event: seen.append(event.position.seq))
        async with running(asyncio.create_task(observer.run())):
            epoch = Epoch.new(1)
            await node.join("n1", encode_snapshot(snapshot(device(), epoch=epoch)))
            await until(lambda: view.node("n1"), "the first snapshot")
            kill_at = {events * (n + 1) // (outages + 2) for n in range(outages)}
            restart: asyncio.Future[object] | None = None
            for seq in range(1, events + 1):
                if seq in kill_at:
                    if restart is not None:
                        await restart
                    server.kill()
                    restart = asyncio.ensure_future(asyncio.to_thread(_later, 0.2, server))
                await node.set_state(encode_snapshot(snapshot(device(), epoch=epoch, seq=seq)))
                await node.publish(event_bytes(seq, epoch=epoch))
                await asyncio.sleep(0.002)
            assert restart is not None
            await restart
            await until(lambda: seen and seen[-1] == events, "the last event", timeout=20)
            await until(lambda: view.node("n1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
    assert seen == list(range(1, events + 1))


def _later(seconds: float, server: NatsServer) -> None:
    time.sleep(seconds)
    server.start()


async def test_no_event_is_lost_or_doubled_when_the_server_is_killed(server: NatsServer) -> None:
    await server_is_killed(server, events=400, outages=1)


@pytest.mark.slow
async def test_no_event_is_lost_or_doubled_when_the_server_is_killed_often(server: NatsServer) -> None:
    await server_is_killed(server, events=10_000, outages=10)


async def test_what_was_acknowledged_survives_the_death_of_the_server(server: NatsServer) -> None:
    async with started(server) as (node, _):
        await node.join("n1", b"")
        for burst in range(5):
            await asyncio.gather(*(node.publish(b"%d %d" % (burst, n)) for n in range(100)))
            server.kill()
            await until(lambda: client_of(node) is None, "the end of the connection")
            await asyncio.to_thread(server.start)
            # What was acknowledged is forgotten here: nobody would send it again.
            async with asyncio.timeout(10):
                while await stored(node) != (burst + 1) * 100:
                    await asyncio.sleep(0.01)


async def stored(engine: NatsEngine) -> int | None:
    """Events in the stream; None where nobody can be asked."""
    client = client_of(engine)
    with suppress(OSError):
        if client is not None:
            return (await client.jetstream(timeout=1).stream_info(stream_name("test"))).state.messages
    return None


async def test_a_connection_that_ends_before_it_is_set_up_is_given_up_at_once(server: NatsServer) -> None:
    ups, downs = list[str](), list[str]()
    never = asyncio.Event()

    async def on_up(_: Any) -> None:
        ups.append("up")
        if len(ups) == 1:
            await never.wait()  # as a question does that nobody answers

    link = NatsLink(server.endpoint, NatsSettings(), None, on_up, lambda: downs.append("down"))
    opening = asyncio.create_task(link.open())
    await until(lambda: ups, "the first connection")
    server.kill()
    await until(lambda: downs, "its end")
    assert not opening.done()
    await asyncio.to_thread(server.start)
    await asyncio.wait_for(opening, 10)
    assert ups == ["up", "up"]
    await link.close()


async def test_a_server_that_has_lost_its_store_gets_the_state_from_the_nodes(server: NatsServer) -> None:
    view = MasterView(grace_s=30)
    async with started(server) as (node, watcher):
        observer = ClusterObserver(watcher, view)
        async with running(asyncio.create_task(observer.run())):
            await node.join("n1", encode_snapshot(snapshot(device())))
            await until(lambda: view.node("n1"), "the first snapshot")
            for seq in range(1, 51):
                await node.set_state(encode_snapshot(snapshot(device(), seq=seq)))
                await node.publish(event_bytes(seq))
            await until(lambda: view.node("n1").seq == 50)  # type: ignore[union-attr]
            server.kill()
            await until(lambda: client_of(node) is None and client_of(watcher) is None)
            await asyncio.to_thread(server.forget)
            for seq in range(51, 54):
                await node.set_state(encode_snapshot(snapshot(device(), seq=seq)))
                await node.publish(event_bytes(seq))
            await asyncio.to_thread(server.start)
            await until(lambda: view.node("n1").seq == 53)  # type: ignore[union-attr]
            await node.set_state(encode_snapshot(snapshot(device(), seq=54)))
            await node.publish(event_bytes(54))
            await until(lambda: view.node("n1").seq == 54)  # type: ignore[union-attr]
            await until(lambda: view.node("n1").state is NodeState.HEALTHY)  # type: ignore[union-attr]


async def test_without_a_server_events_are_kept_and_the_oldest_dropped_aloud(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(server, backlog_events=10) as (node, watcher):
        await node.join("n1", b"state")
        subscription = await watcher.subscribe()
        assert await anext(subscription) == NodeUp("n1")
        server.kill()
        await until(lambda: client_of(node) is None and client_of(watcher) is None)
        assert [await anext(subscription) for _ in range(2)] == [HubAway(), NodeDown("n1")]
        async with asyncio.timeout(5):
            for seq in range(30):
                await node.publish(b"%d" % seq)  # does not wait for a server
            await node.publish_telemetry(b"{}")
            assert await watcher.snapshot("n1") == ()
            with pytest.raises(NoAnswer, match="no NATS server"):
                await watcher.command("n1", b"")
        assert "the oldest events are dropped" in caplog.text
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(10):
            items = [await anext(subscription) for _ in range(12)]
        assert items[0] == HubBack()
        assert items.count(NodeUp("n1")) == 1
        events = [item for item in items if isinstance(item, EventReceived)]
        assert events == [EventReceived("n1", b"%d" % seq) for seq in range(20, 30)]


async def test_who_joins_or_subscribes_without_a_server_is_there_with_the_next(server: NatsServer) -> None:
    async with started(server) as (node, watcher):
        server.kill()
        await until(lambda: client_of(node) is None and client_of(watcher) is None)
        await node.join("n1", b"state")
        subscription = await watcher.subscribe()
        readings = list[bytes]()
        await watcher.follow_telemetry(lambda _, payload: readings.append(payload))
        await node.publish(b"first")
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(10):
            # Who is connected again first decides whether the watcher hears of the node or its event first.
            while (item := await anext(subscription)) != NodeUp("n1"):
                assert item in (HubBack(), EventReceived("n1", b"first"))
            await node.publish(b"second")
            while (await anext(subscription)) != EventReceived("n1", b"second"):
                pass
            while not readings:
                await node.publish_telemetry(b"reading")
                await asyncio.sleep(0.01)
        assert [reply.payload for reply in await watcher.snapshot("*")] == [b"state"]


async def test_a_frozen_server_holds_up_nobody(server: NatsServer) -> None:
    async with started(server) as (node, watcher):
        await node.join("n1", b"")
        subscription = await watcher.subscribe()
        assert await anext(subscription) == NodeUp("n1")
        server.signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                await node.publish(b"event")
                while await anext(subscription) != NodeDown("n1"):
                    pass  # the server may have got the event before it froze
            start = time.monotonic()
            await watcher.close()
            assert time.monotonic() - start < 5.0
        finally:
            server.signal(signal.SIGCONT)
        await watcher.start()
        subscription = await watcher.subscribe()
        async with asyncio.timeout(10):
            assert await anext(subscription) == NodeUp("n1")


async def test_a_consumer_that_the_server_drops_begins_anew(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurt.cluster.nats_subscription.SILENT_S", 0.3)
    monkeypatch.setattr("gpurt.cluster.nats_subscription.SIGN_OF_LIFE_S", 0.1)
    async with started(server) as (node, watcher):
        await node.join("n1", b"")
        subscription = await watcher.subscribe()
        assert await anext(subscription) == NodeUp("n1")
        manager = client_of(watcher).jetstream()
        for info in await manager.consumers_info(stream_name("test")):
            if not info.name.startswith("live_"):
                await manager.delete_consumer(stream_name("test"), info.name)
        for seq in range(100):
            await node.publish(b"%d" % seq)
        async with asyncio.timeout(10):
            items = [await anext(subscription) for _ in range(100)]
        assert items == [EventReceived("n1", b"%d" % seq) for seq in range(100)]


async def test_what_the_stream_has_dropped_is_announced(server: NatsServer) -> None:
    async with started(server, stream_events_per_node=20) as (node, watcher):
        await node.join("n1", b"")
        subscription = await watcher.subscribe()
        async with asyncio.timeout(5):
            assert await anext(subscription) == NodeUp("n1")
            await node.publish(b"first")
            assert await anext(subscription) == EventReceived("n1", b"first")
            await client_of(watcher)._close(0)  # its connection ends, that of the node does not
            while client_of(watcher) is not None:
                await asyncio.sleep(0)
            await asyncio.gather(*(node.publish(b"%d" % seq) for seq in range(50)))
            items = [await anext(subscription)]
            while items[-1] != EventReceived("n1", b"49"):
                items.append(await anext(subscription))
        assert EventsDropped("n1") in items
        assert items[-20:] == [EventReceived("n1", b"%d" % seq) for seq in range(30, 50)]


async def test_a_start_waits_for_a_server_says_so_once_and_is_cancelled_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    find_nats_server()
    engine = NatsEngine(cluster="test", endpoint=f"nats://127.0.0.1:{free_port()}")
    starting = asyncio.create_task(engine.start())
    with caplog.at_level(logging.INFO):
        await until(lambda: "is not there yet" in caplog.text, "the word that there is no server")
        await asyncio.sleep(0.6)
    assert caplog.text.count("is not there yet") == 1
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):  # it would wait for the server without end
            await starting
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.05)
    await engine.close()
    with pytest.raises(BusClosed):
        await starting


async def test_a_start_gets_through_once_there_is_a_server(server: NatsServer) -> None:
    server.kill()
    engine = NatsEngine(cluster="test", endpoint=server.endpoint)
    starting = [asyncio.create_task(engine.start()) for _ in range(2)]
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(10):
        await asyncio.gather(*starting)
    await engine.join("n1", b"state")
    assert [reply.payload for reply in await engine.snapshot("n1")] == [b"state"]
    await engine.close()


async def test_a_server_without_jetstream_is_told_what_it_lacks() -> None:
    server = NatsServer("--name", "plain").start()
    try:
        with pytest.raises(BusUnavailable, match="no JetStream") as caught:
            await NatsEngine(cluster="test", endpoint=server.endpoint).start()
        assert "nats-server -js" in str(caught.value)
    finally:
        server.end()


async def test_a_server_with_small_messages_is_refused() -> None:
    server = NatsServer.configured("max_payload: 65536\njetstream: {}\n").start()
    try:
        with pytest.raises(BusUnavailable, match="65536 bytes only"):
            await NatsEngine(cluster="test", endpoint=server.endpoint).start()
    finally:
        server.end()


async def test_a_stream_that_takes_something_else_is_refused(server: NatsServer) -> None:
    async with started(server, 1) as (engine,):
        await client_of(engine).jetstream().add_stream(name=stream_name("other"), subjects=["something.else"])
    with pytest.raises(BusUnavailable, match=r"does not take gpurt\.v1\.other\.node"):
        await NatsEngine(cluster="other", endpoint=server.endpoint).start()


async def test_strangers_on_the_subjects_of_nodes_harm_nobody(server: NatsServer) -> None:
    async with started(server, 2) as (node, watcher):
        subscription = await watcher.subscribe()
        readings = list[tuple[str, bytes]]()
        await watcher.follow_telemetry(lambda name, payload: readings.append((name, payload)))
        client = client_of(node)
        for name in ("BAD", "a/b", "n1"):
            for leaf in ("live", "ev", "telemetry"):
                await client.publish(f"gpurt.v1.test.node.{name}.{leaf}", b"rubbish")
        await client.publish("gpurt.v1.test.node.n1.telemetry", bytes(MAX_EVENT_BYTES))
        for answer in ({}, {"Gpurt-Part": "x"}, {"Gpurt-Part": f"{'0' * 32} 3 2"}, {"Gpurt-Part": f"{'0' * 32} 0 99"}):

            async def lie(message: Any, answer: dict[str, str] = answer) -> None:
                await client.publish(message.reply, b"x", headers=answer or None)

            await client.subscribe("gpurt.v1.test.node.n1.state", cb=lie)
        assert await watcher.snapshot("n1", timeout=0.3) == ()
        async with asyncio.timeout(30):
            event = await anext(each async for each in subscription if isinstance(each, EventReceived))
        assert event == EventReceived("n1", b"rubbish")
        # In order behind what is too large.
        await client.publish("gpurt.v1.test.node.n1.telemetry", b"last")
        await until(lambda: ("n1", b"last") in readings)
        assert readings == [("n1", b"rubbish"), ("n1", b"last")]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b'{"stream":"s","seq":1}', None),
        (b'{"error":{"description":"no room"}}', "no room"),
        (b'{"error":{"description":"\\u001b[2J"}}', r"\x1b[2J"),
        (b'{"error":[1]}', "[1]"),
        (b"[1]", "an answer that is none of a stream"),
        (b"[" * 100_000, "an answer that is no JSON"),
        (b"\xff", "an answer that is no JSON"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_no_answer_to_an_event_ends_anything(answer: bytes, says: str | None) -> None:
    assert _trouble(SimpleNamespace(data=answer, headers=None)) == says


@pytest.mark.parametrize(
    "address",
    ["nats://", "nats://host", "nats://host:0", "nats://host:65536", "nats://me:x@host:4222", "nats:h:1"],
)
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidName, match="endpoint"):
        MasterConfig(endpoint=address)
    with pytest.raises(InvalidName, match="endpoint"):
        WorkerConfig("w1", endpoint=address)


def test_the_address_chooses_the_engine() -> None:
    assert isinstance(engine_at("nats://127.0.0.1:4222", cluster="test"), NatsEngine)
    assert isinstance(engine_at("tcp/127.0.0.1:7447", cluster="test"), ZenohEngine)
    for address in ("nats://[::1]:4222", "nats://nats.example:4222", "tcp/host:7447"):
        assert check_endpoint(address) == address
