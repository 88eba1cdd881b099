"""OpenCL's devices from recorded tables, and from pyopencl where it is installed. Names of tests carry the case that
they stand for."""

from __future__ import annotations

import types
from typing import Any

import pytest

from gpurt.errors import ReasonCode
from gpurt.sources.opencl_properties import OpenClDevice, read_opencl
from gpurt.sources.opencl_query import query_opencl
from gpurt.sources.table import absent_driver
from gpurt.types import DeviceKind

GIB = 1 << 30
Table = dict[str, Any]

# As pyopencl reports pocl 3.0.
POCL: Table = {
    "name": "pthread-AMD EPYC", "vendor": "AuthenticAMD", "vendor_id": 32902, "type": 2, "available": 1,
    "version": "OpenCL 3.0 PoCL HSTR: pthread-x86_64-unknown-linux-gnu-znver3", "driver_version": "3.0-rc2",
    "global_memory_bytes": 15261192192, "max_allocation_bytes": 4294967296, "compute_units": 2, "clock_mhz": 2596,
    "unified_memory": True, "free_memory_kib": None,
    "errors": {"board_name": "unsupported", "free_memory_kib": "unsupported", "pci_domain": "unsupported"},
}  # fmt: skip
H100: Table = {
    "name": "NVIDIA H100 80GB HBM3", "vendor": "NVIDIA Corporation", "vendor_id": 0x10DE, "type": 4, "available": 1,
    "version": "OpenCL 3.0 CUDA", "driver_version": "590.48.01", "global_memory_bytes": 85017493504,
    "max_allocation_bytes": 21254373376, "compute_units": 132, "clock_mhz": 1980, "unified_memory": False,
    "pci_domain": 0, "pci_bus": 9, "pci_device": 0, "pci_function": 0,
}  # fmt: skip
MI210: Table = H100 | {
    "name": "gfx90a:sramecc+:xnack-", "board_name": "AMD Instinct MI210", "vendor": "Advanced Micro Devices, Inc.",
    "vendor_id": 0x1002, "pci_domain": None, "pci_bus": 3, "global_memory_bytes": 64 * GIB,
    "free_memory_kib": 60 << 20,
}  # fmt: skip


def devices(*rows: Table, **more: Any) -> tuple[OpenClDevice, ...]:
    inventory = read_opencl({"platforms": [{"name": "Platform", "devices": list(rows)} | more]})
    assert inventory.skipped == ()
    return inventory.devices


class TestTable:
    def test_everything_that_is_told(self) -> None:
        (found,) = devices(H100)
        assert found == OpenClDevice(
            0, 0, "Platform", "NVIDIA H100 80GB HBM3", "NVIDIA Corporation", 0x10DE, "OpenCL 3.0 CUDA", "590.48.01",
            DeviceKind.GPU, True, "00000000:09:00.0", True, 85017493504, None, 21254373376, False, 132, 1980,
            {"memory_free_bytes": "unsupported"},
        )  # fmt: skip

    def test_amd_by_its_own_extensions(self) -> None:
        (found,) = devices(MI210)
        assert found.name == "AMD Instinct MI210"
        assert (found.pci_address, found.pci_domain_told) == ("00000000:03:00.0", False)
        assert found.memory_free_bytes == 60 * GIB
        assert found.unavailable == {}

    def test_vk4_place_on_the_bus_is_all_that_opencl_tells(self) -> None:
        assert devices(H100 | {"pci_domain": 0xF, "pci_bus": 1})[0].pci_address == "0000000f:01:00.0"

    def test_hosts_processor_is_not_taken_for_a_gpu(self) -> None:
        (found,) = devices(POCL)
        assert (found.kind, found.selectable) == (DeviceKind.SOFTWARE, False)
        assert found.unavailable == {"memory_free_bytes": "unsupported", "pci_address": "unsupported"}

    def test_ranked(self) -> None:
        inside = H100 | {"name": "inside", "unified_memory": True, "global_memory_bytes": 96 * GIB}
        gone = MI210 | {"available": 0}
        inventory = read_opencl({"platforms": [{"devices": [POCL, inside]}, {"devices": [gone, H100]}]})
        assert [(d.platform_index, d.index) for d in inventory.ranked()] == [(1, 1), (0, 1)]

    @pytest.mark.parametrize(
        ("broken", "field", "reason"),
        [
            ({"global_memory_bytes": 0}, "memory_total_bytes", "invalid"),
            ({"clock_mhz": 0}, "max_clock_mhz", "invalid"),
            ({"compute_units": 2**40}, "compute_units", "invalid"),
            ({"pci_bus": -1}, "pci_address", "invalid"),
            ({"pci_domain": "x"}, "pci_address", "invalid"),
            ({"free_memory_kib": 2**35}, "memory_free_bytes", "invalid"),
            ({"name": "", "board_name": None}, "name", "unsupported"),
            ({"unified_memory": "yes"}, "unified_memory", "invalid"),
            ({"driver_version": None, "errors": {"driver_version": "error"}}, "driver_version", "error"),
        ],
    )
    def test_one_broken_value_costs_one_field(self, broken: Table, field: str, reason: str) -> None:
        (found,) = devices(MI210 | broken)
        assert getattr(found, field) is None
        assert found.unavailable == {field: reason}

    @pytest.mark.parametrize(
        "broken",
        [None, 5, {}, {"platforms": 5}, {"platforms": [5]}, {"platforms": [{}]}, {"platforms": [{"devices": [5]}]}],
    )
    def test_what_is_no_table_is_said(self, broken: object) -> None:
        inventory = read_opencl(broken)
        assert inventory.devices == ()
        assert inventory.skipped


