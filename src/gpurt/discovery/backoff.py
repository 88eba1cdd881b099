"""When to look again for a backend that could not be used: after 10 s, then 20, 40 … up to 5 minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from gpurt.discovery.registry import Attempts

FIRST_S: Final = 10.0
LONGEST_S: Final = 300.0


class Backoff:
    """Counts failures by backend.

    Args:
        clock: seconds, monotonic.
        wall: Unix time, only to remember across processes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._waiting: dict[str, tuple[int, float]] = {}

    def failed(self, name: str) -> None:
        failures = self._waiting.get(name, (0, 0.0))[0] + 1
        # The exponent is bounded as well: 2.0 ** 2000 is an error, not infinity.
        self._waiting[name] = (failures, self._clock() + min(FIRST_S * 2.0 ** min(failures - 1, 10), LONGEST_S))

    def succeeded(self, name: str) -> None:
        self._waiting.pop(name, None)

    def is_due(self, name: str) -> bool:
        return name not in self._waiting or self._clock() >= self._waiting[name][1]

    def dump(self) -> dict[str, Attempts]:
        """For the registry."""
        ahead = self._wall() - self._clock()
        return {
            name: Attempts(failures=failures, retry_at=round(at + ahead, 3))
            for name, (failures, at) in self._waiting.items()
        }

    def restore(self, attempts: Mapping[str, Attempts]) -> None:
        """From the registry. A wall clock that jumped delays by the longest delay at most."""
        for name, attempt in attempts.items():
            wait = min(max(attempt.retry_at - self._wall(), 0.0), LONGEST_S)
            self._waiting[name] = (attempt.failures, self._clock() + wait)
