"""The health of devices over time: hysteresis, Xids that are neither forgotten nor held for ever, restarts.

Worse is believed at once, better only after several readings in a row. Times are of the observer's monotonic clock, so
that a clock that is set condemns and clears nothing; what is restored after a restart counts from then on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from gpurt.health.evidence import SEVERITY, Evidence, Finding, findings, merged
from gpurt.health.policy import XID_MEANINGS, HealthPolicy, XidEffect
from gpurt.health.report import DeviceHealthReport, HealthReport, Peaks, seconds_in_states
from gpurt.sources.condition import Throttle
from gpurt.types import DeviceState

_log = logging.getLogger("gpurt.health")

MAX_REMEMBERED: Final = 1000
"""Transitions and Xids that are kept per device, the newest: a storm must not eat the host's memory."""

_XID_STATES: Final = {XidEffect.DEGRADED: DeviceState.DEGRADED, XidEffect.LOST: DeviceState.LOST}
_SLOWED_BY_HARDWARE: Final = frozenset({Throttle.HARDWARE, Throttle.HARDWARE_THERMAL, Throttle.POWER_BRAKE})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is believed of a device."""

    state: DeviceState = DeviceState.HEALTHY
    reason: str | None = None
    """Every defect, for people; None when there is none."""
    notes: tuple[str, ...] = ()
    """What is worth knowing of a device that may be used."""

    @property
    def usable(self) -> bool:
        """Whether new work may be placed on it."""
        return self.state is DeviceState.HEALTHY


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state, at ``at`` seconds of the monitor's clock."""

    key: str
    previous: DeviceState
    state: DeviceState
    reason: str | None
    at: float


class _Device:
    def __init__(self, at: float) -> None:
        self.verdict = Verdict()
        self.last = Evidence()
        self.failures = 0
        self.better = 0
        self.hot = False
        self.slowed_since: float | None = None
        self.xids: dict[int, float] = {}
        """Xids that condemn, each with the time of its last one."""
        self.since = at
        self.transitions: deque[Transition] = deque(maxlen=MAX_REMEMBERED)
        self.xid_log: deque[tuple[float, int]] = deque(maxlen=MAX_REMEMBERED)
        self.peaks = Peaks()


