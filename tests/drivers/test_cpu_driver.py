from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from gpurt.backends import cpu_backend
from gpurt.backends.cpu_backend import CPUBackend, CPUDriver
from gpurt.errors import OutOfMemory
from gpurt.sources import host
from gpurt.types import DeviceKind, GPUDevice

MIB = 1 << 20


def meminfo(root: Path, *, total_mib: int, available_mib: int) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total_mib * 1024} kB\nMemAvailable: {available_mib * 1024} kB\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of 1 GiB, half of it free, with four CPUs."""
    meminfo(tmp_path, total_mib=1024, available_mib=512)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list: 0-3\n")
    (tmp_path / "proc/cpuinfo").write_text("vendor_id: AuthenticAMD\nmodel name: AMD EPYC\nflags: avx avx2\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    return tmp_path


def opened(driver: CPUDriver) -> tuple[CPUDriver, tuple[GPUDevice, ...]]:
    devices = tuple(driver.open())
    for index in range(len(devices)):
        driver.attach(index)
    return driver, devices


class TestRecord:
    def test_what_the_host_is(self, root: Path) -> None:
        _, (device,) = opened(CPUDriver(root=root))
        assert (device.device_id, device.backend, device.kind) == ("cpu:0", "cpu", DeviceKind.CPU)
        assert (device.name, device.vendor, device.compute_capability) == ("AMD EPYC", "amd", "avx2")
        assert (device.compute_units, device.tensor_core_count) == (4, 0)
        assert (device.memory_bytes, device.memory_available) == (1024 * MIB, 512 * MIB)
        assert (device.memory_usable_bytes, device.memory_usable_source) == (512 * MIB, "meminfo")
        key = f"host:{host.host_fingerprint(root)}"
        assert device.identity is not None
        assert (device.identity.key, device.identity.stable, device.memory_pool_id) == (key, True, key)
        assert not device.unified_memory
        assert GPUDevice.model_validate_json(device.model_dump_json()) == device

    def test_limit_decides_what_is_usable_and_not_what_is_there(self, root: Path) -> None:
        _, (device,) = opened(CPUDriver(memory_limit=64 * MIB, root=root))
        assert (device.memory_bytes, device.memory_available) == (1024 * MIB, 512 * MIB)
        assert (device.memory_usable_bytes, device.memory_usable_source) == (64 * MIB, "limit")

    def test_several_devices_share_the_host(self, root: Path) -> None:
        _, devices = opened(CPUDriver(devices=2, root=root))
        assert [device.device_id for device in devices] == ["cpu:0", "cpu:1"]
        assert len({device.stable_id for device in devices}) == 2
        assert len({device.memory_pool_id for device in devices}) == 1
        assert [device.memory_bytes for device in devices] == [512 * MIB] * 2
        assert [device.compute_units for device in devices] == [2, 2]

    @pytest.mark.parametrize("arguments", [{"devices": 0}, {"memory_limit": -1}])
    def test_arguments_that_mean_nothing(self, arguments: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="positive"):
            CPUDriver(**arguments)


class TestCopies:
    def test_write_touches_its_range_only(self) -> None:
        driver, _ = opened(CPUDriver())
        mem = driver.alloc(0, 64 * 1024)
        background, data = os.urandom(64 * 1024), os.urandom(100)
        driver.write(0, mem, 0, memoryview(background))
        driver.write(0, mem, 4096, memoryview(data))
        whole = bytearray(64 * 1024)
        driver.read(0, mem, 0, memoryview(whole))
        assert whole == background[:4096] + data + background[4196:]
        part = bytearray(50)
        driver.read(0, mem, 4111, memoryview(part))
        assert part == data[15:65]
        driver.free(0, mem)

    def test_copy_between_devices_and_within_one_allocation(self) -> None:
        driver, _ = opened(CPUDriver(devices=2))
        source, target = driver.alloc(0, 1000), driver.alloc(1, 2000)
        data = os.urandom(1000)
        driver.write(0, source, 0, memoryview(data))
        driver.copy(0, source, 10, 1, target, 1500, 400)
        driver.copy(1, target, 1500, 1, target, 7, 400)
        driver.sync(1)
        out = bytearray(2000)
        driver.read(1, target, 0, memoryview(out))
        assert out[1500:1900] == out[7:407] == data[10:410]

    def test_host_view_is_the_memory_itself(self) -> None:
        driver, _ = opened(CPUDriver())
        mem = driver.alloc(0, 16)
        view = driver.host_view(0, mem)
        assert (view.format, view.nbytes, view.readonly) == ("B", 16, False)
        view[3:6] = b"abc"
        out = bytearray(3)
        driver.read(0, mem, 3, memoryview(out))
        assert out == b"abc"


class TestBudget:
    def test_refused_before_the_library_is_asked(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, _ = opened(CPUDriver(root=root))
        asked: list[int] = []
        monkeypatch.setattr(np, "empty", lambda size, dtype: asked.append(size))
        with pytest.raises(MemoryError, match=r"629,145,600 bytes asked for on cpu:0, .*536,870,912"):
            driver.alloc(0, 600 * MIB)
        assert asked == []

    def test_memory_given_out_counts_before_it_is_touched(self, root: Path) -> None:
        driver, _ = opened(CPUDriver(root=root))
        first = driver.alloc(0, 300 * MIB)
        with pytest.raises(MemoryError):
            driver.alloc(0, 300 * MIB)
        driver.free(0, first)
        driver.free(0, driver.alloc(0, 300 * MIB))

    def test_touched_memory_counts_once(self, root: Path) -> None:
        driver, _ = opened(CPUDriver(root=root))
        mem = driver.alloc(0, 128 * MIB)
        mem.fill(1)
        meminfo(root, total_mib=1024, available_mib=512 - 128)
        reading = driver.telemetry(0)
        assert reading.memory_free_bytes == pytest.approx((512 - 128) * MIB, abs=16 * MIB)
        driver.free(0, mem)

    def test_refusal_looks_again_first(self, root: Path) -> None:
        driver, _ = opened(CPUDriver(root=root))
        driver.free(0, driver.alloc(0, MIB))
        meminfo(root, total_mib=1024, available_mib=900)  # another process has ended
        driver.free(0, driver.alloc(0, 800 * MIB))

    def test_limit_of_each_device(self, root: Path) -> None:
        driver, _ = opened(CPUDriver(memory_limit=8 * MIB, devices=2, root=root))
        held = [driver.alloc(0, 8 * MIB), driver.alloc(1, 8 * MIB)]
        for index in (0, 1):
            with pytest.raises(MemoryError):
                driver.alloc(index, 1)
            driver.free(index, held[index])

    def test_group_limit(self, root: Path) -> None:
        (root / "proc/self/cgroup").write_text("0::/a\n")
        group = root / "sys/fs/cgroup/a"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(str(100 * MIB))
        (group / "memory.current").write_text(str(60 * MIB))
        driver, (device,) = opened(CPUDriver(root=root))
        assert (device.memory_bytes, device.memory_usable_bytes) == (100 * MIB, 40 * MIB)
        assert device.memory_usable_source == "cgroup"
        with pytest.raises(MemoryError):
            driver.alloc(0, 41 * MIB)

    def test_failure_of_the_library_is_not_counted(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, _ = opened(CPUDriver(root=root))

        def fail(*_: object) -> None:
            raise MemoryError("from NumPy")

        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", fail)
            with pytest.raises(MemoryError, match="from NumPy"):
                driver.alloc(0, 400 * MIB)
        driver.free(0, driver.alloc(0, 400 * MIB))

    def test_reopened_driver_starts_afresh(self, root: Path) -> None:
        driver, _ = opened(CPUDriver(root=root))
        driver.alloc(0, 400 * MIB)
        driver.close()
        opened(driver)
        driver.free(0, driver.alloc(0, 400 * MIB))


class TestTelemetry:
    def test_memory_adds_up_and_follows_allocations(self, root: Path) -> None:
        driver, _ = opened(CPUDriver(root=root))
        before = driver.telemetry(0)
        assert (before.memory_total_bytes, before.memory_free_bytes) == (1024 * MIB, 512 * MIB)
        assert before.memory_used_bytes == 512 * MIB
        mem = driver.alloc(0, 100 * MIB)
        # The process's own resident memory takes part, and moves by some pages.
        assert driver.telemetry(0).memory_free_bytes == pytest.approx(412 * MIB, abs=8 * MIB)
        driver.free(0, mem)
        assert driver.telemetry(0).memory_free_bytes == 512 * MIB

    def test_limit_is_the_total(self, root: Path) -> None:
        driver, _ = opened(CPUDriver(memory_limit=64 * MIB, devices=2, root=root))
        reading = driver.telemetry(1)
        assert (reading.memory_total_bytes, reading.memory_free_bytes) == (64 * MIB, 64 * MIB)

    def test_every_empty_field_has_a_reason(self) -> None:
        driver, _ = opened(CPUDriver())
        reading = driver.telemetry(0).model_dump()
        unavailable = reading.pop("unavailable")
        assert {name for name, value in reading.items() if value is None} == set(unavailable)
        assert {name for name, value in reading.items() if value is not None} <= driver.capabilities.telemetry

    def test_sensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = type("shwtemp", (), {})
        hot, warm, broken = entry(), entry(), entry()
        hot.current, warm.current, broken.current = 71.5, 50.0, 65261.8
        readings = {"coretemp": [warm, hot, broken], "nvme": [broken]}
        monkeypatch.setattr(psutil, "sensors_temperatures", lambda: readings, raising=False)
        frequency = type("scpufreq", (), {"current": 2596.1, "max": 0.0})
        monkeypatch.setattr(psutil, "cpu_freq", frequency)
        driver, (device,) = opened(CPUDriver())
        reading = driver.telemetry(0)
        assert (reading.temperature_c, reading.clock_mhz, device.clock_rate_mhz) == (71.5, 2596, 2596)
        monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
        assert driver.telemetry(0).unavailable["clock_mhz"] == "unsupported"


class TestBackend:
    async def test_round_trip(self) -> None:
        data = os.urandom(3 * MIB + 17)
        async with CPUBackend(devices=2) as backend:
            async with backend.allocation("cpu:0", len(data) + 5) as a, backend.allocation("cpu:1", len(data)) as b:
                await backend.copy_to_device(data, a, 5)
                await backend.copy_device_to_device(a, b, len(data), src_offset_bytes=5)
                assert await backend.copy_from_device(b) == data
            info = await backend.get_device_memory_info("cpu:0")
            assert info.total_bytes == info.used_bytes + info.available_bytes + info.reserved_bytes

    async def test_allocation_over_the_machine(self) -> None:
        async with CPUBackend() as backend:
            total = (await backend.get_device_memory_info("cpu:0")).total_bytes
            with pytest.raises(OutOfMemory) as caught:
                await backend.allocate("cpu:0", total + 1)
        error = caught.value
        assert (error.requested_bytes, error.total_bytes, error.device_id) == (total + 1, total, "cpu:0")
        assert error.free_bytes is not None

    async def test_allocation_over_the_limit(self) -> None:
        async with CPUBackend(memory_limit=MIB) as backend:
            info = await backend.get_device_memory_info("cpu:0")
            assert (info.total_bytes, info.available_bytes, info.used_bytes) == (MIB, MIB, 0)
            with pytest.raises(OutOfMemory) as caught:
                await backend.allocate("cpu:0", MIB + 1)
            assert caught.value.limit_bytes == MIB
            await backend.deallocate(await backend.allocate("cpu:0", MIB))

    async def test_options_reach_the_shell(self) -> None:
        with pytest.raises(ValueError, match="hang_after"):
            CPUBackend(hang_after=0)

    async def test_entry_point(self) -> None:
        async with cpu_backend.create() as backend:
            assert [device.device_id for device in await backend.list_devices()] == ["cpu:0"]

    def test_import_loads_neither_numpy_nor_psutil_nor_a_vendor_library(self) -> None:
        code = "import sys, gpurt.backends.cpu_backend; print(sorted({'numpy', 'psutil', 'pynvml'} & set(sys.modules)))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr
