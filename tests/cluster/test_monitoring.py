"""A worker's devices between two look-ups: readings on the bus, Xids and lost devices as events at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpurt.cluster.board import ReadingsBoard
from gpurt.cluster.bus import EventEngine
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import BusClosed, ClusterError, MalformedEvent
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.monitoring import NodeMonitoring
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.readings import MAX_READINGS_BYTES, DeviceReadings, decode_readings, encode_readings
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import BackendUnavailable, ReasonCode, Unsupported
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.nvml_events import XidEvent
from gpurt.telemetry import host_reader
from gpurt.testing.faults import FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver, create_simulated
from gpurt.types import DeviceState
from tests.cluster.conftest import Bus
from tests.cluster.support import HOST_A, FakeClock, until
from tests.cluster.support import device as some_device
from tests.discovery.records import PCIS, UUIDS, device
from tests.discovery.test_service import Host


def readings(key: str = "GPU-a", **fields: Any) -> DeviceReadings:
    return DeviceReadings(device=key, age_s=0.5, contact="healthy", **fields)


class TestMessages:
    def test_there_and_back(self) -> None:
        told = readings(temperature_c=41.5, unavailable={"power_w": "unsupported"})
        (payload,) = encode_readings("n1", "1-" + "0" * 32, [told])
        assert decode_readings(payload, node="n1").devices == (told,)

    def test_many_devices_are_several_messages(self) -> None:
        payloads = encode_readings("n1", "e", [readings(f"GPU-{n}") for n in range(200)])
        assert len(payloads) == 4
        assert max(map(len, payloads)) < MAX_READINGS_BYTES
        told = [each.device for payload in payloads for each in decode_readings(payload, node="n1").devices]
        assert told == [f"GPU-{n}" for n in range(200)]
        assert encode_readings("n1", "e", []) == []

    @pytest.mark.parametrize(
        "payload",
        [b"", b"{}", b"[" * 100_000, b'{"node":"n1","epoch":"e","devices":[{"device":"x","age_s":NaN}]}', b"\xff"],
    )
    def test_what_are_no_readings(self, payload: bytes) -> None:
        with pytest.raises(MalformedEvent):
            decode_readings(payload, node="n1")

    def test_nobody_speaks_for_another_node(self) -> None:
        (payload,) = encode_readings("n2", "e", [readings()])
        with pytest.raises(MalformedEvent, match="n2"):
            decode_readings(payload, node="n1")


async def test_readings_reach_every_follower_and_no_subscriber(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    await node.join("n1", b"{}")
    subscription = await observer.subscribe()
    clock = FakeClock()
    async with ReadingsBoard(observer, clock=clock) as board:
        payload = encode_readings("n1", "e1", [readings("GPU-a", temperature_c=41.0), readings("GPU-b")])[0]

        async def heard(key: str) -> None:
            async with asyncio.timeout(10):
                while key not in board.readings("n1"):
                    await node.publish_telemetry(payload)  # a subscription may need a moment to be known
                    await asyncio.sleep(0.01)

        await heard("GPU-a")
        assert board.readings("n1")["GPU-a"].temperature_c == 41.0
        clock.now += 3
        assert board.readings("n1")["GPU-b"].age_s == pytest.approx(3.5)
        payload = encode_readings("n1", "e2", [readings("GPU-c")])[0]
        await heard("GPU-c")
        assert set(board.readings("n1")) == {"GPU-c"}
        payload = b"garbage"
        await node.publish_telemetry(payload)
        await until(lambda: board.refused > 0)
        board.forget("n1")
        assert board.readings("n1") == {}
    items = [type(await anext(subscription)).__name__]
    assert items == ["NodeUp"]
    with pytest.raises(MalformedEvent):
        await node.publish_telemetry(b"x" * (MAX_READINGS_BYTES + 1))
    await node.leave()
    with pytest.raises(ClusterError):
        await node.publish_telemetry(payload)
    await observer.close()
    with pytest.raises(BusClosed):
        await observer.follow_telemetry(lambda node, payload: None)


# A worker


class Tape:
    """NVML's events: what a test says, when it says it."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, ...]] = []
        self.events: asyncio.Queue[XidEvent | Exception] = asyncio.Queue()
        self.refuse: list[Exception] = []

    @asynccontextmanager
    async def open(self, addresses: Iterable[str]) -> AsyncIterator[AsyncIterator[XidEvent]]:
        self.opened.append(tuple(addresses))
        if self.refuse:
            raise self.refuse.pop(0)
        yield self._events()

    async def _events(self) -> AsyncIterator[XidEvent]:
        while True:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            yield event


