"""The zenoh bus between real processes, which are killed and come back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gpurt.cluster.bus import BusItem, EventReceived, NodeUp
from gpurt.cluster.envelope import EventKind, decode
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import BusUnavailable, InvalidName
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.observer import BURST, ClusterObserver
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_settings import ZenohSettings, calm_runtime, load_zenoh, session_config
from tests.cluster.support import E1, Child, device, event_bytes, free_port, snapshot, until


@pytest.fixture
def endpoint() -> str:
    return f"tcp/127.0.0.1:{free_port()}"


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


async def test_a_killed_node_is_suspect_within_a_quarter_second_then_lost_then_back(
    endpoint: str, children: list[Child]
) -> None:
    view = MasterView(grace_s=0.3)
    async with running(asyncio.create_task(run_master(MasterConfig("test", endpoint), view))):
        children.append(Child("node", endpoint, "n1"))
        children.append(Child("node", endpoint, "n2"))
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
        children.append(await Child("node", endpoint, "n1").ready())
        await until(lambda: state("n1") is NodeState.HEALTHY, "the return")


async def hub_is_killed(endpoint: str, children: list[Child], *, events: int, rate: float, outages: int) -> None:
    """A node publishes to an observer in another process; the hub between them is killed again and again."""
    children.append(await Child("hub", endpoint).ready())
    node = ZenohEngine(cluster="test", endpoint=endpoint)
    watcher = ZenohEngine(cluster="test", endpoint=endpoint)
    seen: list[int] = []
    view = MasterView()
    observer = ClusterObserver(watcher, view, on_event=lambda event: seen.append(event.position.seq))
    await asyncio.gather(node.start(), watcher.start())
    try:
        async with running(asyncio.create_task(observer.run())):
            epoch = Epoch.new(1)
            await node.join("n1", encode_snapshot(snapshot(device(), epoch=epoch)))
            await until(lambda: view.node("n1"), "the first snapshot")
            kill_at = {events * (n + 1) // (outages + 2) for n in range(outages)}
            start = time.monotonic()
            restart: asyncio.Task[Child] | None = None
            for seq in range(1, events + 1):
                if seq in kill_at:
                    if restart is not None:
                        children.append(await restart)
                    children.pop().kill()
                    restart = asyncio.create_task(_later(0.2, endpoint))
                await node.set_state(encode_snapshot(snapshot(device(), epoch=epoch, seq=seq)))
                await node.publish(event_bytes(seq, epoch=epoch))
                await asyncio.sleep(max(0.0, start + seq / rate - time.monotonic()))
            assert restart is not None
            children.append(await restart)
            await until(lambda: view.node("n1").seq == events, "the last event", timeout=20)  # type: ignore[union-attr]
            await until(lambda: view.node("n1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
        # Where the outage took longer than the backlog lasts, a snapshot stands for the events that it holds: each is
        # in the picture once, by itself or by that.
        counters = observer.counters("n1")
        assert len(seen) == counters.applied
        assert counters.applied + counters.superseded == events
        assert seen == sorted(set(seen))
    finally:
        await asyncio.gather(node.close(), watcher.close())


async def _later(seconds: float, endpoint: str) -> Child:
    await asyncio.sleep(seconds)
    return await Child("hub", endpoint).ready()


async def test_no_event_is_lost_or_doubled_when_the_hub_is_killed(endpoint: str, children: list[Child]) -> None:
    await hub_is_killed(endpoint, children, events=2000, rate=400, outages=1)


@pytest.mark.slow
async def test_no_event_is_lost_or_doubled_when_the_hub_is_killed_often(endpoint: str, children: list[Child]) -> None:
    await hub_is_killed(endpoint, children, events=20_000, rate=300, outages=5)


async def test_worker_process_to_master_process(endpoint: str, children: list[Child], tmp_path: Path) -> None:
    """Every device of every worker, keyed by (node, device), through real processes; and a worker that comes back
    has the same devices."""
    master = await Child("master", endpoint).ready()
    children.append(master)
    workers = [
        Child("worker", endpoint, "w1", tmp_path / "w1.json", "h100x2"),
        Child("worker", endpoint, "w2", tmp_path / "w2.json", "h100x2,m2-ultra"),
    ]
    children += workers
    await asyncio.gather(*(worker.ready() for worker in workers))

    async def picture(devices: int, **nodes: str) -> set[tuple[str, str]]:
        async with asyncio.timeout(15):
            while True:
                said = json.loads(await master.line())
                if said["nodes"] == nodes and len(said["devices"]) == devices:
                    return {(node, key) for node, key in said["devices"]}

    everything = await picture(5, w1="healthy", w2="healthy")
    assert sum(node == "w1" for node, _ in everything) == 2
    assert len(everything) == 5
    workers[0].process.kill()
    await picture(3, w1="suspect", w2="healthy")
    await picture(3, w1="lost", w2="healthy")
    children.append(await Child("worker", endpoint, "w1", tmp_path / "w1.json", "h100x2").ready())
    assert await picture(5, w1="healthy", w2="healthy") == everything
    assert children[-1].end() == 0
    await picture(3, w1="left", w2="healthy")


def test_a_hub_waits_for_a_slow_reader_for_less_time_than_a_node_may_be_silent() -> None:
    settings = ZenohSettings()
    config = session_config(load_zenoh(), "tcp/127.0.0.1:7447", listen=True, settings=settings)
    waits_us = json.loads(config.get_json("transport/link/tx/queue/congestion_control/block/wait_before_close"))
    # Each shows twice in a lease that it is there; a hub that waits reads nothing of anybody.
    assert waits_us / 1e6 < settings.lease_s / 2


async def test_a_worker_waits_for_its_hub_and_is_cancelled_cleanly(endpoint: str, tmp_path: Path) -> None:
    joined = asyncio.Event()

    async def ready(worker: Worker) -> None:
        assert worker.backend is not None
        joined.set()

    config = WorkerConfig("w1", "test", endpoint, registry_path=tmp_path / "r.json", simulate="h100")
    worker = asyncio.create_task(run_worker(config, on_ready=ready))
    await asyncio.sleep(0.3)
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):  # it would wait for its hub without end
            await worker
    worker = asyncio.create_task(run_worker(config, on_ready=ready))
    view = MasterView()
    async with running(asyncio.create_task(run_master(MasterConfig("test", endpoint), view))):
        async with running(worker):
            await joined.wait()
            await until(lambda: view.node("w1"))
            record = view.node("w1")
            assert record is not None
            assert record.gpu_backend == "simulated"
            assert all(d.simulated for d in record.gpu_devices)
            first = record.epoch
        await until(lambda: view.node("w1").state is NodeState.LEFT)  # type: ignore[union-attr]
        joined.clear()
        async with running(asyncio.create_task(run_worker(config, on_ready=ready))):
            await joined.wait()
            await until(lambda: view.node("w1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
            record = view.node("w1")
            assert record is not None
            assert Epoch.parse(record.epoch) > Epoch.parse(first)


async def test_what_the_registry_remembers_is_told_at_once_and_then_looked_up(endpoint: str, tmp_path: Path) -> None:
    config = WorkerConfig("w1", "test", endpoint, registry_path=tmp_path / "r.json", simulate="h100")
    hub = ZenohEngine(cluster="test", endpoint=endpoint, listen=True)
    await hub.start()
    subscription = await hub.subscribe()
    statuses: list[str] = []

    async def collect() -> None:
        async for item in subscription:
            if isinstance(item, EventReceived):
                event = decode(item.payload, node="w1")
                if event.type == EventKind.NODE_SNAPSHOT and event.data is not None:
                    statuses.append(event.document()["discovery_status"])

    collecting = asyncio.create_task(collect())
    try:
        for _ in range(2):
            joined = asyncio.Event()

            async def ready(_: Worker, joined: asyncio.Event = joined) -> None:
                joined.set()

            async with running(asyncio.create_task(run_worker(config, on_ready=ready))):
                await joined.wait()
                await until(lambda: statuses and statuses[-1] == "complete")
            statuses.append("end of run")
        assert statuses == ["complete", "end of run", "stale", "complete", "end of run"]
    finally:
        await hub.close()
        await collecting


async def test_an_address_in_use_is_said_so(endpoint: str) -> None:
    first = ZenohEngine(endpoint=endpoint, listen=True)
    second = ZenohEngine(endpoint=endpoint, listen=True)
    await first.start()
    try:
        with pytest.raises(BusUnavailable, match="cannot listen on tcp/") as caught:
            await second.start()
        assert "another port" in str(caught.value)
    finally:
        await first.close()
    await second.start()
    await second.close()


@pytest.mark.parametrize("address", ["", "127.0.0.1:7447", "tcp/127.0.0.1:0", "tcp/a,tcp/b", "http/x:1"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidName, match="endpoint"):
        MasterConfig(endpoint=address)
    with pytest.raises(InvalidName, match="endpoint"):
        WorkerConfig("w1", endpoint=address)


async def test_who_is_asked_for_the_state_sends_a_mark_that_is_no_event(endpoint: str) -> None:
    """By its number at the bus an observer sees what it missed while its connection was cut."""
    hub = ZenohEngine(cluster="test", endpoint=endpoint, listen=True)
    node = ZenohEngine(cluster="test", endpoint=endpoint)
    await asyncio.gather(hub.start(), node.start())
    sizes: list[int] = []
    bare = hub._session.declare_subscriber(  # pyright: ignore[reportPrivateUsage]
        "gpurt/v1/test/node/*/ev", lambda sample: sizes.append(len(sample.payload))
    )
    subscription = await hub.subscribe()
    items: list[BusItem] = []

    async def collect() -> None:
        async for item in subscription:
            items.append(item)

    collecting = asyncio.create_task(collect())
    try:
        await node.join("n1", encode_snapshot(snapshot(epoch=E1)))
        await node.publish(b"one")
        await until(lambda: NodeUp("n1") in items, "the node")
        assert await hub.snapshot("n1")
        await until(lambda: 0 in sizes, "the mark")
        await node.publish(b"two")
        await until(lambda: EventReceived("n1", b"two") in items, "the event behind it")
        assert [item for item in items if item != NodeUp("n1")] == [
            EventReceived("n1", payload) for payload in (b"one", b"two")
        ]
    finally:
        collecting.cancel()
        bare.undeclare()
        await asyncio.gather(node.close(), hub.close())
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name == "gpurt:zenoh:events"])


@pytest.mark.parametrize("chosen", [None, "(rx: (worker_threads: 7))"])
def test_a_hub_that_is_a_process_of_its_own_reads_its_links_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.delenv("ZENOH_RUNTIME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("ZENOH_RUNTIME", chosen)
    calm_runtime()
    assert os.environ["ZENOH_RUNTIME"] == (chosen or "(rx: (worker_threads: 1), acc: (handover: rx))")
    monkeypatch.delenv("ZENOH_RUNTIME")


def test_importing_the_cluster_layer_loads_no_bus_library() -> None:
    import subprocess
    import sys

    code = "import gpurt.cluster.master, sys; sys.exit(bool({'zenoh', 'nats'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


async def test_a_burst_of_events_leaves_the_loop_free(endpoint: str) -> None:
    hub = ZenohEngine(cluster="test", endpoint=endpoint, listen=True)
    node = ZenohEngine(cluster="test", endpoint=endpoint)
    view = MasterView()
    await hub.start()
    await node.start()
    try:
        async with running(asyncio.create_task(ClusterObserver(hub, view).run())):
            await node.join("n1", encode_snapshot(snapshot(device())))
            await until(lambda: view.node("n1"))
            await node.set_state(encode_snapshot(snapshot(device(), seq=3000)))
            payloads = [event_bytes(seq, data={"x": "y" * 600}) for seq in range(1, 3001)]
            sending = asyncio.gather(*map(node.publish, payloads))
            most = last = 0
            while last < 3000:
                await asyncio.sleep(0)
                record = view.node("n1")
                assert record is not None
                most, last = max(most, record.seq - last), record.seq
            await sending
            # What was applied between two turns of this task.
            assert most <= BURST
    finally:
        await asyncio.gather(node.close(), hub.close())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this platform cannot freeze a process")
async def test_a_frozen_node_is_suspect_after_the_lease_and_comes_back(endpoint: str, children: list[Child]) -> None:
    view = MasterView(grace_s=60)
    async with running(asyncio.create_task(run_master(MasterConfig("test", endpoint), view))):
        children.append(await Child("node", endpoint, "n1").ready())
        await until(lambda: view.node("n1"))
        children[0].process.send_signal(signal.SIGSTOP)
        taken = await until(lambda: view.node("n1").state is NodeState.SUSPECT)  # type: ignore[union-attr]
        assert taken < 2.5
        children[0].process.send_signal(signal.SIGCONT)
        await until(lambda: view.node("n1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
