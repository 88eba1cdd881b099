"""Noticing that the machine has slept.

On Linux one clock goes on while the machine sleeps (``CLOCK_BOOTTIME``) and one does not (``CLOCK_MONOTONIC``). Neither
is ever set, so that a wall clock that jumps is no sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LEAST_S: Final = 1.0
"""A shorter sleep is not told from two clocks read one after the other on a busy machine."""


def boottime() -> float | None:
    """Seconds since the machine was started, sleep included; None where no clock tells."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime(clock)


class SleepClock:
    """
    Args:
        with_sleep: seconds that go on while the machine sleeps, or None where there is no such clock.
        awake: seconds that do not.
    """

    def __init__(
        self, with_sleep: Callable[[], float | None] = boottime, awake: Callable[[], float] = time.monotonic
    ) -> None:
        self._with_sleep, self._awake = with_sleep, awake
        self._ahead = self._difference()

    def slept_s(self) -> float:
        """Seconds that the machine has slept since this was asked last; 0.0 for less than one second, and where that
        cannot be known."""
        before, self._ahead = self._ahead, self._difference()
        if before is None or self._ahead is None or self._ahead - before < LEAST_S:
            return 0.0
        return self._ahead - before

    def _difference(self) -> float | None:
        with_sleep = self._with_sleep()
        return None if with_sleep is None else with_sleep - self._awake()
