"""Readings: a value with its unit and age, or None with the reason. What cannot be true is dropped, never clamped."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from gpurt.sources.condition import ABNORMAL_THROTTLES, DeviceCondition
from gpurt.types import DeviceState

INVALID: Final = "invalid"
STALE: Final = "stale"


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that is measured, and the values it can have."""

    unit: str
    low: float
    high: float
    """Beyond what any device has, and below what drivers write for "not available"."""


_MEMORY = Metric("bytes", 0, 1 << 50)
METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "memory_total_bytes": Metric("bytes", 1, 1 << 50),
        "memory_used_bytes": _MEMORY,
        "memory_free_bytes": _MEMORY,
        "memory_reserved_bytes": _MEMORY,
        "temperature_c": Metric("°C", -50, 250),
        "power_w": Metric("W", 0, 10_000),
        "clock_mhz": Metric("MHz", 0, 100_000),
        "utilization_percent": Metric("%", 0, 100),
    }
)
"""By the field names of :class:`gpurt.types.Telemetry`."""

_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {"unsupported": "not told", "no_permission": "no permission", "error": "error", STALE: STALE, INVALID: INVALID}
)

_PARTS: Final = ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")


@dataclass(frozen=True, slots=True)
class RawReading:
    """What a source tells, unchecked: values by metric, and the reasons of those that it cannot tell."""

    values: Mapping[str, Any]
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])
    condition: DeviceCondition | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric as it is known now."""

    value: int | float | None
    unit: str
    age_s: float
    """Seconds since the device was asked."""
    reason: str | None = None
    """Why there is no value: ``unsupported no_permission error stale invalid``. None exactly when there is one."""
    last: int | float | None = None
    """The value that has become too old, for people who want to see it all the same."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one device told at one time. ``values`` and ``unavailable`` have each metric in one of them."""

    device_id: str
    at: float
    """Seconds of the collector's clock when the device was asked."""
    values: Mapping[str, int | float]
    unavailable: Mapping[str, str]
    condition: DeviceCondition | None = None
    contact: DeviceState = DeviceState.HEALTHY
    """How it answered: ``healthy``, ``suspect`` (with an error), ``unresponsive`` (not since ``at``), ``lost``."""
    contact_reason: str | None = None

    def reading(self, metric: str, now: float, stale_after_s: float) -> Reading:
        """One metric as of ``now``.

        Raises:
            KeyError: no metric of that name.
        """
        unit, age = METRICS[metric].unit, max(0.0, now - self.at)
        value = self.values.get(metric)
        if value is None:
            return Reading(None, unit, age, self.unavailable[metric])
        if age > stale_after_s:
            return Reading(None, unit, age, STALE, value)
        return Reading(value, unit, age)

    @property
    def is_empty(self) -> bool:
        """The device answered, and told nothing of itself."""
        return not self.values and self.condition is None

    @property
    def memory_percent(self) -> float | None:
        """Used share of the memory, or None where used or total is not known."""
        total, used = self.values.get("memory_total_bytes"), self.values.get("memory_used_bytes")
        return None if total is None or used is None else 100 * used / total

    @property
    def throttled(self) -> bool | None:
        """Whether clocks are held down by anything but the power limit; None where that is not told."""
        throttle = self.condition.throttle if self.condition else None
        return None if throttle is None else bool(throttle & ABNORMAL_THROTTLES)

    def record(self, now: float, stale_after_s: float) -> dict[str, Any]:
        """JSON values: each metric with its value or reason, the age, and how the device answered."""
        readings = {metric: self.reading(metric, now, stale_after_s) for metric in METRICS}
        return {
            "device_id": self.device_id,
            "age_s": round(max(0.0, now - self.at), 3),
            "contact": str(self.contact),
            **{metric: reading.value for metric, reading in readings.items()},
            "throttled": self.throttled,
            "unavailable": {metric: reading.reason for metric, reading in readings.items() if reading.reason},
        }


def reason_words(reason: str | None) -> str | None:
    """Why there is no value, as people read it; None for a word that is none of the reasons."""
    return _WORDS.get(reason or "")


def checked(raw: RawReading) -> tuple[dict[str, int | float], dict[str, str], tuple[str, ...]]:
    """Values that can be true, reasons for all other metrics, and the metrics that told something impossible.

    A metric that the source itself has dropped as ``invalid`` is among the last, too.
    """
    values: dict[str, int | float] = {}
    reasons: dict[str, str] = {}
    for name, metric in METRICS.items():
        told = raw.values.get(name)
        if told is None:
            reasons[name] = raw.unavailable.get(name, "unsupported")
        elif (value := _number(told)) is not None and metric.low <= value <= metric.high:
            values[name] = value
        else:
            reasons[name] = INVALID
    total = values.get("memory_total_bytes")
    for name in _PARTS:
        if total is not None and values.get(name, 0) > total:
            del values[name]
            reasons[name] = INVALID
    return values, reasons, tuple(name for name, reason in reasons.items() if reason == INVALID)


def _number(told: object) -> int | float | None:
    """A plain number; NumPy's scalars are numbers too, truth values and text are not. NaN stays: no range has it."""
    if isinstance(told, bool) or not isinstance(told, numbers.Real):
        return None
    if isinstance(told, numbers.Integral):
        return int(told)
    try:
        return float(told)
    except OverflowError:
        return None