class HealthMonitor:
    """Judges devices by what is observed of them. Call it from one thread; it does no I/O.

    Args:
        policy: what is a defect.
        clock: seconds, monotonic.

    ``key`` names a device; use :attr:`gpurt.types.GPUDevice.stable_id`, so that what is known of a device follows it
    through reboots.
    """

    def __init__(self, policy: HealthPolicy | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy or HealthPolicy()
        self._clock = clock
        self._devices: dict[str, _Device] = {}

    def observe(self, key: str, evidence: Evidence) -> Transition | None:
        """Take one observation in; the change of state that it makes, or None."""
        now, device = self._clock(), self._device(key)
        condition = merged(device.last.condition, evidence.condition)
        evidence = Evidence(evidence.contact, evidence.contact_reason, evidence.temperature_c, condition)
        device.last = evidence
        device.peaks.add(now, evidence.temperature_c)
        found = list(findings(self.policy, evidence, hot=device.hot))
        device.hot = any(finding.code == "too_hot" for finding in found)
        found += self._failing(device, evidence)
        found += self._slowed(device, evidence, now)
        found += self._xids(device, now)
        if evidence.contact is DeviceState.SUSPECT and not _is_worse(found, device.verdict.state):
            device.better = 0  # a reading that failed shows nothing to be well
            return None
        return self._settle(key, device, found, now)

    def xid(self, key: str, number: int) -> Transition | None:
        """Take an Xid in; the change of state that it makes, or None.

        Raises:
            ValueError: ``number`` is not a whole number from 0 on.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"an Xid is a whole number, not {number!r}")
        now, device = self._clock(), self._device(key)
        device.xid_log.append((now, number))
        effect = self.policy.effect(number)
        if effect not in _XID_STATES:
            return None
        _log.warning("%s: Xid %d (%s) makes it %s", key, number, _meaning(number), effect)
        device.xids[number] = now
        found = [*findings(self.policy, device.last, hot=device.hot), *self._xids(device, now)]
        # An Xid makes nothing better, and is no reading that could count towards that.
        return self._settle(key, device, found, now) if _is_worse(found, device.verdict.state) else None

    def verdict(self, key: str) -> Verdict:
        """What is believed of a device now; one that nobody has observed yet is healthy as far as is known."""
        device = self._devices.get(key)
        return device.verdict if device else Verdict()

    def forget(self, key: str) -> None:
        """Drop all that is known of a device, as after it was replaced."""
        self._devices.pop(key, None)

    # What outlives the process

    def export(self, boot_id: str | None = None) -> dict[str, Any]:
        """What a later process must know, as JSON values. ``boot_id`` names the present boot of the kernel."""
        devices = {
            key: {"state": str(device.verdict.state), "reason": device.verdict.reason, "xids": sorted(device.xids)}
            for key, device in self._devices.items()
            if not device.verdict.usable
        }
        return {"boot_id": boot_id, "devices": devices}

    def restore(self, document: Mapping[str, Any], boot_id: str | None = None) -> None:
        """Take over what an earlier process exported. Devices stay what they were until they have shown themselves
        clean; after a reboot (both ids known, and different) they start afresh, for that has reset them.

        What is malformed costs its own entry.
        """
        if boot_id is not None and document.get("boot_id") not in (None, boot_id):
            return
        devices: Any = document.get("devices")
        entries: Mapping[Any, Any] = cast("Mapping[Any, Any]", devices) if isinstance(devices, Mapping) else {}
        for key, entry in entries.items():
            try:
                state, xids = DeviceState(entry["state"]), [int(xid) for xid in entry["xids"]]
                reason = str(entry["reason"])
            except (KeyError, TypeError, ValueError, OverflowError) as exc:
                _log.warning("remembered health of %s is not understood: %s: %s", key, type(exc).__name__, exc)
                continue
            if state not in SEVERITY or state is DeviceState.HEALTHY:
                continue
            device = self._device(str(key))
            device.verdict = Verdict(state, reason)
            device.xids = {xid: device.since for xid in xids if self.policy.effect(xid) in _XID_STATES}

    def get_health_report(self, hours: float = 24.0) -> HealthReport:
        """What happened in the last ``hours``, per device; less where less is remembered.

        Raises:
            ValueError: ``hours`` not positive.
        """
        if not hours > 0:
            raise ValueError(f"hours must be positive: {hours}")
        now = self._clock()
        since = now - hours * 3600
        return HealthReport(hours, {key: _report(device, since, now) for key, device in self._devices.items()})

    # Inside

    def _device(self, key: str) -> _Device:
        if key not in self._devices:
            self._devices[key] = _Device(self._clock())
        return self._devices[key]

    def _failing(self, device: _Device, evidence: Evidence) -> list[Finding]:
        device.failures = device.failures + 1 if evidence.contact is DeviceState.SUSPECT else 0
        if device.failures < self.policy.suspect_after:
            return []
        text = evidence.contact_reason or "its readings fail"
        return [Finding("contact_suspect", DeviceState.SUSPECT, text)]

    def _slowed(self, device: _Device, evidence: Evidence, now: float) -> list[Finding]:
        throttle = evidence.condition.throttle if evidence.condition else None
        if throttle is None:
            return []  # not told: neither begins nor ends anything
        slowed = throttle & _SLOWED_BY_HARDWARE
        if not slowed:
            device.slowed_since = None
            return []
        if device.slowed_since is None:
            device.slowed_since = now
        if now - device.slowed_since < self.policy.throttle_hold_s:
            return []
        why = ", ".join(sorted(slowed))
        return [Finding("slowed_down", DeviceState.DEGRADED, f"its hardware has been slowing it down ({why})")]

    def _xids(self, device: _Device, now: float) -> list[Finding]:
        for xid, last in tuple(device.xids.items()):
            if now - last >= self.policy.xid_hold_s:
                del device.xids[xid]
        return [
            Finding(
                f"xid_{xid}", _XID_STATES[self.policy.effect(xid)], f"Xid {xid}: {XID_MEANINGS.get(xid, 'unlisted')}"
            )
            for xid in sorted(device.xids)
        ]

    def _settle(self, key: str, device: _Device, found: list[Finding], now: float) -> Transition | None:
        was, state = device.verdict.state, _worst(found)
        improves = SEVERITY.index(state) < SEVERITY.index(was)
        device.better = device.better + 1 if improves else 0
        if improves and device.better < self.policy.recover_after:
            return None
        device.better = 0
        defects = [finding for finding in found if finding.state is not DeviceState.HEALTHY]
        defects.sort(key=lambda finding: -SEVERITY.index(finding.state))
        reason = "; ".join(f"{finding.code}: {finding.text}" for finding in defects) or None
        notes = tuple(finding.text for finding in found if finding.state is DeviceState.HEALTHY)
        device.verdict = Verdict(state, reason, notes)
        if state is was:
            return None
        transition = Transition(key, was, state, reason, now)
        device.transitions.append(transition)
        return transition


def _meaning(xid: int) -> str:
    return XID_MEANINGS.get(xid, "not in the list of those known here")


def _worst(found: list[Finding]) -> DeviceState:
    return max((finding.state for finding in found), key=SEVERITY.index, default=DeviceState.HEALTHY)


def _is_worse(found: list[Finding], state: DeviceState) -> bool:
    return SEVERITY.index(_worst(found)) > SEVERITY.index(state)


def _report(device: _Device, since: float, now: float) -> DeviceHealthReport:
    xids: dict[int, int] = {}
    for at, number in device.xid_log:
        if at >= since:
            xids[number] = xids.get(number, 0) + 1
    steps = [(step.at, step.previous, step.state) for step in device.transitions]
    return DeviceHealthReport(
        state=device.verdict.state,
        usable=device.verdict.usable,
        reason=device.verdict.reason,
        notes=device.verdict.notes,
        changes=tuple((now - step.at, step.state, step.reason) for step in device.transitions if step.at >= since),
        xids=xids,
        hottest_c=device.peaks.highest(since),
        seconds=seconds_in_states(steps, device.verdict.state, max(since, device.since), now),
    )
