"""What the conformance kit cannot ask of the Metal driver: refusals, budgets, identity, sharing, threads."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.metal_backends import (
    MAC,
    EmulatedMLX,
    RecordedTools,
    cpu_driver,
    emulated_driver,
    mac_root,
    recorded,
)

from gpurt.backends.metal import memory as metal_memory
from gpurt.backends.metal.host import Computer
from gpurt.backends.metal.memory import MOST_ELEMENTS, WORD_BYTES, words_shape
from gpurt.backends.metal_backend import MetalBackend, MetalDriver, create
from gpurt.discovery import sight_apple
from gpurt.discovery.sight_record import View
from gpurt.errors import BackendUnavailable, DeviceLost, HandleInUse, OutOfMemory, OutOfRange, ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.sources import apple_query
from gpurt.types import DeviceKind

MIB = 1 << 20
STOCK = 115448720916


def refusal(driver: MetalDriver) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        driver.open()
    assert caught.value.backend == "metal"
    return caught.value


class TestRefusals:
    @pytest.mark.parametrize("platform", ["linux", "win32", "android", "ios"])
    def test_elsewhere(self, platform: str) -> None:
        error = refusal(MetalDriver(computer=Computer(platform, "arm64")))
        assert error.reason is ReasonCode.WRONG_PLATFORM
        assert platform in error.message
        assert error.install_hint is None

    @pytest.mark.skipif(sys.platform == "darwin", reason="there may be a GPU here")
    async def test_factory_entry_on_this_computer(self) -> None:
        backend = create()
        assert isinstance(backend, MetalBackend)
        with pytest.raises(BackendUnavailable) as caught:
            await backend.initialize()
        assert caught.value.reason is ReasonCode.WRONG_PLATFORM
        assert backend.devices == ()

    def test_rosetta(self) -> None:
        error = refusal(MetalDriver(computer=Computer("darwin", "x86_64", translated=True, os_version="15.3")))
        assert error.reason is ReasonCode.NO_LIBRARY
        assert "Rosetta" in error.message
        assert "arm64" in (error.hint or "")
        assert error.install_hint is None  # pip finds nothing for this Python

    def test_intel(self) -> None:
        error = refusal(MetalDriver(computer=Computer("darwin", "x86_64", os_version="13.7.2")))
        assert error.reason is ReasonCode.UNSUPPORTED_DEVICE
        assert "x86_64" in error.message
        assert "cpu" in (error.hint or "")

    @pytest.mark.parametrize("version", ["13.7.2", "12.6", "11.0"])
    def test_old_system(self, version: str) -> None:
        error = refusal(MetalDriver(computer=Computer("darwin", "arm64", os_version=version)))
        assert error.reason is ReasonCode.DRIVER_MISMATCH
        assert version in error.message
        assert "update macOS to 14" in (error.hint or "")

    @pytest.mark.parametrize(
        ("driver", "package"),
        [
            (MetalDriver(computer=MAC), "# mlx"),
            (MetalDriver(computer=Computer("darwin", "arm64")), "# mlx"),  # the version is not told
            (MetalDriver("cpu", computer=Computer("linux", "x86_64")), "# mlx[cpu]"),
        ],
    )
    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch, driver: MetalDriver, package: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mlx"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Missing("mlx"), *sys.meta_path])
        error = refusal(driver)
        assert error.reason is ReasonCode.NO_LIBRARY
        assert error.message == "the Python package mlx is not installed"
        assert error.install_hint == error.hint == f"pip install 'gpurt[metal]'  {package}"

    def test_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mlx.core", SimpleNamespace(__version__="0.31.2"))
        error = refusal(MetalDriver(computer=MAC))
        assert error.reason is ReasonCode.NO_LIBRARY
        assert "0.31.2" in error.message
        assert error.install_hint == "pip install --upgrade 'mlx>=0.32'"

    @pytest.mark.parametrize("has_kernels", [False, True])
    def test_no_gpu_in_mlx(self, monkeypatch: pytest.MonkeyPatch, has_kernels: bool) -> None:
        def version(name: str) -> str:
            if has_kernels and name == "mlx-metal":
                return "0.32.4"
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        driver = emulated_or_skip(available=False)
        error = refusal(driver)
        if has_kernels:
            assert error.reason is ReasonCode.NO_DEVICE
            assert "virtual machine" in error.message
        else:
            assert error.reason is ReasonCode.NO_LIBRARY
            assert "mlx-metal" in (error.install_hint or "")

    def test_no_such_device(self) -> None:
        with pytest.raises(ValueError, match="tpu"):
            MetalDriver("tpu")  # pyright: ignore[reportArgumentType]


class Missing:
    """An import system without one package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {self._package!r}", name=self._package)


