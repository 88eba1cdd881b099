"""Events: what changed between two discoveries. Pure functions of two results.

Devices are compared by ``stable_id``, so a reboot that permutes indices adds and removes nothing. A backend that
could not be asked says nothing about its devices: ``carry_over`` keeps them, and only a successful enumeration
without a device makes it ``removed``. Small changes of memory are not events; ``settled`` is the state that
subscribers have been told, against which the next difference is taken, so that many small changes add up to one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from gpurt.discovery.assemble import is_conclusive
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.unreached import unreached
from gpurt.errors import ReasonCode
from gpurt.registry.records import utc_now
from gpurt.types import BackendReport, DeviceState, GPUDevice

MEMORY_QUANTUM_BYTES: Final = 64 << 20
MEMORY_QUANTUM: Final = 0.01

_MEMORY_FIELDS: Final = ("memory_available", "memory_usable_bytes")
_MEMORY_SOURCE: Final = "memory_usable_source"
"""Told with the figure that it explains; by itself it is no news."""
_HEALTH_FIELDS: Final = ("state", "state_reason", "usable")
_GONE: Final = frozenset({DeviceState.LOST, DeviceState.SUSPECT, DeviceState.UNRESPONSIVE, DeviceState.REMOVED})


class EventType(StrEnum):
    SNAPSHOT = "snapshot"
    """``snapshot`` replaces all that was known: the first answer, or a subscriber that was too slow."""
    ADDED = "added"
    REMOVED = "removed"
    LOST = "lost"
    RECOVERED = "recovered"
    CHANGED = "changed"
    """Anything but state and free memory; ``reason`` names the fields."""
    HEALTH = "health"
    MEMORY = "memory"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    BACKEND_AVAILABLE = "backend_available"


class DeviceEvent(BaseModel):
    """One change on this host."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: EventType
    stable_id: str | None = None
    """Which device; None for events of a backend and snapshots."""
    device: GPUDevice | None = None
    """The device after the change."""
    backend: str | None = None
    previous_state: DeviceState | None = None
    reason: str | None = None
    snapshot: DiscoveryResult | None = None
    observed_monotonic: float = Field(default_factory=time.monotonic)
    """Seconds of this process's monotonic clock: for ages."""
    observed_at: str = Field(default_factory=utc_now)
    """ISO 8601, UTC: for people."""


def diff(old: DiscoveryResult | None, new: DiscoveryResult, *, reason: str | None = None) -> tuple[DeviceEvent, ...]:
    """What happened between two results. Without an old one, that is one snapshot: nothing is known to be new.

    Urgent events come first: lost and removed, then backends, added, recovered, health, changed, memory.
    ``reason`` is that of the snapshot.
    """
    observed: dict[str, Any] = {"observed_monotonic": time.monotonic(), "observed_at": utc_now()}
    if old is None:
        return (DeviceEvent(type=EventType.SNAPSHOT, snapshot=new, reason=reason, **observed),)
    new = carry_over(old, new)
    before, after = _by_key(old.devices), _by_key(new.devices)
    events: list[DeviceEvent] = []

    def say(type_: EventType, device: GPUDevice, why: str | None, previous: DeviceState | None = None) -> None:
        events.append(
            DeviceEvent(
                type=type_,
                stable_id=device.stable_id,
                device=device,
                backend=device.backend,
                previous_state=previous,
                reason=why,
                **observed,
            )
        )

    for key, device in before.items():
        if key not in after and _asked(device, new):
            gone = device.model_copy(update={"state": DeviceState.REMOVED, "usable": False})
            gone = unreached(gone, old.timestamp)
            say(EventType.REMOVED, gone, "no longer enumerated", device.state)
    for key, device in after.items():
        previous = before.get(key)
        if previous is None:
            say(EventType.ADDED, device, None)
            continue
        if _health(previous) != _health(device):
            say(_health_type(previous, device), device, device.state_reason, previous.state)
        if fields := _changed_fields(previous, device):
            say(EventType.CHANGED, device, ", ".join(fields), previous.state)
        if not _same_memory(previous, device) and not _told_with_health(previous, device):
            say(EventType.MEMORY, device, None, previous.state)
    events.extend(DeviceEvent(**event, **observed) for event in _backend_changes(old.reports, new.reports))
    return tuple(sorted(events, key=lambda event: _URGENCY.index(event.type)))


def carry_over(old: DiscoveryResult | None, new: DiscoveryResult) -> DiscoveryResult:
    """``new`` with the devices of ``old`` that nobody could look for, no longer usable, and without what was free on
    them then.

    A device was looked for when one of its backends enumerated successfully; where a backend was not even asked,
    its devices are left out. A device that the driver counts but cannot name any more (``lost``, without identity)
    gets its record of before.
    """
    if old is None:
        return new
    present = _by_key(new.devices)
    kept: list[GPUDevice] = []
    missing: list[GPUDevice] = []
    for key, device in _by_key(old.devices).items():
        asked = _asked(device, new)
        if key in present or not asked:
            continue
        if any(map(enumerated, asked)):
            missing.append(device)
        elif device.state in _GONE and not device.usable:
            kept.append(unreached(device, old.timestamp))
        else:
            why = f"{asked[0].reason}: {asked[0].message}"
            kept.append(unreached(_carried(device, _state_for(asked[0].reason), why), old.timestamp))
    lost = [unreached(device, old.timestamp) for device in missing if device.state is not DeviceState.REMOVED]
    devices = _named(new.devices, lost)
    return new.model_copy(update={"devices": (*devices, *kept)})


