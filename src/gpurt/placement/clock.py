"""The time a search has."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

_LONGEST: Final = 1e9
"""Seconds, decades, that stand for as long as it takes: of infinity no share can be kept back."""


class Clock:
    """How long there is, and whether anybody still wants the answer."""

    def __init__(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        seconds = min(seconds, _LONGEST)
        self.begin = monotonic()
        # What is left over is for the plan itself, its check, and for engines that look at the clock only now and then.
        self.deadline = self.begin + seconds - max(0.04 * seconds, _step(seconds))
        self.cancelled = cancelled

    @property
    def left(self) -> float:
        return self.deadline - monotonic()

    @property
    def spent(self) -> float:
        return monotonic() - self.begin

    def over(self) -> bool:
        return monotonic() >= self.deadline or self.cancelled()

    def part(self, seconds: float) -> Clock:
        """A clock for a part of the work, up to so many seconds; nothing is kept back again for what comes behind."""
        part = Clock(seconds, self.cancelled)
        part.deadline = min(self.deadline, part.begin + seconds - _step(seconds))
        return part

    def slice(self, seconds: float) -> Callable[[], bool]:
        """True once so many seconds are gone, or the whole time is."""
        until = min(self.deadline, monotonic() + seconds)
        return lambda: monotonic() >= until or self.cancelled()


def _step(seconds: float) -> float:
    """Seconds kept back for engines that have just looked at the clock."""
    return min(0.03, 0.3 * seconds)
