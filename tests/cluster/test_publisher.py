"""A node's voice: what discovery finds is what the master believes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.commands import request_rediscovery
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import ClusterError, NoAnswer, NodeNameTaken
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import this_host
from gpurt.cluster.view import MasterView
from gpurt.discovery.events import DeviceEvent, EventType, diff
from gpurt.discovery.result import DiscoveryResult
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport, DeviceState, GPUDevice
from tests.cluster.conftest import Bus
from tests.cluster.support import HOST_A, HOST_B, device, result, until


class Cluster:
    """A master's view, and nodes to come."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.view = MasterView()
        self.engine: EventEngine
        self.observer: ClusterObserver

    async def node(self, host: Any = HOST_A, **options: Any) -> NodePublisher:
        return NodePublisher(await self.bus.node(), "n1", host=host, epoch=Epoch.new(1), **options)

    async def settled(self, publisher: NodePublisher) -> None:
        """The view has everything that was published, and it is what the node itself says."""

        def same() -> bool:
            record = self.view.node("n1")
            return record is not None and (record.epoch, record.seq) == (str(publisher.epoch), publisher.position.seq)

        await until(same, "the last event")
        record = self.view.node("n1")
        assert record is not None
        said = publisher.snapshot()
        assert record.gpu_devices == said.gpu_devices
        assert record.reports == said.reports
        for field in ("gpu_backend", "primary_gpu_device_id", "gpu_discovery_timestamp", "discovery_status", "host"):
            assert getattr(record, field) == getattr(said, field)

    async def quiet(self) -> None:
        """The node's token has come, and no question to the node is under way: its answer would contain the news."""
        nodes = self.observer._nodes  # pyright: ignore[reportPrivateUsage]
        await until(lambda: nodes["n1"].up and not nodes["n1"].asking, "the end of the questions")


@pytest.fixture
async def cluster(bus: Bus) -> AsyncIterator[Cluster]:
    made = Cluster(bus)
    made.engine = await bus.observer()
    made.observer = ClusterObserver(made.engine, made.view)
    ready = asyncio.Event()
    task = asyncio.create_task(made.observer.run(ready.set))
    await ready.wait()
    yield made
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_the_node_and_its_fields_are_there(cluster: Cluster) -> None:
    publisher = await cluster.node()
    await publisher.start(result(device("GPU-x", usable=False), device("GPU-a", 1)))
    await cluster.settled(publisher)
    record = cluster.view.node("n1")
    assert record is not None
    assert (record.gpu_backend, record.primary_gpu_device_id) == ("cuda", "cuda:1")
    assert record.gpu_discovery_timestamp
    assert [d.identity.key for d in record.gpu_devices if d.identity] == ["GPU-x", "GPU-a"]
    assert list(cluster.view.snapshot().available_devices) == [("n1", "GPU-a")]


async def test_without_a_usable_device_there_is_no_backend_and_not_an_unknown_one(cluster: Cluster) -> None:
    publisher = await cluster.node()
    await publisher.start(result(device(usable=False)))
    await cluster.settled(publisher)
    record = cluster.view.node("n1")
    assert record is not None
    assert (record.gpu_backend, record.primary_gpu_device_id) == (None, None)


async def test_what_discovery_tells_is_what_the_master_sees(cluster: Cluster) -> None:
    a, b, c = device("GPU-a", 0), device("GPU-b", 1), device("GPU-c", 2)
    down = [BackendReport(name="cuda", status="unavailable", reason=ReasonCode.CRASHED, message="signal 11")]
    steps: list[DiscoveryResult] = [
        result(a, b),
        result(a, b, c),
        result(a, b.model_copy(update={"state": DeviceState.LOST, "usable": False}), c),
        result(a.model_copy(update={"clock_rate_mhz": 900, "memory_available": 1 << 30}), b, c),
        result(b, c),
        DiscoveryResult(
            backend_name=None, devices=(), reports=tuple(down), discovery_status="partial", timestamp="2026-01-01"
        ),
        result(b, c),
    ]
    publisher = await cluster.node()
    changes = cluster.view.changes()
    await publisher.start(steps[0])
    await cluster.settled(publisher)
    told = steps[0]
    for step in steps[1:]:
        for event in diff(told, step):
            await publisher.publish_event(event)
        await cluster.settled(publisher)
        told = step if step.devices else told
    changes.close()
    kinds = [(change.kind, change.device) async for change in changes]
    for expected in (
        (ChangeKind.DEVICE_ADDED, "GPU-c"),
        (ChangeKind.DEVICE_HEALTH, "GPU-b"),
        (ChangeKind.DEVICE_UPDATED, "GPU-a"),
        (ChangeKind.DEVICE_REMOVED, "GPU-a"),
    ):
        assert kinds.count(expected) >= 1, expected
    record = cluster.view.node("n1")
    assert record is not None
    assert list(record.devices) == ["GPU-b", "GPU-c"]
    assert cluster.observer.resyncs == {"joined": 1}


