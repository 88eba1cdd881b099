"""Apple's GPUs from recorded texts. Names of tests carry the case that they stand for."""

from __future__ import annotations

import json
import plistlib
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import pytest

from gpurt.errors import ReasonCode
from gpurt.sources.apple import AppleGpu, AppleInventory, read_apple
from gpurt.sources.apple_parse import parse_accelerators, parse_displays, parse_size, parse_sysctl
from gpurt.sources.apple_query import query_apple, query_apple_tools, query_mlx
from gpurt.sources.apple_tools import ToolAnswer, run_tool
from gpurt.sources.table import Absence
from gpurt.types import DeviceKind

GIB = 1 << 30
Table = dict[str, Any]

STOCK = 115448720916
"""107.52 GiB of 128: what Metal recommends there as the system comes."""

MISSING = {"error": {"reason": "no_library", "message": "there is no /usr/sbin/ioreg"}}


def sysctl(wired: str | None = "0", memory: str = str(128 * GIB)) -> str:
    lines = [
        f"hw.memsize: {memory}", "hw.model: Mac16,5", "hw.ncpu: 16", "kern.osproductversion: 26.1",
        "machdep.cpu.brand_string: Apple M4 Max", "kern.hv_vmm_present: 0",
    ]  # fmt: skip
    return "\n".join([*lines, *([] if wired is None else [f"iogpu.wired_limit_mb: {wired}"])]) + "\n"


def displays(*items: Table) -> str:
    return json.dumps({"SPDisplaysDataType": list(items)})


M4_MAX: Table = {
    "_name": "Apple M4 Max", "spdisplays_mtlgpufamilysupport": "spdisplays_metal4", "sppci_model": "Apple M4 Max",
    "spdisplays_vendor": "sppci_vendor_Apple", "sppci_bus": "spdisplays_builtin", "sppci_cores": "40",
    "sppci_device_type": "spdisplays_gpu", "spdisplays_ndrvs": [{"_name": "Color LCD"}],
}  # fmt: skip
RADEON: Table = {
    "_name": "AMD Radeon Pro 5500M", "sppci_model": "AMD Radeon Pro 5500M", "spdisplays_vendor": "sppci_vendor_amd",
    "sppci_bus": "spdisplays_pcie_device", "spdisplays_vram": "8 GB", "spdisplays_device-id": "0x7340",
    "spdisplays_mtlgpufamilysupport": "spdisplays_metal3",
}  # fmt: skip
UHD_630: Table = {
    "_name": "Intel UHD Graphics 630", "sppci_model": "Intel UHD Graphics 630", "spdisplays_vendor": "Intel",
    "sppci_bus": "spdisplays_builtin", "spdisplays_vram_shared": "1536 MB",
}  # fmt: skip


def registry(*items: Table) -> str:
    return plistlib.dumps(list(items)).decode()


AGX: Table = {
    "IOObjectClass": "AGXAcceleratorG16X", "model": b"Apple M4 Max\0", "gpu-core-count": 40,
    "PerformanceStatistics": {"Device Utilization %": 29, "In use system memory": 1154580480, "recoveryCount": 0},
}  # fmt: skip


def mlx(**more: Any) -> Table:
    return {
        "available": True, "device_name": "Apple M4 Max", "architecture": "applegpu_g16s", "memory_size": 128 * GIB,
        "max_recommended_working_set_size": STOCK, "max_buffer_length": 86586540032, "resource_limit": 499000,
    } | more  # fmt: skip


def computer(**parts: Any) -> Table:
    return {
        "sysctl": sysctl(), "system_profiler": displays(M4_MAX), "ioreg": registry(AGX), "mlx": mlx(),
    } | parts  # fmt: skip


def gpu(**parts: Any) -> AppleGpu:
    (found,) = read_apple(computer(**parts)).gpus
    return found