class Failing(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"failed: {code}")
        self.code = code


class Source:
    """Attributes that are exceptions are raised, as pyopencl's do."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["values"] = values

    def __getattr__(self, name: str) -> Any:
        value = self.values.get(name, Failing(-30))
        if isinstance(value, Exception):
            raise value
        return value


def package(*platforms: Source) -> Any:
    return types.SimpleNamespace(get_platforms=lambda: list(platforms))


class TestQuery:
    def test_nvidia(self) -> None:
        device = Source(name="L4", type=4, pci_bus_id_nv=0x41, pci_slot_id_nv=9, pci_domain_id_nv=1,
                        integrated_memory_nv=0, host_unified_memory=1, driver_version=Failing(-5))  # fmt: skip
        inventory = read_opencl(query_opencl(package(Source(name="CUDA", get_devices=lambda: [device]))))
        (found,) = inventory.devices
        assert (found.pci_address, found.pci_domain_told) == ("00000001:41:09.0", True)
        assert (found.platform, found.unified_memory, found.kind) == ("CUDA", False, DeviceKind.GPU)
        assert found.unavailable["driver_version"] == "error"
        assert found.unavailable["memory_total_bytes"] == "unsupported"

    def test_amd(self) -> None:
        place = types.SimpleNamespace(type=1, bus=-63, device=0, function=0)  # signed characters
        device = Source(name="gfx942", topology_amd=place, global_free_memory_amd=[1 << 20, 1 << 19], type=4)
        (found,) = read_opencl(query_opencl(package(Source(get_devices=lambda: [device])))).devices
        assert (found.pci_address, found.memory_free_bytes) == ("00000000:c1:00.0", GIB)

    def test_platform_that_cannot_list_is_said(self) -> None:
        def fails() -> list[Any]:
            raise Failing(-6)

        def empty() -> list[Any]:
            raise Failing(-1)

        inventory = read_opencl(
            query_opencl(package(Source(name="A", get_devices=fails), Source(name="B", get_devices=empty)))
        )
        assert inventory.devices == ()
        assert [(s.where, s.why) for s in inventory.skipped] == [("platforms[0]", "A: cannot list devices: failed: -6")]

    def test_no_driver(self) -> None:
        def fails() -> list[Any]:
            raise Failing(-1001)

        for cl in (types.SimpleNamespace(get_platforms=fails), package()):
            absence = read_opencl(query_opencl(cl)).absence
            assert absence is not None
            assert absence.reason is ReasonCode.NO_DRIVER

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (ModuleNotFoundError("no", name="pyopencl"), ReasonCode.NO_LIBRARY),
            (ImportError("libOpenCL.so.1"), ReasonCode.ERROR),
            (OSError("DLL load failed"), ReasonCode.ERROR),
        ],
    )
    def test_hng4_package_that_does_not_load(
        self, error: Exception, reason: ReasonCode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(name: str) -> None:
            raise error

        monkeypatch.setattr("importlib.import_module", fails)
        absence = read_opencl(query_opencl()).absence
        assert absence is not None
        assert absence.reason is reason

    def test_pocl_itself(self) -> None:
        """On a software device: needs pyopencl and an OpenCL driver."""
        table = query_opencl()
        if "error" in table:
            pytest.skip(table["error"]["message"])
        inventory = read_opencl(table)
        assert inventory.devices
        assert all(device.name and device.memory_total_bytes for device in inventory.devices)


def test_a_variable_that_leads_to_no_driver_is_said() -> None:
    told = absent_driver(("OCL_ICD_VENDORS",), "no OpenCL driver is installed", {"OCL_ICD_VENDORS": "/nowhere"})
    assert told.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert "OCL_ICD_VENDORS='/nowhere'" in told.message
    assert absent_driver(("OCL_ICD_VENDORS",), "none", {}).reason is ReasonCode.NO_DRIVER
