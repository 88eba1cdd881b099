"""What happened to devices in the last hours."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpurt.types import DeviceState

_BUCKET_S: Final = 60.0
_BUCKETS: Final = 7 * 24 * 60
"""A week, by the minute."""


@dataclass(frozen=True, slots=True)
class DeviceHealthReport:
    """One device. Ages are seconds before the report."""

    state: DeviceState
    usable: bool
    reason: str | None
    notes: tuple[str, ...]
    changes: tuple[tuple[float, DeviceState, str | None], ...]
    """Changes of state within the time asked for, oldest first: age, new state, reason."""
    xids: Mapping[int, int]
    """How often each Xid came, those of applications included."""
    hottest_c: float | None
    """The highest temperature read within the time asked for, to the minute."""
    seconds: Mapping[DeviceState, float]
    """How long it was in each state, within the time asked for and since it was first observed."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """All devices, by the key they are observed under, over the last ``hours``."""

    hours: float
    devices: Mapping[str, DeviceHealthReport]


@dataclass(slots=True)
class Peaks:
    """The highest value of each minute of the last week."""

    _minutes: deque[tuple[int, float]] = field(default_factory=lambda: deque[tuple[int, float]](maxlen=_BUCKETS))

    def add(self, now: float, value: float | None) -> None:
        if value is None:
            return
        minute = int(now // _BUCKET_S)
        if self._minutes and self._minutes[-1][0] == minute:
            value = max(value, self._minutes.pop()[1])
        self._minutes.append((minute, value))

    def highest(self, since: float) -> float | None:
        first = since // _BUCKET_S
        return max((value for minute, value in self._minutes if minute >= first), default=None)


def seconds_in_states(
    steps: Sequence[tuple[float, DeviceState, DeviceState]], state: DeviceState, since: float, now: float
) -> dict[DeviceState, float]:
    """How long each state lasted between ``since`` and ``now``; ``steps`` are (time, before, after), oldest first."""
    seconds: dict[DeviceState, float] = {}
    for at, before, _ in (*steps, (now, state, state)):
        if at > since:
            seconds[before] = seconds.get(before, 0.0) + at - since
            since = at
    return seconds