class TestTogether:
    def test_everything_that_is_told(self) -> None:
        inventory = read_apple(computer())
        assert inventory == AppleInventory(
            gpus=(
                AppleGpu(
                    "Apple M4 Max", "apple", DeviceKind.INTEGRATED_GPU, "applegpu_g16s", 40, 4, True, 128 * GIB, STOCK,
                    "metal", 86586540032, 1154580480, 29.0, {},
                ),
            ),
            model="Mac16,5", os_version="26.1", virtual_machine=False, host_memory_bytes=128 * GIB, wired_limit_bytes=0,
        )  # fmt: skip

    def test_older_computer_with_two_gpus_of_others(self) -> None:
        inventory = read_apple(computer(system_profiler=displays(UHD_630, RADEON), ioreg="", mlx={"available": False}))
        inside, card = inventory.gpus
        assert (inside.vendor, inside.kind, inside.unified_memory) == ("intel", DeviceKind.INTEGRATED_GPU, True)
        assert inside.memory_total_bytes == 1536 << 20
        assert (card.vendor, card.kind, card.memory_total_bytes) == ("amd", DeviceKind.GPU, 8 * GIB)
        assert (card.metal_version, card.working_set_bytes) == (3, None)
        assert card.unavailable["working_set_bytes"] == "unsupported"
        assert inventory.metal is not None

    def test_two_of_apples_are_not_mixed_up(self) -> None:
        inventory = read_apple(computer(system_profiler=displays(M4_MAX, M4_MAX), ioreg=registry(AGX, AGX)))
        assert [found.utilization_percent for found in inventory.gpus] == [None, None]
        assert "2 drivers" in inventory.skipped[0].why

    @pytest.mark.parametrize("broken", [None, 5, "apple", []])
    def test_what_is_no_table_is_said(self, broken: object) -> None:
        inventory = read_apple(broken)
        assert (inventory.gpus, len(inventory.skipped)) == ((), 1)

    def test_nothing_at_all(self) -> None:
        inventory = read_apple({})
        assert inventory.gpus == ()
        assert set(inventory.absences) == {"sysctl", "system_profiler", "ioreg", "mlx"}
        assert inventory.host_memory_bytes is None
        assert inventory.unavailable["host_memory_bytes"] == "unsupported"


class TestMemory:
    def test_apl1_budget_is_metals_and_not_the_memory(self) -> None:
        found = gpu()
        assert (found.working_set_bytes, found.working_set_source) == (STOCK, "metal")
        assert found.memory_total_bytes == 128 * GIB

    def test_apl1_metals_figure_reflects_the_setting_already(self) -> None:
        found = gpu(sysctl=sysctl("114688"), mlx=mlx(max_recommended_working_set_size=112 * GIB))
        assert (found.working_set_bytes, found.working_set_source) == (112 * GIB, "metal")

    def test_apl1_without_mlx_the_setting_counts(self) -> None:
        found = gpu(sysctl=sysctl("114688"), mlx=MISSING)
        assert (found.working_set_bytes, found.working_set_source) == (112 * GIB, "sysctl")
        assert found.memory_total_bytes == 128 * GIB

    @pytest.mark.parametrize(
        ("wired", "limit", "reason"),
        [
            ("0", 0, "unsupported"),
            (None, None, "unsupported"),
            ("garbage", None, "invalid"),
            ("", None, "invalid"),
            ("-5", None, "invalid"),
            ("999999999", None, "invalid"),
        ],
    )
    def test_apl1_without_either_nothing_is_guessed(self, wired: str | None, limit: int | None, reason: str) -> None:
        inventory = read_apple(computer(sysctl=sysctl(wired), mlx=MISSING))
        (found,) = inventory.gpus
        assert inventory.wired_limit_bytes == limit
        assert (found.working_set_bytes, found.working_set_source) == (None, None)
        assert found.unavailable["working_set_bytes"] == reason

    @pytest.mark.parametrize("size", [0, 129 * GIB, "much", True, 1.5])
    def test_apl1_impossible_working_set_is_none(self, size: object) -> None:
        found = gpu(mlx=mlx(max_recommended_working_set_size=size))
        assert (found.working_set_bytes, found.unavailable["working_set_bytes"]) == (None, "invalid")

    def test_apl1_setting_above_what_metal_calls_the_memory(self) -> None:
        told = mlx(memory_size=64 * GIB, max_recommended_working_set_size=None)
        found = gpu(sysctl=sysctl("114688"), mlx=told)
        assert (found.working_set_bytes, found.unavailable["working_set_bytes"]) == (None, "invalid")

    def test_more_used_than_there_is(self) -> None:
        statistics = {"Device Utilization %": 101, "In use system memory": 129 * GIB}
        found = gpu(ioreg=registry(AGX | {"PerformanceStatistics": statistics}))
        assert (found.memory_used_bytes, found.utilization_percent) == (None, None)
        assert found.unavailable == {"memory_used_bytes": "invalid", "utilization_percent": "invalid"}


