"""Memory accounting: whose bytes, how many, how old. The numbers are those of docs/problems.md."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpurt.backends.cpu_backend import CPUDriver
from gpurt.cluster.board import ReadingsBoard
from gpurt.cluster.inprocess import InProcessEngine
from gpurt.cluster.records import NodeState
from gpurt.errors import OutOfMemory
from gpurt.factory import GPUBackendFactory
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.host import memory_budget
from gpurt.telemetry import LeakDetector, RawReading, TelemetryCollector, wait_for_memory, with_fallback
from gpurt.testing.faults import Fault
from gpurt.testing.profiles import PROFILES, Profile
from gpurt.types import DeviceKind
from gpurt.usable_memory import RESERVES, Amount, Figures, total_usable_bytes, usable_memory
from tests.discovery.records import UUIDS, cpu, device
from tests.problems.rig import Host, Machine, Tree, a_cluster, kinds, machine, plugged, rest
from tests.sources import trees

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


def card(gib: int) -> Profile:
    return replace(PROFILES["rtx-4090"], memory_bytes=gib * GIB)


async def test_m23_a_card_of_12_gib_is_12_gib_whatever_the_host_has(tmp_path: Path) -> None:
    with plugged(machine([card(12)])):
        async with a_cluster(tmp_path) as cluster:
            await cluster.start("n1", backends=["accel", "cpu"])
            shown = cluster.view.snapshot().available_devices.values()
            (gpu,) = (each for each in shown if each.backend == "accel")
            (host,) = (each for each in shown if each.kind is DeviceKind.CPU)
    assert gpu.memory_bytes == 12 * GIB
    assert gpu.memory_usable_bytes is not None
    assert 11 * GIB < gpu.memory_usable_bytes <= 12 * GIB
    assert gpu.memory_pool_id is None or gpu.memory_pool_id != host.memory_pool_id
    assert host.memory_bytes == (await asyncio.to_thread(memory_budget)).total_bytes


async def test_m24_more_than_the_card_has_is_refused_with_the_figures() -> None:
    driver = machine([card(24)])
    async with DriverBackend(driver) as backend:
        kept = await backend.allocate("accel:0", 20 * GIB)
        with pytest.raises(OutOfMemory) as caught:
            await backend.allocate("accel:0", 6 * GIB)
        short = caught.value
        assert (short.requested_bytes, short.free_bytes, short.total_bytes) == (6 * GIB, 4 * GIB, 24 * GIB)
        assert short.device_id == "accel:0"
        await backend.deallocate(kept)
        await backend.deallocate(await backend.allocate("accel:0", 24 * GIB))
    # A limit that somebody has set holds in its place, before the library is asked.
    driver = machine([card(24)])
    async with DriverBackend(driver, memory_limit={"accel:0": 8 * GIB}) as backend:
        with pytest.raises(OutOfMemory) as caught:
            await backend.allocate("accel:0", 9 * GIB)
        assert (caught.value.limit_bytes, caught.value.free_bytes) == (8 * GIB, 8 * GIB)
        assert "memory_limit" in str(caught.value.hint)
        assert [call for call in driver.calls if call.method == "alloc"] == []
        assert (await backend.get_device_memory_info("accel:0")).available_bytes == 8 * GIB


async def test_m24_a_limit_of_the_environment_is_kept() -> None:
    driver = machine([card(24)])
    with plugged(driver):
        backend = await GPUBackendFactory.create_backend("accel", environ={"GPURT_MEMORY_LIMIT": "accel:0=8GiB"})
        async with backend:
            await backend.deallocate(await backend.allocate("accel:0", 8 * GIB))
            calls = len(driver.calls)
            with pytest.raises(OutOfMemory) as caught:
                await backend.allocate("accel:0", 9 * GIB)
            assert (caught.value.limit_bytes, len(driver.calls)) == (8 * GIB, calls)


async def test_m25_a_tool_that_is_missing_is_replaced_and_never_reads_zero() -> None:
    async def macmon() -> RawReading:
        raise FileNotFoundError("macmon")

    async def other() -> RawReading:
        return RawReading({"memory_total_bytes": 64 * GIB, "memory_used_bytes": 20 * GIB}, {"power_w": "unsupported"})

    async def broken() -> RawReading:
        raise RuntimeError("unknown chip")

    collector = TelemetryCollector({"one": with_fallback(macmon, other), "two": with_fallback(macmon, broken)})
    await collector.poll()
    one, two = collector.readings("one"), collector.readings("two")
    assert (one["memory_total_bytes"].value, one["memory_used_bytes"].value) == (64 * GIB, 20 * GIB)
    assert (one["power_w"].value, one["power_w"].reason) == (None, "unsupported")
    assert all(reading.value is None and reading.reason for reading in two.values())


def test_m26_what_can_be_reclaimed_counts_as_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # macOS: no /proc, and half of the memory is "used" by what the system gives back when asked.
    told = SimpleNamespace(total=16 * GIB, available=13 * GIB, used=8 * GIB, free=GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: told)
    host = memory_budget(tmp_path)
    assert (host.total_bytes, host.usable_bytes, host.source) == (16 * GIB, 13 * GIB, "psutil")
    metal = Figures(16 * GIB, None, unified=True, budget_bytes=12 * GIB)
    found = usable_memory(metal, host=host, host_pool="host:x")
    assert (found.usable_bytes, found.source) == (12 * GIB, "budget")
    busy = replace(host, usable_bytes=GIB)
    assert usable_memory(metal, host=busy).usable_bytes == GIB
    assert usable_memory(metal, host=busy, limit=Amount(10 * GIB, forced=True)).usable_bytes == 10 * GIB
    # Linux: page cache is reclaimable, too.
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 13631488 kB\n")
    assert memory_budget(tmp_path).usable_bytes == 13 * GIB


class Leaky(Machine):
    """What is freed comes back, but for 300 MiB."""

    name = "accel"

    def free(self, index: int, mem: Any) -> None:
        super().free(index, mem)
        self._open[index].used += 300 * MIB


async def test_m27_a_leak_of_every_load_is_noticed() -> None:
    detector = LeakDetector(threshold_bytes=64 * MIB, cycles=3)
    found = []
    async with DriverBackend(Leaky([card(24)])) as backend:
        for _ in range(5):
            weights = [await backend.allocate("accel:0", GIB)]
            for handle in weights:
                await backend.deallocate(handle)
            found.append(detector.after_unload((await backend.get_device_memory_info("accel:0")).used_bytes))
    assert [leak is not None for leak in found] == [False, False, False, True, False]
    assert found[3] is not None
    assert (found[3].grown_bytes, found[3].cycles) == (900 * MIB, 3)


# Memory that is the host's, too


def host_of(root: Path, total: int, available: int) -> None:
    """What the kernel says of the host's memory."""
    (root / "proc").mkdir(exist_ok=True)
    text = f"MemTotal: {total >> 10} kB\nMemFree: 1024 kB\nMemAvailable: {available >> 10} kB\n"
    (root / "proc/meminfo").write_text(text)


