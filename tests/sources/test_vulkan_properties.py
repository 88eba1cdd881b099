"""Vulkan's devices from recorded tables, and from the package itself where it is installed. Names of tests carry the
case that they stand for."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from gpurt.errors import ReasonCode
from gpurt.sources.vulkan_properties import VulkanDevice, VulkanHeap, read_vulkan
from gpurt.sources.vulkan_query import query_vulkan
from gpurt.types import DeviceKind

GIB, MIB = 1 << 30, 1 << 20
Table = dict[str, Any]


def heap(size: int, local: bool, budget: int | None = None, usage: int | None = None) -> Table:
    return {"size_bytes": size, "device_local": local, "budget_bytes": budget, "usage_bytes": usage}


# As the package reports Debian 12's Mesa.
LAVAPIPE: Table = {
    "name": "llvmpipe (LLVM 15.0.6, 256 bits)", "vendor_id": 65541, "device_id": 0, "device_type": 4,
    "api_version": 4206822, "driver_version_code": 1, "device_uuid": "6d65736132322e332e36000000000000",
    "driver_uuid": "6c6c766d706970655555494400000000", "device_luid": None, "max_allocation_bytes": 2147483648,
    "driver_id": 13, "driver_name": "llvmpipe", "driver_info": "Mesa 22.3.6 (LLVM 15.0.6)",
    "heaps": [heap(2147483648, True)],
}  # fmt: skip


def nvidia(digit: str, bus: int, **more: Any) -> Table:
    """An RTX 2080 SUPER of 8192 MiB without resizable BAR: its third heap is a window to the first."""
    return {
        "name": "NVIDIA GeForce RTX 2080 SUPER", "vendor_id": 0x10DE, "device_id": 0x1E81, "device_type": 2,
        "api_version": 4206847, "driver_version_code": 591 << 22 | 86 << 14, "driver_id": 4, "driver_name": "NVIDIA",
        "driver_info": "591.86", "device_uuid": digit * 32, "driver_uuid": "d" * 32,
        "device_luid": "a1d3000000000000", "max_allocation_bytes": 4292870144,
        "pci_domain": 0, "pci_bus": bus, "pci_device": 0, "pci_function": 0,
        "heaps": [
            heap(7987 * MIB, True, 7500 * MIB, 100 * MIB), heap(15 * GIB, False, 14 * GIB, 0),
            heap(214 * MIB, True, 200 * MIB, 0),
        ],
    } | more  # fmt: skip


def radv(digit: str, bus: int, **more: Any) -> Table:
    return {
        "name": "AMD Radeon RX 7900 XTX (RADV NAVI31)", "vendor_id": 0x1002, "device_id": 0x744C, "device_type": 2,
        "api_version": 4206867, "driver_version_code": 100663299, "driver_id": 3, "driver_name": "radv",
        "driver_info": "Mesa 24.0.3", "device_uuid": digit * 32, "pci_domain": 0, "pci_bus": bus, "pci_device": 0,
        "pci_function": 0, "heaps": [heap(24 * GIB - 256 * MIB, True), heap(256 * MIB, True), heap(15 * GIB, False)],
    } | more  # fmt: skip


def amdvlk(digit: str, bus: int, **more: Any) -> Table:
    names = {"driver_id": 2, "driver_name": "AMD open-source driver", "driver_info": "2023.Q4.3"}
    return radv(digit, bus) | names | {"name": "AMD Radeon RX 7900 XTX"} | more


def devices(*rows: Table) -> tuple[VulkanDevice, ...]:
    inventory = read_vulkan({"devices": list(rows)})
    assert inventory.skipped == ()
    return inventory.devices


class TestTable:
    def test_everything_that_is_told(self) -> None:
        (found,) = devices(nvidia("a", 0x0C))
        assert found == VulkanDevice(
            0, "NVIDIA GeForce RTX 2080 SUPER", DeviceKind.GPU, False, 0x10DE, 0x1E81, "1.3.255", "591.86", 4,
            "NVIDIA", "dddddddd-dddd-dddd-dddd-dddddddddddd", "aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa",
            "000000000000d3a1", "00000000:0c:00.0",
            (
                VulkanHeap(7987 * MIB, True, 7500 * MIB, 100 * MIB),
                VulkanHeap(15 * GIB, False, 14 * GIB, 0),
                VulkanHeap(214 * MIB, True, 200 * MIB, 0),
            ),
            4292870144, 7987 * MIB, 7400 * MIB, {},
        )  # fmt: skip
        assert found.vendor_uuid == "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"

    def test_window_to_a_cards_memory_is_not_more_memory(self) -> None:
        assert devices(nvidia("a", 1))[0].memory_total_bytes == 7987 * MIB
        assert devices(radv("b", 3))[0].memory_total_bytes == 24 * GIB  # AMD's two heaps are two parts

    def test_without_budgets_free_memory_is_not_told(self) -> None:
        (found,) = devices(radv("b", 3))
        assert (found.memory_free_bytes, found.unavailable["memory_free_bytes"]) == (None, "unsupported")
        assert found.vendor_uuid is None  # made from the place on the bus

    def test_zeros_where_a_budget_should_be_are_no_budget(self) -> None:
        (found,) = devices(nvidia("a", 1, heaps=[heap(8 * GIB, True, 0, 0)]))
        assert (found.memory_free_bytes, found.unavailable["memory_free_bytes"]) == (None, "invalid")

    def test_one_broken_heap_is_not_a_smaller_card(self) -> None:
        inventory = read_vulkan({"devices": [radv("b", 3, heaps=[heap(24 * GIB, True), {"size_bytes": "much"}])]})
        (found,) = inventory.devices
        assert (found.memory_total_bytes, found.heaps) == (None, ())
        assert found.unavailable["memory_total_bytes"] == "invalid"
        assert inventory.skipped[0].where == "devices[0].heaps[1]"

    @pytest.mark.parametrize(
        ("row", "version"),
        [
            (nvidia("a", 1, driver_info=None, driver_version_code=590 << 22 | 48 << 14 | 1 << 6), "590.48.01"),
            (nvidia("a", 1, driver_version_code=None), "591.86"),
            (radv("b", 3), "24.0.3"),
            (radv("b", 3, driver_id=5, driver_version_code=101 << 14 | 5972), "101.5972"),
        ],
    )
    def test_driver_versions_as_their_vendors_write_them(self, row: Table, version: str) -> None:
        (found,) = devices(row)
        assert found.driver_version == version
        assert "driver_version" not in found.unavailable

    def test_virtual_and_integrated(self) -> None:
        virtual, inside, other = devices(
            nvidia("a", 1, device_type=3), radv("b", 3, device_type=1), radv("c", 4, device_type=0)
        )
        assert (virtual.kind, virtual.virtual) == (DeviceKind.GPU, True)
        assert (inside.kind, inside.unified_memory) == (DeviceKind.INTEGRATED_GPU, True)
        assert other.kind is DeviceKind.UNKNOWN
        ranked = read_vulkan({"devices": [nvidia("a", 1, device_type=3), radv("b", 3, device_type=1)]}).ranked()
        assert [device.kind for device in ranked] == [DeviceKind.INTEGRATED_GPU, DeviceKind.GPU]

    def test_name_behind_a_translation_layer(self) -> None:
        (dozen,) = devices(nvidia("a", 1, driver_id=23, name="Microsoft Direct3D12 (NVIDIA GeForce RTX 4090)"))
        assert dozen.inner_name == "NVIDIA GeForce RTX 4090"
        assert devices(nvidia("a", 1))[0].inner_name is None

    @pytest.mark.parametrize(
        ("broken", "field", "reason"),
        [
            ({"device_uuid": "0" * 32}, "device_uuid", "unsupported"),
            ({"device_uuid": "abcd"}, "device_uuid", "invalid"),
            ({"device_uuid": b"bytes"}, "device_uuid", "invalid"),
            ({"device_id": 2**32}, "device_id", "invalid"),
            ({"pci_device": 32}, "pci_address", "invalid"),
            ({"pci_bus": None}, "pci_address", "unsupported"),
            ({"max_allocation_bytes": 0}, "max_allocation_bytes", "invalid"),
            ({"name": None, "errors": {"name": "error"}}, "name", "error"),
            ({"name": None, "errors": {"name": ["x"]}}, "name", "error"),
        ],
    )
    def test_one_broken_value_costs_one_field(self, broken: Table, field: str, reason: str) -> None:
        (found,) = devices(nvidia("a", 1, **broken))
        assert getattr(found, field) is None
        assert found.unavailable == {field: reason}

    @pytest.mark.parametrize("broken", [None, [], "vulkan", {}, {"devices": 5}, {"devices": [5, None]}])
    def test_what_is_no_table_is_said(self, broken: object) -> None:
        inventory = read_vulkan(broken)
        assert inventory.devices == ()
        assert inventory.skipped


class TestChoice:
    def test_vk1_software_is_not_taken(self) -> None:
        alone = read_vulkan({"devices": [LAVAPIPE]})
        assert alone.devices[0].kind is DeviceKind.SOFTWARE
        assert alone.ranked() == ()

    def test_vk1_software_before_a_card(self) -> None:
        inventory = read_vulkan({"devices": [LAVAPIPE, radv("b", 3)]})
        assert [device.index for device in inventory.ranked()] == [1]
        assert [device.selectable for device in inventory.devices] == [False, True]

    @pytest.mark.parametrize(
        "row",
        [
            {"name": "llvmpipe (LLVM 17.0.6, 256 bits)", "device_type": 4},
            {"name": "llvmpipe (LLVM 17.0.6, 256 bits)", "device_type": 0},
            {"name": "SwiftShader Device (LLVM 10.0.0)", "device_type": 2},
            {"name": "GPU", "device_type": 2, "driver_id": 10},
            {"name": "Microsoft Direct3D12 (Microsoft Basic Render Driver)", "device_type": 2, "driver_id": 23},
        ],
    )
    def test_vk1_software_by_any_sign(self, row: Table) -> None:
        assert devices(row)[0].kind is DeviceKind.SOFTWARE

    def test_vk2_two_drivers_of_one_card_and_a_second_card(self) -> None:
        """Same UUID under different drivers is one device; the same device id proves nothing."""
        first, again, second = devices(radv("a", 3), amdvlk("a", 3), radv("b", 4))
        assert first.device_uuid == again.device_uuid != second.device_uuid
        assert first.device_id == again.device_id == second.device_id
        assert first.driver_id != again.driver_id
        assert [d.unavailable.get("device_uuid") for d in (first, again, second)] == [None, None, None]

    def test_vk3_equal_places_on_the_bus_are_not_used(self) -> None:
        found = devices(*(nvidia(digit, 1) for digit in "abce"))
        assert [device.pci_address for device in found] == [None] * 4
        assert {device.unavailable["pci_address"] for device in found} == {"ambiguous"}
        assert len({device.device_uuid for device in found}) == 4

    def test_vk3_equal_uuids_are_not_used(self) -> None:
        """Four cards that share two UUIDs (llama.cpp #19026)."""
        found = devices(nvidia("a", 1), nvidia("a", 2), nvidia("b", 3), nvidia("b", 4))
        assert [device.device_uuid for device in found] == [None] * 4
        assert len({device.pci_address for device in found}) == 4

    def test_vk3_records_that_nothing_tells_apart_keep_what_they_have(self) -> None:
        found = devices(nvidia("a", 1), nvidia("a", 1))
        assert [device.unavailable for device in found] == [{}, {}]

    def test_vk4_identifiers_as_other_sources_write_them(self) -> None:
        (found,) = devices(nvidia("a", 0x01, pci_domain=0xF))
        assert found.pci_address == "0000000f:01:00.0"
        assert found.vendor_uuid == "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"

    def test_vk5_ranked_without_opening_anything(self) -> None:
        big = radv("b", 3)
        inside = radv("c", 4, device_type=1, heaps=[heap(64 * GIB, True)])
        inventory = read_vulkan({"devices": [LAVAPIPE, inside, nvidia("a", 1), big]})
        assert [device.index for device in inventory.ranked()] == [3, 2, 1]


class TestQuery:
    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (ModuleNotFoundError("No module named 'vulkan'", name="vulkan"), ReasonCode.NO_LIBRARY),
            (OSError("Cannot find Vulkan SDK version"), ReasonCode.NO_LIBRARY),
            (ImportError("libffi.so.7: cannot open shared object file"), ReasonCode.ERROR),
            (RuntimeError("broken"), ReasonCode.ERROR),
            (AttributeError("module has no attribute"), ReasonCode.ERROR),
        ],
    )
    def test_hng4_package_that_does_not_load(
        self, error: Exception, reason: ReasonCode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Finder:
            def find_spec(self, name: str, path: object = None, target: object = None) -> None:
                if name == "vulkan":
                    raise error

        monkeypatch.delitem(sys.modules, "vulkan", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        absence = read_vulkan(query_vulkan()).absence
        assert absence is not None
        assert absence.reason is reason
        assert "Traceback" not in absence.message

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("VkErrorIncompatibleDriver", ReasonCode.NO_DRIVER),
            ("VkErrorInitializationFailed", ReasonCode.NO_DRIVER),
            ("VkErrorOutOfHostMemory", ReasonCode.ERROR),
        ],
    )
    def test_no_instance(self, name: str, reason: ReasonCode) -> None:
        def fails(*args: Any) -> None:
            raise type(name, (Exception,), {})  # the package's errors have no text

        vk = types.SimpleNamespace(
            vkEnumerateInstanceExtensionProperties=lambda layer: iter(()),
            VkApplicationInfo=dict, VkInstanceCreateInfo=dict, vkCreateInstance=fails,
        )  # fmt: skip
        absence = read_vulkan(query_vulkan(vk)).absence
        assert absence is not None
        assert absence.reason is reason
        assert len(absence.message) > 10

    def test_call_that_fails_costs_its_own_fields(self) -> None:
        def fails(*args: Any) -> None:
            raise RuntimeError("VkErrorDeviceLost")

        properties = types.SimpleNamespace(
            deviceName="Adreno", vendorID=0x5143, deviceID=1, deviceType=1, apiVersion=1 << 22, driverVersion=1
        )
        destroyed: list[Any] = []
        vk = types.SimpleNamespace(
            vkEnumerateInstanceExtensionProperties=lambda layer: iter(()),
            VkApplicationInfo=dict, VkInstanceCreateInfo=dict, vkCreateInstance=lambda *args: "instance",
            vkEnumeratePhysicalDevices=lambda instance: ["one", "two"],
            vkGetPhysicalDeviceProperties=lambda d: properties if d == "one" else fails(),
            vkEnumerateDeviceExtensionProperties=lambda d, layer: iter(()),
            vkGetPhysicalDeviceMemoryProperties=fails,
            vkDestroyInstance=lambda instance, _: destroyed.append(instance),
        )  # fmt: skip
        one, two = read_vulkan(query_vulkan(vk)).devices
        assert (one.name, one.kind) == ("Adreno", DeviceKind.INTEGRATED_GPU)
        assert one.unavailable["device_uuid"] == "unsupported"  # a device of Vulkan 1.0
        assert one.unavailable["memory_total_bytes"] == "error"
        assert (two.name, two.unavailable["name"], two.unavailable["device_uuid"]) == (None, "error", "error")
        assert destroyed == ["instance"]

    def test_lavapipe_itself(self) -> None:
        """On a software device: needs the package ``vulkan`` and a software driver."""
        table = query_vulkan()
        if "error" in table:
            pytest.skip(table["error"]["message"])
        software = [d for d in read_vulkan(table).devices if d.kind is DeviceKind.SOFTWARE]
        if not software:
            pytest.skip("no software driver is installed")
        assert software[0].memory_total_bytes
        assert not software[0].selectable
        assert software[0].device_uuid