class Rig:
    """A node with two cards, watched, and a master's view of it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.tape = Tape()
        self.host = Host(device(0), device(1))
        self.discovery = self.host.service(path, interval=3600)
        self.view = MasterView()
        self.bus = InProcessBus("test")
        self.options = options

    async def __aenter__(self) -> Rig:
        self.engine, self.other = InProcessEngine(self.bus), InProcessEngine(self.bus)
        await self.engine.start()
        await self.other.start()
        self.publisher = NodePublisher(self.engine, "n1", host=HOST_A, epoch=Epoch.new(1))
        await self.publisher.start(await self.discovery.discover_all_devices())
        self.monitoring = NodeMonitoring(
            self.discovery, self.publisher, open_events=self.tape.open, interval_s=0.01, **self.options
        )
        observer = ClusterObserver(self.other, self.view)
        self.tasks = [
            asyncio.create_task(self.monitoring.run()),
            asyncio.create_task(self.publisher.follow(self.discovery.subscribe())),
            asyncio.create_task(observer.run()),
        ]
        await until(lambda: self.tape.opened and self.view.node("n1"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with suppress(asyncio.CancelledError):
                await task
        await self.discovery.shutdown()
        await self.engine.close()
        await self.other.close()

    def state(self, n: int) -> tuple[DeviceState, bool]:
        node = self.view.node("n1")
        assert node is not None
        record = node.devices[UUIDS[n]]
        return record.device.state, record.available


class TestXids:
    async def test_an_xid_reaches_the_master_without_a_look_up(self, tmp_path: Path) -> None:
        async with Rig(tmp_path / "r.json") as rig:
            assert rig.tape.opened == [tuple(PCIS[:2])]
            probes = len(rig.host.probes)
            gate = rig.host.gate = asyncio.Event()  # no look-up can end
            await rig.tape.events.put(XidEvent(31, PCIS[0]))
            await rig.tape.events.put(XidEvent(79, PCIS[1].upper()))
            await until(lambda: rig.state(1) == (DeviceState.LOST, False))
            assert rig.state(0) == (DeviceState.HEALTHY, True)
            await until(lambda: len(rig.host.probes) > probes, "the look-up that follows")
            gate.set()

    async def test_an_xid_of_no_card_in_particular_concerns_every_card_and_nothing_else(self, tmp_path: Path) -> None:
        async with Rig(tmp_path / "r.json") as rig:
            await rig.tape.events.put(XidEvent(48, None))
            await until(lambda: rig.state(0)[0] is rig.state(1)[0] is DeviceState.DEGRADED)
            node = rig.view.node("n1")
            assert node is not None
            assert [each.device.backend for each in node.devices.values() if each.available] == ["toy"]

    async def test_another_card_is_listened_to_as_well(self, tmp_path: Path) -> None:
        async with Rig(tmp_path / "r.json") as rig:
            rig.host.shows["cuda"] = (device(0), device(1), device(2))
            rig.discovery.look_soon()
            await until(lambda: rig.tape.opened[-1] == tuple(PCIS[:3]))
            await rig.tape.events.put(XidEvent(79, PCIS[2]))
            await until(lambda: rig.state(2)[0] is DeviceState.LOST)

    async def test_events_that_end_are_opened_again_and_a_driver_without_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gpurt.cluster.monitoring.REOPEN_FIRST_S", 0.01)
        async with Rig(tmp_path / "r.json") as rig:
            rig.tape.refuse = [
                BackendUnavailable("driver is gone", reason=ReasonCode.NO_DRIVER),
                Unsupported("no GPU here gives events"),
            ]
            await rig.tape.events.put(OSError("the driver was unloaded"))
            await until(lambda: len(rig.tape.opened) == 3)
            await asyncio.sleep(0.05)
            assert len(rig.tape.opened) == 3
            assert not rig.tasks[0].done()

    async def test_partitions(self, tmp_path: Path) -> None:
        async with Rig(tmp_path / "r.json") as rig:
            whole = device(2)
            assert whole.identity is not None
            parts = [
                device(2, device_id=f"cuda:{n}").model_copy(
                    update={"identity": whole.identity.model_copy(update={"key": f"MIG-{n}", "partition": f"{n}/0"})}
                )
                for n in (3, 4)
            ]
            rig.host.shows["cuda"] = (device(0), *parts)
            rig.discovery.look_soon()
            await until(lambda: rig.tape.opened[-1] == (PCIS[0], PCIS[2]))
            concerned = rig.monitoring._concerned
            assert concerned(XidEvent(48, PCIS[2], "4/0")) == ["MIG-4"]
            assert concerned(XidEvent(48, PCIS[2])) == ["MIG-3", "MIG-4"]
            assert all(host_reader(part) is None for part in parts)


async def test_cards_whose_telemetry_nobody_tells_stay_in_use(tmp_path: Path) -> None:
    """No NVML in this process: that says nothing about the cards."""
    async with Rig(tmp_path / "r.json") as rig:
        collector = rig.monitoring.service.collector
        async with asyncio.timeout(10):
            while not all(key in collector.device_ids and len(collector.history(key)) > 4 for key in UUIDS[:2]):
                await asyncio.sleep(0.01)
        assert [rig.state(n) for n in (0, 1)] == [(DeviceState.HEALTHY, True)] * 2
        # Neither do empty readings clear anybody; look-ups do, in their time.
        await rig.tape.events.put(XidEvent(48, PCIS[0]))
        await until(lambda: rig.state(0)[0] is DeviceState.DEGRADED)
        monitor = rig.discovery.health.monitor
        monitor._devices[UUIDS[0]].xids.clear()  # as if ten minutes had passed
        seen = len(collector.history(UUIDS[0]))
        await until(lambda: len(collector.history(UUIDS[0])) > seen + 5)
        assert not monitor.verdict(UUIDS[0]).usable
        for _ in range(4):
            await rig.discovery.discover_all_devices()
        await until(lambda: rig.state(0) == (DeviceState.HEALTHY, True))


async def test_a_simulated_worker_is_watched_through_its_backend(tmp_path: Path) -> None:
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))
    bus = InProcessBus("test")
    engine, master = InProcessEngine(bus), InProcessEngine(bus)
    await engine.start()
    await master.start()
    async with (
        DriverBackend(driver) as backend,
        GPUDiscoveryService(backend, registry_path=tmp_path / "r.json", interval=3600) as discovery,
        ReadingsBoard(master) as board,
    ):
        keys = [each.stable_id for each in backend.devices]
        publisher = NodePublisher(engine, "n1", host=HOST_A, epoch=Epoch.new(1))
        await publisher.start(await discovery.discover_all_devices())
        monitoring = NodeMonitoring(discovery, publisher, interval_s=0.01)
        monitoring.use(backend)
        running = asyncio.create_task(monitoring.run())
        await until(lambda: set(board.readings("n1")) == set(keys))
        first = board.readings("n1")[keys[0]]
        assert first.contact == "healthy"
        assert first.memory_total_bytes
        assert first.memory_total_bytes % (1 << 20) == 0
        events = discovery.subscribe(3600)
        assert (await anext(events)).snapshot is not None
        driver.lose(1)
        async with asyncio.timeout(10):
            event = await anext(events)
        assert (event.type, event.stable_id) == ("lost", keys[1])
        await until(lambda: board.readings("n1")[keys[1]].contact == "lost")
        assert board.readings("n1")[keys[0]].contact == "healthy"
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert not discovery.health.is_watched(keys[0])
    await engine.close()
    await master.close()


@asynccontextmanager
async def a_watched_node(bus: Bus, path: Path) -> AsyncIterator[tuple[list[bytes], NodeMonitoring]]:
    """``n1`` with two simulated cards that were read and are not read again, and that would say nothing more for an
    hour; and what it has sent."""
    engine = await bus.node()
    sent: list[bytes] = []
    send = engine.publish_telemetry

    async def counted(payload: bytes) -> None:
        sent.append(payload)
        await send(payload)

    quiet = asyncio.Event()

    async def pause(seconds: float) -> None:
        await asyncio.sleep(3600 if quiet.is_set() else seconds)

    engine.publish_telemetry = counted  # type: ignore[method-assign]
    async with (
        create_simulated("h100x2") as backend,
        GPUDiscoveryService(backend, registry_path=path / "r.json", interval=3600) as discovery,
    ):
        publisher = NodePublisher(engine, "n1", host=HOST_A, epoch=Epoch.new(1))
        await publisher.start(await discovery.discover_all_devices())
        options: dict[str, Any] = {"interval_s": 0.01, "refresh_s": 3600, "min_interval_s": 3600, "sleep": pause}
        monitoring = NodeMonitoring(discovery, publisher, **options)
        monitoring.use(backend)
        running = asyncio.create_task(monitoring.run())
        try:
            await until(lambda: sent and len(monitoring.readings()) == 2, "the first readings")
            quiet.set()
            told = -1
            while told != len(sent):  # the last reading may still be on its way
                told = len(sent)
                await asyncio.sleep(0.1)
            yield sent, monitoring
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await publisher.leave()


@asynccontextmanager
async def an_observer(engine: EventEngine) -> AsyncIterator[ReadingsBoard]:
    async with ReadingsBoard(engine) as board:
        watching = asyncio.create_task(ClusterObserver(engine, MasterView()).run())
        try:
            yield board
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def test_who_comes_late_hears_the_readings_at_once_with_their_age(bus: Bus, tmp_path: Path) -> None:
    """Nothing has changed, so nothing would be told: that an observer asks for the state is what has it told."""
    await bus.observer()
    async with a_watched_node(bus, tmp_path) as (_, monitoring):
        collector = monitoring.service.collector
        collector.clock = lambda: time.monotonic() + 20  # as if they had been read 20 s ago
        for engine in (await bus.node(), await bus.observer()):
            async with an_observer(engine) as board:
                await until(lambda board=board: len(board.readings("n1")) == 2, "the readings")
                heard = board.readings("n1")
            now = monitoring.readings()
            assert all(20 <= heard[each.device].age_s <= each.age_s + 0.01 for each in now), "no older ones as new ones"
            assert all(each.memory_used_bytes is not None for each in heard.values())
    assert not monitoring._publisher.on_asked  # type: ignore[union-attr]


async def test_many_who_come_at_once_cost_a_node_one_repetition(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurt.cluster.monitoring.REPEAT_S", 3600.0)
    observer = await bus.observer()
    async with a_watched_node(bus, tmp_path) as (sent, _):
        before = len(sent)
        await asyncio.sleep(0.05)
        assert len(sent) == before, "nobody asks, nothing is said"
        asked = await asyncio.gather(*(observer.snapshot("n1", timeout=10) for _ in range(20)))
        assert [len(replies) for replies in asked] == [1] * 20
        await until(lambda: len(sent) > before)
        await asyncio.sleep(0.05)
        assert len(sent) == before + 1


async def test_run_worker_watches_and_publishes(tmp_path: Path) -> None:
    bus = InProcessBus("test")
    master = InProcessEngine(bus)
    await master.start()
    ready: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def on_ready(worker: Worker) -> None:
        ready.set_result(worker)

    config = WorkerConfig(
        node="n1", cluster="test", registry_path=tmp_path / "r.json", simulate="h100x2", telemetry_s=0.02
    )
    async with ReadingsBoard(master) as board:
        running = asyncio.create_task(run_worker(config, on_ready=on_ready, engine=InProcessEngine(bus)))
        worker = await asyncio.wait_for(ready, 20)
        assert worker.monitoring is not None
        await until(lambda: len(board.readings("n1")) == 2)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    await master.close()


async def test_a_worker_may_do_without(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="telemetry_s"):
        WorkerConfig(node="n1", telemetry_s=0)
    ready: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def on_ready(worker: Worker) -> None:
        ready.set_result(worker)

    config = WorkerConfig(
        node="n1", cluster="test", registry_path=tmp_path / "r.json", simulate="h100", telemetry_s=None
    )
    running = asyncio.create_task(run_worker(config, on_ready=on_ready, engine=InProcessEngine(InProcessBus("test"))))
    worker = await asyncio.wait_for(ready, 20)
    assert worker.monitoring is None
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_the_processor_is_read_without_a_backend(tmp_path: Path) -> None:
    from gpurt.backends.cpu_backend import CPUDriver

    (record,) = await asyncio.to_thread(CPUDriver().open)
    reader = host_reader(record)
    assert reader is not None
    reading = await reader()
    assert reading.values["memory_total_bytes"] == record.memory_bytes
    reader.close()
    async with create_simulated("h100") as backend:
        assert host_reader(backend.devices[0]) is None
    assert host_reader(some_device(identity=None)) is None


def test_readings_are_json() -> None:
    assert json.loads(encode_readings("n", "e", [readings()])[0])["devices"][0]["temperature_c"] is None
