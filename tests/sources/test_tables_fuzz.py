"""Any table that a library, a tool or a person may give: nothing is raised, no device is invented, none is dropped
without a reason, and every empty field has one."""

from __future__ import annotations

import dataclasses
import json
import plistlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sources import test_apple, test_dxgi, test_opencl_properties, test_vulkan_properties

from gpurt.sources.apple import AppleGpu, read_apple
from gpurt.sources.dxgi import directml_ordinal, read_dxgi
from gpurt.sources.opencl_properties import read_opencl
from gpurt.sources.vulkan_properties import read_vulkan
from gpurt.types import DeviceKind

EXAMPLES = pytest.mark.parametrize("examples", [1000, pytest.param(100_000, marks=pytest.mark.slow)])

numbers = st.integers(-2, 2**65) | st.sampled_from([0, 1, 2, 4, 2**32 - 1, 2**32, 2**50, 2**63, 2**64 - 1])
scalars = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
junk = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=4), scalars, max_size=2)
errors = st.dictionaries(st.sampled_from(["name", "luid", "heaps", "pci_bus", "adapters"]), junk, max_size=2)


def rows(*recorded: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A recorded row with a few values changed, taken out, or taken from another."""
    keys = sorted({key for row in recorded for key in row})
    values = st.sampled_from([value for row in recorded for value in row.values()])
    changes = st.dictionaries(st.sampled_from(keys), junk | values, max_size=4)
    without = st.lists(st.sampled_from(keys), max_size=3)
    return st.builds(
        lambda row, changed, gone, why: {k: v for k, v in {**row, **changed, **why}.items() if k not in gone},
        st.sampled_from(recorded), changes, without, st.just({}) | st.builds(lambda e: {"errors": e}, errors),
    )  # fmt: skip


def explained(record: Any) -> None:
    """Every empty field has a reason, and no filled one has."""
    empty = {item.name for item in dataclasses.fields(record) if getattr(record, item.name) is None}
    told = dict(record.unavailable)
    assert empty <= set(told), (empty, told)
    known = {"unsupported", "no_permission", "invalid", "error", "ambiguous"}
    assert set(told.values()) <= known
    names = {item.name for item in dataclasses.fields(record)}
    assert {name for name in set(told) & names if getattr(record, name) is not None} <= {"heaps"}
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        assert not isinstance(value, int) or value >= 0
        if isinstance(value, str):
            value.encode()
            assert value.isprintable()


def accounted(listed: object, devices: Sequence[Any], skipped: Sequence[Any], where: str) -> None:
    """Each record of a list is a device, each other thing in it is skipped."""
    if not isinstance(listed, list):
        assert not devices
        assert any(item.where == where for item in skipped)
        return
    records = [item for item in listed if isinstance(item, dict)]
    assert len(devices) == len(records)
    places = {f"{where}[{place}]" for place, item in enumerate(listed) if not isinstance(item, dict)}
    assert {item.where for item in skipped if re.fullmatch(rf"{where}\[[0-9]+\]", item.where)} == places


def run(examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def each(table: Any) -> None:
        check(table)

    each()


def lists(row: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(row | row | row | junk, max_size=4) | junk


DXGI = rows(test_dxgi.RTX_4090, test_dxgi.UHD_770, test_dxgi.WARP, test_dxgi.EGPU)


@EXAMPLES
def test_any_table_of_dxgi(examples: int) -> None:
    def check(table: Any) -> None:
        inventory = read_dxgi(table)
        if isinstance(table, dict) and "error" in table:
            assert inventory.absence is not None
            return
        accounted(table.get("adapters"), inventory.adapters, inventory.skipped, "adapters")
        for adapter in inventory.adapters:
            explained(adapter)
            assert directml_ordinal(adapter).device_id == adapter.index
            assert (adapter.memory_total_bytes or 0) >= 0
        places = [a.high_performance_index for a in inventory.adapters if a.high_performance_index is not None]
        assert len(set(places)) == len(places)
        assert all(a.kind is not DeviceKind.SOFTWARE and not a.remote for a in inventory.ranked())

    luids = st.sampled_from([test_dxgi.RTX_4090["luid"], test_dxgi.UHD_770["luid"].upper()])
    tables = st.fixed_dictionaries(
        {},
        optional={
            "adapters": lists(DXGI), "high_performance": st.lists(luids | junk, max_size=4) | junk, "size_bits": junk,
            "errors": errors | junk,
        },
    )  # fmt: skip
    run(examples, tables | st.builds(lambda e: {"error": e}, junk), check)


VULKAN = rows(
    test_vulkan_properties.LAVAPIPE,
    test_vulkan_properties.nvidia("a", 1),
    test_vulkan_properties.nvidia("b", 1),
    test_vulkan_properties.radv("a", 3),
)
HEAPS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "size_bytes": numbers | junk, "device_local": st.booleans() | junk, "budget_bytes": numbers | junk,
            "usage_bytes": numbers | junk,
        },
    )
    | junk,
    max_size=3,
)  # fmt: skip


@EXAMPLES
def test_any_table_of_vulkan(examples: int) -> None:
    def check(table: Any) -> None:
        inventory = read_vulkan(table)
        if "error" in table:
            assert inventory.absence is not None
            return
        accounted(table.get("devices"), inventory.devices, inventory.skipped, "devices")
        for device in inventory.devices:
            explained(device)
            assert (device.memory_free_bytes or 0) <= (device.memory_total_bytes or 0)
            local = sum(heap.size_bytes for heap in device.heaps if heap.device_local)
            assert (device.memory_total_bytes or 0) <= local
        assert all(device.kind is not DeviceKind.SOFTWARE for device in inventory.ranked())

    heaped = st.builds(lambda row, heaps: {**row, "heaps": heaps}, VULKAN, HEAPS)
    tables = st.fixed_dictionaries({}, optional={"devices": lists(VULKAN | heaped)})
    run(examples, tables | st.builds(lambda e: {"error": e}, junk), check)


OPENCL = rows(test_opencl_properties.POCL, test_opencl_properties.H100, test_opencl_properties.MI210)


@EXAMPLES
def test_any_table_of_opencl(examples: int) -> None:
    def check(table: Any) -> None:
        inventory = read_opencl(table)
        if "error" in table:
            assert inventory.absence is not None
            return
        platforms = table.get("platforms")
        if not isinstance(platforms, list):
            accounted(platforms, inventory.devices, inventory.skipped, "platforms")
            return
        for place, platform in enumerate(platforms):
            where = f"platforms[{place}]"
            if not isinstance(platform, dict):
                assert any(item.where == where for item in inventory.skipped)
                continue
            listed = platform.get("devices")
            found = [device for device in inventory.devices if device.platform_index == place]
            if isinstance(listed, list):
                assert len(found) == sum(isinstance(item, dict) for item in listed)
            else:
                assert any(item.where == f"{where}.devices" for item in inventory.skipped)
        for device in inventory.devices:
            explained(device)
            assert (device.memory_free_bytes or 0) <= (device.memory_total_bytes or 2**51)
        assert all(device.kind is not DeviceKind.SOFTWARE for device in inventory.ranked())

    platform = st.fixed_dictionaries(
        {}, optional={"name": st.text(max_size=4) | junk, "devices": lists(OPENCL), "problem": junk}
    )
    tables = st.fixed_dictionaries({}, optional={"platforms": lists(platform)})
    run(examples, tables | st.builds(lambda e: {"error": e}, junk), check)


# JSON and property lists hold less than Python does.
plain = st.none() | st.booleans() | st.integers(-2, 2**63) | st.floats() | st.text(max_size=8)
plist_text = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), max_size=8)
in_plist = st.booleans() | st.integers(-2, 2**63) | st.floats(allow_nan=False) | plist_text | st.binary(max_size=8)
shown = rows(test_apple.M4_MAX, test_apple.RADEON, test_apple.UHD_630).map(
    lambda row: {k: v for k, v in row.items() if isinstance(v, (str, int, float, list, dict, type(None)))}
)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _plist(value: Any) -> str:
    return plistlib.dumps(value, skipkeys=True).decode()


STATISTICS = st.dictionaries(
    st.sampled_from(["Device Utilization %", "In use system memory"]), in_plist | st.integers(0, 100), max_size=2
)
drivers = st.fixed_dictionaries(
    {},
    optional={
        "IOObjectClass": st.sampled_from(["AGXAcceleratorG16X", "IntelAccelerator"]) | in_plist,
        "model": in_plist, "gpu-core-count": in_plist | st.integers(1, 80),
        "PerformanceStatistics": STATISTICS | in_plist,
    },
)  # fmt: skip
MLX = st.fixed_dictionaries(
    {"available": st.sampled_from([True, True, False, None, "yes"])},
    optional={key: junk | st.integers(0, 2**40) for key in test_apple.mlx() if key != "available"},
)
FAILED = st.builds(lambda e: {"error": e}, junk | st.just({"reason": "timeout", "message": "slow"}))
wired = st.sampled_from(["0", "114688", "-1", "x", ""]) | st.text(max_size=6)


@EXAMPLES
def test_any_table_of_apple(examples: int) -> None:
    def check(table: Any) -> None:
        inventory = read_apple(table)
        for gpu in inventory.gpus:
            explained(gpu)
            checked(gpu)
        tools = {"sysctl", "system_profiler", "ioreg"}
        answered = {name for name in tools if isinstance(table.get(name), str)}
        assert set(inventory.absences) >= tools - answered
        assert not set(inventory.absences) & answered
        listed = table.get("system_profiler")
        if isinstance(listed, str) and listed.startswith('{"SPDisplaysDataType": ['):
            # What Apple's own drivers show may come on top, and never instead.
            items = [item for item in json.loads(listed)["SPDisplaysDataType"] if isinstance(item, dict)]
            assert len(inventory.gpus) >= len(items)

    def checked(gpu: AppleGpu) -> None:
        assert gpu.utilization_percent is None or 0 <= gpu.utilization_percent <= 100
        total = gpu.memory_total_bytes
        for part in (gpu.working_set_bytes, gpu.memory_used_bytes):
            assert part is None or total is None or part <= total
        assert (gpu.working_set_bytes is None) == (gpu.working_set_source is None)

    tables = st.fixed_dictionaries(
        {},
        optional={
            "sysctl": st.builds(lambda w: test_apple.sysctl(w), wired) | st.text(max_size=40) | FAILED | junk,
            "system_profiler": st.lists(shown | plain, max_size=3).map(lambda v: _json({"SPDisplaysDataType": v}))
            | plain.map(_json) | st.text(max_size=20) | FAILED | junk,
            "ioreg": st.lists(drivers | in_plist, max_size=3).map(_plist) | in_plist.map(_plist)
            | st.text(max_size=20) | FAILED | junk,
            "mlx": MLX | FAILED | junk,
        },
    )  # fmt: skip
    run(examples, tables, check)
