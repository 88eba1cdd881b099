"""Discovery between two look-ups: usable memory, health, hot changes, and many cycles of all of it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.budget import budgeted
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.subscription import Subscription
from gpurt.discovery.wire import Failure
from gpurt.errors import GPUError, ReasonCode
from gpurt.health import Evidence
from gpurt.hotchange import Cause
from gpurt.hotchange import watcher as watcher_module
from gpurt.identity import device_identity
from gpurt.sources.host import HostMemory
from gpurt.testing.loops import PATIENCE
from gpurt.testing.simulated import create_simulated
from gpurt.types import DeviceState, GPUDevice
from gpurt.usable_memory import MemorySettings, total_usable_bytes
from tests.discovery.records import GIB, UUIDS, cpu, device
from tests.discovery.test_service import TIMED_OUT, Host, kinds, take

NUMPY: Mapping[str, Any] = {"backend": "cpu", "backend_name": "numpy", "memory_usable_source": "meminfo"}


def put(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with 64 GiB, of which 40 are available, in its second boot."""
    root = tmp_path / "root"
    put(root, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n")
    put(root, "proc/sys/kernel/random/boot_id", "boot-2\n")
    put(root, "etc/machine-id", "0123456789abcdef0123456789abcdef\n")
    return root


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def drained(subscription: Subscription) -> list[DeviceEvent]:
    """Events that wait to be read; nobody looks devices up for it."""
    events = list(subscription._events)
    subscription._events.clear()
    return events


class TestUsableMemory:
    HOST = HostMemory(64 * GIB, 40 * GIB, 40 * GIB, "meminfo")

    def of(self, record: GPUDevice, **environ: str) -> tuple[int | None, str | None, str | None]:
        variables = {f"GPURT_MEMORY_{name.upper()}": value for name, value in environ.items()}
        after = budgeted(record, MemorySettings.from_environ(variables), self.HOST, "host:abc")
        return after.memory_usable_bytes, after.memory_usable_source, after.memory_pool_id

    def test_a_card_has_what_is_free_less_the_reserve(self) -> None:
        assert self.of(device(0)) == (79 * GIB - (512 << 20), "driver", None)
        assert self.of(device(0), reserve="1GiB") == (78 * GIB, "driver", None)

    def test_a_unified_gpu_is_a_member_of_the_hosts_pool(self) -> None:
        spark = device(0, unified_memory=True, memory_bytes=None, memory_available=None)
        assert self.of(spark) == (40 * GIB - (512 << 20), "meminfo", "host:abc")

    def test_of_an_apu_the_graphics_drivers_share_counts(self) -> None:
        apu = device(0, vendor="amd", backend="rocm", unified_memory=True, memory_bytes=30 * GIB)
        assert self.of(apu.model_copy(update={"memory_available": 28 * GIB})) == (
            28 * GIB - (512 << 20),
            "driver",
            "host:abc",
        )
        busy = HostMemory(64 * GIB, 10 * GIB, 10 * GIB, "cgroup")
        after = budgeted(apu.model_copy(update={"memory_available": 28 * GIB}), MemorySettings(), busy, "host:abc")
        assert (after.memory_usable_bytes, after.memory_usable_source) == (10 * GIB - (512 << 20), "cgroup")

    def test_apples_working_set_is_a_bound(self) -> None:
        record = device(
            0,
            vendor="apple",
            backend="metal",
            unified_memory=True,
            memory_bytes=64 * GIB,
            memory_usable_bytes=21 * GIB,
            memory_usable_source="budget",
        )
        assert self.of(record) == (21 * GIB - (512 << 20), "budget", "host:abc")

    def test_limits_for_all_and_for_one(self) -> None:
        assert self.of(device(0), limit="20GiB")[:2] == (20 * GIB, "limit")
        assert self.of(device(1), limit="cuda:0=40GiB,20GiB")[:2] == (20 * GIB, "limit")
        assert self.of(device(0), limit="cuda:0=40GiB,20GiB")[:2] == (40 * GIB, "limit")
        assert self.of(device(0), limit=f"{UUIDS[0]}=3GiB,20GiB")[:2] == (3 * GIB, "limit")

    def test_the_limit_of_an_open_backend_is_not_raised(self) -> None:
        record = cpu(**NUMPY | {"memory_usable_source": "limit", "memory_usable_bytes": GIB})
        assert self.of(record)[:2] == (GIB, "limit")
        assert self.of(record, limit="512MiB")[:2] == (512 << 20, "limit")

    def test_a_part_of_the_processor_has_no_more_than_its_part(self) -> None:
        part = cpu(**NUMPY, memory_bytes=16 * GIB).model_copy(
            update={"identity": device_identity(uuid="host:x", fallback="").model_copy(update={"partition": "1"})}
        )
        assert self.of(part)[0] == 16 * GIB

    async def test_a_results_devices_share_one_pool_per_host(self, path: Path, root: Path) -> None:
        host = Host(device(0), device(1, unified_memory=True, memory_bytes=None, memory_available=None))
        host.shows["toy"] = (cpu(**NUMPY),)
        async with host.service(path, root=root) as service:
            result = await service.discover_all_devices()
        card, unified, processor = result.devices
        assert card.memory_pool_id is None
        assert unified.memory_pool_id == processor.memory_pool_id
        assert (processor.memory_usable_bytes, processor.memory_usable_source) == (40 * GIB, "meminfo")
        assert total_usable_bytes(result.devices) == 79 * GIB - (512 << 20) + 40 * GIB

    async def test_simulated_devices_stay_as_they_are(self, path: Path, root: Path) -> None:
        async with create_simulated("h100,m2-ultra") as backend:
            result = await GPUDiscoveryService(backend, registry_path=path, root=root).discover_all_devices()
            for shown, own in zip(result.devices, backend.devices, strict=True):
                assert (shown.memory_usable_bytes, shown.memory_usable_source, shown.memory_pool_id) == (
                    own.memory_usable_bytes,
                    own.memory_usable_source,
                    own.memory_pool_id,
                )

    async def test_simulated_devices_obey_limits_and_reserves(self, path: Path, root: Path) -> None:
        environ = {"GPURT_MEMORY_LIMIT": "simulated:0=20GiB", "GPURT_MEMORY_RESERVE": "1GiB"}
        for host in (create_simulated("h100,m2-ultra", environ={}), create_simulated("h100,m2-ultra", environ=environ)):
            async with host as backend:
                service = GPUDiscoveryService(backend, registry_path=path, root=root, environ=environ)
                first, second = (await service.discover_all_devices()).devices
            assert (first.memory_usable_bytes, first.memory_usable_source) == (20 * GIB, "limit")
            assert second.memory_available is not None
            assert second.memory_usable_bytes == second.memory_available - GIB
            assert (second.memory_usable_source, second.memory_pool_id) == ("profile", second.stable_id)

    def test_no_more_is_usable_than_is_free(self) -> None:
        record = cpu(**NUMPY, memory_available=39 * GIB)
        after = budgeted(record, MemorySettings(), self.HOST, "host:abc")
        assert (after.memory_usable_bytes, after.memory_available) == (40 * GIB, 40 * GIB)
        strange = cpu(memory_usable_bytes=50 * GIB, memory_usable_source="limit", memory_available=39 * GIB)
        after = budgeted(strange, MemorySettings(), self.HOST, "host:abc")
        assert (after.memory_usable_bytes, after.memory_available) == (39 * GIB, 39 * GIB)
        # What the kernel would reclaim is free, and drivers of unified memory do not say so.
        spark = device(0, unified_memory=True, memory_bytes=64 * GIB, memory_available=5 * GIB)
        after = budgeted(spark, MemorySettings(), self.HOST, "host:abc")
        assert (after.memory_usable_bytes, after.memory_available) == (40 * GIB - (512 << 20), 40 * GIB)
        forced = MemorySettings.from_environ({"GPURT_MEMORY_LIMIT": "60GiB!"})
        after = budgeted(device(0, memory_available=GIB), forced, self.HOST, "host:abc")
        assert (after.memory_usable_bytes, after.memory_available) == (60 * GIB, GIB)

    async def test_a_limit_that_is_no_size_is_said(self, path: Path) -> None:
        with pytest.raises(GPUError, match="GPURT_MEMORY_LIMIT"):
            await Host(device(0)).service(path, environ={"GPURT_MEMORY_LIMIT": "lots"}).discover_all_devices()

    async def test_who_decides_is_told_with_the_figure_and_is_no_news_by_itself(self, path: Path, root: Path) -> None:
        host, clock = Host(), Clock()
        host.shows["toy"] = (cpu(**NUMPY),)
        async with host.service(path, root=root, clock=clock) as service:
            subscription = service.subscribe(1e9)
            await service._poll()
            drained(subscription)
            put(root, "proc/self/cgroup", "0::/a\n")
            put(root, "sys/fs/cgroup/a/memory.max", str(40 * GIB))
            put(root, "sys/fs/cgroup/a/memory.current", str(1 << 20))
            clock.now += 20
            await service._poll()
            assert [event.type for event in drained(subscription)] == []
            put(root, "sys/fs/cgroup/a/memory.current", str(30 * GIB))
            clock.now += 20
            await service._poll()
            (event,) = drained(subscription)
            assert event.type is EventType.MEMORY
            assert event.device is not None
            assert (event.device.memory_usable_bytes, event.device.memory_usable_source) == (10 * GIB, "cgroup")


class TestHealth:
    async def opened(self, service: GPUDiscoveryService) -> Subscription:
        subscription = service.subscribe(1e9)
        await service._poll()
        drained(subscription)
        return subscription

    def xid(self, service: GPUDiscoveryService, number: int, key: str = UUIDS[0]) -> None:
        transition = service.health.monitor.xid(key, number)
        if transition is not None:
            service.take_health(transition)

    async def test_nvi_10_an_xid_is_told_at_once_and_its_device_gets_no_work(self, path: Path) -> None:
        host = Host(device(0), device(1))
        async with host.service(path) as service:
            subscription = await self.opened(service)
            probes = len(host.probes)
            for harmless in (13, 31, 43, 45, 68, 109):
                self.xid(service, harmless)
            assert drained(subscription) == []
            self.xid(service, 48)
            (event,) = drained(subscription)
            assert len(host.probes) == probes  # told before anybody has looked again
            assert (event.type, event.stable_id) == (EventType.HEALTH, UUIDS[0])
            assert event.device is not None
            assert (event.device.state, event.device.usable) == (DeviceState.DEGRADED, False)
            assert "Xid 48" in (event.device.state_reason or "")
            result = await service.discover_all_devices(refresh=False)
            assert [each.usable for each in result.devices] == [False, True, True]
            await service._poll()
            assert drained(subscription) == []

    async def test_nvi_10_restarts_neither_forget_nor_hold_for_ever(self, path: Path, root: Path) -> None:
        host, clock = Host(device(0), device(1)), Clock()
        async with host.service(path, root=root, clock=clock) as service:
            await self.opened(service)
            self.xid(service, 79)
        assert json.loads(path.read_text())["health"]["boot_id"] == "boot-2"
        async with host.service(path, root=root, clock=clock) as service:
            first = await service.discover_all_devices()
            assert (first.devices[0].state, first.devices[0].usable) == (DeviceState.LOST, False)
            assert first.devices[1].usable
            subscription = service.subscribe(1e9)
            drained(subscription)
            clock.now += 700  # longer than an Xid counts
            for _ in range(4):
                clock.now += 10
                await service._poll()
            assert kinds(drained(subscription)) == [("recovered", UUIDS[0])]
        async with host.service(path, root=root, clock=clock) as service:
            assert (await service.discover_all_devices()).devices[0].usable

    async def test_a_reboot_resets_devices(self, path: Path, root: Path) -> None:
        host = Host(device(0))
        async with host.service(path, root=root) as service:
            await self.opened(service)
            self.xid(service, 79)
        put(root, "proc/sys/kernel/random/boot_id", "boot-3\n")
        async with host.service(path, root=root) as service:
            assert (await service.discover_all_devices()).devices[0].usable

    async def test_the_same_loss_by_two_ways_is_one_event(self, path: Path) -> None:
        host = Host(device(0))
        lost = device(0, usable=False, state=DeviceState.LOST, state_reason="gpu_is_lost: NVML says so")
        clock = Clock()
        async with host.service(path, clock=clock) as service:
            subscription = await self.opened(service)
            self.xid(service, 79)
            host.shows["cuda"] = (lost,)
            await service._poll()
            assert kinds(drained(subscription)) == [("lost", UUIDS[0])]
        path.unlink()
        host.shows["cuda"] = (device(0),)
        async with host.service(path, clock=clock) as service:
            subscription = await self.opened(service)
            host.shows["cuda"] = (lost,)
            await service._poll()
            self.xid(service, 79)
            assert kinds(drained(subscription)) == [("lost", UUIDS[0])]

    async def test_a_device_that_was_replaced_starts_afresh(self, path: Path) -> None:
        host, clock = Host(device(0), device(1)), Clock()
        async with host.service(path, clock=clock) as service:
            subscription = await self.opened(service)
            self.xid(service, 79)
            host.shows["cuda"] = (device(1),)
            await service._poll()
            host.shows["cuda"] = (device(0), device(1))
            await service._poll()
            assert kinds(drained(subscription)) == [("lost", UUIDS[0]), ("removed", UUIDS[0]), ("added", UUIDS[0])]
            assert (await service.discover_all_devices(refresh=False)).devices[0].usable
            assert UUIDS[0] not in json.dumps(service.health.monitor.export())

    async def test_look_ups_do_not_clear_what_telemetry_watches(self, path: Path) -> None:
        host, clock = Host(device(0)), Clock()
        async with host.service(path, clock=clock) as service:
            await self.opened(service)
            service.health.is_watched = lambda key: key == UUIDS[0]
            hung = service.health.monitor.observe(UUIDS[0], Evidence(contact=DeviceState.UNRESPONSIVE))
            assert hung is not None
            service.take_health(hung)
            for _ in range(10):
                await service._poll()
            assert not (await service.discover_all_devices(refresh=False)).devices[0].usable

    async def test_the_preferred_backend_is_one_with_a_device_that_is_well(self, path: Path) -> None:
        async with Host(device(0)).service(path) as service:
            await self.opened(service)
            self.xid(service, 79)
            assert (await service.discover_all_devices(refresh=False)).backend_name == "toy"
            assert (await service.discover_all_devices()).backend_name == "toy"

    async def test_two_services_of_one_registry_keep_each_others_findings(self, path: Path, root: Path) -> None:
        hosts = Host(device(0), device(1)), Host(device(0), device(1))
        async with hosts[0].service(path, root=root) as one, hosts[1].service(path, root=root) as other:
            await self.opened(one)
            await self.opened(other)
            self.xid(one, 79, UUIDS[0])
            self.xid(other, 48, UUIDS[1])
        async with Host(device(0), device(1)).service(path, root=root) as service:
            states = [each.state for each in (await service.discover_all_devices()).devices]
        assert states[:2] == [DeviceState.LOST, DeviceState.DEGRADED]

    async def test_what_condemns_comes_from_the_environment(self, path: Path) -> None:
        environ = {"GPURT_HEALTH_XIDS": "31=lost,79=notice"}
        async with Host(device(0)).service(path, environ=environ) as service:
            subscription = await self.opened(service)
            self.xid(service, 79)
            assert drained(subscription) == []
            self.xid(service, 31)
            assert kinds(drained(subscription)) == [("lost", UUIDS[0])]

    @pytest.mark.parametrize("health", [[], "x", {"devices": 3}, {"devices": {"GPU-x": None}}, {"boot_id": 7}])
    async def test_any_remembered_health_costs_itself_alone(self, path: Path, health: Any) -> None:
        await Host(device(0)).service(path).discover_all_devices()
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"health": health}))
        result = await Host(device(0)).service(path).discover_all_devices()
        assert result.devices[0].usable
        assert result.persisted

    async def test_simulated_health_has_its_own_place(self, path: Path) -> None:
        async with create_simulated("h100x2", seed="w") as backend:
            key = backend.devices[0].stable_id
            async with GPUDiscoveryService(backend, registry_path=path) as service:
                await service.discover_all_devices()
                self.xid(service, 79, key)
            document = json.loads(path.read_text())
            assert not document["health"].get("devices")
            assert key in document["simulated"]["health"]["devices"]
            async with GPUDiscoveryService(backend, registry_path=path) as service:
                assert not (await service.discover_all_devices()).devices[0].usable


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "DEBOUNCE_S", 0.01)
    monkeypatch.setattr(watcher_module, "TICK_S", 0.01)


