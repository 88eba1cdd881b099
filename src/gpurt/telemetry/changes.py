"""Which readings differ enough to be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpurt.health.policy import is_finite_number
from gpurt.telemetry.reading import Sample
from gpurt.types import DeviceState


class Aspect(StrEnum):
    """What of a device has changed."""

    FIRST = "first"
    """Its first sample; all of it is news."""
    CONTACT = "contact"
    """It answers no longer, again, or in another way."""
    THROTTLE = "throttle"
    MEMORY = "memory"
    TEMPERATURE = "temperature"
    UTILIZATION = "utilization"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """How much a value must differ, strictly, from what was told last.

    Raises:
        ValueError: one that is negative or no finite number.
    """

    memory_points: float = 1.0
    """Points of used memory in percent of the total."""
    temperature_c: float = 5.0
    utilization_points: float = 10.0

    def __post_init__(self) -> None:
        for what in ("memory_points", "temperature_c", "utilization_points"):
            value = getattr(self, what)
            if not is_finite_number(value) or value < 0:
                raise ValueError(f"{what} must be a finite number and not negative, not {value!r}")


@dataclass(frozen=True, slots=True)
class TelemetryChange:
    """One device has changed. ``sample`` is all that is known of it now, ``previous`` what was told before."""

    device_id: str
    aspects: frozenset[Aspect]
    sample: Sample
    previous: Sample | None


AT_ONCE: Final = frozenset({Aspect.FIRST, Aspect.CONTACT})
"""Never held back: each is one event for one change of state."""


def compare(told: Sample | None, sample: Sample, thresholds: Thresholds) -> frozenset[Aspect]:
    """What of ``sample`` is news after ``told``. A value that comes or goes is news: None is not 0."""
    if told is None:
        return frozenset({Aspect.FIRST})
    if told.contact is not sample.contact:
        return frozenset({Aspect.CONTACT})
    if sample.contact is not DeviceState.HEALTHY:
        return frozenset()  # no device, no values
    found: set[Aspect] = set()
    if told.throttled is not sample.throttled:
        found.add(Aspect.THROTTLE)
    if _memory_differs(told, sample, thresholds.memory_points):
        found.add(Aspect.MEMORY)
    if _differs(told, sample, "temperature_c", thresholds.temperature_c):
        found.add(Aspect.TEMPERATURE)
    if _differs(told, sample, "utilization_percent", thresholds.utilization_points):
        found.add(Aspect.UTILIZATION)
    return frozenset(found)


def _differs(told: Sample, sample: Sample, metric: str, threshold: float) -> bool:
    a, b = told.values.get(metric), sample.values.get(metric)
    if a is None or b is None:
        return a is not b
    return abs(a - b) > threshold


def _memory_differs(told: Sample, sample: Sample, points: float) -> bool:
    total = sample.values.get("memory_total_bytes")
    if told.values.get("memory_total_bytes") != total:
        return True
    # In bytes: percentages are rounded, and a change of exactly one point must not be told. Without a total there are
    # no points, and only a value that comes or goes is news.
    return _differs(told, sample, "memory_used_bytes", float("inf") if total is None else points * total / 100)
