"""The ROCm driver over a stand-in runtime and recorded machines: identity, memory, sensors, what differs from CUDA."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.sources.trees import partitioned_host
from tests.support.fake_cuda import MIB, CUDARuntimeError, FakeRuntime, install
from tests.support.fake_hip import FakeHip, recorded, two_cards

from gpurt.backends import rocm_backend
from gpurt.backends.cupy.hip_context import HipContexts
from gpurt.backends.rocm_backend import ROCmDriver
from gpurt.errors import DeviceLost, OutOfMemory
from gpurt.runtime.backend import DriverBackend
from gpurt.types import DeviceKind, DeviceState, GPUDevice

MI210 = "GPU-93bb3629c01aea1c"
MI210_2 = "GPU-93bb3629c01aea1d"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def opened(
    monkeypatch: pytest.MonkeyPatch, root: Path, environ: Mapping[str, str] | None = None
) -> tuple[ROCmDriver, FakeHip, tuple[GPUDevice, ...]]:
    runtime = FakeHip(root)
    install(monkeypatch, runtime)
    driver = ROCmDriver(environ=environ or {}, root=root)
    return driver, runtime, tuple(driver.open())


# Records


def test_a_card_is_what_the_kernel_and_hip_say(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driver, runtime, (card,) = opened(monkeypatch, recorded("amd-mi210", root))
    assert (card.device_id, card.name, card.vendor) == ("rocm:0", "AMD Instinct MI210", "amd")
    assert (card.backend, card.backend_name, card.backends) == ("rocm", "cupy", ("rocm",))
    assert (card.compute_capability, card.compute_units, card.clock_rate_mhz) == ("gfx90a", 104, 1700)
    assert card.max_threads_per_block == 1024
    assert (card.memory_bytes, card.memory_available) == (68702699520, 68702699520 - 11735040)
    assert (card.memory_usable_bytes, card.memory_usable_source) == (card.memory_available, "driver")
    assert (card.kind, card.unified_memory, card.memory_pool_id) == (DeviceKind.GPU, False, None)
    assert (card.driver_version, card.state, card.usable) == ("HIP 7.0", DeviceState.HEALTHY, True)
    assert card.identity is not None
    assert (card.identity.key, card.identity.uuid, card.identity.stable) == (MI210, MI210, True)
    assert (card.identity.pci_address, card.identity.serial) == ("00000000:03:00.0", "692231000131")
    # Nobody knows, and 0 would be a lie.
    assert (card.tensor_core_count, card.bandwidth_gbps) == (None, None)
    # Looking makes no queue on the device.
    assert not {"setDevice", "memGetInfo"} & set(runtime.calls)
    driver.close()


def test_a_gpu_inside_a_processor_has_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driver, runtime, (gpu,) = opened(monkeypatch, recorded("amd-strix-halo", root))
    assert (gpu.kind, gpu.unified_memory, gpu.compute_capability) == (DeviceKind.INTEGRATED_GPU, True, "gfx1151")
    assert (gpu.memory_pool_id or "").startswith("host:")
    assert gpu.memory_bytes == runtime.capacity == 133143986176
    assert gpu.memory_available == 133143986176 - 1073741824
    # The driver would map more than the host has left.
    assert gpu.memory_usable_bytes == 118566368 * 1024
    assert gpu.memory_usable_source == "meminfo"
    assert gpu.identity is not None
    assert (gpu.identity.uuid, gpu.identity.key) == (None, "pci:00000000:c4:00.0")
    reading = driver.telemetry(0)
    assert (reading.memory_total_bytes, reading.memory_used_bytes) == (133143986176, 1073741824)


def test_a_kernel_that_gives_hip_the_carve_out_only(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Before Linux 6.10 allocations of an APU came from what the firmware had set aside, and HIP says so."""
    recorded("amd-strix-halo", root)
    runtime = FakeHip(root, capacity=512 * MIB)
    install(monkeypatch, runtime)
    (gpu,) = ROCmDriver(environ={}, root=root).open()
    assert gpu.memory_bytes == gpu.memory_available == gpu.memory_usable_bytes == 512 * MIB


