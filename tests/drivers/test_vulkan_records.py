"""What the Vulkan driver decides without a device: order, identity, memory types, and why it refuses."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.sources.test_vulkan_properties import GIB, LAVAPIPE, MIB, Table, amdvlk, nvidia, radv

from gpurt.backends.vulkan.library import (
    LOADER_HINTS,
    closed_nodes,
    kind_of,
    load_library,
    refusal,
    telling,
)
from gpurt.backends.vulkan.memory import MAPPED, MemoryBudget, MemoryType, choose
from gpurt.backends.vulkan.record import in_order, masked, record_of, vulkan_identity
from gpurt.backends.vulkan_backend import VulkanDriver
from gpurt.discovery.sight import sight
from gpurt.errors import BackendUnavailable, DeviceLost, OutOfMemory, ReasonCode
from gpurt.sources.table import Absence
from gpurt.sources.vulkan_properties import read_vulkan
from gpurt.types import DeviceKind

INTEGRATED: Table = radv("c", 4, device_type=1, name="AMD Radeon 780M (RADV PHOENIX)")
VIRTUAL: Table = nvidia("e", 9, device_type=3)
MOBILE: Table = {
    key: value for key, value in radv("f", 7, name="Adreno 750", vendor_id=0x5143).items() if not key.startswith("pci")
}
WINDOWS: Table = {
    key: value
    for key, value in radv("a", 7, device_luid="a1d3000000000000", driver_id=5).items()
    if not key.startswith("pci")
}
DOZEN: Table = nvidia("b", 2, name="Microsoft Direct3D12 (NVIDIA GeForce RTX 2080 SUPER)", driver_id=23)


def order(*rows: Table) -> list[int]:
    return [device.index for device in in_order(read_vulkan({"devices": list(rows)}))]


class TestOrder:
    def test_discrete_integrated_virtual_software(self) -> None:
        assert order(LAVAPIPE, VIRTUAL, INTEGRATED, nvidia("a", 1)) == [3, 2, 1, 0]

    def test_larger_first_and_equals_as_listed(self) -> None:
        assert order(nvidia("a", 1), nvidia("b", 2), radv("c", 3)) == [2, 0, 1]

    def test_a_card_that_two_drivers_show_is_one(self) -> None:
        assert order(radv("c", 3), amdvlk("d", 3), radv("e", 4)) == [0, 2]

    def test_what_one_driver_lists_is_never_one(self) -> None:
        assert order(MOBILE, MOBILE) == [0, 1]

    def test_software_is_never_taken_for_one_another(self) -> None:
        assert order(LAVAPIPE, LAVAPIPE) == [0, 1]


class TestIdentity:
    @pytest.mark.parametrize(
        "row", [nvidia("a", 1), radv("b", 3), INTEGRATED, VIRTUAL, MOBILE, WINDOWS, DOZEN, LAVAPIPE]
    )
    def test_is_what_looking_gives(self, row: Table, tmp_path: Path) -> None:
        """Or discovery would list the device that it has sighted, and the one that was opened."""
        tables = tmp_path / "tables"
        tables.mkdir()
        rows = [nvidia("9", 0x1F), row]
        (tables / "vulkan.json").write_text(json.dumps({"devices": rows}))
        line = sight("vulkan", environ={}, root=tmp_path, tables=tables)
        assert line is not None
        device = read_vulkan({"devices": rows}).devices[1]
        record = record_of(device, 1, threads_per_block=None, unfit=None)
        sighted = next(one for one in line.devices if one.stable_id == record.stable_id)
        same = ("identity", "name", "vendor", "kind", "backend_name", "memory_bytes", "driver_version")
        assert {field: getattr(record, field) for field in same} == {field: getattr(sighted, field) for field in same}

    def test_of_nvidia_is_its_uuid(self) -> None:
        (device,) = read_vulkan({"devices": [nvidia("a", 1)]}).devices
        assert vulkan_identity(device).key == "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"


class TestRecord:
    def test_hardware(self) -> None:
        (device,) = read_vulkan({"devices": [nvidia("a", 1)]}).devices
        record = record_of(device, 0, threads_per_block=1024, unfit=None)
        assert record.kind is DeviceKind.GPU
        assert (record.support_level, record.usable, record.unified_memory) == ("partial", True, False)
        assert (record.memory_available, record.memory_usable_bytes) == (7400 * MIB, 7400 * MIB)
        assert (record.memory_usable_source, record.memory_pool_id) == ("driver", None)

    def test_free_memory_that_is_not_told_is_not_made_up(self) -> None:
        (device,) = read_vulkan({"devices": [radv("b", 3)]}).devices
        record = record_of(device, 0, threads_per_block=None, unfit=None)
        assert (record.memory_bytes, record.memory_available) == (24 * GIB, None)
        assert (record.memory_usable_bytes, record.memory_usable_source) == (None, None)

    def test_integrated_works_in_the_hosts_memory(self) -> None:
        (device,) = read_vulkan({"devices": [INTEGRATED]}).devices
        record = record_of(device, 0, threads_per_block=None, unfit=None)
        assert record.unified_memory
        assert (record.memory_pool_id or "").startswith("host:")
        assert 0 < (record.memory_usable_bytes or 0) <= 24 * GIB

    def test_unfit_is_listed_and_not_usable(self) -> None:
        (device,) = read_vulkan({"devices": [radv("b", 3)]}).devices
        record = record_of(device, 0, threads_per_block=None, unfit="unsupported_device: no queue of it can copy")
        assert (record.usable, record.state_reason) == (False, "unsupported_device: no queue of it can copy")


class TestMask:
    def seen(self, environ: dict[str, str], *rows: Table) -> list[bool]:
        inventory = read_vulkan({"devices": list(rows)})
        ordered = in_order(inventory)
        records = [record_of(one, n, threads_per_block=None, unfit=None) for n, one in enumerate(ordered)]
        return [record.usable for record in masked(records, ordered, inventory, environ)]

    def test_counts_as_the_loader_does(self) -> None:
        rows = (INTEGRATED, nvidia("a", 1), radv("c", 3))  # in order: 2, 1, 0
        assert self.seen({"GGML_VK_VISIBLE_DEVICES": "1"}, *rows) == [False, True, False]
        assert self.seen({"GGML_VK_VISIBLE_DEVICES": "2,0"}, *rows) == [True, False, True]
        assert self.seen({}, *rows) == [True, True, True]

    def test_counts_what_two_drivers_show_twice(self) -> None:
        rows = (nvidia("a", 1), radv("c", 3), amdvlk("d", 3))
        assert self.seen({"GGML_VK_VISIBLE_DEVICES": "0,2"}, *rows) == [False, True]

    def test_a_vendors_variable_holds_by_name_alone(self) -> None:
        rows = (nvidia("a", 1), nvidia("b", 2), radv("c", 3))
        by_name = {"CUDA_VISIBLE_DEVICES": "GPU-bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb"}
        assert self.seen(by_name, *rows) == [True, False, True]
        assert self.seen({"CUDA_VISIBLE_DEVICES": "1"}, *rows) == [True, True, True]  # CUDA's order, not Vulkan's
        assert self.seen({"CUDA_VISIBLE_DEVICES": "-1"}, *rows) == [True, False, False]


class TestMemoryTypes:
    # As NVIDIA, RADV on an APU, and lavapipe show them: flags and heap.
    NVIDIA = (MemoryType(0, 0, 1), MemoryType(1, 1, 0), MemoryType(2, 6, 1), MemoryType(3, 14, 1), MemoryType(4, 7, 2))
    APU = (MemoryType(0, 1, 1), MemoryType(1, 6, 0), MemoryType(2, 7, 1), MemoryType(3, 14, 0), MemoryType(4, 0xC7, 1))

    def test_a_cards_own_memory_before_its_window(self) -> None:
        assert [one.number for one in choose(self.NVIDIA, needed=1, unwanted=2)] == [1, 4]

    def test_staging_that_the_host_reads_quickly(self) -> None:
        assert [one.number for one in choose(self.NVIDIA, needed=6, wanted=8, unwanted=1)] == [3, 2, 4]

    def test_types_with_strange_flags_are_left_alone(self) -> None:
        assert [one.number for one in choose(self.APU, needed=MAPPED, wanted=8)] == [2]


class TestBudget:
    def test_heaps_are_counted_apart(self) -> None:
        budget = MemoryBudget("vulkan:3", [100, 50], lambda: None, most=3)
        budget.take(0, 60)
        with pytest.raises(MemoryError, match="41 bytes asked for on vulkan:3, 40 of 100 left"):
            budget.take(0, 41)
        budget.take(1, 50)
        budget.take(0, 40)
        with pytest.raises(MemoryError, match="3 allocations"):
            budget.take(0, 0)
        budget.give_back(0, 60)
        with pytest.raises(MemoryError, match="0 of 50 left"):
            budget.take(1, 1)
        budget.take(0, 60)

    def test_integrated_gets_no_more_than_the_host_has(self) -> None:
        budget = MemoryBudget("vulkan:0", [1 << 50], lambda: None, most=9, integrated=True)
        with pytest.raises(MemoryError):
            budget.take(0, 1 << 49)
        budget.take(0, MIB)


class TestRefusals:
    def refused(self, platform: str = "linux") -> BackendUnavailable:
        with pytest.raises(BackendUnavailable) as caught:
            VulkanDriver(platform=platform).open()
        assert caught.value.backend == "vulkan"
        return caught.value

    def test_package_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vulkan", None)
        error = self.refused()
        assert error.reason is ReasonCode.NO_LIBRARY
        assert error.install_hint == "pip install 'gpurt[vulkan]'  # vulkan"
        assert "vulkan is not installed" in error.message

    @pytest.mark.parametrize("platform", ["linux", "win32", "darwin"])
    def test_loader_missing(self, platform: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "vulkan.py").write_text("raise OSError('Cannot find Vulkan SDK version')\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "vulkan", raising=False)
        error = self.refused(platform)
        assert error.reason is ReasonCode.NO_LIBRARY
        assert "Vulkan loader is not installed" in error.message
        assert error.install_hint == LOADER_HINTS[platform]
        assert "pip install" not in (error.install_hint or "")

    @pytest.mark.parametrize("has_function", [True, False])
    def test_loader_too_old(self, has_function: bool) -> None:
        package = types.SimpleNamespace(vkCreateInstance=None)
        if has_function:
            package.vkEnumerateInstanceVersion = lambda: 1 << 22
        with pytest.raises(BackendUnavailable, match=r"version 1\.0; 1\.1 is needed") as caught:
            load_library(package, "linux")
        assert caught.value.reason is ReasonCode.DRIVER_MISMATCH

    def test_another_package_of_that_name(self) -> None:
        with pytest.raises(BackendUnavailable, match="is not the package") as caught:
            load_library(types.SimpleNamespace(), "linux")
        assert caught.value.reason is ReasonCode.NO_LIBRARY

    @pytest.mark.parametrize("reason", [ReasonCode.NO_DRIVER, ReasonCode.NO_DEVICE])
    def test_nodes_that_may_not_be_opened(self, reason: ReasonCode, tmp_path: Path) -> None:
        node = tmp_path / "dev/dri/renderD128"
        node.parent.mkdir(parents=True)
        node.touch(mode=0o660)
        nothing = Absence(reason, "the Vulkan drivers show no device")
        error = refusal(nothing, platform="linux", root=tmp_path, may=lambda path: False)
        assert error.reason is ReasonCode.NO_PERMISSION
        assert "/dev/dri/renderD128" in error.message
        assert "render" in (error.hint or "")
        assert refusal(nothing, platform="linux", root=tmp_path, may=lambda path: True).reason is reason
        assert closed_nodes(tmp_path / "nothing") == []

    def test_anything_else_is_as_it_was_told(self, tmp_path: Path) -> None:
        error = refusal(Absence(ReasonCode.ERROR, "Vulkan does not start: Odd"), platform="linux", root=tmp_path)
        assert (error.reason, error.message) == (ReasonCode.ERROR, "Vulkan does not start: Odd")


class TestErrors:
    @staticmethod
    def raised(name: str, *arguments: Any) -> Exception:
        return type(name, (Exception,), {})(*arguments)

    def test_get_a_text_and_keep_their_type(self) -> None:
        empty = self.raised("VkErrorOutOfDeviceMemory")
        with pytest.raises(type(empty)) as caught, telling("allocating 5 bytes on vulkan:0"):
            raise empty
        assert caught.value is empty
        assert str(empty) == (
            "allocating 5 bytes on vulkan:0: the device has not enough memory left (VkErrorOutOfDeviceMemory)"
        )
        for other in (self.raised("VkErrorUnknown", "said"), ValueError()):
            text = str(other)
            with pytest.raises(type(other)), telling("copying"):
                raise other
            assert str(other) == text

    def test_meanings(self) -> None:
        for name in ("VkErrorOutOfDeviceMemory", "VkErrorOutOfHostMemory", "VkErrorTooManyObjects"):
            assert kind_of(self.raised(name)) is OutOfMemory
        assert kind_of(self.raised("VkErrorDeviceLost")) is DeviceLost
        assert kind_of(self.raised("VkErrorFormatNotSupported")) is None
        assert VulkanDriver().classify(MemoryError()) is OutOfMemory
