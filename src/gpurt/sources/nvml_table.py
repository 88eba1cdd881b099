"""What NVML tells about a machine as a table, so that one machine's answers can be looked at on another.

The table, made by :func:`query_nvml` or by hand::

    {"driver_version": "590.48.01",
     "devices": [{...}, ...]}           # in NVML's order

Keys of a device are the fields of :class:`~gpurt.sources.nvml_device.NvmlDevice` (without ``index``, which is its
place, and ``unavailable``, which is under ``errors``), ``partitions`` with the fields of
:class:`~gpurt.sources.nvml_device.NvmlPartition`, ``condition`` with those of
:class:`~gpurt.sources.condition.DeviceCondition`, and ``temperature_c``. All may be missing. Where NVML gives no access
at all the table is ``{"error": {"reason": …, "message": …, "hint": …}}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from gpurt.errors import BackendUnavailable, GPUError, ReasonCode
from gpurt.identity import normalize_pci_address, normalize_uuid
from gpurt.sources.condition import DeviceCondition, RecoveryAction, Throttle
from gpurt.sources.nvml_device import NvmlDevice, NvmlPartition
from gpurt.sources.sysfs import Skipped
from gpurt.sources.table import Row, absence_of, as_mapping, rows
from gpurt.types import DeviceState

_MOST_BYTES: Final = 2**50
_MOST: Final = 2**53

# Field → lowest and highest value that can be.
_DEVICE_NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "memory_total_bytes": (1, _MOST_BYTES),
    "memory_free_bytes": (0, _MOST_BYTES),
    "memory_used_bytes": (0, _MOST_BYTES),
    "memory_reserved_bytes": (0, _MOST_BYTES),
    "memory_reported_bytes": (1, _MOST_BYTES),
    "core_count": (1, 2**24),
    "multiprocessor_count": (1, 2**20),
    "max_clock_mhz": (1, 100_000),
    "numa_node": (0, 2**20),
}
_CONDITION_NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "ecc_corrected": (0, _MOST),
    "ecc_uncorrected": (0, _MOST),
    "ecc_uncorrected_lifetime": (0, _MOST),
    "remapped_corrected": (0, 2**20),
    "remapped_uncorrected": (0, 2**20),
    "slowdown_temperature_c": (1, 250),
    "pcie_generation": (1, 64),
    "pcie_width": (1, 64),
    "pcie_max_generation": (1, 64),
    "pcie_max_width": (1, 64),
}
_CONDITION_FLAGS: Final = ("ecc_enabled", "remap_pending", "remap_failed")


@dataclass(frozen=True, slots=True)
class NvmlInventory:
    """Every GPU that NVML shows, and what could not be understood."""

    devices: tuple[NvmlDevice, ...] = ()
    driver_version: str | None = None
    conditions: Mapping[int, DeviceCondition] = field(default_factory=dict[int, DeviceCondition])
    """By the device's index; missing where nobody asked, or nothing was told."""
    temperatures: Mapping[int, float] = field(default_factory=dict[int, float])
    """°C by the device's index."""
    skipped: tuple[Skipped, ...] = ()
    absence: BackendUnavailable | None = None
    """Why NVML could not be asked."""


def read_nvml(table: object) -> NvmlInventory:
    """GPUs of a recorded table. Whatever cannot be understood costs its own field, or is in ``skipped``."""
    whole = as_mapping(table)
    if whole is None:
        return NvmlInventory(skipped=(Skipped("nvml", f"not a table but {type(table).__name__}"),))
    why = absence_of(whole)
    if why is not None:
        hint = Row(as_mapping(whole["error"]) or {}).text("hint")
        return NvmlInventory(absence=BackendUnavailable(why.message, reason=why.reason, backend="nvml", hint=hint))
    found, skipped = rows(whole.get("devices"), "devices")
    devices: list[NvmlDevice] = []
    conditions: dict[int, DeviceCondition] = {}
    temperatures: dict[int, float] = {}
    for place, values in found:
        device = _device(Row(values), place, skipped)
        devices.append(device)
        told = as_mapping(values.get("condition"))
        if told is not None:
            conditions[device.index] = _condition(Row(told))
        celsius = _real(values.get("temperature_c"), -50, 250)
        if celsius is not None:
            temperatures[device.index] = celsius
    version = Row(whole).text("driver_version")
    return NvmlInventory(tuple(devices), version, conditions, temperatures, tuple(skipped))


