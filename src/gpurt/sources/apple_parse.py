"""The texts of macOS's own tools about its GPUs, as values. Pure: recorded texts do as well as fresh ones."""

from __future__ import annotations

import json
import plistlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from gpurt.sources.sysfs import Skipped
from gpurt.sources.table import Row, as_mapping, rows

_MOST_BYTES: Final = 2**50
_MOST_CORES: Final = 4096

_SIZE = re.compile(r"([0-9]{1,9}) (MB|GB)", re.ASCII)
_METAL = re.compile(r"spdisplays_metal([0-9]{1,2})", re.ASCII)
_NAME = re.compile(r"[a-zA-Z][\w.]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Display:
    """One GPU of ``system_profiler SPDisplaysDataType``."""

    name: str | None
    vendor: str | None
    """``apple amd intel nvidia``, or the tool's own word in lower case."""
    built_in: bool | None
    cores: int | None
    metal_version: int | None
    memory_bytes: int | None
    """Of a card, or of the host's as much as an Intel GPU may use; Apple's own GPUs have no such figure."""
    memory_shared: bool
    device_id: int | None
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU driver of ``ioreg -c IOAccelerator``."""

    driver: str | None
    """Name of the driver's class; Apple's begin with ``AGX``."""
    name: str | None
    cores: int | None
    utilization_percent: float | None
    memory_used_bytes: int | None
    """Of the host's memory, by all processes."""
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])


def parse_sysctl(text: str) -> dict[str, str]:
    """``name: value`` lines of ``sysctl``; the complaints about names that it does not know are none."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and _NAME.fullmatch(name.strip()) and name.strip() != "sysctl":
            values.setdefault(name.strip(), value.strip())
    return values


def parse_displays(text: str) -> tuple[tuple[Display, ...], tuple[Skipped, ...]]:
    """GPUs in the JSON of ``system_profiler -json SPDisplaysDataType``, and what in it is none."""
    where = "system_profiler"
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return (), (Skipped(where, f"not JSON: {exc}"),)
    whole = as_mapping(document)
    if whole is None or "SPDisplaysDataType" not in whole:
        return (), (Skipped(where, "has no SPDisplaysDataType"),)
    found, skipped = rows(whole["SPDisplaysDataType"], "SPDisplaysDataType")
    return tuple(_display(Row(values)) for _, values in found), tuple(skipped)


def parse_accelerators(data: bytes) -> tuple[tuple[Accelerator, ...], tuple[Skipped, ...]]:
    """GPU drivers in the property list of ``ioreg -a -r -d 1 -c IOAccelerator``. No output at all means none."""
    if not data.strip():
        return (), ()
    try:
        document: object = plistlib.loads(data, fmt=plistlib.FMT_XML)
    except Exception as exc:  # plistlib lets through whatever its parsers raise for broken input
        return (), (Skipped("ioreg", f"not a property list: {type(exc).__name__}: {exc}"),)
    found, skipped = rows(document, "ioreg")
    return tuple(_accelerator(Row(_texts(values))) for _, values in found), tuple(skipped)


def parse_size(text: str) -> int | None:
    """``1536 MB`` in bytes, or None for anything else."""
    match = _SIZE.fullmatch(text)
    return int(match[1]) << (20 if match[2] == "MB" else 30) if match else None


def _display(row: Row) -> Display:
    vendor = row.text("vendor", "spdisplays_vendor")
    metal = row.text("metal_version", "spdisplays_mtlgpufamilysupport")
    match = _METAL.fullmatch(metal or "")
    if metal is not None and match is None:
        row.missing("metal_version", "unsupported")  # an older macOS's word for a feature set, or "not supported"
    bus = row.text("built_in", "sppci_bus")
    memory, shared = _video_memory(row)
    return Display(
        name=row.text("name", "sppci_model") or _second(row, "name", "_name"),
        vendor=None if vendor is None else _vendor(vendor),
        built_in=None if bus is None else bus == "spdisplays_builtin",
        cores=row.integer("cores", 1, _MOST_CORES, "sppci_cores"),
        metal_version=int(match[1]) if match else None,
        memory_bytes=memory,
        memory_shared=shared,
        device_id=row.integer("device_id", 0, 2**32 - 1, "spdisplays_device-id"),
        unavailable=row.unavailable,
    )


def _second(row: Row, field_name: str, key: str) -> str | None:
    text = row.text(field_name, key)
    if text is not None:
        row.unavailable.pop(field_name, None)
    return text


def _vendor(text: str) -> str:
    # "sppci_vendor_Apple", "Intel", "AMD (0x1002)": the tool's spelling differs between versions.
    word = text.removeprefix("sppci_vendor_").split(" ")[0].lower()
    return {"ati": "amd"}.get(word, word)


def _video_memory(row: Row) -> tuple[int | None, bool]:
    name = "memory_bytes"
    for key, shared in (("spdisplays_vram_shared", True), ("spdisplays_vram", False), ("_spdisplays_vram", False)):
        text = row.text(name, key)
        if text is None:
            continue
        size = parse_size(text)
        if size is None or not 0 < size <= _MOST_BYTES:
            row.missing(name, "invalid")
            return None, shared
        row.unavailable.pop(name, None)
        return size, shared
    return None, False


def _accelerator(row: Row) -> Accelerator:
    statistics = Row(as_mapping(row.raw("statistics", "PerformanceStatistics")) or {})
    row.unavailable.pop("statistics", None)
    utilization = statistics.integer("utilization_percent", 0, 100, "Device Utilization %")
    used = statistics.integer("memory_used_bytes", 0, _MOST_BYTES, "In use system memory")
    return Accelerator(
        driver=row.text("driver", "IOObjectClass") or _second(row, "driver", "IOClass"),
        name=row.text("name", "model"),
        cores=row.integer("cores", 1, _MOST_CORES, "gpu-core-count"),
        utilization_percent=None if utilization is None else float(utilization),
        memory_used_bytes=used,
        unavailable={**row.unavailable, **statistics.unavailable},
    )


def _texts(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """With byte strings, which is how the firmware's properties come, as text."""
    plain = cast("Mapping[Any, object]", values)
    return {key: v.decode("ascii", "replace") if isinstance(v, bytes) else v for key, v in plain.items()}
