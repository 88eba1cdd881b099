"""Alerts: once when a value crosses a line, once when it is back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurt.health.policy import is_finite_number
from gpurt.telemetry.reading import METRICS, Sample


@dataclass(frozen=True, slots=True)
class AlertRule:
    """Fires when ``metric`` (or ``memory_percent``) is above ``above``, or below ``below``; exactly one is given.

    It is over when the value is back by ``margin``, so that a value at the line fires once and not at every reading.
    A value that is not known neither fires nor ends an alert.

    Raises:
        ValueError: no name, no such metric, or a bound or margin that is no finite number.
    """

    name: str
    metric: str
    above: float | None = None
    below: float | None = None
    margin: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"an alert's name must be a text, not {self.name!r}")
        if (self.above is None) == (self.below is None):
            raise ValueError(f"alert {self.name!r} needs one of above and below")
        if self.metric != "memory_percent" and self.metric not in METRICS:
            known = ", ".join((*METRICS, "memory_percent"))
            raise ValueError(f"alert {self.name!r}: there is no metric {self.metric!r}; there are {known}")
        for what, value in (("above", self.above), ("below", self.below), ("margin", self.margin)):
            # NaN compares as false with everything, so such an alert would never fire and never say why.
            if value is not None and not is_finite_number(value):
                raise ValueError(f"alert {self.name!r}: {what} must be a finite number, not {value!r}")
        if self.margin < 0:
            raise ValueError(f"alert {self.name!r}: margin must not be negative, but is {self.margin!r}")

    def is_crossed(self, value: float, *, active: bool) -> bool:
        margin = self.margin if active else 0.0
        if self.above is not None:
            return value > self.above - margin
        assert self.below is not None
        return value < self.below + margin


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule has begun to hold for a device (``active``), or is over."""

    rule: AlertRule
    device_id: str
    active: bool
    value: float
    at: float
    """Seconds of the collector's clock when the device was asked."""


class Alerts:
    """The rules, and where they hold at present."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        names = [rule.name for rule in rules]
        if len(set(names)) != len(names):
            raise ValueError(f"alerts need different names: {', '.join(names)}")
        self.rules = tuple(rules)
        self._active: set[tuple[str, str]] = set()

    def judge(self, sample: Sample) -> tuple[Alert, ...]:
        """The alerts that one sample begins or ends."""
        found: list[Alert] = []
        for rule in self.rules:
            value = _value(rule, sample)
            if value is None:
                continue
            key = (rule.name, sample.device_id)
            was = key in self._active
            holds = rule.is_crossed(value, active=was)
            if holds is not was:
                (self._active.add if holds else self._active.discard)(key)
                found.append(Alert(rule, sample.device_id, holds, value, sample.at))
        return tuple(found)

    def is_known(self, rule: AlertRule, sample: Sample) -> bool:
        """Whether ``sample`` tells what the rule is about."""
        return _value(rule, sample) is not None

    def is_active(self, rule: AlertRule, device_id: str) -> bool:
        return (rule.name, device_id) in self._active


def _value(rule: AlertRule, sample: Sample) -> float | None:
    return sample.memory_percent if rule.metric == "memory_percent" else sample.values.get(rule.metric)