def _named(devices: Iterable[GPUDevice], missing: list[GPUDevice]) -> list[GPUDevice]:
    """``devices``, with the nameless lost ones replaced by what is missing, where it cannot be anything else."""
    devices = list(devices)
    nameless = [i for i, device in enumerate(devices) if _is_nameless(device)]
    for i in nameless:
        alike = [device for device in missing if device.backend == devices[i].backend]
        if len(alike) == sum(devices[other].backend == devices[i].backend for other in nameless):
            was = min(alike, key=lambda device: device.device_id)
            missing.remove(was)
            nameless = [other for other in nameless if other != i]
            devices[i] = _carried(was, DeviceState.LOST, devices[i].state_reason)
    return devices


def _is_nameless(device: GPUDevice) -> bool:
    return device.state is DeviceState.LOST and not (device.identity and device.identity.stable)


def _carried(device: GPUDevice, state: DeviceState, why: str | None) -> GPUDevice:
    return device.model_copy(update={"usable": False, "state": state, "state_reason": why})


def _asked(device: GPUDevice, result: DiscoveryResult) -> list[BackendReport]:
    """The reports on the backends that show, or showed, this device."""
    names = device.backends or (device.backend,)
    return [report for report in result.reports if report.name in names]


def enumerated(report: BackendReport) -> bool:
    """Whether a device missing from this backend's answer is really missing.

    Also so when the backend cannot be used but its devices were listed: by NVML, or before verification hung.
    """
    return is_conclusive(report) or bool(report.device_ids)


def settled(old: DiscoveryResult | None, new: DiscoveryResult, *, hold_memory: bool = False) -> DiscoveryResult:
    """``new`` as subscribers have been told it: memory that changed too little to say is still the old figure.

    With ``hold_memory`` no change of memory counts; it will be said later, when it is held no longer.
    """
    if old is None:
        return new
    before = _by_key(old.devices)
    devices: list[GPUDevice] = []
    for key, device in _by_key(new.devices).items():
        previous = before.get(key)
        held = hold_memory or (previous is not None and _same_memory(previous, device))
        if previous is not None and held and not _told_with_health(previous, device):
            fields = (*_MEMORY_FIELDS, _MEMORY_SOURCE)
            device = device.model_copy(update={field: getattr(previous, field) for field in fields})
        devices.append(device)
    return new.model_copy(update={"devices": tuple(devices)})


_URGENCY: Final = (
    EventType.SNAPSHOT,
    EventType.LOST,
    EventType.REMOVED,
    EventType.BACKEND_UNAVAILABLE,
    EventType.BACKEND_AVAILABLE,
    EventType.ADDED,
    EventType.RECOVERED,
    EventType.HEALTH,
    EventType.CHANGED,
    EventType.MEMORY,
)


def _by_key(devices: Iterable[GPUDevice]) -> dict[str, GPUDevice]:
    by_key: dict[str, GPUDevice] = {}
    for device in devices:
        key = device.stable_id
        # Two devices without a real identity may share the name that stands for one.
        by_key[f"{key} {device.device_id}" if key in by_key else key] = device
    return by_key


def _health(device: GPUDevice) -> tuple[DeviceState, bool, str]:
    # Texts may differ at every attempt ("no answer within 10 s while …"); what counts is the code before the colon.
    return device.state, device.usable, (device.state_reason or "").partition(":")[0]


def _health_type(previous: GPUDevice, device: GPUDevice) -> EventType:
    if device.state is DeviceState.LOST and previous.state is not DeviceState.LOST:
        return EventType.LOST
    if device.state is DeviceState.HEALTHY and previous.state in _GONE:
        return EventType.RECOVERED
    return EventType.HEALTH


def _changed_fields(previous: GPUDevice, device: GPUDevice) -> tuple[str, ...]:
    ignored = {*_MEMORY_FIELDS, _MEMORY_SOURCE, *_HEALTH_FIELDS}
    return tuple(
        field
        for field in GPUDevice.model_fields
        if field not in ignored and getattr(previous, field) != getattr(device, field)
    )


def _same_memory(previous: GPUDevice, device: GPUDevice) -> bool:
    quantum = max(MEMORY_QUANTUM_BYTES, MEMORY_QUANTUM * (device.memory_bytes or 0))
    for field in _MEMORY_FIELDS:
        a, b = getattr(previous, field), getattr(device, field)
        if (a is None) != (b is None) or (a is not None and abs(a - b) >= quantum):
            return False
    return True


def _told_with_health(previous: GPUDevice, device: GPUDevice) -> bool:
    """Whether the figures came or went because the device did: the event that says that brings them."""
    if _health(previous) == _health(device):
        return False
    return any((getattr(previous, field) is None) != (getattr(device, field) is None) for field in _MEMORY_FIELDS)


def _state_for(reason: ReasonCode | None) -> DeviceState:
    return DeviceState.UNRESPONSIVE if reason is ReasonCode.TIMEOUT else DeviceState.SUSPECT


def _backend_changes(old: Iterable[BackendReport], new: Iterable[BackendReport]) -> list[dict[str, Any]]:
    before = {report.name: report for report in old}
    changes: list[dict[str, Any]] = []
    for report in new:
        previous = before.get(report.name)
        if previous is None or (previous.status, previous.reason) == (report.status, report.reason):
            continue
        if report.status == "ok":
            changes.append({"type": EventType.BACKEND_AVAILABLE, "backend": report.name, "reason": report.message})
        else:
            why = f"{report.reason}: {report.message}"
            changes.append({"type": EventType.BACKEND_UNAVAILABLE, "backend": report.name, "reason": why})
    return changes
