"""DirectML's driver: its adapters, its budget, its chunks, on recorded Windows machines and on ONNX Runtime's CPU."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")

import numpy as np
import onnxruntime
from tests.support.directml_backends import FIXTURES, FakeRuntime, recorded, windows

from gpurt.attempt import attempt
from gpurt.backends.directml.memory import LARGEST_CHUNK, SMALLEST_CHUNK, TensorMemory, chunk_bytes_for
from gpurt.backends.directml.runtime import PROVIDERS
from gpurt.backends.directml.session import DeviceCopies, identity_model
from gpurt.backends.directml_backend import DirectMLBackend, DirectMLDriver, create
from gpurt.discovery.sight_record import View
from gpurt.discovery.sight_windows import look
from gpurt.errors import BackendUnavailable, OutOfMemory, ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.dxgi_calls import DxgiError
from gpurt.types import DeviceKind, DeviceState

GIB = 1 << 30
Row = dict[str, Any]

RTX: Row = recorded("windows-rtx-4090")["adapters"][0]
WARP: Row = recorded("windows-rtx-4090")["adapters"][1]
SMALL_RTX = RTX | {
    "name": "NVIDIA GeForce RTX 4060", "luid": "000000000000d4a1", "pci_bus": 3, "dedicated_video_bytes": 8 * GIB,
    "local_budget_bytes": 7 * GIB, "local_usage_bytes": 0,
}  # fmt: skip
UHD = RTX | {
    "name": "Intel(R) UHD Graphics 770", "vendor_id": 0x8086, "luid": "000000000000c1b2", "pci_bus": 0,
    "pci_device": 2, "dedicated_video_bytes": 128 << 20, "shared_system_bytes": 16 * GIB,
    "local_budget_bytes": 15 * GIB, "local_usage_bytes": 0, "non_local_budget_bytes": 0,
}  # fmt: skip
REMOTE = RTX | {"name": "Microsoft Remote Display Adapter", "flags": 1, "luid": "0000000000000777"}


@pytest.fixture
def driver() -> Iterator[DirectMLDriver]:
    """Over the CPU's memory, open, with the chunks that users have."""
    driver = DirectMLDriver(device_type="cpu")
    driver.open()
    yield driver
    driver.close()


def get(driver: DirectMLDriver, mem: Any, size: int, offset: int = 0, index: int = 0) -> bytes:
    target = bytearray(size)
    driver.read(index, mem, offset, memoryview(target))
    return bytes(target)