async def test_m28_an_apu_has_what_the_host_lends_it(tmp_path: Path) -> None:
    gtt = 115964116992
    trees.strix_halo_host(tmp_path, gtt=gtt)  # 512 MiB of its own
    host_of(tmp_path, 192 * GIB, 180 * GIB)
    tree = Tree(tmp_path)
    found = await tree.discover("rocm", "cpu")
    gpu, host = found.devices
    assert gpu.kind is DeviceKind.INTEGRATED_GPU
    assert gpu.memory_usable_bytes is not None
    assert 100 * GIB < gpu.memory_usable_bytes <= gtt + trees.STRIX_HALO_VRAM
    assert gpu.unified_memory
    assert gpu.memory_pool_id == host.memory_pool_id is not None
    # The same memory, so it counts once.
    assert total_usable_bytes(found.devices) == host.memory_usable_bytes == 180 * GIB
    # A busy host lends less.
    host_of(tmp_path, 192 * GIB, 40 * GIB)
    gpu, host = (await tree.discover("rocm", "cpu")).devices
    assert gpu.memory_usable_bytes is not None
    assert gpu.memory_usable_bytes <= 40 * GIB + trees.STRIX_HALO_VRAM


async def test_m29_memory_carved_out_for_a_gpu_is_neither_the_hosts_nor_the_sum(tmp_path: Path) -> None:
    trees.strix_halo_host(tmp_path, vram=96 * GIB, gtt=16 * GIB)
    host_of(tmp_path, 32 * GIB, 30 * GIB)
    gpu, host = (await Tree(tmp_path).discover("rocm", "cpu")).devices
    assert (gpu.memory_bytes, host.memory_usable_bytes) == (96 * GIB, 30 * GIB)
    free = 96 * GIB - trees.STRIX_HALO_VRAM_USED
    assert gpu.memory_usable_bytes is not None
    assert free - GIB < gpu.memory_usable_bytes <= free
    assert gpu.memory_pool_id != host.memory_pool_id