class TestHotChange:
    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.002)

    async def test_a_new_device_is_told_long_before_the_next_interval(
        self, path: Path, root: Path, quick: None
    ) -> None:
        host = Host(device(0))
        async with host.service(path, root=root, interval=3600) as service:
            service._watcher._tick_s = 0.01
            subscription = service.subscribe()
            await take(subscription, 1)
            watched: list[int] = []

            async def watch() -> None:
                async for result in service.watch():
                    watched.append(len(result.devices))

            watching = asyncio.create_task(watch())
            arriving = asyncio.ensure_future(anext(subscription))
            await self.until(lambda: watched == [2] and service._watcher._marks is not None)
            host.shows["cuda"] = (device(0), device(1))
            put(root, "dev/nvidia1")
            async with asyncio.timeout(PATIENCE):
                assert kinds([await arriving]) == [("added", UUIDS[1])]
            await self.until(lambda: watched == [2, 3])
            await service.shutdown()
            await watching

    async def test_a_driver_that_is_installed_ends_the_wait_of_its_backend(
        self, path: Path, root: Path, quick: None
    ) -> None:
        """NVI-9: the service was there before the driver."""
        host = Host()
        host.shows["cuda"] = Failure(ReasonCode.NO_DRIVER, "not loaded")
        async with host.service(path, root=root, interval=3600) as service:
            service._watcher._tick_s = 0.01
            subscription = service.subscribe()
            await take(subscription, 1)
            arriving = asyncio.create_task(take(subscription, 2))
            await self.until(lambda: service._watcher._marks is not None)
            host.shows["cuda"] = (device(0),)
            put(root, "proc/driver/nvidia/version", "NVRM version: 590.48.01\n")
            assert kinds(await arriving) == [("backend_available", "cuda"), ("added", UUIDS[0])]

    async def test_after_a_sleep_nothing_is_believed_and_nothing_is_lost(self, path: Path, root: Path) -> None:
        host = Host(device(0))
        async with host.service(path, root=root, interval=3600) as service:
            subscription = service.subscribe()
            await take(subscription, 1)
            await service.discover_all_devices()
            assert any(UUIDS[0] in key for key in host.verified[-1])
            waiting = asyncio.ensure_future(anext(subscription))
            await asyncio.sleep(0)
            probes = len(host.probes)
            service._changed(frozenset({Cause.RESUMED}))
            await self.until(lambda: len(host.probes) == probes + 2)
            assert not any(UUIDS[0] in key for key in host.verified[-1])
            await asyncio.sleep(0.01)
            assert not waiting.done()
            result = await service.cached()
            assert result is not None
            assert (result.discovery_status, result.devices[0].state) == ("complete", DeviceState.HEALTHY)
            await service.shutdown()
            with pytest.raises(StopAsyncIteration):
                await waiting

    async def test_clk_1_a_wall_clock_that_jumps_changes_nothing(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, jump, wall = Clock(), 0.0, time.time
        monkeypatch.setattr(time, "time", lambda: wall() + jump)
        host = Host(device(0))
        async with host.service(path, clock=clock) as service:
            subscription = service.subscribe(1e9)
            await service._poll()
            drained(subscription)
            for jump in (3600.0, -86400.0, 1e8):  # noqa: B007 - the wall clock reads it
                clock.now += 1
                await service._poll()
                cached = await service.cached()
                assert cached is not None
                assert cached.age_s == 0.0
                assert all(each.state is DeviceState.HEALTHY for each in cached.devices)
            assert drained(subscription) == []

    async def test_nvi_2_a_container_that_lost_its_nodes(self, path: Path, root: Path) -> None:
        for node in ("nvidiactl", "nvidia0", "nvidia1"):
            put(root, f"dev/{node}")
        put(root, "proc/driver/nvidia/version", "NVRM version: 590.48.01\n")
        put(root, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
        host, clock = Host(device(0), device(1)), Clock()
        async with host.service(path, root=root, clock=clock) as service:
            subscription = service.subscribe(1e9)
            await service._poll()
            drained(subscription)
            for node in ("nvidiactl", "nvidia0", "nvidia1"):
                (root / "dev" / node).unlink()
            # Without nodes the library sees no device, which would otherwise mean that they are really gone.
            for reason in (ReasonCode.NO_DEVICE, ReasonCode.ERROR, ReasonCode.NO_DRIVER):
                host.shows["cuda"] = Failure(reason, "Unknown Error (999)")
                clock.now += 400
                await service._poll()
            events = drained(subscription)
            assert kinds(events) == [
                ("backend_unavailable", "cuda"),
                ("health", UUIDS[0]),
                ("health", UUIDS[1]),
            ]
            result = await service.discover_all_devices(refresh=False)
            cards = [each for each in result.devices if each.backend == "cuda"]
            assert [(each.stable_id, each.usable) for each in cards] == [(UUIDS[0], False), (UUIDS[1], False)]
            report = result.reports[0]
            assert report.reason is ReasonCode.NO_PERMISSION
            assert "/dev/nvidia0" in report.message
            assert "999" in report.message
            assert "create the container again" in (report.hint or "")
            assert "lost its devices" in (cards[0].state_reason or "")
            host.shows["cuda"] = (device(0), device(1))
            clock.now += 400
            await service._poll()
            assert kinds(drained(subscription)) == [
                ("backend_available", "cuda"),
                ("recovered", UUIDS[0]),
                ("recovered", UUIDS[1]),
            ]

    async def test_a_card_that_was_unplugged_is_removed_although_its_driver_stays(self, path: Path, root: Path) -> None:
        put(root, "dev/nvidia0")
        put(root, "proc/driver/nvidia/version", "NVRM version: 590.48.01\n")
        host = Host(device(0))
        async with host.service(path, root=root) as service:
            subscription = service.subscribe(1e9)
            await service._poll()
            drained(subscription)
            (root / "dev/nvidia0").unlink()
            host.shows["cuda"] = Failure(ReasonCode.NO_DEVICE, "no device")
            await service._poll()
            assert kinds(drained(subscription)) == [("removed", UUIDS[0]), ("backend_unavailable", "cuda")]


class TestFirstAnswers:
    async def test_a_subscriber_has_the_registrys_answer_before_anybody_has_answered(self, path: Path) -> None:
        host = Host(device(0))
        await host.service(path).discover_all_devices()
        host.gate = asyncio.Event()
        async with host.service(path) as service:
            subscription = service.subscribe()
            (event,) = await take(subscription, 1)
            assert event.snapshot is not None
            assert (event.snapshot.discovery_status, len(event.snapshot.devices)) == ("stale", 2)
            host.shows["cuda"] = (device(0), device(1))
            host.gate.set()
            assert kinds(await take(subscription, 1)) == [("added", UUIDS[1])]

    async def test_hng_3_a_late_answer_upgrades_what_was_told(self, path: Path) -> None:
        host = Host(device(0))
        host.gates["cuda"] = asyncio.Event()
        host.sees["cuda"] = (device(0, usable=False),)
        async with host.service(path) as service:
            subscription = service.subscribe()
            (event,) = await take(subscription, 1)
            assert event.snapshot is not None
            assert (event.snapshot.discovery_status, event.snapshot.pending) == ("preview", ("cuda",))
            assert [each.usable for each in event.snapshot.devices] == [False, True]
            host.gates["cuda"].set()
            (event,) = await take(subscription, 1)
            assert event.type is EventType.SNAPSHOT
            assert event.snapshot is not None
            assert event.snapshot.discovery_status == "complete"
            assert [each.usable for each in event.snapshot.devices] == [True, True]

    async def test_hng_2_a_program_that_is_restarted_does_not_crash_a_probe_each_time(self, path: Path) -> None:
        host = Host()
        host.shows["cuda"] = Failure(ReasonCode.CRASHED, "signal 11")
        for _ in range(5):
            async with host.service(path) as service:
                result = await service.discover_all_devices(patient=True)
                assert result.reports[0].reason is ReasonCode.CRASHED
        assert host.probes.count("cuda") == 1
        assert host.probes.count("toy") == 5


async def test_50_callers_at_once_make_one_probe_per_backend(path: Path) -> None:
    host = Host(device(0))
    async with host.service(path) as service:
        results = await asyncio.gather(*(service.discover_all_devices() for _ in range(50)))
        assert sorted(host.probes) == ["cuda", "toy"]
        assert all(result is results[0] for result in results)
        mixed = await asyncio.gather(
            *(service.discover_all_devices(patient=n % 2 == 0, on_preview=lambda _: None) for n in range(50))
        )
        assert len({id(result) for result in mixed}) <= 2
        assert len(host.probes) <= 6


def census() -> tuple[int, int]:
    """Threads of ours and open file descriptors."""
    mine = sum(thread.name.startswith("gpurt") for thread in threading.enumerate())
    return mine, len(os.listdir("/proc/self/fd"))


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors under /proc")
async def test_1000_cycles_give_one_event_per_change_and_leave_nothing(path: Path, root: Path) -> None:
    """A driver that hangs, recovers, loses a GPU and gets it back, again and again."""
    clock = Clock()
    both = (device(0), device(1))
    lost = device(1, usable=False, state=DeviceState.LOST, state_reason="gpu_is_lost: it has fallen off the bus")
    acts: list[tuple[Any, list[tuple[str, str]]]] = [
        (both, []),
        (
            TIMED_OUT,
            [("backend_unavailable", "cuda"), ("health", UUIDS[0]), ("health", UUIDS[1])],
        ),
        (both, [("backend_available", "cuda"), ("recovered", UUIDS[0]), ("recovered", UUIDS[1])]),
        ((device(0), lost), [("lost", UUIDS[1])]),
        (both, [("recovered", UUIDS[1])]),
        ((device(0),), [("removed", UUIDS[1])]),
        (both, [("added", UUIDS[1])]),
    ]
    host = Host(*both)
    service = host.service(path, root=root, clock=clock)
    subscription = service.subscribe(1e9)
    cycles = 0

    async def round_of_acts(expect: bool = True) -> None:
        nonlocal cycles
        for shows, expected in acts:
            host.shows["cuda"] = shows
            events: list[DeviceEvent] = []
            for _ in range(5):
                clock.now += 400  # longer than any back-off
                await service._poll()
                events += drained(subscription)
                cycles += 1
            host.probes.clear()
            host.deadlines.clear()
            host.verified.clear()
            if expect:
                assert kinds(events) == expected

    async def counted() -> tuple[int, int]:
        await settled_threads()
        gc.collect()
        return census()

    try:
        await round_of_acts(expect=False)
        things = await counted()
        while cycles < 600:
            await round_of_acts()
        tracemalloc.start(1)  # not before: it makes everything three times as slow
        while cycles < 700:
            await round_of_acts()
        assert await counted() == things
        before = held_bytes()
        while cycles < 1000:
            await round_of_acts()
        assert await counted() == things
        grown = held_bytes() - before
    finally:
        tracemalloc.stop()
        await service.shutdown()
    # pydantic keeps every short text that it has parsed lately, time stamps among them: 100 bytes a cycle.
    assert grown < 128 << 10, f"{grown} bytes more after 300 cycles"
    assert len(json.loads(path.read_text())["devices"]) == 3


def held_bytes() -> int:
    # Without pathlib: it interns names, and the interpreter's table of those grows by megabytes at some moment.
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*/pathlib.py")])
    return sum(trace.size for trace in traces.traces)


async def settled_threads() -> None:
    """Threads of calls that have ended take a moment to end, too. The helper of host copies is the process's own."""
    async with asyncio.timeout(PATIENCE):
        while any(
            thread.name.startswith("gpurt") and thread.name != "gpurt:hostcopy" for thread in threading.enumerate()
        ):
            await asyncio.sleep(0.001)
