"""The CUDA driver over the stand-in runtime: identity, copies, peers, absences, errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest
from tests.support.fake_cuda import (
    MIB,
    CUDARuntimeError,
    FakeLibcuda,
    FakeNvml,
    FakeRuntime,
    install,
    install_nvml,
    nvml_record,
)

from gpurt.backends.cuda_backend import CUDABackend, CUDADriver, create
from gpurt.backends.cupy.bounce import BOUNCE_BYTES
from gpurt.backends.cupy.cuda_context import PrimaryContexts
from gpurt.errors import BackendUnavailable, DeviceLost, OutOfMemory, ReasonCode
from gpurt.sources.nvml import NvmlPartition
from gpurt.types import DeviceKind, DeviceState

NO_NVML = BackendUnavailable("libnvidia-ml not found", reason=ReasonCode.NO_DRIVER, hint="install the driver")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return install(monkeypatch)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    session = FakeNvml([nvml_record(0), nvml_record(1)])
    install_nvml(monkeypatch, session)
    return session


@pytest.fixture
def driver(runtime: FakeRuntime, nvml: FakeNvml) -> Iterator[CUDADriver]:
    driver = CUDADriver(environ={})
    driver.open()
    yield driver
    for index in (0, 1):
        driver.detach(index)
    driver.close()


def in_thread(call: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join(10)
    return result[0]


# Devices


def test_record_says_what_the_device_is(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    first, second = CUDADriver(environ={}).open()
    assert (first.device_id, first.name, first.vendor) == ("cuda:0", "NVIDIA H100 80GB HBM3", "nvidia")
    assert (first.compute_capability, first.compute_units, first.tensor_core_count) == ("9.0", 132, 528)
    assert (first.max_threads_per_block, first.clock_rate_mhz, first.bandwidth_gbps) == (1024, 1980, 3352.3)
    assert (first.memory_bytes, first.memory_available) == (64 * MIB, 60 * MIB)
    assert (first.backend, first.backend_name, first.driver_version) == ("cuda", "cupy", "580.159")
    assert first.kind is DeviceKind.GPU
    assert not first.unified_memory
    assert first.identity is not None
    assert first.identity.key == "GPU-00000000-0000-0000-0000-000000000000"
    assert second.identity is not None
    assert second.identity.pci_address == "00000000:02:00.0"


def test_free_memory_never_exceeds_the_total(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, FakeNvml([nvml_record(0, memory_free_bytes=79 * MIB)]))
    device = CUDADriver(environ={}).open()[0]
    assert device.memory_available == device.memory_usable_bytes == device.memory_bytes == 64 * MIB


def test_nothing_that_only_looks_makes_a_context(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    driver = CUDADriver(environ={})
    driver.open()
    driver.attach(0)
    assert driver.telemetry(1).temperature_c == 41.0
    assert nvml.asked == ["00000000:02:00.0"]
    driver.detach(0)
    driver.close()
    assert "setDevice" not in runtime.calls
    assert nvml.closed == 1


def test_without_nvml_memory_is_known_and_identity_is_the_address(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvml(monkeypatch, NO_NVML)
    driver = CUDADriver(environ={})
    device = driver.open()[1]
    assert device.identity is not None
    assert (device.identity.key, device.identity.stable) == ("pci:00000000:02:00.0", True)
    assert device.driver_version == "CUDA 12.8"
    driver.alloc(1, MIB)
    reading = driver.telemetry(1)
    assert (reading.memory_total_bytes, reading.memory_used_bytes, reading.memory_free_bytes) == (
        64 * MIB,
        MIB,
        63 * MIB,
    )
    assert reading.temperature_c is None
    assert set(reading.unavailable) == {
        "memory_reserved_bytes",
        "temperature_c",
        "power_w",
        "clock_mhz",
        "utilization_percent",
    }


def test_cuda_13_tells_clocks_by_attribute_only(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    for key in ("clockRate", "memoryClockRate", "memoryBusWidth"):
        del runtime.properties[0][key]
    runtime.attributes = {13: 1755000, 36: 1000000, 37: 4096}
    device = CUDADriver(environ={}).open()[0]
    assert (device.clock_rate_mhz, device.bandwidth_gbps) == (1755, 1024.0)
    runtime.attributes = {}
    device = CUDADriver(environ={}).open()[0]
    assert (device.clock_rate_mhz, device.bandwidth_gbps) == (None, None)


@pytest.mark.parametrize(
    ("name", "capability", "cores"),
    [
        ("NVIDIA A100", (8, 0), 40),
        ("NVIDIA L40S", (8, 9), 40),
        ("Tesla V100", (7, 0), 80),
        ("Tesla T4", (7, 5), 80),
        ("NVIDIA GeForce GTX 1650", (7, 5), 0),
        ("NVIDIA T1000", (7, 5), 0),
        ("Tesla P100", (6, 0), 0),
        ("NVIDIA GB10", (12, 1), 40),
        ("from the future", (19, 3), None),
    ],
)
def test_tensor_cores_by_architecture(
    runtime: FakeRuntime, nvml: FakeNvml, name: str, capability: tuple[int, int], cores: int | None
) -> None:
    runtime.properties[0] |= {
        "name": name.encode(),
        "major": capability[0],
        "minor": capability[1],
        "multiProcessorCount": 10,
    }
    assert CUDADriver(environ={}).open()[0].tensor_core_count == cores


def test_integrated_gpu_shares_the_host_s_memory(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    runtime.properties[1]["integrated"] = 1
    discrete, integrated = CUDADriver(environ={}).open()
    assert (integrated.kind, integrated.unified_memory) == (DeviceKind.INTEGRATED_GPU, True)
    assert integrated.memory_pool_id is not None
    assert integrated.memory_pool_id.startswith("host:")
    assert discrete.memory_pool_id is None


def test_partition_has_its_own_identity_and_memory(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = NvmlPartition("MIG-01010101-0101-0101-0101-010101010101", "1g.10gb", "9/0", 10 * MIB, 10 * MIB, 16)
    parents = [nvml_record(index, partitions=(partition,)) for index in (0, 1)]
    install_nvml(monkeypatch, FakeNvml(parents))
    driver = CUDADriver(environ={})
    known, unknown = driver.open()
    assert known.identity is not None
    assert known.identity.uuid == partition.uuid
    assert known.identity.partition == "9/0"
    assert known.memory_available == 64 * MIB
    assert unknown.identity is not None
    assert not unknown.identity.stable
    reading = driver.telemetry(0)
    assert (reading.memory_total_bytes, reading.temperature_c) == (64 * MIB, 41.0)


def test_one_failing_device_costs_one_device(
    runtime: FakeRuntime, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(index: int) -> dict[str, Any]:
        if index == 0:
            raise CUDARuntimeError(46)
        return runtime.properties[index]

    monkeypatch.setattr(runtime, "getDeviceProperties", properties)
    broken, whole = CUDADriver(environ={}).open()
    assert (broken.device_id, broken.usable, broken.state) == ("cuda:0", False, DeviceState.DEGRADED)
    assert broken.identity is not None
    assert broken.identity.uuid is not None
    assert broken.compute_units is None
    assert whole.usable


# Memory


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (1, 1), (3, 7), (4095, 4097), (12345, 3 * MIB + 1)])
def test_bytes_come_back_from_odd_offsets(driver: CUDADriver, offset: int, size: int) -> None:
    mem = driver.alloc(0, 4 * MIB)
    driver.write(0, mem, 0, memoryview(bytes(4 * MIB)))
    payload = np.random.default_rng(size).bytes(size)
    driver.write(0, mem, offset, memoryview(payload))
    back = bytearray(4 * MIB)
    driver.read(0, mem, 0, memoryview(back))
    assert back == bytes(offset) + payload + bytes(4 * MIB - offset - size)


def test_copy_on_one_device(driver: CUDADriver, runtime: FakeRuntime) -> None:
    mem = driver.alloc(1, 1000)
    driver.write(1, mem, 0, memoryview(bytes(range(250)) * 4))
    driver.copy(1, mem, 3, 1, mem, 501, 101)
    back = bytearray(101)
    driver.read(1, mem, 501, memoryview(back))
    assert back == bytes(range(3, 104))
    driver.free(1, mem)
    assert not runtime.live


def test_each_thread_has_a_stream_of_its_own(driver: CUDADriver, runtime: FakeRuntime) -> None:
    mem = driver.alloc(0, 16)

    def work() -> set[int]:
        driver.attach(0)
        driver.write(0, mem, 0, memoryview(b"x" * 16))
        mine = {handle for handle, each in runtime.streams.items() if each.thread == threading.get_ident()}
        driver.detach(0)
        return mine

    first, second = in_thread(work), in_thread(work)
    assert len(first) == len(second) == 1
    assert first != second
    assert not runtime.streams


def test_sync_waits_for_work_of_others(driver: CUDADriver, runtime: FakeRuntime) -> None:
    mem = driver.alloc(0, 4)
    source = np.frombuffer(b"abcd", np.uint8)
    runtime.setDevice(0)
    stream = runtime.streamCreateWithFlags(1)
    runtime.memcpyAsync(mem, source.ctypes.data, 4, 1, stream)
    in_thread(lambda: driver.sync(0))
    assert not runtime.streams[stream].queue


# Two devices


def exchange(driver: CUDADriver, nbytes: int) -> bytes:
    source, target = driver.alloc(0, nbytes + 5), driver.alloc(1, nbytes + 9)
    driver.write(0, source, 5, memoryview(np.random.default_rng(1).bytes(nbytes)))
    driver.copy(0, source, 5, 1, target, 9, nbytes)
    back, sent = bytearray(nbytes), bytearray(nbytes)
    driver.read(1, target, 9, memoryview(back))
    driver.read(0, source, 5, memoryview(sent))
    assert back == sent
    driver.free(0, source)
    driver.free(1, target)
    return bytes(back)


def test_peer_access_is_enabled_once_a_direction(driver: CUDADriver, runtime: FakeRuntime) -> None:
    exchange(driver, 1000)
    exchange(driver, 1001)
    in_thread(lambda: (exchange(driver, 10), driver.detach(0), driver.detach(1)))
    assert runtime.enabled == [(0, 1)]
    assert runtime.calls.count("deviceEnablePeerAccess") == 1
    assert runtime.calls.count("memcpyPeerAsync") == 3
    assert not runtime.pinned


def test_peer_access_enabled_by_somebody_else_is_fine(driver: CUDADriver, runtime: FakeRuntime) -> None:
    runtime.enabled.append((0, 1))
    exchange(driver, 1000)


@pytest.mark.parametrize("nbytes", [1, BOUNCE_BYTES, BOUNCE_BYTES + 1, 2 * BOUNCE_BYTES + 3])
@pytest.mark.parametrize("pin_limit", [1 << 40, 0])
def test_denied_peer_access_goes_through_the_host(
    driver: CUDADriver, runtime: FakeRuntime, nbytes: int, pin_limit: int
) -> None:
    runtime.peers = False
    runtime.pin_limit = pin_limit
    exchange(driver, nbytes)
    exchange(driver, nbytes)
    assert "memcpyPeerAsync" not in runtime.calls
    assert [len(each) for each in runtime.pinned.values()].count(2 * BOUNCE_BYTES) == bool(pin_limit)
    driver.detach(0)
    driver.detach(1)
    driver.close()
    assert not runtime.pinned
    assert not runtime.streams


# Life


def test_contexts_are_made_before_cupy_would_and_released(
    runtime: FakeRuntime, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    libcuda = FakeLibcuda(order)
    monkeypatch.setattr("ctypes.CDLL", lambda name: libcuda)
    runtime.on_set_device = lambda index: order.append(f"setDevice {index}")
    driver = CUDADriver(environ={})
    driver.open()
    assert order == ["cuInit"]
    driver.alloc(1, 1)
    driver.alloc(1, 1)
    assert order == ["cuInit", "retain 11", "setDevice 1", "setDevice 1"]
    driver.close()
    driver.close()
    assert order[4:] == ["release 11"]


def test_no_warm_up_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeLibcuda(order, init_status=100))
    contexts = PrimaryContexts()
    contexts.prepare()
    contexts.retain(0)
    contexts.release()
    assert order == ["cuInit"]


def test_open_after_close(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    driver = CUDADriver(environ={})
    for _ in range(3):
        assert len(driver.open()) == 2
        exchange(driver, 100)
        driver.close()
    assert nvml.closed == 3
    # Contexts, and what was enabled in them, outlive close(): CUDA says so, and that is no failure.
    assert runtime.enabled == [(0, 1)]


def test_detach_after_close(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    driver = CUDADriver(environ={})
    driver.open()
    exchange(driver, 100)
    driver.close()
    driver.detach(0)
    driver.detach(1)
    assert not runtime.streams


# Errors


def test_exhaustion_is_out_of_memory(driver: CUDADriver) -> None:
    with pytest.raises(CUDARuntimeError) as caught:
        driver.alloc(0, 65 * MIB)
    assert driver.classify(caught.value) is OutOfMemory


@pytest.mark.parametrize("status", [46, 700, 719, 999])
def test_poisoned_context_is_a_lost_device(driver: CUDADriver, status: int) -> None:
    assert driver.classify(CUDARuntimeError(status)) is DeviceLost


def test_other_errors_are_left_to_the_shell(driver: CUDADriver) -> None:
    assert driver.classify(CUDARuntimeError(1)) is None
    assert driver.classify(ValueError("700")) is None
    assert driver.classify(MemoryError()) is OutOfMemory


# Absence


def refusal(environ: dict[str, str] | None = None) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        CUDADriver(environ=environ or {}).open()
    assert caught.value.backend == "cuda"
    return caught.value


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.usefixtures("no_cupy", "nvml")
def test_without_cupy_the_command_that_installs_it() -> None:
    error = refusal()
    assert error.reason is ReasonCode.NO_LIBRARY
    assert error.install_hint is not None
    assert "pip install 'gpurt[cuda12]'" in error.install_hint
    assert "cupy-cuda12x" in str(error)


def test_rocm_s_cupy_is_refused(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    install(monkeypatch, FakeRuntime(is_hip=True))
    error = refusal()
    assert error.reason is ReasonCode.NO_LIBRARY
    assert "built for ROCm" in error.message
    assert "cupy-cuda12x" in str(error)


@pytest.mark.usefixtures("no_cupy")
@pytest.mark.parametrize("said", [ReasonCode.NO_DRIVER, ReasonCode.DRIVER_MISMATCH, ReasonCode.NO_PERMISSION])
def test_without_a_driver_cupy_is_not_blamed_first(monkeypatch: pytest.MonkeyPatch, said: ReasonCode) -> None:
    install_nvml(monkeypatch, BackendUnavailable("as NVML says", reason=said, hint="do this"))
    error = refusal()
    assert error.reason is said
    assert error.message.startswith("as NVML says; CuPy for CUDA is not installed")
    assert error.hint is not None
    assert error.hint.startswith("do this; pip install")


@pytest.mark.usefixtures("no_cupy")
def test_without_cupy_and_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeNvml([])
    install_nvml(monkeypatch, session)
    assert refusal().reason is ReasonCode.NO_DEVICE
    assert session.closed == 1


@pytest.mark.usefixtures("no_cupy")
def test_without_nvml_s_package_cupy_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, BackendUnavailable("no pynvml", reason=ReasonCode.NO_LIBRARY))
    assert "CuPy" in refusal().message


@pytest.mark.usefixtures("nvml")
def test_cupy_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("libamdhip64.so.7: cannot open shared object file\nlong banner")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr("importlib.import_module", fail)
    error = refusal()
    assert error.reason is ReasonCode.NO_LIBRARY
    assert "libamdhip64" in error.message
    assert "banner" not in error.message
    assert isinstance(error.__cause__, ImportError)


def test_driver_too_old(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    runtime.count_status = 35
    error = refusal()
    assert (error.reason, error.code) == (ReasonCode.DRIVER_MISMATCH, 35)
    assert "580.159 is too old" in error.message
    assert nvml.closed == 1
    runtime.driver_version = 0
    assert "libcuda" in refusal().message


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (ReasonCode.NO_DRIVER, ReasonCode.NO_DRIVER),
        (ReasonCode.DRIVER_MISMATCH, ReasonCode.DRIVER_MISMATCH),
        (ReasonCode.NO_PERMISSION, ReasonCode.NO_PERMISSION),
        (ReasonCode.NO_LIBRARY, ReasonCode.NO_DRIVER),
    ],
)
def test_no_driver_and_what_nvml_says_of_it(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, said: ReasonCode, reason: ReasonCode
) -> None:
    install_nvml(monkeypatch, BackendUnavailable("as NVML says", reason=said, hint="do this"))
    runtime.count_status = 35
    error = refusal()
    assert error.reason is reason
    assert "as NVML says" in error.message
    assert error.hint


@pytest.mark.parametrize("mask", ["", "-1", "7"])
def test_hidden_by_the_environment(runtime: FakeRuntime, nvml: FakeNvml, mask: str) -> None:
    runtime.count_status = 100
    error = refusal({"CUDA_VISIBLE_DEVICES": mask})
    assert error.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert f"CUDA_VISIBLE_DEVICES={mask!r}" in error.message


def test_no_device(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, FakeNvml([]))
    runtime.count_status = 100
    assert refusal().reason is ReasonCode.NO_DEVICE
    # NVML has none either, so the mask hides nothing.
    assert refusal({"CUDA_VISIBLE_DEVICES": "0"}).reason is ReasonCode.NO_DEVICE
    runtime.count_status = 0
    runtime.properties.clear()
    assert refusal().reason is ReasonCode.NO_DEVICE


@pytest.mark.parametrize(
    ("status", "reason"),
    [(803, ReasonCode.DRIVER_MISMATCH), (802, ReasonCode.NO_DRIVER), (46, ReasonCode.ERROR), (999, ReasonCode.ERROR)],
)
def test_other_refusals_keep_their_code(runtime: FakeRuntime, nvml: FakeNvml, status: int, reason: ReasonCode) -> None:
    runtime.count_status = status
    error = refusal()
    assert (error.reason, error.code) == (reason, status)


# Through the shell


async def test_backend_round_trip(runtime: FakeRuntime, nvml: FakeNvml) -> None:
    payload = np.random.default_rng(2).bytes(2 * MIB + 1)
    async with CUDABackend() as backend:
        here = await backend.allocate("cuda:0", len(payload) + 3)
        there = await backend.allocate("cuda:1", len(payload))
        await backend.copy_to_device(payload, here, 3)
        await backend.copy_device_to_device(here, there, len(payload), src_offset_bytes=3)
        await backend.synchronize("cuda:1")
        assert await backend.copy_from_device(there) == payload
        assert await backend.get_device_temperature("cuda:0") == 41.0
        with pytest.raises(OutOfMemory):
            await backend.allocate("cuda:0", 65 * MIB)
        await backend.deallocate(here)
        await backend.deallocate(there)
    assert not runtime.live
    # Lanes end on their own time after shutdown().
    async with asyncio.timeout(5):
        while runtime.streams:
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("no_cupy")
async def test_backend_refuses_with_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match="cupy-cuda12x"):
        await create().initialize()
