"""Why a node is told to have changed, in words for people. Pure."""

from __future__ import annotations

from typing import Final

from gpurt.cluster.records import DeviceRecord, NodeRecord
from gpurt.cluster.state import NodeFields
from gpurt.types import GPUDevice

_FIELDS: Final = tuple(NodeFields.model_fields)
_DEVICE_FIELDS: Final = tuple(GPUDevice.model_fields)


def summary_of(record: NodeRecord) -> tuple[object, ...]:
    """What makes ``node_updated`` when it differs."""
    return (*(getattr(record, name) for name in _FIELDS), record.epoch, record.host, record.reports)


def joined(record: NodeRecord) -> str:
    count = len(record.devices)
    return f"{count} device{'s' * (count != 1)}, discovery {record.discovery_status or 'not done yet'}"


def back(old: NodeRecord, new: NodeRecord, now: float) -> str:
    run = "the same run of it" if old.epoch == new.epoch else "a new run of it"
    return f"{run} is there, after {max(0.0, now - old.state_since):.1f} s as {old.state}"


def silent(record: NodeRecord, now: float) -> str:
    return f"not heard for {max(0.0, now - record.state_since):.1f} s"


def updated(before: NodeRecord, after: NodeRecord) -> str:
    """What of the node's summary is another now."""
    said: list[str] = []
    if before.epoch != after.epoch:
        said.append("a new run of its process")
    if before.host != after.host:
        said.append("its host says other things of itself")
    for name in _FIELDS:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            said.append(f"{name}: {_told(old)} -> {_told(new)}")
    older = {report.name: report for report in before.reports}
    for report in after.reports:
        if report != (known := older.get(report.name)):
            state = report.status if report.reason is None else f"{report.status} ({report.reason})"
            was = "" if known is None else ", again" if known.reason == report.reason else f", was {known.status}"
            said.append(f"backend {report.name}: {state}{was}")
    gone = sorted(older.keys() - {report.name for report in after.reports})
    said += [f"backend {name}: no report any more" for name in gone]
    return "; ".join(said) or "its reports are in another order"


def of_device(before: DeviceRecord | None, after: DeviceRecord) -> str | None:
    """What is another about a device; None for a new one that is well."""
    now = after.device
    if before is None:
        return now.state_reason
    was = before.device
    others = [name for name in _DEVICE_FIELDS if getattr(was, name) != getattr(now, name)]
    if not others:
        return "its node is healthy" if after.available else "its node is not healthy"
    if (was.state, was.usable, was.state_reason) != (now.state, now.usable, now.state_reason):
        return now.state_reason or f"{was.state} -> {now.state}"
    return ", ".join(others)


def _told(value: object) -> str:
    return "not told" if value is None else str(value)
