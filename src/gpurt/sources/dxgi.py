"""Graphics adapters of Windows from a table of what DXGI says of them. Pure; :func:`read_dxgi` runs anywhere.

The table, made by :func:`gpurt.sources.dxgi_calls.record_dxgi` or by hand::

    {"size_bits": 64,                   # width of SIZE_T in the process that asked
     "adapters": [{...}, ...],          # in the order of EnumAdapters1
     "high_performance": ["0000000000012345", ...],   # LUIDs in that order of EnumAdapterByGpuPreference
     "errors": {}}                      # of the two lists; an adapter has its own

Keys of an adapter: ``name vendor_id device_id subsystem_id revision luid flags dedicated_video_bytes
dedicated_system_bytes shared_system_bytes local_budget_bytes local_usage_bytes non_local_budget_bytes
non_local_usage_bytes pci_bus pci_device pci_function driver_version``, and in tables from other tools
``registry_memory_bytes`` (``HardwareInformation.qwMemorySize``) and ``adapter_ram_bytes`` (WMI, 32 bits wide).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from gpurt.sources.ranking import NEVER_BY_ITSELF, rank
from gpurt.sources.sysfs import Skipped
from gpurt.sources.table import Absence, Row, absence_of, as_mapping, known_reason, repeated, rows
from gpurt.types import DeviceKind

_MOST_BYTES: Final = 2**50
_UINT32: Final = 2**32 - 1

# DXGI_ADAPTER_FLAG of dxgi.h.
_REMOTE: Final = 1
_SOFTWARE: Final = 2

_BASIC_RENDER_DRIVER: Final = (0x1414, 0x008C)
"""Microsoft's WARP. Some versions of Windows list it without the software flag."""

_NARROW_CEILING: Final = (4 << 30) - (2 << 20)
"""From here on a size out of a 32-bit field may be any larger size: drivers put the largest number in that they can,
rounded down to some page size."""

_log = logging.getLogger("gpurt.sources.dxgi")


@dataclass(frozen=True, slots=True)
class DxgiAdapter:
    """One adapter. Bytes; None is "not told", and ``unavailable`` says why."""

    index: int
    """Place in EnumAdapters1, which DirectML calls ``device_id``. Changes when an adapter comes or goes."""
    high_performance_index: int | None
    """Place in EnumAdapterByGpuPreference(HIGH_PERFORMANCE)."""
    name: str | None
    vendor_id: int | None
    device_id: int | None
    subsystem_id: int | None
    revision: int | None
    luid: str | None
    """16 hexadecimal digits, high part first. Names the adapter until the next boot, or until it is unplugged."""
    pci_address: str | None
    driver_version: str | None
    """Of the user-mode driver, four numbers."""
    kind: DeviceKind
    """``UNKNOWN`` where DXGI does not tell whether the adapter has memory of its own."""
    remote: bool
    """Of a remote session: what it draws with is in another computer."""
    dedicated_video_bytes: int | None
    dedicated_system_bytes: int | None
    """Host memory that the firmware set aside for it."""
    shared_system_bytes: int | None
    """The most host memory that Windows lets it use besides."""
    local_budget_bytes: int | None
    """What Windows lets the process that asked use of the adapter's fastest memory, at that moment."""
    local_usage_bytes: int | None
    """Of that process alone: DXGI does not tell what others use."""
    non_local_budget_bytes: int | None
    non_local_usage_bytes: int | None
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def selectable(self) -> bool:
        """Whether it may be taken without being asked for: a GPU in this computer."""
        return self.kind not in NEVER_BY_ITSELF and not self.remote

    @property
    def memory_source(self) -> Literal["dedicated", "host"] | None:
        """Where allocations come from."""
        if self.kind is DeviceKind.GPU:
            return "dedicated"
        return "host" if self.kind is DeviceKind.INTEGRATED_GPU else None

    @property
    def memory_total_bytes(self) -> int | None:
        """Its own memory; for a GPU inside a processor all that Windows lets it use of the host's."""
        parts = (self.dedicated_video_bytes, self.dedicated_system_bytes, self.shared_system_bytes)
        if self.memory_source != "host":
            return self.dedicated_video_bytes
        return None if None in parts else sum(part or 0 for part in parts)

    @property
    def memory_free_bytes(self) -> int | None:
        """What the process that asked may still allocate in the adapter's fastest memory."""
        if self.local_budget_bytes is None or self.local_usage_bytes is None:
            return None
        return max(0, self.local_budget_bytes - self.local_usage_bytes)

    @property
    def registry_key(self) -> str | None:
        """What stays the same from boot to boot: vendor, device, subsystem and place on the bus; None unless all are
        told."""
        ids = (self.vendor_id, self.device_id, self.subsystem_id)
        if self.pci_address is None or None in ids:
            return None
        return f"dxgi:{self.vendor_id:04x}-{self.device_id:04x}-{self.subsystem_id:08x}@{self.pci_address}"


