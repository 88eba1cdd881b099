"""Vulkan's devices from a table of their properties. Pure; needs neither the ``vulkan`` package nor a driver.

The table, made by :func:`gpurt.sources.vulkan_query.query_vulkan` or by hand, is ``{"devices": [{...}, ...]}`` in the
order of vkEnumeratePhysicalDevices. Keys of a device: ``name vendor_id device_id device_type api_version
driver_version_code driver_id driver_name driver_info device_uuid driver_uuid device_luid pci_domain pci_bus pci_device
pci_function max_allocation_bytes heaps``; a heap has ``size_bytes device_local budget_bytes usage_bytes``. Identifiers
of bytes are hexadecimal text.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpurt.identity import normalize_uuid
from gpurt.sources.ranking import NEVER_BY_ITSELF, rank
from gpurt.sources.sysfs import Skipped
from gpurt.sources.table import Absence, Row, absence_of, as_mapping, repeated, rows
from gpurt.types import DeviceKind

_MOST_BYTES: Final = 2**50
_UINT32: Final = 2**32 - 1
_NVIDIA: Final = 0x10DE

# VkPhysicalDeviceType of vulkan_core.h.
_KINDS: Final[Mapping[int, DeviceKind]] = {
    0: DeviceKind.UNKNOWN,
    1: DeviceKind.INTEGRATED_GPU,
    2: DeviceKind.GPU,
    3: DeviceKind.GPU,
    4: DeviceKind.SOFTWARE,
}
_VIRTUAL: Final = 3

# VkDriverId of vulkan_core.h.
_NVIDIA_PROPRIETARY, _INTEL_WINDOWS, _DOZEN = 4, 5, 23
_SOFTWARE_DRIVERS: Final = frozenset({10, 13})  # SwiftShader, llvmpipe
_SOFTWARE_NAMES: Final = ("llvmpipe", "lavapipe", "softpipe", "swiftshader", "microsoft basic render driver")

_DOZEN_PREFIX: Final = "Microsoft Direct3D12 ("


@dataclass(frozen=True, slots=True)
class VulkanHeap:
    """One heap. Bytes."""

    size_bytes: int
    device_local: bool
    budget_bytes: int | None
    """What the process that asked may use of it, at that moment, what it uses already included."""
    usage_bytes: int | None
    """What the process that asked uses of it."""


@dataclass(frozen=True, slots=True)
class VulkanDevice:
    """One device as one driver shows it. Bytes; None is "not told", and ``unavailable`` says why."""

    index: int
    """Place in the enumeration, which environment and drivers may change."""
    name: str | None
    kind: DeviceKind
    virtual: bool
    """Part of a GPU, or a GPU behind a virtual machine's border."""
    vendor_id: int | None
    device_id: int | None
    """Of the model: two cards of one model have the same."""
    api_version: str | None
    driver_version: str | None
    """As this vendor writes it."""
    driver_id: int | None
    """Which implementation: the same GPU may show under several."""
    driver_name: str | None
    driver_uuid: str | None
    device_uuid: str | None
    """``8-4-4-4-12`` hexadecimal digits. Of NVIDIA the UUID of the card; others derive it from the place on the bus,
    or, in software, from their own version."""
    luid: str | None
    """Windows' name of the adapter until the next boot: 16 hexadecimal digits, high part first."""
    pci_address: str | None
    heaps: tuple[VulkanHeap, ...]
    max_allocation_bytes: int | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    """Of the process that asked: budget less usage."""
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def selectable(self) -> bool:
        """Whether it may be taken without being asked for."""
        return self.kind not in NEVER_BY_ITSELF

    @property
    def unified_memory(self) -> bool:
        """Allocations come out of the host's memory."""
        return self.kind in (DeviceKind.INTEGRATED_GPU, DeviceKind.SOFTWARE)

    @property
    def vendor_uuid(self) -> str | None:
        """The UUID as the vendor's own library prints it, where it is one of the card: NVIDIA's ``GPU-…``."""
        return normalize_uuid(self.device_uuid) if self.vendor_id == _NVIDIA else None

    @property
    def inner_name(self) -> str | None:
        """Name of the GPU behind a translation layer (Dozen, which is Vulkan over Direct3D); None for a driver."""
        name = self.name or ""
        if name.startswith(_DOZEN_PREFIX) and name.endswith(")"):
            return name[len(_DOZEN_PREFIX) : -1]
        return name if self.driver_id == _DOZEN and name else None