def available(make: Any, *args: Any, **options: Any) -> Any:
    try:
        return make(*args, **options)
    except BackendUnavailable as exc:
        pytest.skip(f"[{exc.reason}] {exc}")


def emulated_or_skip(**options: Any) -> MetalDriver:
    return available(emulated_driver, **options)


class TestOnAnEmulatedMac:
    def test_record(self) -> None:
        driver = emulated_or_skip()
        (device,) = driver.open()
        try:
            assert (device.device_id, device.name, device.vendor) == ("metal:0", "Apple M4 Max", "apple")
            assert (device.kind, device.compute_capability, device.compute_units) == (
                DeviceKind.INTEGRATED_GPU, "applegpu_g16s", 40,
            )  # fmt: skip
            assert device.memory_bytes == 128 << 30
            assert (device.memory_usable_bytes, device.memory_usable_source) == (STOCK, "metal")
            assert device.memory_available is not None
            assert 0 < device.memory_available <= STOCK
            assert device.unified_memory
            assert device.identity is not None
            assert device.identity.key == f"{device.memory_pool_id}/gpu"
            assert device.memory_pool_id is not None
            assert device.driver_version is not None
            assert device.driver_version.startswith("MLX ")
            assert device.driver_version.endswith(", macOS 26.1")
            assert driver.capabilities.max_allocation_bytes == 86586540032
        finally:
            driver.close()

    def test_same_device_as_discovery_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = emulated_or_skip()
        (device,) = driver.open()
        driver.close()
        monkeypatch.setattr(apple_query, "query_apple", recorded)
        lines = list(sight_apple.look(View(environ={}, root=mac_root())))
        (sighted,) = lines[-1].devices
        same = ("identity", "name", "vendor", "kind", "compute_capability", "compute_units", "memory_bytes")
        same += ("memory_usable_bytes", "memory_usable_source", "memory_pool_id", "unified_memory")
        assert [getattr(device, field) for field in same] == [getattr(sighted, field) for field in same]

    def test_telemetry_adds_up(self) -> None:
        driver = emulated_or_skip()
        driver.open()
        reading = driver.telemetry(0)
        driver.close()
        total, free, reserved = reading.memory_total_bytes, reading.memory_free_bytes, reading.memory_reserved_bytes
        assert total is not None
        assert free is not None
        assert reserved is not None
        assert total == 128 << 30
        assert reserved >= total - STOCK  # what macOS keeps from the GPU is no use to anybody who asks for memory
        assert reading.memory_used_bytes == total - free - reserved >= 0
        missing = {"temperature_c", "power_w", "clock_mhz", "utilization_percent"}
        assert reading.unavailable == dict.fromkeys(missing, "unsupported")

    async def test_working_set_is_the_bound(self) -> None:
        """And not what the host has: beyond it MLX goes on until the system stops it."""
        driver = emulated_or_skip(max_recommended_working_set_size=512 * MIB, memory_size=1024 * MIB)
        async with DriverBackend(driver) as backend:
            assert backend.devices[0].memory_usable_bytes == 512 * MIB
            async with backend.allocation("metal:0", 300 * MIB):
                with pytest.raises(OutOfMemory) as caught:
                    await backend.allocate("metal:0", 300 * MIB)
                assert caught.value.requested_bytes == 300 * MIB
                assert f"{512 * MIB:,}" in str(caught.value.__cause__)
                assert "iogpu.wired_limit_mb" in str(caught.value.__cause__)
                info = await backend.get_device_memory_info("metal:0")
                assert info.available_bytes < 300 * MIB
            async with backend.allocation("metal:0", 300 * MIB):
                pass

    async def test_largest_buffer_is_the_bound(self) -> None:
        async with DriverBackend(emulated_or_skip(max_buffer_length=64 * MIB)) as backend:
            with pytest.raises(OutOfRange, match=f"{64 * MIB:,}"):
                await backend.allocate("metal:0", 64 * MIB + 1)
            async with backend.allocation("metal:0", 64 * MIB):
                pass

    def test_cached_memory_makes_room(self) -> None:
        """MLX keeps what is freed; that must not refuse the next allocation."""
        kept = [200 * MIB]
        mx = SimpleNamespace(
            get_active_memory=lambda: 0, get_cache_memory=lambda: kept[0], clear_cache=lambda: kept.__setitem__(0, 0)
        )
        budget = metal_memory.GpuBudget(mx, 512 * MIB, 256 * MIB, Path("/"))
        budget.take(50 * MIB)
        assert kept == [200 * MIB]
        budget.take(250 * MIB)
        assert kept == [0]
        with pytest.raises(MemoryError):
            budget.take(257 * MIB)

    def test_without_figures_the_host_is_the_bound(self) -> None:
        driver = emulated_or_skip(max_recommended_working_set_size=None)
        (device,) = driver.open()
        assert device.memory_usable_bytes is None  # nobody tells, so nothing is claimed
        with pytest.raises(MemoryError):
            driver.alloc(0, 1 << 50)
        driver.close()

    def test_two_gpus_of_apples_are_not_guessed_at(self) -> None:
        table = recorded()
        item = table["system_profiler"].partition("[")[2].rpartition("]")[0]
        table["system_profiler"] = f'{{"SPDisplaysDataType": [{item}, {item}]}}'
        mx = available(EmulatedMLX, table["mlx"])
        driver = MetalDriver(root=mac_root(), computer=MAC, run=RecordedTools(table), mx=mx)
        assert refusal(driver).reason is ReasonCode.UNSUPPORTED_DEVICE