class TestAbsence:
    def test_apl2_no_metal_device_in_a_virtual_machine(self) -> None:
        def fails(*args: Any) -> None:
            raise RuntimeError("[metal::Device] No Metal device")

        fake = types.SimpleNamespace(
            metal=types.SimpleNamespace(is_available=lambda: False), device_info=fails, gpu="gpu"
        )
        inventory = read_apple(computer(system_profiler=displays(), ioreg="", mlx=query_mlx(fake)))
        assert inventory.gpus == ()
        assert inventory.metal is not None
        assert inventory.metal.reason is ReasonCode.NO_DEVICE

    def test_apl2_available_and_yet_it_raises(self) -> None:
        def fails(*args: Any) -> None:
            raise RuntimeError("[metal::Device] No Metal device")

        fake = types.SimpleNamespace(metal=types.SimpleNamespace(is_available=lambda: True), device_info=fails, gpu=0)
        inventory = read_apple(computer(mlx=query_mlx(fake)))
        assert inventory.metal is not None
        assert (inventory.metal.reason, "No Metal device" in inventory.metal.message) == (ReasonCode.ERROR, True)
        assert inventory.gpus[0].working_set_bytes is None
        assert inventory.gpus[0].memory_total_bytes == 128 * GIB

    @pytest.mark.parametrize("failure", ["absent", "status"])
    def test_apl3_each_tool_may_be_missing_and_the_others_stand_in(self, failure: str) -> None:
        answers = {"sysctl": sysctl(), "system_profiler": displays(M4_MAX), "ioreg": registry(AGX)}
        fake = types.SimpleNamespace(
            metal=types.SimpleNamespace(is_available=lambda: True),
            device_info=lambda device: {k: v for k, v in mlx().items() if k != "available"}, gpu="gpu",
        )  # fmt: skip
        for broken in answers:
            why = {
                "absent": Absence(ReasonCode.NO_LIBRARY, f"there is no {broken}"),
                "status": Absence(ReasonCode.ERROR, f"{broken} ended with status 1"),
            }[failure]

            def run(argv: Sequence[str], deadline_s: float, *, partial: bool = False) -> ToolAnswer:
                name = argv[0].rsplit("/", 1)[1]
                return ToolAnswer(None, why) if name == broken else ToolAnswer(answers[name].encode())  # noqa: B023

            inventory = read_apple(query_apple(run, fake))
            (found,) = inventory.gpus
            assert inventory.absences == {broken: why}
            assert (found.name, found.cores) == ("Apple M4 Max", 40)
            assert (found.memory_total_bytes, found.working_set_bytes) == (128 * GIB, STOCK)
            assert (found.memory_used_bytes is None) == (broken == "ioreg")

    def test_apl3_without_any_source_memory_is_none_and_not_0(self) -> None:
        nothing = dict.fromkeys(("sysctl", "mlx", "system_profiler"), MISSING)
        found = gpu(**nothing)  # the driver alone
        assert found.name == "Apple M4 Max"
        assert found.memory_total_bytes is None
        assert found.unavailable["memory_total_bytes"] == "unsupported"

    def test_hng4_mlx_that_does_not_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for error, reason in (
            (ModuleNotFoundError("no", name="mlx"), ReasonCode.NO_LIBRARY),
            (ImportError("Library not loaded: @rpath/libmlx.dylib"), ReasonCode.ERROR),
        ):
            with monkeypatch.context() as patch:
                patch.setattr("importlib.import_module", _raiser(error))
                metal = read_apple(computer(mlx=query_mlx())).metal
            assert metal is not None
            assert metal.reason is reason

    def test_mlx_itself_without_a_gpu(self) -> None:
        mx = pytest.importorskip("mlx.core")
        if mx.metal.is_available():
            pytest.skip("there is a Metal device")
        metal = read_apple(computer(mlx=query_mlx())).metal
        assert metal is not None
        assert metal.reason is ReasonCode.NO_DEVICE