def test_an_old_kernel_without_a_graphics_card(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driver, runtime, (card,) = opened(monkeypatch, recorded("amd-vega10", root))
    assert card.identity is not None
    assert (card.identity.uuid, card.identity.pci_address) == ("GPU-c34ec50444dd0a6c", "00000000:19:00.0")
    assert card.memory_bytes == runtime.capacity == 17163091968
    assert card.memory_available == 17163091968 - 14102528
    assert driver.telemetry(0).temperature_c is None


def test_without_files_hip_is_all_there_is(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """As in WSL, whose GPUs no file shows."""
    install(monkeypatch, FakeHip(two_cards(root / "there", 64 * MIB)))
    driver = ROCmDriver(environ={}, root=root / "nothing")
    first, second = driver.open()
    assert (first.compute_capability, first.memory_bytes, first.memory_available) == ("gfx90a", 64 * MIB, 64 * MIB)
    assert first.identity is not None
    assert (first.identity.key, second.stable_id) == ("pci:00000000:03:00.0", "pci:00000000:04:00.0")
    mem = driver.alloc(1, MIB)
    reading = driver.telemetry(1)
    assert (reading.memory_used_bytes, reading.memory_free_bytes) == (MIB, 63 * MIB)
    assert set(reading.unavailable) == {"temperature_c", "power_w", "clock_mhz", "utilization_percent"}
    driver.free(1, mem)
    driver.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, [MI210, MI210_2]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [MI210_2, MI210]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, [MI210_2]),
        ({"ROCR_VISIBLE_DEVICES": MI210_2, "HIP_VISIBLE_DEVICES": "0"}, [MI210_2]),
    ],
)
def test_hips_order_is_not_the_kernels(
    monkeypatch: pytest.MonkeyPatch, root: Path, environ: dict[str, str], expected: list[str]
) -> None:
    two_cards(root, 64 * MIB)
    runtime = FakeHip(root)
    # HIP applies the variables itself.
    places = [[MI210, MI210_2].index(uuid) for uuid in expected]
    runtime.properties = [runtime.properties[place] for place in places]
    monkeypatch.setattr(runtime, "deviceGetPCIBusId", lambda index: f"0000:0{3 + places[index]}:00.0")
    install(monkeypatch, runtime)
    devices = ROCmDriver(environ=environ, root=root).open()
    assert [device.stable_id for device in devices] == expected


@pytest.mark.parametrize("scheme", ["function", "top bits"])
@pytest.mark.parametrize("hip_tells_functions", [False, True])
def test_partitions_of_a_card_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, root: Path, scheme: str, hip_tells_functions: bool
) -> None:
    partitioned_host(root, scheme=scheme)
    runtime = FakeHip(root)
    install(monkeypatch, runtime)
    order = [2, 0, 1, 3]
    monkeypatch.setattr(
        runtime,
        "deviceGetPCIBusId",
        lambda index: f"0000:05:00.{order[index] if hip_tells_functions else 0}",
    )
    driver = ROCmDriver(environ={"HIP_VISIBLE_DEVICES": "2,0,1,3"}, root=root)
    devices = driver.open()
    assert [device.stable_id for device in devices] == [f"GPU-abcdef0123456789/{n}" for n in order]
    assert [device.identity.pci_address for device in devices if device.identity] == ["00000000:05:00.0"] * 4
    assert [driver.telemetry(index).memory_used_bytes for index in range(4)] == order