def query_nvml(root: Path = Path("/")) -> dict[str, Any]:
    """The table of this machine. Blocking, for as long as the driver takes; raises nothing that NVML may raise."""
    from gpurt.sources.nvml import open_session

    try:
        with open_session() as session:
            table: dict[str, Any] = {"driver_version": session.driver_version, "devices": []}
            for device in session.devices(root):
                row = asdict(device)
                del row["index"]
                row["errors"] = dict(row.pop("unavailable"))
                if device.pci_address is not None:
                    try:
                        condition = asdict(session.condition(device.pci_address))
                        condition["errors"] = dict(condition.pop("unavailable"))
                        row["condition"] = condition
                        row["temperature_c"] = session.telemetry(device.pci_address, root).temperature_c
                    except GPUError as exc:
                        row["errors"]["condition"] = "error"
                        row["reason"] = row["reason"] or exc.message
                table["devices"].append(row)
    except BackendUnavailable as exc:
        return {"error": {"reason": str(exc.reason), "message": exc.message, "hint": exc.hint}}
    except Exception as exc:
        return {"error": {"reason": str(ReasonCode.ERROR), "message": f"{type(exc).__name__}: {exc}", "hint": None}}
    # Enumerations become their texts, sets lists.
    return json.loads(json.dumps(table, default=sorted))


def _device(row: Row, place: int, skipped: list[Skipped]) -> NvmlDevice:
    parts, lost = ([], []) if row.raw("partitions") is None else rows(row.raw("partitions"), f"devices[{place}].parts")
    skipped.extend(lost)
    uuid, address = row.text("uuid"), row.text("pci_address")
    state = DeviceState(row.text("state") or "healthy")
    device = NvmlDevice(
        index=place,
        name=row.text("name"),
        uuid=_known(row, "uuid", uuid, normalize_uuid(uuid)),
        pci_address=_known(row, "pci_address", address, normalize_pci_address(address)),
        includes_reserved=row.flag("includes_reserved") or False,
        unified_memory=row.flag("unified_memory") or False,
        compute_capability=row.text("compute_capability"),
        memory_bandwidth_gbps=_real(row.raw("memory_bandwidth_gbps"), 0, 1e6),
        state=DeviceState.HEALTHY if state is DeviceState.UNKNOWN else state,
        reason=row.text("reason"),
        partitions=tuple(_partition(Row(values)) for _, values in parts),
        **{name: row.integer(name, *limits) for name, limits in _DEVICE_NUMBERS.items()},
        unavailable=row.unavailable,
    )
    for name in ("memory_reported_bytes", "includes_reserved", "unified_memory", "state", "reason", "partitions"):
        row.unavailable.pop(name, None)  # what need not be told
    return device


def _partition(row: Row) -> NvmlPartition:
    return NvmlPartition(
        uuid=normalize_uuid(row.text("uuid"), prefix="MIG-"),
        name=row.text("name"),
        partition=row.text("partition"),
        memory_total_bytes=row.integer("memory_total_bytes", 1, _MOST_BYTES),
        memory_free_bytes=row.integer("memory_free_bytes", 0, _MOST_BYTES),
        multiprocessor_count=row.integer("multiprocessor_count", 1, 2**20),
    )


def _condition(row: Row) -> DeviceCondition:
    known: dict[str, Any] = {name: row.integer(name, *limits) for name, limits in _CONDITION_NUMBERS.items()}
    known |= {name: row.flag(name) for name in _CONDITION_FLAGS}
    action = row.text("recovery_action")
    known["recovery_action"] = next((each for each in RecoveryAction if each == action), None)
    if known["recovery_action"] is None and action is not None:
        row.missing("recovery_action", "invalid")
    reasons: object = row.raw("throttle")
    if isinstance(reasons, (list, tuple)):
        known["throttle"] = frozenset(each for each in Throttle if each in reasons)
    elif reasons is not None:
        row.missing("throttle", "invalid")
    names = {item.name for item in fields(DeviceCondition)}
    return DeviceCondition(**known, unavailable={k: v for k, v in row.unavailable.items() if k in names})


def _known(row: Row, name: str, told: str | None, value: str | None) -> str | None:
    if told is not None and value is None:
        row.missing(name, "invalid")
    return value


def _real(value: object, low: float, high: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        return None
    return float(value)