class TestMemory:
    @pytest.mark.parametrize(
        "nbytes", [1, 7, 8, 9, 4096, (1 << 31) - 1, 1 << 31, (1 << 34) - 8, 1 << 34, (1 << 34) + 1, (40 << 30) + 5]
    )
    def test_every_size_has_a_shape(self, nbytes: int) -> None:
        rows, columns = words_shape(nbytes)
        assert max(rows, columns) <= MOST_ELEMENTS
        assert 0 <= rows * columns * WORD_BYTES - nbytes < (rows + 1) * WORD_BYTES

    def test_several_rows_are_one_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = available(cpu_driver)
        driver.open()
        monkeypatch.setattr(metal_memory, "words_shape", partial(words_shape, most=1000))
        content = random.Random(3).randbytes(100_003)
        mem = driver.alloc(0, len(content))
        assert mem.array.shape[0] == 13
        driver.write(0, mem, 0, memoryview(content))
        assert bytes(driver.host_view(0, mem)) == content
        driver.free(0, mem)
        driver.close()

    @pytest.mark.slow
    def test_beyond_two_to_the_31(self) -> None:
        driver = available(cpu_driver)
        driver.open()
        size = (1 << 31) + 5
        mem = driver.alloc(0, size)
        driver.write(0, mem, size - 5, memoryview(b"after"))
        target = bytearray(6)
        driver.read(0, mem, size - 6, memoryview(target))
        assert target == b"\0after"
        driver.free(0, mem)
        driver.close()

    def test_large_memory_goes_back_to_the_system(self) -> None:
        driver = available(cpu_driver)
        driver.open()
        mx = driver._mx
        before = mx.get_active_memory()
        mem = driver.alloc(0, 128 * MIB)
        assert mx.get_active_memory() - before >= 128 * MIB
        driver.free(0, mem)
        assert mx.get_active_memory() - before < MIB
        driver.close()

    @pytest.mark.parametrize("size", [4096, 64 * MIB])
    def test_memory_in_use_outlives_its_free(self, size: int) -> None:
        """The shell never frees it while a view is open; a shutdown may."""
        driver = available(cpu_driver)
        driver.open()
        mem = driver.alloc(0, size)
        view = np.frombuffer(driver.host_view(0, mem), np.uint8)
        view[:] = 7
        driver.free(0, mem)
        others = [driver.alloc(0, size) for _ in range(4)]
        assert (view == 7).all()
        for other in others:
            assert not np.shares_memory(np.frombuffer(driver.host_view(0, other), np.uint8), view)
            driver.free(0, other)
        driver.close()

    def test_cached_memory_can_be_trimmed(self) -> None:
        driver = available(cpu_driver)
        driver.open()
        for mem in [driver.alloc(0, 4096) for _ in range(8)]:
            driver.free(0, mem)
        kept = driver._mx.get_cache_memory()
        assert kept > 0
        assert driver.trim(0) == kept
        assert driver._mx.get_cache_memory() == 0
        driver.close()

    async def test_view_shares_with_numpy_and_dlpack(self) -> None:
        async with DriverBackend(available(cpu_driver)) as backend, backend.allocation("metal:0", 64) as handle:
            with await backend.view(handle, (4, 4), "float32") as view:
                shared = np.from_dlpack(view)
                shared[:] = np.arange(16, dtype=np.float32).reshape(4, 4)
                with pytest.raises(HandleInUse):
                    await backend.deallocate(handle)
                del shared
            content = await backend.copy_from_device(handle)
            assert content == np.arange(16, dtype=np.float32).tobytes()