async def test_m30_a_unified_gpu_has_what_the_host_can_give(registry: Path, tmp_path: Path) -> None:
    host_of(tmp_path, 121 * GIB, 116 * GIB)
    gb10 = device(
        0, name="NVIDIA GB10", kind=DeviceKind.INTEGRATED_GPU, unified_memory=True, memory_bytes=121 * GIB,
        memory_available=int(2.9 * GIB),
    )  # fmt: skip
    (found,) = (await Host(cuda=(gb10,)).service(registry, root=tmp_path).discover_all_devices()).devices
    assert found.memory_usable_bytes is not None
    assert 115 * GIB < found.memory_usable_bytes <= 116 * GIB
    assert found.memory_usable_source == "meminfo"
    assert found.memory_pool_id is not None


async def test_m31_a_device_whose_memory_nvml_does_not_tell_is_kept(tmp_path: Path) -> None:
    host_of(tmp_path, 121 * GIB, 116 * GIB)
    row = {"index": 0, "name": "NVIDIA GB10", "uuid": UUIDS[0], "pci_address": "0000000f:01:00.0",
           "unified_memory": True, "compute_capability": "12.1",
           "errors": {"memory_total_bytes": "unsupported"}}  # fmt: skip
    tree = Tree(tmp_path, nvml={"driver_version": "580.173.02", "devices": [row]})
    gpu = (await tree.discover("cuda", "cpu")).devices[0]
    assert (gpu.stable_id, gpu.unified_memory) == (UUIDS[0], True)
    assert gpu.memory_usable_bytes is not None
    assert 115 * GIB < gpu.memory_usable_bytes <= 116 * GIB
    assert gpu.memory_usable_source == "meminfo"


async def test_m32_memory_that_comes_back_late_is_waited_for() -> None:
    driver = machine([card(16)])
    async with DriverBackend(driver) as backend:

        async def free() -> int | None:
            return (await backend.get_device_memory_info("accel:0")).available_bytes

        await backend.deallocate(await backend.allocate("accel:0", 12 * GIB))
        driver.inject(Fault("telemetry", first=4, lie={"memory_free_bytes": 4 * GIB}))
        found = await wait_for_memory(free, 15 * GIB, interval_s=0.001)
        assert (found.recovered, found.free_bytes) == (True, 16 * GIB)
        driver.inject(Fault("telemetry", lie={"memory_free_bytes": 4 * GIB}))
        given_up = await wait_for_memory(free, 15 * GIB, interval_s=0.001, deadline_s=0.02)
        assert (given_up.recovered, given_up.free_bytes) == (False, 4 * GIB)


@pytest.mark.parametrize(("limit", "usable", "source"), [("max", 20 * GIB, "meminfo"), (8 * GIB, 7 * GIB, "cgroup")])
async def test_m33_a_containers_limit_is_what_there_is(tmp_path: Path, limit: Any, usable: int, source: str) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", f"MemTotal: {23 << 20} kB\nMemFree: 1024 kB\nMemAvailable: {20 << 20} kB\n")
    write("proc/self/cgroup", "0::/box\n")
    write("sys/fs/cgroup/box/memory.max", f"{limit}\n")
    write("sys/fs/cgroup/box/memory.current", f"{3 * GIB}\n")
    write("sys/fs/cgroup/box/memory.stat", f"anon 1\ninactive_file {2 * GIB}\nactive_file 5\n")
    driver = CPUDriver(root=tmp_path)
    async with DriverBackend(driver) as backend:
        (processor,) = backend.devices
        assert (processor.memory_usable_bytes, processor.memory_usable_source) == (usable, source)
        assert processor.memory_bytes == (23 * GIB if limit == "max" else limit)
        with pytest.raises(OutOfMemory):
            await backend.allocate("cpu:0", usable + GIB)


