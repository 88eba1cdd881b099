"""OpenCL's devices from a table of their properties. Pure; needs neither ``pyopencl`` nor a driver.

The table, made by :func:`gpurt.sources.opencl_query.query_opencl` or by hand, is ``{"platforms": [{"name": …, "vendor":
…, "version": …, "devices": [{...}, ...]}, ...]}``. Keys of a device: ``name vendor vendor_id version driver_version
type global_memory_bytes max_allocation_bytes compute_units clock_mhz unified_memory available pci_domain pci_bus
pci_device pci_function free_memory_kib``, and ``board_name`` of AMD, which calls devices by their architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpurt.sources.ranking import NEVER_BY_ITSELF, rank
from gpurt.sources.sysfs import Skipped
from gpurt.sources.table import Absence, Row, absence_of, as_mapping, rows
from gpurt.types import DeviceKind

_MOST_BYTES: Final = 2**50
_UINT32: Final = 2**32 - 1

# cl_device_type of cl.h.
_CPU, _GPU, _ACCELERATOR, _CUSTOM = 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class OpenClDevice:
    """One device as one platform shows it. Bytes, MHz; None is "not told", and ``unavailable`` says why."""

    platform_index: int
    index: int
    """Within its platform. Both change when a driver is installed."""
    platform: str | None
    name: str | None
    vendor: str | None
    vendor_id: int | None
    """Mostly of the PCI bus, but some platforms have numbers of their own."""
    version: str | None
    driver_version: str | None
    kind: DeviceKind
    """``SOFTWARE`` is the host's own processor under OpenCL."""
    available: bool | None
    """False: listed, and cannot be used now."""
    pci_address: str | None
    pci_domain_told: bool
    """False: the address is in domain 0 because nothing tells another."""
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    """Of AMD only: OpenCL itself does not tell."""
    max_allocation_bytes: int | None
    unified_memory: bool | None
    compute_units: int | None
    max_clock_mhz: int | None
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def selectable(self) -> bool:
        """Whether it may be taken without being asked for."""
        return self.kind not in NEVER_BY_ITSELF and self.available is not False


@dataclass(frozen=True, slots=True)
class OpenClInventory:
    """Every device of every platform, the host's processor included, and what could not be read."""

    devices: tuple[OpenClDevice, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    absence: Absence | None = None
    """Why OpenCL could not be asked."""

    def ranked(self) -> tuple[OpenClDevice, ...]:
        """Devices that may be taken without being asked for, the best first."""
        chosen = [device for device in self.devices if device.selectable]
        return tuple(
            sorted(
                chosen,
                key=lambda d: (*rank(d.kind, memory_bytes=d.memory_total_bytes), d.platform_index, d.index),
            )
        )


def read_opencl(table: object) -> OpenClInventory:
    """Devices of a recorded table. Whatever cannot be understood costs its own field, or is in ``skipped``."""
    whole = as_mapping(table)
    if whole is None:
        return OpenClInventory(skipped=(Skipped("opencl", f"not a table but {type(table).__name__}"),))
    absence = absence_of(whole)
    if absence is not None:
        return OpenClInventory(absence=absence)
    platforms, skipped = rows(whole.get("platforms"), "platforms")
    devices: list[OpenClDevice] = []
    for place, values in platforms:
        platform = Row(values)
        name = platform.text("name")
        found, lost = rows(values.get("devices"), f"platforms[{place}].devices")
        problem = platform.text("problem")
        if problem is not None:
            lost.append(Skipped(f"platforms[{place}]", f"{name or 'a platform without a name'}: {problem}"))
        skipped.extend(lost)
        why = platform.unavailable.get("name")
        devices.extend(_device(Row(row), place, index, name, why) for index, row in found)
    return OpenClInventory(tuple(devices), tuple(skipped))


def _device(row: Row, platform_index: int, index: int, platform: str | None, no_platform: str | None) -> OpenClDevice:
    if no_platform is not None:
        row.missing("platform", no_platform)
    board = row.text("board_name")
    row.unavailable.pop("board_name", None)
    name = row.text("name")
    if board is not None:
        row.unavailable.pop("name", None)
    kind = _kind(row.integer("type", 0, _UINT32))
    unified = row.flag("unified_memory")
    if kind is DeviceKind.GPU and unified:
        kind = DeviceKind.INTEGRATED_GPU
    address, domain_told = _pci_address(row)
    total = row.integer("memory_total_bytes", 1, _MOST_BYTES, key="global_memory_bytes")
    return OpenClDevice(
        platform_index=platform_index,
        index=index,
        platform=platform,
        name=board or name,
        vendor=row.text("vendor"),
        vendor_id=row.integer("vendor_id", 0, _UINT32),
        version=row.text("version"),
        driver_version=row.text("driver_version"),
        kind=kind,
        available=row.flag("available"),
        pci_address=address,
        pci_domain_told=domain_told,
        memory_total_bytes=total,
        memory_free_bytes=_free(row, total),
        max_allocation_bytes=row.integer("max_allocation_bytes", 1, _MOST_BYTES),
        unified_memory=unified,
        compute_units=row.integer("compute_units", 1, _UINT32),
        # 0 is how platforms say that they do not know.
        max_clock_mhz=row.integer("max_clock_mhz", 1, 100_000, key="clock_mhz"),
        unavailable=row.unavailable,
    )


def _kind(code: int | None) -> DeviceKind:
    if code is None:
        return DeviceKind.UNKNOWN
    if code & _GPU:
        return DeviceKind.GPU
    if code & _CPU:
        return DeviceKind.SOFTWARE
    return DeviceKind.ACCELERATOR if code & (_ACCELERATOR | _CUSTOM) else DeviceKind.UNKNOWN


def _free(row: Row, total: int | None) -> int | None:
    kib = row.integer("memory_free_bytes", 0, _MOST_BYTES >> 10, key="free_memory_kib")
    if kib is not None and total is not None and kib << 10 > total:
        return row.missing("memory_free_bytes", "invalid")
    return None if kib is None else kib << 10


_PCI: Final = (("pci_bus", 255), ("pci_device", 31), ("pci_function", 7))


def _pci_address(row: Row) -> tuple[str | None, bool]:
    domain = row.integer("pci_domain", 0, _UINT32)
    untold = row.unavailable.pop("pci_domain", None)
    parts = [row.integer(name, 0, most) for name, most in _PCI]
    reasons = [row.unavailable.pop(name, None) for name, _ in _PCI]
    # A domain that is told and is none leaves no address: only silence means the usual domain 0.
    if None in parts or untold not in (None, "unsupported"):
        return row.missing("pci_address", next((reason for reason in (*reasons, untold) if reason), "invalid")), False
    return "{:08x}:{:02x}:{:02x}.{:x}".format(domain or 0, *parts), domain is not None