def test_partitions_that_cannot_be_told_apart_are_not_guessed(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    partitioned_host(root, scheme="top bits")
    install(monkeypatch, FakeHip(root))
    # The variables of this process say that HIP has one device, and it has four.
    devices = ROCmDriver(environ={"HIP_VISIBLE_DEVICES": "1"}, root=root).open()
    assert [device.identity.uuid for device in devices if device.identity][1:] == [None] * 3


def test_one_failing_device_costs_one_device(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    two_cards(root, 64 * MIB)
    runtime = install(monkeypatch, FakeHip(root))

    def properties(index: int) -> dict[str, object]:
        if index == 0:
            raise CUDARuntimeError(719)
        return runtime.properties[index]

    monkeypatch.setattr(runtime, "getDeviceProperties", properties)
    broken, whole = ROCmDriver(environ={}, root=root).open()
    assert (broken.device_id, broken.usable, broken.state) == ("rocm:0", False, DeviceState.DEGRADED)
    assert (broken.stable_id, broken.compute_capability) == (MI210, "gfx90a")
    assert whole.usable


# Use


def test_sensors_are_the_cards_own(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    two_cards(root, 64 * MIB)
    (root / "sys/class/drm/card2/device/hwmon/hwmon4/temp1_input").write_text("71000\n")
    driver, runtime, _ = opened(monkeypatch, root)
    mem = driver.alloc(1, 3 * MIB)
    runtime.calls.clear()
    first, second = driver.telemetry(0), driver.telemetry(1)
    assert (first.temperature_c, second.temperature_c) == (46.0, 71.0)
    assert (first.power_w, first.clock_mhz, first.utilization_percent) == (67.0, 800, 3)
    assert (first.memory_used_bytes, second.memory_used_bytes) == (0, 3 * MIB)
    assert second.memory_free_bytes == 61 * MIB
    assert first.unavailable == {"memory_reserved_bytes": "unsupported"}
    assert "memory_reserved_bytes" not in driver.capabilities.telemetry
    # No call of HIP: a sensor that is read must not wake the library, or wait for it.
    assert runtime.calls == []
    driver.free(1, mem)


def test_no_call_that_hip_lacks(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """The stand-in refuses asynchronous pools as HIP does; copies of every kind go without them."""
    driver, runtime, _ = opened(monkeypatch, two_cards(root, 128 * MIB))
    for size in (100, 9 * MIB):
        content = random.Random(size).randbytes(size)
        here, there = driver.alloc(0, size), driver.alloc(1, size)
        block = driver.host_alloc(size)
        driver.host_memory(block)[:] = content
        driver.write(0, here, 0, driver.host_memory(block))
        driver.copy(0, here, 0, 1, there, 0, size)
        back = bytearray(size)
        driver.read(1, there, 0, memoryview(back))
        assert back == content
        driver.host_free(block)
        driver.free(0, here)
        driver.free(1, there)
    assert runtime.enabled == [(0, 1)]
    assert not any("Async" in call and not call.startswith("memcpy") for call in runtime.calls)
    for index in (0, 1):
        driver.detach(index)
    driver.close()
    assert not runtime.live
    assert not runtime.pinned


def test_errors_of_hip(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driver, _, _ = opened(monkeypatch, two_cards(root, 64 * MIB))
    with pytest.raises(CUDARuntimeError) as caught:
        driver.alloc(0, 65 * MIB)
    assert driver.classify(caught.value) is OutOfMemory
    assert driver.classify(CUDARuntimeError(700)) is DeviceLost  # an illegal address, after which HIP is gone
    assert driver.classify(CUDARuntimeError(1)) is None


async def test_through_the_shell(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    runtime = await asyncio.to_thread(lambda: FakeHip(two_cards(root, 64 * MIB)))
    install(monkeypatch, runtime)
    async with DriverBackend(ROCmDriver(environ={}, root=root)) as backend:
        here, there = await backend.allocate("rocm:0", 1000), await backend.allocate("rocm:1", 1000)
        await backend.copy_to_device(b"rocm" * 250, here)
        await backend.copy_device_to_device(here, there, 1000)
        assert await backend.copy_from_device(there) == b"rocm" * 250
        assert await backend.get_device_temperature("rocm:0") == 46.0
        with pytest.raises(OutOfMemory):
            await backend.allocate("rocm:0", 65 * MIB)
        await backend.deallocate(here)
        await backend.deallocate(there)
    assert not runtime.live


# Warm-up


STUB = """
#include <stdlib.h>
int hipInit(unsigned flags) { setenv("HIP_INIT_CALLED", "yes", 1); return 0; }
"""

WARM_UP = """
import ctypes, os, sys
from gpurt.backends.cupy.hip_context import HipContexts
library = os.path.join(sys.argv[1], "libamdhip64.so.7")
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
contexts = HipContexts()
contexts.prepare()
assert getenv(b"HIP_INIT_CALLED") is None, "loaded a runtime that CuPy does not use"
ctypes.CDLL(library)  # as CuPy does
contexts.prepare()
assert getenv(b"HIP_INIT_CALLED") == b"yes"
contexts.retain(0)
contexts.release()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an ELF library")
def test_the_runtime_that_cupy_loaded_is_initialised_and_no_other(tmp_path: Path) -> None:
    source, library = tmp_path / "stub.c", tmp_path / "libamdhip64.so.7"
    source.write_text(STUB)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WARM_UP, str(tmp_path)], check=True, env=environ, timeout=60)


@pytest.mark.parametrize("status", [0, 100])
def test_what_the_warm_up_meets_is_no_error(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    asked: list[str] = []

    class Library:
        def hipInit(self, flags: int) -> int:
            asked.append("hipInit")
            return status

    def load(name: str, mode: int) -> Library:
        asked.append(name)
        if name.endswith(".7"):
            raise OSError(f"{name}: cannot open shared object file")
        return Library()

    monkeypatch.setattr(ctypes, "CDLL", load)
    contexts = HipContexts()
    contexts.prepare()
    assert asked == ["libamdhip64.so.7", "libamdhip64.so.6", "hipInit"]
    assert contexts.properties(0) is None


# Shape


def test_the_driver_is_thin_and_loads_nothing_of_amds() -> None:
    text = Path(rocm_backend.__file__).read_text()
    assert len(text.splitlines()) <= 80
    for file in Path(rocm_backend.__file__).parent.glob("rocm*.py"):
        assert not re.search(r"\bamdsmi\b|\basync\b", file.read_text()), file.name


def test_what_is_shared_is_shared(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driver, runtime, _ = opened(monkeypatch, two_cards(root, 64 * MIB))
    assert isinstance(runtime, FakeRuntime)
    assert driver.capabilities.p2p
    assert driver.capabilities.pins_memory
    assert driver.capabilities.cuda_pointers
    mem = driver.alloc(0, 16)
    assert driver.pointer(0, mem) == mem
    driver.free(0, mem)