async def test_a_backend_that_fails_and_returns(cluster: Cluster) -> None:
    publisher = await cluster.node()
    await publisher.start(result(device()))
    await publisher.publish_event(
        DeviceEvent(type=EventType.BACKEND_UNAVAILABLE, backend="cuda", reason="driver_mismatch: reboot")
    )
    await cluster.settled(publisher)
    record = cluster.view.node("n1")
    assert record is not None
    assert (record.reports[0].reason, record.reports[0].message) == (ReasonCode.DRIVER_MISMATCH, "reboot")
    await publisher.publish_event(DeviceEvent(type=EventType.BACKEND_AVAILABLE, backend="cuda", reason="fine"))
    await cluster.settled(publisher)


async def test_a_snapshot_is_told_only_when_something_is_new(cluster: Cluster) -> None:
    publisher = await cluster.node()
    first = result(device())
    await publisher.start(first)
    before = publisher.position
    await publisher.publish_snapshot(first)
    await publisher.publish_event(DeviceEvent(type=EventType.SNAPSHOT, snapshot=first))
    assert publisher.position == before
    await publisher.publish_snapshot(result(device("GPU-b")))
    await cluster.settled(publisher)
    assert list(cluster.view.snapshot().devices) == [("n1", "GPU-b")]


async def test_news_too_large_for_an_event_is_fetched(cluster: Cluster) -> None:
    publisher = await cluster.node()
    await publisher.start(result(device()))
    await cluster.settled(publisher)
    await cluster.quiet()
    many: list[GPUDevice] = [device(f"GPU-{index}", index) for index in range(400)]
    await publisher.publish_snapshot(result(*many))
    await until(lambda: len(cluster.view.snapshot().devices) == 400, "the large snapshot")
    await cluster.settled(publisher)
    assert cluster.observer.resyncs["notice"] == 1


async def test_follow_and_goodbye(cluster: Cluster) -> None:
    async def events() -> AsyncIterator[DeviceEvent]:
        known = result(device())
        yield DeviceEvent(type=EventType.SNAPSHOT, snapshot=known)
        for event in diff(known, result(device(), device("GPU-b", 1))):
            yield event

    publisher = await cluster.node()
    with pytest.raises(ClusterError, match="not joined"):
        await publisher.publish_snapshot(result())
    await publisher.start(result(device()))
    await publisher.follow(events())
    await cluster.settled(publisher)
    await publisher.leave()
    await publisher.leave()
    await until(lambda: cluster.view.node("n1").state is NodeState.LEFT)  # type: ignore[union-attr]
    assert cluster.view.snapshot().available_devices == {}


async def test_the_master_has_a_node_look_again(cluster: Cluster) -> None:
    found = result(device(), device("GPU-b", 1))

    async def rediscover() -> DiscoveryResult:
        return found

    publisher = await cluster.node(rediscover=rediscover)
    await publisher.start(result(device()))
    await until(lambda: cluster.view.node("n1"))
    answer = await request_rediscovery(cluster.engine, "n1", term=3)
    assert answer == {"status": "complete", "devices": 2}
    await cluster.settled(publisher)
    assert len(cluster.view.snapshot().devices) == 2
    with pytest.raises(ClusterError, match="term 2 refused"):
        await request_rediscovery(cluster.engine, "n1", term=2)
    with pytest.raises(ClusterError, match="command"):
        await cluster.engine.command("n1", json.dumps({"command": "explode"}).encode())
    with pytest.raises(NoAnswer):
        await request_rediscovery(cluster.engine, "n2", timeout=0.2)


async def test_a_name_in_use_is_refused_with_who_uses_it(cluster: Cluster) -> None:
    first, second = await cluster.node(), await cluster.node(HOST_B)
    await first.start(result(device()))
    await cluster.settled(first)
    with pytest.raises(NodeNameTaken, match="alpha") as caught:
        await second.start(result(device("GPU-z")))
    assert "another node name" in str(caught.value)
    await cluster.settled(first)
    await first.leave()
    await second.start(result(device("GPU-z")))
    await cluster.settled(second)


def test_this_host_names_the_machine() -> None:
    host = this_host()
    assert len(host.fingerprint) == 16
    assert host.pid


async def test_who_is_cancelled_while_joining_says_goodbye(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = await cluster.node()
    engine, seen = publisher._engine, asyncio.Event()
    join = engine.join

    async def slow(*args: Any) -> None:
        await join(*args)
        seen.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "join", slow)
    starting = asyncio.create_task(publisher.start(result(device())))
    await seen.wait()
    await until(lambda: cluster.view.node("n1") is not None, "the node")
    starting.cancel()
    await asyncio.wait({starting})
    await publisher.leave()
    await until(lambda: cluster.view.node("n1").state is NodeState.LEFT, "the goodbye")  # type: ignore[union-attr]


async def test_a_join_that_fails_is_no_join(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = await cluster.node()

    async def fail(*args: Any) -> None:
        raise ClusterError("refused")

    monkeypatch.setattr(publisher._engine, "join", fail)
    with pytest.raises(ClusterError, match="refused"):
        await publisher.start(result(device()))
    with pytest.raises(ClusterError, match="not"):
        await publisher.publish_snapshot(result(device()))
    await publisher.leave()