@dataclass(frozen=True, slots=True)
class VulkanInventory:
    """Every device of every driver, software included, and what could not be read."""

    devices: tuple[VulkanDevice, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    absence: Absence | None = None
    """Why Vulkan could not be asked."""

    def ranked(self) -> tuple[VulkanDevice, ...]:
        """Devices that may be taken without being asked for, the best first. Nothing has been opened for it."""
        chosen = [device for device in self.devices if device.selectable]
        return tuple(
            sorted(chosen, key=lambda d: (*rank(d.kind, virtual=d.virtual, memory_bytes=d.memory_total_bytes), d.index))
        )


def read_vulkan(table: object) -> VulkanInventory:
    """Devices of a recorded table. Whatever cannot be understood costs its own field, or is in ``skipped``.

    Within one driver every record is a device of its own. An identifier that several of them share does not tell them
    apart: it is left out of all of them, as ``ambiguous``, unless nothing else tells them apart either.
    """
    whole = as_mapping(table)
    if whole is None:
        return VulkanInventory(skipped=(Skipped("vulkan", f"not a table but {type(table).__name__}"),))
    absence = absence_of(whole)
    if absence is not None:
        return VulkanInventory(absence=absence)
    found, skipped = rows(whole.get("devices"), "devices")
    devices: list[VulkanDevice] = []
    for place, values in found:
        device, lost = _device(Row(values), place)
        devices.append(device)
        skipped.extend(lost)
    return VulkanInventory(tuple(_told_apart(devices)), tuple(skipped))


def _device(row: Row, index: int) -> tuple[VulkanDevice, list[Skipped]]:
    name, vendor = row.text("name"), row.integer("vendor_id", 0, _UINT32)
    kind_code, driver = row.integer("device_type", 0, _UINT32), row.integer("driver_id", 0, _UINT32)
    kind = DeviceKind.UNKNOWN if kind_code is None else _KINDS.get(kind_code, DeviceKind.UNKNOWN)
    if driver in _SOFTWARE_DRIVERS or any(word in (name or "").lower() for word in _SOFTWARE_NAMES):
        kind = DeviceKind.SOFTWARE
    found, lost = _heaps(row, index)
    api = row.integer("api_version", 0, _UINT32)
    info = row.text("driver_info")
    code = row.integer("driver_version", 0, _UINT32, key="driver_version_code")
    version = _driver_version(code, vendor, driver, info)
    row.unavailable.pop("driver_info", None)
    if version is not None:
        row.unavailable.pop("driver_version", None)
    total, free = _memory(row, found, nvidia=vendor == _NVIDIA)
    device = VulkanDevice(
        index=index,
        name=name,
        kind=kind,
        virtual=kind_code == _VIRTUAL,
        vendor_id=vendor,
        device_id=row.integer("device_id", 0, _UINT32),
        api_version=None if api is None else f"{api >> 22 & 0x7F}.{api >> 12 & 0x3FF}.{api & 0xFFF}",
        driver_version=version,
        driver_id=driver,
        driver_name=row.text("driver_name"),
        driver_uuid=_uuid(row, "driver_uuid"),
        device_uuid=_uuid(row, "device_uuid"),
        luid=_luid(row),
        pci_address=_pci_address(row),
        heaps=found or (),
        max_allocation_bytes=row.integer("max_allocation_bytes", 1, 2**64 - 1),
        memory_total_bytes=total,
        memory_free_bytes=free,
        unavailable=row.unavailable,
    )
    return device, lost


def _driver_version(code: int | None, vendor: int | None, driver: int | None, info: str | None) -> str | None:
    if driver == _NVIDIA_PROPRIETARY and info:
        return info  # as NVML writes it, "590.48.01"; the number has lost the leading zeros
    if code is None:
        return None
    if driver == _INTEL_WINDOWS:
        return f"{code >> 14}.{code & 0x3FFF}"
    if vendor == _NVIDIA and driver in (None, _NVIDIA_PROPRIETARY):
        return f"{code >> 22}.{code >> 14 & 0xFF:02}.{code >> 6 & 0xFF:02}"
    return f"{code >> 22}.{code >> 12 & 0x3FF}.{code & 0xFFF}"


def _heaps(row: Row, index: int) -> tuple[tuple[VulkanHeap, ...] | None, list[Skipped]]:
    """All heaps, or None where one of them is not told: without it the device would look smaller."""
    where = f"devices[{index}].heaps"
    value = row.raw("heaps")
    if value is None:
        return None, []
    found, skipped = rows(value, where)
    heaps: list[VulkanHeap] = []
    for place, values in found:
        heap = Row(values)
        size, local = heap.integer("size_bytes", 1, _MOST_BYTES), heap.flag("device_local")
        if size is None or local is None:
            skipped.append(Skipped(f"{where}[{place}]", f"no heap: {', '.join(heap.unavailable)} not told"))
            continue
        # The extension promises more than 0. What is above the heap's size has been seen, and promises nothing.
        budget = heap.integer("budget_bytes", 1, size)
        usage = heap.integer("usage_bytes", 0, _MOST_BYTES)
        for field_name in ("budget_bytes", "usage_bytes"):
            reason = heap.unavailable.get(field_name)
            if reason and local:
                row.missing("memory_free_bytes", reason)
        heaps.append(VulkanHeap(size, local, budget, usage))
    if skipped:
        row.missing("heaps", "invalid")
        return None, skipped
    return tuple(heaps), []


def _memory(row: Row, heaps: Sequence[VulkanHeap] | None, *, nvidia: bool) -> tuple[int | None, int | None]:
    """Total and free bytes of the device's own memory."""
    local = [heap for heap in heaps or () if heap.device_local]
    if not local:
        reason = row.unavailable.get("heaps", "unsupported")
        row.missing("memory_total_bytes", reason)
        row.missing("memory_free_bytes", reason)
        return None, None
    if nvidia:
        # NVIDIA's second heap of this kind is the window through which the host sees the first. AMD's are two parts.
        local = [max(local, key=lambda heap: heap.size_bytes)]
    total = sum(heap.size_bytes for heap in local)
    free = 0
    for heap in local:
        if heap.budget_bytes is None or heap.usage_bytes is None:
            row.unavailable.setdefault("memory_free_bytes", "unsupported")
            return total, None
        free += max(0, heap.budget_bytes - heap.usage_bytes)
    row.unavailable.pop("memory_free_bytes", None)
    return total, free


def _uuid(row: Row, name: str) -> str | None:
    octets = row.octets(name, 16)
    if octets is not None and not any(octets):
        return row.missing(name, "unsupported")  # how drivers say "none"
    return None if octets is None else str(uuid.UUID(bytes=octets))


def _luid(row: Row) -> str | None:
    octets = row.octets("luid", 8, key="device_luid")
    if octets is not None and not any(octets):
        return row.missing("luid", "unsupported")
    # A LUID in memory begins with the low part, least significant byte first.
    return None if octets is None else octets[::-1].hex()


_PCI: Final = (("pci_domain", 2**32 - 1), ("pci_bus", 255), ("pci_device", 31), ("pci_function", 7))


def _pci_address(row: Row) -> str | None:
    parts = [row.integer(name, 0, most) for name, most in _PCI]
    reasons = [row.unavailable.pop(name, None) for name, _ in _PCI]
    if None in parts:
        return row.missing("pci_address", next(reason for reason in reasons if reason))
    return "{:08x}:{:02x}:{:02x}.{:x}".format(*parts)


def _told_apart(devices: Sequence[VulkanDevice]) -> list[VulkanDevice]:
    """Without the identifiers that devices of one driver share, where others tell those devices apart."""
    result = list(devices)
    drivers = {_driver(device) for device in devices}
    for driver in drivers:
        places = [i for i, device in enumerate(devices) if _driver(device) == driver]
        uuids = repeated(devices[i].device_uuid for i in places)
        addresses = repeated(devices[i].pci_address for i in places)
        for i in places:
            one = devices[i]
            others = [devices[j] for j in places if j != i]
            if one.device_uuid in uuids and all(
                other.pci_address != one.pci_address for other in others if other.device_uuid == one.device_uuid
            ):
                result[i] = _without(result[i], "device_uuid")
            if one.pci_address in addresses and all(
                other.device_uuid != one.device_uuid for other in others if other.pci_address == one.pci_address
            ):
                result[i] = _without(result[i], "pci_address")
    return result


def _driver(device: VulkanDevice) -> tuple[int | None, str | None, str | None]:
    return device.driver_id, device.driver_name, device.driver_uuid


def _without(device: VulkanDevice, name: str) -> VulkanDevice:
    changes: dict[str, Any] = {name: None, "unavailable": {**device.unavailable, name: "ambiguous"}}
    return replace(device, **changes)
