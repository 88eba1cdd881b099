"""What discovery tells about devices and backends, as the cluster's events have it. Pure."""

from __future__ import annotations

from typing import Final

from gpurt.cluster.envelope import EventKind
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport

DEVICE_KINDS: Final = {
    EventType.ADDED: EventKind.DEVICE_ADDED,
    EventType.REMOVED: EventKind.DEVICE_REMOVED,
    EventType.LOST: EventKind.DEVICE_HEALTH,
    EventType.RECOVERED: EventKind.DEVICE_HEALTH,
    EventType.HEALTH: EventKind.DEVICE_HEALTH,
    EventType.CHANGED: EventKind.DEVICE_UPDATED,
    EventType.MEMORY: EventKind.DEVICE_UPDATED,
}


def report_after(report: BackendReport | None, event: DeviceEvent, name: str) -> BackendReport:
    """The report on backend ``name`` after an event, which brings a reason code and a text only."""
    report = report or BackendReport(name=name, status="ok")
    if event.type is EventType.BACKEND_AVAILABLE:
        return report.model_copy(update={"status": "ok", "reason": None, "message": event.reason or "", "hint": None})
    code, _, message = (event.reason or "").partition(": ")
    known = code in set(ReasonCode)
    return report.model_copy(
        update={
            "status": "unavailable",
            "reason": ReasonCode(code) if known else ReasonCode.ERROR,
            "message": message if known else event.reason or "",
        }
    )
