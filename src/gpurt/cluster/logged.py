"""What happens in a cluster, as log records with ``node``, ``device`` and ``event`` in their ``extra``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable
from typing import Final

from gpurt.cluster.changes import Change, ChangeKind
from gpurt.cluster.shards import ShardState
from gpurt.cluster.view import MasterView
from gpurt.discovery.events import DeviceEvent, EventType

_log = logging.getLogger("gpurt.cluster.changes")

_WORSE: Final = frozenset(
    {
        ChangeKind.NODE_SUSPECT,
        ChangeKind.NODE_LOST,
        ChangeKind.CONFLICT,
        ChangeKind.PLAN_TROUBLE,
        ChangeKind.TERM_DOUBTED,
        ChangeKind.MISSED,
        ChangeKind.NODE_FORGOTTEN,
    }
)
_WORSE_EVENTS: Final = frozenset({EventType.LOST, EventType.REMOVED, EventType.BACKEND_UNAVAILABLE})


async def log_changes(view: MasterView) -> None:
    """Log what changes in a master's view from now on, until cancelled."""
    async for change in view.changes():
        log_change(change, view)


def log_change(change: Change, view: MasterView) -> None:
    """One change; a warning where a node or a device is worse than before."""
    node = view.node(change.node) if change.node is not None else None
    record = node.devices.get(change.device) if node is not None and change.device is not None else None
    worse = change.kind in _WORSE
    if change.kind is ChangeKind.NODE_PLACEMENT and node is not None:
        worse = any(shard.state is ShardState.FAILED for shard in node.placement.shards)
    if change.kind is ChangeKind.DEVICE_HEALTH:
        worse = record is None or not record.available
    what = change.kind.value.replace("_", " ")
    about = " ".join(filter(None, (change.node, record.device.name if record is not None else change.device)))
    why = change.message or (f"{change.missed} changes" if change.missed else "")
    fields = {"node": change.node, "device": change.device, "event": change.kind.value}
    text = ": ".join(filter(None, (" ".join(filter(None, (what, about))), why)))
    _log.log(logging.WARNING if worse else logging.INFO, "%s", text, extra=fields)


async def log_events(node: str, events: AsyncIterable[DeviceEvent]) -> None:
    """Log what a node finds about its own devices, until the events end."""
    async for event in events:
        log_event(node, event)


def log_event(node: str, event: DeviceEvent) -> None:
    """One event; a warning where a device or a backend is worse than before."""
    worse = event.type in _WORSE_EVENTS
    if event.type is EventType.HEALTH and event.device is not None:
        worse = not event.device.usable
    if event.snapshot is not None:
        about = f"{len(event.snapshot.devices)} devices, {event.snapshot.discovery_status}"
    elif event.device is not None:
        about = f"{event.device.device_id} {event.device.name}, {event.device.state}"
    else:
        about = event.backend or ""
    fields = {"node": node, "device": event.stable_id, "event": event.type.value}
    text = ": ".join(filter(None, (f"{event.type.value} {about}".strip(), event.reason)))
    _log.log(logging.WARNING if worse else logging.INFO, "%s", text, extra=fields)
