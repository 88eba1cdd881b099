"""A clock that only sleeping moves, for simulated devices whose transfers last as long as their links need."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from gpurt.runtime.backend import DriverBackend
from gpurt.testing.profiles import Profile
from gpurt.testing.simulated import SimulatedDriver


class FakeClock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 1000.0

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


def modelled(profiles: Iterable[Profile], clock: FakeClock) -> DriverBackend:
    """A backend of simulated devices that sleep by their model on ``clock``."""
    return DriverBackend(SimulatedDriver(profiles, realtime=True, clock=clock, sleep=clock.sleep))