def _raiser(error: Exception) -> Any:
    def fails(name: str) -> None:
        raise error

    return fails


class TestParsers:
    def test_sysctl(self) -> None:
        text = "hw.memsize: 1\nsysctl: unknown oid 'iogpu.wired_limit_mb'\nhw.model:  a: b \nhw.memsize: 2\n?\n: 3\n"
        assert parse_sysctl(text) == {"hw.memsize": "1", "hw.model": "a: b"}

    @pytest.mark.parametrize(
        ("text", "size"),
        [("1536 MB", 1536 << 20), ("8 GB", 8 * GIB), ("8GB", None), ("", None), ("-1 GB", None), ("8 TB", None)],
    )
    def test_sizes(self, text: str, size: int | None) -> None:
        assert parse_size(text) == size

    @pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"SPDisplaysDataType": 5}', '{"a": 1}', "[" * 100_000])
    def test_displays_that_are_none(self, text: str) -> None:
        found, skipped = parse_displays(text)
        assert found == ()
        assert len(skipped) == 1

    @pytest.mark.parametrize(
        "data", [b"<plist", b"<?xml version='1.0'?><plist><integer>x</integer></plist>", b"bplist00"]
    )
    def test_registries_that_are_none(self, data: bytes) -> None:
        found, skipped = parse_accelerators(data)
        assert found == ()
        assert len(skipped) == 1

    def test_no_accelerator_is_no_output(self) -> None:
        assert parse_accelerators(b"\n") == ((), ())


@pytest.mark.skipif(sys.platform == "win32", reason="sessions and process groups of POSIX")
class TestTools:
    def test_output(self) -> None:
        assert run_tool([sys.executable, "-c", "print('hw.ncpu: 2')"], 30) == ToolAnswer(b"hw.ncpu: 2\n")

    def test_apl3_tool_that_is_not_there(self) -> None:
        absence = run_tool(["/nonexistent/ioreg"], 1).absence
        assert absence is not None
        assert absence.reason is ReasonCode.NO_LIBRARY

    def test_tool_that_may_not_be_run(self) -> None:
        absence = run_tool(["/etc/passwd"], 1).absence
        assert absence is not None
        assert absence.reason is ReasonCode.NO_PERMISSION

    @pytest.mark.parametrize("partial", [False, True])
    def test_apl3_tool_that_fails(self, partial: bool) -> None:
        code = "import sys; print('hw.ncpu: 2'); print('no such name', file=sys.stderr); sys.exit(1)"
        answer = run_tool([sys.executable, "-c", code], 30, partial=partial)
        if partial:
            assert answer == ToolAnswer(b"hw.ncpu: 2\n")
        else:
            assert answer.absence is not None
            assert answer.absence.message.endswith("ended with status 1: no such name")

    def test_tool_that_hangs_is_killed_with_its_children(self) -> None:
        started = time.monotonic()
        # The shell's child keeps the pipe open: to kill the shell alone would leave us waiting for it.
        absence = run_tool(["/bin/sh", "-c", "sleep 60 & sleep 60"], 0.1).absence
        assert absence is not None
        assert absence.reason is ReasonCode.TIMEOUT
        assert time.monotonic() - started < 20

    def test_none_of_them_is_here(self) -> None:
        if sys.platform == "darwin":
            pytest.skip("they are here")
        table = query_apple_tools()
        assert {entry["error"]["reason"] for name, entry in table.items() if name != "sysctl"} == {"no_library"}