@dataclass(frozen=True, slots=True)
class DxgiInventory:
    """Every adapter in the order of EnumAdapters1, software included, and what could not be read."""

    adapters: tuple[DxgiAdapter, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    absence: Absence | None = None
    """Why DXGI could not be asked."""

    def ranked(self) -> tuple[DxgiAdapter, ...]:
        """Adapters that may be taken without being asked for, the best first."""
        return ranked(adapter for adapter in self.adapters if adapter.selectable)


@dataclass(frozen=True, slots=True)
class DirectMLOrdinal:
    """The integer that DirectML takes for an adapter. ONNX Runtime does not say which adapter it then opened."""

    device_id: int
    name: str | None
    luid: str | None
    verified: bool = False


def ranked(adapters: Iterable[DxgiAdapter]) -> tuple[DxgiAdapter, ...]:
    """Discrete before integrated before unknown before software, then more memory, then the system's own order."""
    return tuple(sorted(adapters, key=lambda a: (*rank(a.kind, memory_bytes=a.memory_total_bytes), a.index)))


def directml_ordinal(adapter: DxgiAdapter) -> DirectMLOrdinal:
    """``device_id`` for ONNX Runtime's DirectML provider, derived from the order of EnumAdapters1, and logged."""
    _log.info(
        "DirectML device_id %d is meant to be %s (LUID %s); ONNX Runtime cannot confirm it",
        adapter.index,
        adapter.name or "an adapter without a name",
        adapter.luid or "unknown",
    )
    return DirectMLOrdinal(adapter.index, adapter.name, adapter.luid)


def read_dxgi(table: object) -> DxgiInventory:
    """Adapters of a recorded table. Whatever cannot be understood costs its own field, or is in ``skipped``."""
    whole = as_mapping(table)
    if whole is None:
        return DxgiInventory(skipped=(Skipped("dxgi", f"not a table but {type(table).__name__}"),))
    absence = absence_of(whole)
    if absence is not None:
        return DxgiInventory(absence=absence)
    found, skipped = rows(whole.get("adapters"), "adapters")
    bits = 32 if whole.get("size_bits") == 32 else 64
    adapters = [_adapter(Row(values), place, bits) for place, values in found]
    collided = repeated(adapter.luid for adapter in adapters)
    adapters = [_without_luid(adapter) if adapter.luid in collided else adapter for adapter in adapters]
    errors = as_mapping(whole.get("errors")) or {}
    if "adapters" in errors:
        skipped.append(Skipped("adapters", str(errors["adapters"])))
    reason = known_reason(errors.get("high_performance", "unsupported"))
    adapters, unplaced = _placed(adapters, whole.get("high_performance"), reason)
    return DxgiInventory(tuple(adapters), (*skipped, *unplaced))


def _adapter(row: Row, index: int, bits: int) -> DxgiAdapter:
    vendor, device = row.integer("vendor_id", 0, _UINT32), row.integer("device_id", 0, _UINT32)
    flags = row.integer("flags", 0, _UINT32)
    local = row.integer("local_budget_bytes", 0, _MOST_BYTES)
    non_local = row.integer("non_local_budget_bytes", 0, _MOST_BYTES)
    software = bool((flags or 0) & _SOFTWARE) or (vendor, device) == _BASIC_RENDER_DRIVER
    return DxgiAdapter(
        index=index,
        high_performance_index=None,
        name=row.text("name"),
        vendor_id=vendor,
        device_id=device,
        subsystem_id=row.integer("subsystem_id", 0, _UINT32),
        revision=row.integer("revision", 0, _UINT32),
        luid=_luid(row),
        pci_address=_pci_address(row),
        driver_version=row.text("driver_version"),
        kind=DeviceKind.SOFTWARE if software else _kind(local, non_local),
        remote=bool((flags or 0) & _REMOTE),
        dedicated_video_bytes=_dedicated(row, bits),
        dedicated_system_bytes=_size(row, "dedicated_system_bytes", bits),
        shared_system_bytes=_size(row, "shared_system_bytes", bits),
        local_budget_bytes=local,
        local_usage_bytes=row.integer("local_usage_bytes", 0, _MOST_BYTES),
        non_local_budget_bytes=non_local,
        non_local_usage_bytes=row.integer("non_local_usage_bytes", 0, _MOST_BYTES),
        unavailable=row.unavailable,
    )


def _kind(local_budget: int | None, non_local_budget: int | None) -> DeviceKind:
    # An adapter without memory of its own has one group of segments, the local one (D3D12_MEMORY_POOL, "UMA").
    if not local_budget or non_local_budget is None:
        return DeviceKind.UNKNOWN
    return DeviceKind.GPU if non_local_budget else DeviceKind.INTEGRATED_GPU


def _size(row: Row, name: str, bits: int) -> int | None:
    value = row.integer(name, 0, _MOST_BYTES)
    if value is not None and bits == 32 and value >= _NARROW_CEILING:
        row.missing(name, "invalid")
        return None
    return value


def _dedicated(row: Row, bits: int) -> int | None:
    """The first source that tells a size: a 0 is given way to those that know better, and stays if none does."""
    name = "dedicated_video_bytes"
    sources = ((name, bits), ("registry_memory_bytes", 64), ("adapter_ram_bytes", 32))
    told = [_size(row, source, width) for source, width in sources]
    reasons = [row.unavailable.pop(source, None) for source, _ in sources]
    value = next((size for size in told if size), next((size for size in told if size is not None), None))
    if value is None:
        telling = [reason for reason in reasons if reason not in (None, "unsupported")]
        row.missing(name, telling[0] if telling and telling[0] else "unsupported")
    return value


def _luid(row: Row) -> str | None:
    octets = row.octets("luid", 8)
    if octets is None:
        return None
    if not any(octets):
        row.missing("luid", "invalid")
        return None
    return octets.hex()


def _pci_address(row: Row) -> str | None:
    # Windows tells no domain; where buses have numbers beyond 255, domain and bus are mixed in them.
    parts = [row.integer(f"pci_{part}", 0, most) for part, most in (("bus", 255), ("device", 31), ("function", 7))]
    reasons = [row.unavailable.pop(f"pci_{part}", None) for part in ("bus", "device", "function")]
    bus, device, function = parts
    if bus is None or device is None or function is None:
        row.missing("pci_address", next(reason for reason in reasons if reason))
        return None
    return f"00000000:{bus:02x}:{device:02x}.{function}"


def _without_luid(adapter: DxgiAdapter) -> DxgiAdapter:
    return replace(adapter, luid=None, unavailable={**adapter.unavailable, "luid": "ambiguous"})


def _placed(adapters: list[DxgiAdapter], order: Any, reason: str) -> tuple[list[DxgiAdapter], list[Skipped]]:
    """Adapters with their places in the second order, and what that order alone has; ``reason`` if there is none."""
    if order is None:
        return [_unplaced(adapter, reason) for adapter in adapters], []
    if not isinstance(order, (list, tuple)):
        why = Skipped("high_performance", f"not a list but {type(order).__name__}")
        return [_unplaced(adapter, "invalid") for adapter in adapters], [why]
    places: dict[str, int] = {}
    skipped: list[Skipped] = []
    known = {adapter.luid for adapter in adapters}
    for place, item in enumerate(order):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        luid = item.lower() if isinstance(item, str) else ""
        if luid not in known:
            skipped.append(Skipped(f"high_performance[{place}]", f"no adapter of the first order has LUID {luid!r}"))
        elif places.setdefault(luid, place) != place:
            skipped.append(Skipped(f"high_performance[{place}]", f"LUID {luid} is in this order already"))
    placed = [
        replace(adapter, high_performance_index=places[adapter.luid])
        if adapter.luid in places
        else _unplaced(adapter, "error")
        for adapter in adapters
    ]
    return placed, skipped


def _unplaced(adapter: DxgiAdapter, reason: str) -> DxgiAdapter:
    return replace(adapter, unavailable={**adapter.unavailable, "high_performance_index": reason})
