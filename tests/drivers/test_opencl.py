"""The OpenCL driver beyond the kit: who its devices are, what it refuses, and what it does with memory. On pocl."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.opencl_backends import StandIn, driver, package

from gpurt.backends.opencl.memory import OpenCLBudget
from gpurt.backends.opencl.refusals import absent, nothing_usable
from gpurt.backends.opencl_backend import OpenCLDriver
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.sight_opencl import look
from gpurt.discovery.sight_record import View
from gpurt.errors import BackendUnavailable, DeviceLost, InvalidHandle, OutOfMemory, OutOfRange, ReasonCode
from gpurt.sources.opencl_identity import identity_of, usable_devices, vendor_of
from gpurt.sources.opencl_properties import OpenClInventory, read_opencl
from gpurt.sources.opencl_query import query_opencl
from gpurt.sources.table import Absence
from gpurt.types import DeviceKind

GIB = 1 << 30
POCL = {
    "name": "pthread-AMD EPYC", "vendor": "AuthenticAMD", "vendor_id": 32902, "type": 2, "available": 1,
    "global_memory_bytes": 16 * GIB, "max_allocation_bytes": 4 * GIB,
}  # fmt: skip
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "vendor": "NVIDIA Corporation", "vendor_id": 0x10DE, "type": 4, "available": 1,
    "global_memory_bytes": 80 * GIB, "max_allocation_bytes": 20 * GIB, "unified_memory": False,
    "pci_domain": 0, "pci_bus": 0x41, "pci_device": 0, "pci_function": 0,
}  # fmt: skip
ARC = {"name": "Intel(R) Arc(TM) A770", "vendor": "Intel(R) Corporation", "type": 4, "global_memory_bytes": 16 * GIB}
FPGA = {"name": "FPGA", "vendor": "Intel(R) FPGA", "type": 8, "global_memory_bytes": GIB}


def table(*platforms: list[dict[str, Any]], vendor: str = "V") -> dict[str, Any]:
    rows = [{"name": f"P{n}", "vendor": vendor, "devices": devices} for n, devices in enumerate(platforms)]
    return {"platforms": rows}


def inventory(*platforms: list[dict[str, Any]]) -> OpenClInventory:
    return read_opencl(table(*platforms))


@pytest.fixture
def cl() -> Any:
    try:
        query = query_opencl(package())
    except BackendUnavailable as exc:
        pytest.skip(str(exc))
    if read_opencl(query).absence is not None:
        pytest.skip(f"no OpenCL here: {read_opencl(query).absence}")
    return package()


@pytest.fixture
def opened(cl: Any) -> Iterator[OpenCLDriver]:
    two = driver()
    two.open()
    yield two
    two.close()


def as_gpu(cl: Any, **others: Any) -> OpenCLDriver:
    """The first device of this computer, said to be a discrete GPU."""
    platform = cl.get_platforms()[0]
    card = StandIn(platform.get_devices()[0], type=4, host_unified_memory=0, **others)
    shown = StandIn(platform, get_devices=lambda: [card])
    return OpenCLDriver(cl=StandIn(cl, get_platforms=lambda: [shown]))


class TestWhoTheyAre:
    def test_gpus_then_accelerators_then_the_processor(self) -> None:
        found = usable_devices(inventory([POCL], [FPGA, ARC], [H100]))
        assert [device.name for device in found] == [H100["name"], ARC["name"], FPGA["name"], POCL["name"]]
        assert found[-1].kind is DeviceKind.SOFTWARE

    def test_what_is_not_available_is_left_out(self) -> None:
        assert usable_devices(inventory([H100 | {"available": 0}, POCL | {"available": 0}])) == []

    def test_a_card_of_two_platforms_is_one_device(self) -> None:
        found = usable_devices(inventory([H100, ARC], [H100, ARC]))
        assert [(device.name, device.platform_index) for device in found] == [
            (H100["name"], 0), (ARC["name"], 0), (ARC["name"], 1),
        ]  # fmt: skip

    def test_looking_and_opening_agree(self, tmp_path: Path) -> None:
        recorded = table([POCL], [FPGA, ARC], [H100])

        class Recorded(View):
            def table(self, source: str, ask: object) -> object:
                return recorded

        lines: list[ProbeLine] = list(look(Recorded({}, root=tmp_path)))
        sighted = {record.identity.key: record for record in lines[-1].devices if record.identity}
        for device in inventory([POCL], [FPGA, ARC], [H100]).devices:
            record = sighted.pop(identity_of(device).key)
            assert (record.name, record.vendor) == (device.name, vendor_of(device))
            assert record.identity == identity_of(device)
        assert not sighted

    def test_the_host_s_processor_is_a_software_device(self, opened: OpenCLDriver) -> None:
        opened.close()
        devices = opened.open()
        if len(devices) != 2 or devices[0].kind is not DeviceKind.SOFTWARE:
            pytest.skip("this host has more than a processor")
        first, second = devices
        assert first.memory_pool_id == second.memory_pool_id is not None
        assert first.memory_bytes
        assert first.support_level == "experimental"
        assert (first.max_threads_per_block or 0) > 0

    def test_a_gpu_tells_no_free_memory(self, cl: Any) -> None:
        gpu = as_gpu(cl)
        (device,) = gpu.open()
        assert (device.kind, device.memory_pool_id, device.memory_available) == (DeviceKind.GPU, None, None)
        reading = gpu.telemetry(0)
        assert reading.memory_total_bytes == device.memory_bytes
        assert (reading.memory_free_bytes, reading.memory_used_bytes) == (None, None)
        assert reading.unavailable["memory_free_bytes"] == "unsupported"
        mem = gpu.alloc(0, 4096)
        gpu.write(0, mem, 0, memoryview(b"x" * 4096))
        gpu.free(0, mem)
        gpu.close()

    def test_amd_tells_free_memory(self, cl: Any) -> None:
        gpu = as_gpu(cl, global_free_memory_amd=[1 << 10, 1 << 9])
        (device,) = gpu.open()
        assert device.memory_available == gpu.telemetry(0).memory_free_bytes == 1 << 20
        gpu.close()


class TestRefusals:
    def test_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyopencl", None)
        with pytest.raises(BackendUnavailable) as caught:
            OpenCLDriver().open()
        assert caught.value.reason is ReasonCode.NO_LIBRARY
        assert caught.value.install_hint == "pip install 'gpurt[opencl]'  # pyopencl"

    def test_no_driver(self, cl: Any) -> None:
        code = (
            "from gpurt.backends.opencl_backend import OpenCLDriver\n"
            "try: OpenCLDriver(platform='linux').open()\n"
            "except Exception as exc: print(exc.reason, exc.message)"
        )
        environ = {"OCL_ICD_VENDORS": "/nonexistent", "PATH": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(
            [sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, timeout=60
        )
        assert ended.stdout.startswith("hidden_by_environment "), ended.stderr
        assert "OCL_ICD_VENDORS" in ended.stdout

    @pytest.mark.parametrize(("platform", "words"), [("linux", "apt install"), ("win32", "graphics driver")])
    def test_the_driver_s_remedy_is_of_the_platform(self, platform: str, words: str) -> None:
        assert words in (absent(Absence(ReasonCode.NO_DRIVER, "none"), platform).hint or "")

    def test_hidden(self) -> None:
        amd = table([], vendor="Advanced Micro Devices, Inc.")["platforms"]
        exc = nothing_usable(inventory([]), amd, environ={"GPU_DEVICE_ORDINAL": "7"})
        assert exc.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
        assert "GPU_DEVICE_ORDINAL" in (exc.hint or "")

    def test_no_permission(self, tmp_path: Path) -> None:
        (tmp_path / "dev/dri").mkdir(parents=True)
        (tmp_path / "dev/dri/renderD128").touch()
        exc = nothing_usable(inventory([]), [], environ={}, root=tmp_path, may=lambda _: False)
        assert exc.reason is ReasonCode.NO_PERMISSION
        assert "/dev/dri/renderD128" in exc.message

    def test_not_available(self) -> None:
        exc = nothing_usable(inventory([H100 | {"available": 0}]), [], environ={})
        assert exc.reason is ReasonCode.UNSUPPORTED_DEVICE

    def test_no_device(self, tmp_path: Path) -> None:
        # AMD's variable hides nothing of others.
        environ = {"GPU_DEVICE_ORDINAL": "7"}
        exc = nothing_usable(inventory([]), table([])["platforms"], environ=environ, root=tmp_path)
        assert exc.reason is ReasonCode.NO_DEVICE

    def test_a_platform_that_fails(self, tmp_path: Path) -> None:
        broken = read_opencl({"platforms": [{"name": "P", "vendor": "V", "devices": [], "problem": "it is broken"}]})
        exc = nothing_usable(broken, [], environ={}, root=tmp_path)
        assert exc.reason is ReasonCode.ERROR
        assert "it is broken" in exc.message


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "meaning"),
        [(-2, DeviceLost), (-4, OutOfMemory), (-6, OutOfMemory), (-30, OutOfRange), (-61, OutOfMemory), (-5, None)],
    )
    def test_codes(self, code: int, meaning: type | None) -> None:
        class Error(Exception):
            __module__ = "pyopencl._cl"

        error = Error()
        error.code = code  # type: ignore[attr-defined]
        assert OpenCLDriver().classify(error) is meaning

    def test_what_the_library_raises(self, cl: Any, opened: OpenCLDriver) -> None:
        context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
        with pytest.raises(cl.Error) as caught:
            cl.Buffer(context, cl.mem_flags.READ_WRITE, 0)
        assert opened.classify(caught.value) is OutOfMemory
        mem = opened.alloc(0, 16)
        with pytest.raises(cl.Error) as caught:
            opened.write(0, mem, 8, memoryview(b"x" * 16))
        assert opened.classify(caught.value) is OutOfRange
        opened.free(0, mem)

    def test_another_library_s_code_means_nothing(self) -> None:
        error = OSError()
        error.code = -4  # type: ignore[attr-defined]
        assert OpenCLDriver().classify(error) is None


class TestMemory:
    def budget(self, **values: Any) -> OpenCLBudget:
        budget = OpenCLBudget()
        budget.open(usable_devices(inventory([H100 | values])))
        return budget

    def test_never_more_than_the_device_has(self) -> None:
        budget = self.budget(global_memory_bytes=100, max_allocation_bytes=100)
        budget.take(0, 60)
        with pytest.raises(MemoryError, match="60 of its 100"):
            budget.take(0, 41)
        budget.take(0, 40)
        budget.give_back(0, 60)
        budget.take(0, 60)

    def test_largest_piece(self) -> None:
        budget = self.budget(global_memory_bytes=100, max_allocation_bytes=25)
        with pytest.raises(OutOfRange):
            budget.take(0, 26)
        with pytest.raises(MemoryError):  # no matter in how many pieces
            budget.take(0, 101)
        for _ in range(4):
            budget.take(0, 25)

    def test_devices_on_the_host_share_its_memory(self) -> None:
        budget = OpenCLBudget()
        budget.open(usable_devices(inventory([POCL | {"global_memory_bytes": 1 << 45}] * 2)))
        before = budget.reading(1)[1]
        budget.take(0, 1 << 30)
        after = budget.reading(1)[1]
        assert before is not None
        assert after is not None
        assert before - after > 1 << 29

    def test_an_allocation_that_fails_counts_nothing(self, cl: Any) -> None:
        def fails(*_: Any, **__: Any) -> None:
            raise LookupError("the driver has no memory after all")

        gpu = as_gpu(StandIn(cl, enqueue_migrate_mem_objects=fails))
        (device,) = gpu.open()
        assert device.memory_bytes
        largest = gpu.capabilities.max_allocation_bytes or device.memory_bytes
        for _ in range(2 * device.memory_bytes // largest):
            with pytest.raises(LookupError):
                gpu.alloc(0, largest)
        gpu.close()

    def test_a_freed_buffer_never_reaches_the_library(self, opened: OpenCLDriver) -> None:
        live, freed = opened.alloc(0, 64), opened.alloc(0, 64)
        opened.free(0, freed)
        for call in (
            lambda: opened.free(0, freed),
            lambda: opened.write(0, freed, 0, memoryview(b"x")),
            lambda: opened.read(0, freed, 0, memoryview(bytearray(1))),
            lambda: opened.copy(0, freed, 0, 0, live, 0, 1),
            lambda: opened.copy(0, live, 0, 1, freed, 0, 1),
        ):
            with pytest.raises(InvalidHandle):
                call()
        opened.free(0, live)

    def test_between_devices_in_pieces(self, opened: OpenCLDriver) -> None:
        opened.close()
        if len(opened.open()) < 2:
            pytest.skip("one device only, known by its address")
        content = bytes(range(256)) * (1 << 17)  # 32 MiB, two pieces
        src, dst = opened.alloc(0, len(content) + 3), opened.alloc(1, len(content) + 5)
        opened.write(0, src, 3, memoryview(content))
        opened.copy(0, src, 3, 1, dst, 5, len(content))
        back = bytearray(len(content))
        opened.read(1, dst, 5, memoryview(back))
        same = back == content
        assert same
        opened.free(0, src)
        opened.free(1, dst)

    def test_a_thread_s_queue_does_not_outlive_the_driver(self, opened: OpenCLDriver) -> None:
        turn, turned = threading.Semaphore(0), threading.Semaphore(0)
        seen: list[bytes] = []

        def work() -> None:
            for _ in range(2):
                turn.acquire()
                mem, target = opened.alloc(0, 4), bytearray(4)
                opened.write(0, mem, 0, memoryview(b"abcd"))
                opened.read(0, mem, 0, memoryview(target))
                opened.free(0, mem)
                seen.append(bytes(target))
                turned.release()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        for _ in range(2):
            turn.release()
            assert turned.acquire(timeout=30)
            opened.close()
            opened.open()
        thread.join(30)
        assert seen == [b"abcd"] * 2