class TestThreads:
    @pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
    def test_lanes_that_come_and_go_leave_no_thread_behind(self) -> None:
        driver = available(cpu_driver)

        def life() -> None:
            driver.open()
            driver.attach(0)
            mem = driver.alloc(0, 64)
            driver.sync(0)
            driver.free(0, mem)
            driver.detach(0)
            driver.close()

        before = len(os.listdir("/proc/self/task"))
        for _ in range(20):
            thread = threading.Thread(target=life)
            thread.start()
            thread.join()
        # Not exactly: threads of other tests end meanwhile, and the last of these may not be quite gone.
        assert len(os.listdir("/proc/self/task")) < before + 10

    async def test_two_backends_at_once(self) -> None:
        async with (
            DriverBackend(available(cpu_driver)) as one,
            DriverBackend(cpu_driver()) as other,
            one.allocation("metal:0", 2 * MIB) as a,
            other.allocation("metal:0", 2 * MIB) as b,
        ):
            await asyncio.gather(one.copy_to_device(b"a" * (2 * MIB), a), other.copy_to_device(b"b" * (2 * MIB), b))
            assert await one.copy_from_device(a) == b"a" * (2 * MIB)
            assert await other.copy_from_device(b) == b"b" * (2 * MIB)

    def test_software_device_says_so(self) -> None:
        driver = available(cpu_driver)
        (device,) = driver.open()
        driver.close()
        assert device.kind is DeviceKind.SOFTWARE
        assert device.support_level != "full"
        assert device.stable_id.endswith("/mlx-cpu")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size", True),
        ("[metal::malloc] Resource limit (499000) exceeded.", True),
        ("[malloc_or_wait] Unable to allocate 1099511627776 bytes.", True),
        (
            "[METAL] Command buffer execution failed: Insufficient Memory "
            "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            True,
        ),
        (
            "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
            "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
            DeviceLost,
        ),
        ("There is no Stream(cpu, 0) in current thread.", None),
    ],
)
def test_what_errors_of_mlx_mean(text: str, kind: Any) -> None:
    driver = MetalDriver()
    assert driver.classify(RuntimeError(text)) is (OutOfMemory if kind is True else kind)
    assert driver.classify(ValueError(text)) is None


def test_importing_the_backend_loads_no_library() -> None:
    code = (
        "import sys, gpurt.backends.metal_backend as b; b.create();"
        "print([m for m in ('mlx', 'mlx.core', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
