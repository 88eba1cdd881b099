"""Why a node is told to have changed, in words for people. Pure."""

from __future__ import annotations

from typing import Final

from gpurt.cluster.records import DeviceRecord, NodeRecord
from gpurt.cluster.state import NodeFields
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport, GPUDevice

_FIELDS: Final = tuple(NodeFields.model_fields)
_DEVICE_FIELDS: Final = tuple(GPUDevice.model_fields)
_MOVING: Final = frozenset({"memory_available", "memory_usable_bytes", "clock_rate_mhz"})
"""Figures of a device that are other ones at every look."""
_ABSENT: Final = frozenset(
    {ReasonCode.NO_LIBRARY, ReasonCode.NO_DRIVER, ReasonCode.NO_DEVICE, ReasonCode.WRONG_PLATFORM}
)
_WORDS: Final = {
    "gpu_backend": "preferred backend",
    "primary_gpu_device_id": "preferred device",
    "discovery_status": "discovery",
}


def summary_of(record: NodeRecord) -> tuple[object, ...]:
    """What makes ``node_updated`` when it differs."""
    return (*(getattr(record, name) for name in _FIELDS), record.epoch, record.host, record.reports)


def joined(record: NodeRecord) -> str:
    count = len(record.devices)
    draining = ", draining" if record.draining else ""
    return f"{count} device{'s' * (count != 1)}, discovery {record.discovery_status or 'not done yet'}{draining}"


def back(old: NodeRecord, new: NodeRecord, now: float) -> str:
    run = "the same run of it" if old.epoch == new.epoch else "a new run of it"
    return f"{run} is there, after {max(0.0, now - old.state_since):.1f} s as {old.state}"


def silent(record: NodeRecord, now: float) -> str:
    return f"not heard for {max(0.0, now - record.state_since):.1f} s"


def updated(before: NodeRecord, after: NodeRecord) -> str | None:
    """What of the node's summary is another now; None: nothing but when and how long it was looked for, and backends
    of which a first look says nothing unusual."""
    said: list[str] = []
    if before.draining != after.draining:
        said.append("draining: it takes no new placements" if after.draining else "it takes new placements again")
    if before.epoch != after.epoch:
        said.append("a new run of its process")
    if before.host != after.host:
        said.append("its host says other things of itself")
    for name, word in _WORDS.items():
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            said.append(f"{word}: {_told(new)}" if old is None else f"{word}: {old} -> {_told(new)}")
    older = {report.name: report for report in before.reports}
    for report in after.reports:
        known = older.get(report.name)
        news = (
            not _ordinary(report) if known is None else (known.status, known.reason) != (report.status, report.reason)
        )
        if news:
            state = report.status if report.reason is None else f"{report.status} ({report.reason})"
            said.append(f"backend {report.name}: {state}{f', was {known.status}' if known else ''}")
    gone = sorted(older.keys() - {report.name for report in after.reports})
    said += [f"backend {name}: no report any more" for name in gone]
    return "; ".join(said) or None


def _ordinary(report: BackendReport) -> bool:
    """What a first look says of most backends: it works, or this machine has nothing for it."""
    return report.status == "ok" or report.reason in _ABSENT


def moves_alone(before: DeviceRecord | None, after: DeviceRecord) -> bool:
    """Nothing about a device is another but figures that are so at every look."""
    return before is not None and _others(before.device, after.device) <= _MOVING


def of_device(before: DeviceRecord | None, after: DeviceRecord) -> str | None:
    """What is another about a device; None for a new one that is well."""
    now = after.device
    if before is None:
        return now.state_reason
    was = before.device
    if (was.state, was.usable, was.state_reason) != (now.state, now.usable, now.state_reason):
        return now.state_reason or f"{was.state} -> {now.state}"
    others = _others(was, now)
    return ", ".join(_difference(name, was, now) for name in _DEVICE_FIELDS if name in others)


def _others(was: GPUDevice, now: GPUDevice) -> set[str]:
    return {name for name in _DEVICE_FIELDS if getattr(was, name) != getattr(now, name)}


def _difference(name: str, was: GPUDevice, now: GPUDevice) -> str:
    old, new = getattr(was, name), getattr(now, name)
    told = name not in _MOVING and all(isinstance(value, str | int | float | None) for value in (old, new))
    return f"{name}: {_told(old)} -> {_told(new)}" if told else name


def _told(value: object) -> str:
    return "not told" if value is None else str(value)