async def test_m34_memory_that_another_process_frees_is_only_a_new_figure(registry: Path) -> None:
    driver = machine([card(24)])
    async with DriverBackend(driver) as backend:
        seen = []
        for used in (17, 10):  # GiB in use by others
            driver.inner.set_telemetry(  # type: ignore[attr-defined]
                0, memory_used_bytes=used * GIB, memory_free_bytes=(24 - used) * GIB
            )
            info = await backend.get_device_memory_info("accel:0")
            seen.append((info.available_bytes, info.used_bytes))
            await backend.deallocate(await backend.allocate("accel:0", GIB))
    assert seen == [(7 * GIB, 17 * GIB), (14 * GIB, 10 * GIB)]
    host = Host(cuda=(device(0, memory_available=7 * GIB),), toy=(cpu(backend="toy"),))
    service = host.service(registry)
    subscription = service.subscribe(1000)
    await service.discover_all_devices()
    host.shows["cuda"] = (device(0, memory_available=14 * GIB),)
    await service.discover_all_devices()
    assert kinds(await rest(service, subscription))[1:] == [("memory", UUIDS[0])]


async def test_m35_ranks_of_unequal_memory_are_reported_and_used(tmp_path: Path) -> None:
    with plugged(machine([card(24), card(16)])):
        async with a_cluster(tmp_path) as cluster:
            await cluster.start("n1", backends=["accel"])
            assert cluster.node("n1").discovery_status == "complete"
            found = sorted(cluster.view.snapshot().available_devices.values(), key=lambda each: each.device_id)
    assert [each.memory_bytes for each in found] == [24 * GIB, 16 * GIB]
    usable = [each.memory_usable_bytes or 0 for each in found]
    assert usable[0] > usable[1] > 0
    assert total_usable_bytes(found) == sum(usable)


async def test_m36_a_budget_that_somebody_sets_wins_over_the_probe(registry: Path) -> None:
    cards = (device(0, memory_bytes=24 * GIB, memory_available=3 * GIB), device(1, memory_available=70 * GIB))
    environ = {"GPURT_MEMORY_LIMIT": f"{UUIDS[0]}=22GiB!,cuda:1=20GiB"}
    service = Host(cuda=cards).service(registry, environ=environ)
    first, second = (await service.discover_all_devices()).devices
    assert (first.memory_usable_bytes, first.memory_usable_source) == (22 * GIB, "limit")
    assert (second.memory_usable_bytes, second.memory_usable_source) == (20 * GIB, "limit")
    # More than there is cannot be had, and a limit that is not forced raises nothing.
    environ = {"GPURT_MEMORY_LIMIT": "cuda:0=99GiB!,cuda:1=75GiB"}
    service = Host(cuda=cards).service(registry, environ=environ)
    first, second = (await service.discover_all_devices()).devices
    assert first.memory_usable_bytes == 24 * GIB
    assert second.memory_usable_source == "driver"


async def test_m37_values_of_a_node_that_is_gone_are_marked_so(tmp_path: Path) -> None:
    now = 0.0
    async with a_cluster(tmp_path) as cluster:
        listener = InProcessEngine(cluster.bus)
        await listener.start()
        async with ReadingsBoard(listener, clock=lambda: now) as board:
            await cluster.start("n1", simulate="h100x2", telemetry_s=0.02)
            await cluster.until(lambda: len(board.readings("n1")) == 2)
            looked_up = cluster.node("n1").gpu_discovery_timestamp
            assert looked_up
            await cluster.cut_off("n1")
            await cluster.until(lambda: cluster.node("n1").state is NodeState.LOST)
            now = 600.0
            # Still there for people, with their age, and nothing may be placed by them.
            readings = board.readings("n1").values()
            assert all(each.age_s >= 600 and each.memory_used_bytes == 0 for each in readings)
        node = cluster.node("n1")
        assert len(node.devices) == 2
        assert node.gpu_discovery_timestamp == looked_up
        assert cluster.view.clock() >= node.state_since
        assert cluster.available("n1") == []
        assert not any(each.available for each in node.devices.values())


async def test_m38_what_is_in_use_is_not_offered(registry: Path) -> None:
    card = device(0, memory_bytes=24 * GIB, memory_available=18 * GIB)
    (found,) = (await Host(cuda=(card,)).service(registry).discover_all_devices()).devices
    assert found.memory_bytes == 24 * GIB
    # Less a reserve for what a process's context takes before its first allocation.
    assert found.memory_usable_bytes == 18 * GIB - RESERVES[DeviceKind.GPU]