class TestDevices:
    def test_best_first_and_ordinals_of_the_whole_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, runtime, _ = windows(monkeypatch, [UHD, WARP, SMALL_RTX, REMOTE, RTX])
        devices = driver.open()
        assert [(d.device_id, d.name) for d in devices] == [
            ("directml:0", RTX["name"]),
            ("directml:1", SMALL_RTX["name"]),
            ("directml:2", UHD["name"]),
        ]
        # WARP and the remote one have numbers, too: what comes behind them is counted with them.
        assert runtime.sessions == [4, 2, 0]
        for index in range(3):
            driver.free(index, driver.alloc(index, 100))
        assert [ordinal for ordinal, _ in runtime.made] == [4, 2, 0]

    def test_record_of_a_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        [device] = windows(monkeypatch, recorded("windows-rtx-4090")["adapters"])[0].open()
        assert device.kind is DeviceKind.GPU
        assert device.usable
        assert device.memory_bytes == RTX["dedicated_video_bytes"]
        assert device.memory_available == device.memory_usable_bytes == 23 * GIB
        assert device.memory_usable_source == "driver"
        assert (device.vendor, device.backend_name, device.driver_version) == (
            "nvidia", "onnxruntime 1.24.4", "32.0.15.9186",
        )  # fmt: skip
        assert (device.compute_units, device.clock_rate_mhz, device.memory_pool_id) == (None, None, None)

    def test_record_of_a_gpu_in_a_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        [device] = windows(monkeypatch, [UHD])[0].open()
        assert device.kind is DeviceKind.INTEGRATED_GPU
        assert device.unified_memory
        assert device.memory_pool_id is not None
        assert device.memory_bytes == (128 << 20) + 16 * GIB
        assert device.memory_available == 15 * GIB

    def test_what_is_not_told_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = recorded("windows-wmi")["adapters"]
        driver, _, _ = windows(monkeypatch, rows)
        devices = driver.open()
        assert {(d.kind, d.memory_available, d.memory_usable_bytes) for d in devices} == {
            (DeviceKind.UNKNOWN, None, None)
        }
        reading = driver.telemetry(0)
        assert (reading.memory_free_bytes, reading.unavailable["memory_free_bytes"]) == (None, "unsupported")

    def test_memory_of_nothing_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = {key: value for key, value in RTX.items() if "budget" not in key} | {"dedicated_video_bytes": 0}
        driver, _, _ = windows(monkeypatch, [row])
        [device] = driver.open()
        assert (device.memory_bytes, driver.telemetry(0).memory_total_bytes) == (None, None)
        assert driver.telemetry(0).unavailable["memory_total_bytes"] == "unsupported"
        driver.free(0, driver.alloc(0, 100))

    @pytest.mark.parametrize("machine", ["windows-rtx-4090", "windows-wmi"])
    def test_same_key_as_where_it_is_only_looked_at(self, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
        fixture = FIXTURES / machine
        [_, line] = look(View(environ={}, root=fixture / "root", tables=fixture / "tables"))
        sighted = {device.name: device.stable_id for device in line.devices}
        devices = windows(monkeypatch, recorded(machine)["adapters"])[0].open()
        assert devices
        for device in devices:
            assert device.stable_id == sighted[device.name]

    def test_key_where_nothing_is_told_but_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = {key: value for key, value in RTX.items() if not key.startswith("pci_")} | {"luid": "0" * 16}
        [device] = windows(monkeypatch, [row])[0].open()
        assert device.identity is not None
        assert (device.identity.key, device.identity.stable) == ("dxgi:NVIDIA GeForce RTX 4090:0", False)

    def test_adapter_that_takes_no_session_keeps_its_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, _, _ = windows(monkeypatch, [RTX, SMALL_RTX], FakeRuntime(sick=[0]))
        first, second = driver.open()
        assert (first.usable, first.state) == (False, DeviceState.DEGRADED)
        assert first.state_reason is not None
        assert first.state_reason.startswith("unsupported_device: ")
        assert "80070057" in first.state_reason
        assert "more" not in first.state_reason
        assert second.usable
        driver.free(1, driver.alloc(1, 10))

    def test_software_device_says_so(self) -> None:
        driver = DirectMLDriver(device_type="cpu", devices=2)
        devices = driver.open()
        assert {device.kind for device in devices} == {DeviceKind.SOFTWARE}
        assert "full" not in {device.support_level for device in devices}
        assert len({device.stable_id for device in devices}) == 2
        driver.close()

    async def test_software_device_is_used_only_when_asked_for(self) -> None:
        async def make(name: str) -> DriverBackend:
            return DirectMLBackend(device_type="cpu")

        found = await attempt("directml", make, deadline=30)
        assert found.report.reason is ReasonCode.NO_DEVICE
        assert "a software device" in found.report.message
        found = await attempt("directml", make, deadline=30, allow_software=True)
        assert found.backend is not None
        await found.backend.shutdown()


class TestRefusals:
    @pytest.mark.parametrize("platform", ["linux", "darwin"])
    def test_no_directml_elsewhere(self, platform: str) -> None:
        with pytest.raises(BackendUnavailable, match=f"does not exist on {platform}") as caught:
            DirectMLDriver(platform=platform).open()
        assert caught.value.reason is ReasonCode.WRONG_PLATFORM
        assert caught.value.install_hint is None

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows may have one")
    async def test_backend_refuses_and_stays_closed(self) -> None:
        backend = create()
        assert isinstance(backend, DirectMLBackend)
        for _ in range(2):
            with pytest.raises(BackendUnavailable) as caught:
                await backend.initialize()
            assert (caught.value.reason, caught.value.backend) == (ReasonCode.WRONG_PLATFORM, "directml")
        await backend.shutdown()

    @pytest.mark.parametrize(
        ("rows", "said", "hint"),
        [
            ([WARP], "only Microsoft Basic Render Driver", "install the graphics driver"),
            ([REMOTE, WARP], "only Microsoft Remote Display Adapter, Microsoft Basic", "computer's own console"),
            ([], "shows no adapter", "install the graphics driver"),
        ],
    )
    def test_no_gpu(self, monkeypatch: pytest.MonkeyPatch, rows: list[Row], said: str, hint: str) -> None:
        driver, _, dxgi = windows(monkeypatch, rows)
        with pytest.raises(BackendUnavailable, match=said) as caught:
            driver.open()
        assert caught.value.reason is ReasonCode.NO_DEVICE
        assert caught.value.hint is not None
        assert hint in caught.value.hint
        assert (dxgi.factories, dxgi.left_open) == (0, 0)

    @pytest.mark.parametrize(
        "exc", [DxgiError("CreateDXGIFactory1", 0x887A0004), OSError("dxgi.dll"), AttributeError()]
    )
    def test_no_dxgi(self, monkeypatch: pytest.MonkeyPatch, exc: Exception) -> None:
        def broken() -> Any:
            raise exc

        monkeypatch.setitem(sys.modules, "onnxruntime", FakeRuntime())
        with pytest.raises(BackendUnavailable, match="DXGI cannot be opened") as caught:
            DirectMLDriver(platform="win32", open_dxgi=broken).open()
        assert caught.value.reason is ReasonCode.ERROR

    def test_library_comes_before_adapters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, _, dxgi = windows(monkeypatch, [RTX], FakeRuntime(providers=["CPUExecutionProvider"]))
        with pytest.raises(BackendUnavailable) as caught:
            driver.open()
        assert caught.value.reason is ReasonCode.NO_LIBRARY
        assert dxgi.opened == []

    def test_session_on_the_cpu_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, _, dxgi = windows(monkeypatch, [RTX], FakeRuntime(silent=True))
        with pytest.raises(BackendUnavailable, match="asked of DmlExecutionProvider was made on CPUExec") as caught:
            driver.open()
        assert caught.value.reason is ReasonCode.UNSUPPORTED_DEVICE
        assert dxgi.factories == 0

    def test_real_library_without_directml_makes_no_silent_session(self) -> None:
        with (
            pytest.warns(UserWarning, match="not in available provider names"),
            pytest.raises(BackendUnavailable, match="asked of DmlExecutionProvider was made on CPUExec"),
        ):
            DeviceCopies(onnxruntime, "dml", 0)

    def test_every_adapter_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, _, dxgi = windows(monkeypatch, [RTX, UHD], FakeRuntime(sick=[0, 1]))
        with pytest.raises(BackendUnavailable, match=r"none of the GPUs: NVIDIA GeForce RTX 4090: .*; Intel") as caught:
            driver.open()
        assert caught.value.reason is ReasonCode.UNSUPPORTED_DEVICE
        assert dxgi.factories == 0


class TestBudget:
    def test_windows_would_grant_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = dict(RTX)
        driver, runtime, dxgi = windows(monkeypatch, [row])
        driver.open()
        row["local_usage_bytes"] = row["local_budget_bytes"] - 5000
        with pytest.raises(MemoryError, match=r"5,001 bytes asked for on directml:0.* 5,000 more"):
            driver.alloc(0, 5001)
        assert runtime.made == []
        mem = driver.alloc(0, 5000)
        row["local_usage_bytes"] = row["local_budget_bytes"] + 1  # what others took made the budget smaller
        with pytest.raises(MemoryError, match=" 0 more"):
            driver.alloc(0, 1)
        driver.free(0, mem)
        assert dxgi.left_open == 0

    def test_without_a_budget_the_card_is_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = RTX | {"dedicated_video_bytes": 10_000}
        driver, _, _ = windows(monkeypatch, [row])
        driver.open()
        del row["local_budget_bytes"]
        first = driver.alloc(0, 6000)
        with pytest.raises(MemoryError, match=r" 4,000 more"):
            driver.alloc(0, 6000)
        driver.free(0, first)
        driver.free(0, driver.alloc(0, 10_000))

    def test_failed_allocation_is_not_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = {key: value for key, value in RTX.items() if "budget" not in key} | {"dedicated_video_bytes": 10_000}
        driver, runtime, _ = windows(monkeypatch, [row])
        driver.open()
        runtime.failure = RuntimeError("Exception(1) tid(2a4) 8007000E Not enough memory resources are available")
        with pytest.raises(RuntimeError) as caught:
            driver.alloc(0, 10_000)
        assert driver.classify(caught.value) is OutOfMemory
        runtime.failure = None
        driver.free(0, driver.alloc(0, 10_000))

    @pytest.fixture
    def card(self, monkeypatch: pytest.MonkeyPatch) -> tuple[DirectMLDriver, FakeRuntime]:
        return windows(monkeypatch, [RTX])[:2]

    async def test_the_library_out_of_memory_is_typed(self, card: tuple[DirectMLDriver, FakeRuntime]) -> None:
        driver, runtime = card
        async with DriverBackend(driver) as backend:
            runtime.failure = RuntimeError("Exception(1) tid(2a4) 8007000E Not enough memory resources are available")
            with pytest.raises(OutOfMemory) as caught:
                await backend.allocate("directml:0", 1 << 20)
            assert caught.value.requested_bytes == 1 << 20
            runtime.failure = None
            async with backend.allocation("directml:0", 1 << 20):
                pass

    def test_the_host_is_the_limit_of_its_memory(self, driver: DirectMLDriver) -> None:
        free = driver.telemetry(0).memory_free_bytes
        assert free is not None
        with pytest.raises(MemoryError, match="asked for on directml:0"):
            driver.alloc(0, free + GIB)

    def test_telemetry_is_of_this_moment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = dict(RTX)
        driver, _, dxgi = windows(monkeypatch, [WARP, row])
        driver.open()
        row["local_usage_bytes"] = 4 * GIB
        reading = driver.telemetry(0)
        assert (reading.memory_total_bytes, reading.memory_free_bytes) == (RTX["dedicated_video_bytes"], 20 * GIB)
        missing = {"memory_used_bytes", "memory_reserved_bytes", "temperature_c", "power_w", "clock_mhz"}
        assert reading.unavailable == dict.fromkeys(missing | {"utilization_percent"}, "unsupported")
        row["local_usage_bytes"] = 0  # budgets count a little more than the card's own figure
        assert driver.telemetry(0).memory_free_bytes == RTX["dedicated_video_bytes"]
        assert dxgi.left_open == 0

    def test_telemetry_of_an_adapter_that_went(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [dict(RTX)]
        driver, _, dxgi = windows(monkeypatch, rows)
        driver.open()
        monkeypatch.setattr(dxgi, "rows", [])
        reading = driver.telemetry(0)
        assert (reading.memory_free_bytes, reading.unavailable["memory_free_bytes"]) == (None, "error")
        assert reading.memory_total_bytes == RTX["dedicated_video_bytes"]


class TestChunks:
    @pytest.mark.parametrize(
        ("nbytes", "chunk"),
        [
            (1, SMALLEST_CHUNK),
            (4096, SMALLEST_CHUNK),
            ((256 << 10) + 5, 64 << 10),
            (1 << 20, 256 << 10),
            (64 << 20, 16 << 20),
            (10 * GIB, LARGEST_CHUNK),
        ],
    )
    def test_how_large_they_are(self, nbytes: int, chunk: int) -> None:
        assert chunk_bytes_for(nbytes) == chunk

    def test_large_memory_at_odd_offsets(self, driver: DirectMLDriver) -> None:
        size = 2 * LARGEST_CHUNK + (LARGEST_CHUNK // 2) + 77
        mem = driver.alloc(0, size)
        assert len(mem.values) > 2
        expected = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
        driver.write(0, mem, 0, memoryview(expected.tobytes()))
        chunk = mem.chunk_bytes
        for offset, count in ((0, 1), (chunk - 1, 2), (chunk - 5, chunk + 10), (size - 1, 1), (3, 2 * chunk + 1)):
            content = random.Random(offset).randbytes(count)
            driver.write(0, mem, offset, memoryview(content))
            expected[offset : offset + count] = np.frombuffer(content, np.uint8)
            # With a byte on either side, where there is one.
            first, last = max(0, offset - 1), min(size, offset + count + 1)
            same = get(driver, mem, last - first, first) == expected[first:last].tobytes()
            assert same
        whole = get(driver, mem, size) == expected.tobytes()
        assert whole
        driver.free(0, mem)

    def test_whole_chunks_are_copied_on_the_device_and_the_rest_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, runtime, _ = windows(monkeypatch, [RTX, SMALL_RTX], largest_chunk=1000)
        driver.open()
        content = random.Random(5).randbytes(3500)
        src, dst = driver.alloc(0, 3500), driver.alloc(0, 3500)
        driver.write(0, src, 0, memoryview(content))
        driver.copy(0, src, 0, 0, dst, 0, 3500)
        assert runtime.copied == [0] * 4
        assert get(driver, dst, 3500) == content
        driver.copy(0, src, 100, 0, dst, 300, 3000)
        assert len(runtime.copied) == 4
        assert get(driver, dst, 3500) == content[:300] + content[100:3100] + content[3300:]
        other = driver.alloc(1, 3500)
        driver.copy(0, src, 0, 1, other, 0, 3500)
        assert len(runtime.copied) == 4  # no session sees two adapters
        assert get(driver, other, 3500, index=1) == content

    def test_copies_do_not_share_memory(self, driver: DirectMLDriver) -> None:
        src, dst = driver.alloc(0, 1 << 20), driver.alloc(0, 1 << 20)
        driver.write(0, src, 0, memoryview(bytes([1]) * (1 << 20)))
        driver.copy(0, src, 0, 0, dst, 0, 1 << 20)
        driver.write(0, src, 0, memoryview(bytes([2]) * (1 << 20)))
        assert get(driver, dst, 1 << 20) == bytes([1]) * (1 << 20)

    def test_freed_memory_is_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, _, _ = windows(monkeypatch, [RTX])
        driver.open()
        mems = [driver.alloc(0, 1 << 20) for _ in range(2)]
        driver.write(0, mems[0], 5, memoryview(b"edge"))
        driver.copy(0, mems[0], 0, 0, mems[1], 0, 1 << 20)
        get(driver, mems[0], 100, 50)
        gone = [weakref.ref(value) for mem in mems for value in mem.values]
        for mem in mems:
            driver.free(0, mem)
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)

    def test_close_drops_what_is_left_and_opens_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver, runtime, dxgi = windows(monkeypatch, [RTX])
        driver.open()
        gone = [weakref.ref(value) for value in driver.alloc(0, 1 << 20).values]
        driver.close()
        gc.collect()
        assert {ref() for ref in gone} == {None}
        assert dxgi.factories == 0
        driver.close()
        assert [device.device_id for device in driver.open()] == ["directml:0"]
        mem = driver.alloc(0, 100)
        driver.write(0, mem, 0, memoryview(b"x" * 100))
        assert get(driver, mem, 100) == b"x" * 100
        driver.close()
        assert len(runtime.sessions) == 2

    def test_allocation_that_fails_half_way_keeps_nothing(self) -> None:
        values: list[weakref.ref[Any]] = []

        class Value: ...

        def make(shape: list[int], dtype: Any, device_type: str, ordinal: int) -> Any:
            if len(values) == 3:
                raise RuntimeError("8007000E")
            value = Value()
            values.append(weakref.ref(value))
            return value

        class Runtime:
            class OrtValue:
                ortvalue_from_shape_and_type = staticmethod(make)

        memory = TensorMemory(Runtime, "cpu", 1000)
        with pytest.raises(RuntimeError) as caught:
            memory.allocate(0, 5000)
        # While the error, with its frames, is still there.
        assert caught.value is not None
        assert [ref() for ref in values] == [None] * 3


class TestModel:
    def test_onnx_runtime_reads_it(self) -> None:
        session = onnxruntime.InferenceSession(identity_model(), providers=[PROVIDERS["cpu"]])
        [source], [target] = session.get_inputs(), session.get_outputs()
        assert (source.name, source.type, len(source.shape)) == ("x", "tensor(uint8)", 1)
        assert (target.name, target.type, len(target.shape)) == ("y", "tensor(uint8)", 1)
        content = np.arange(200, dtype=np.uint8)
        [result] = session.run(["y"], {"x": content})
        assert (np.asarray(result) == content).all()

    def test_library_is_not_asked_for_before_open(self) -> None:
        code = (
            "import sys, gpurt.backends.directml_backend as b\n"
            "b.create()\n"
            "print('onnxruntime' in sys.modules, 'numpy' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == ["False", "False"]


def test_driver_files_are_short() -> None:
    folder = Path(sys.modules["gpurt.backends.directml_backend"].__file__ or "").parent
    for path in folder.glob("directml_*.py"):
        assert len(path.read_text().splitlines()) <= 300, path.name
        assert "async " not in path.read_text(), path.name
