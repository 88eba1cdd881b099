"""When to look again for a backend that could not be used: after 10 s, then 20, 40 … up to 5 minutes, and at once
when something was installed for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gpurt.discovery.registry import Attempts

FIRST_S: Final = 10.0
LONGEST_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    failures: int
    until: float
    mark: str | None


class Backoff:
    """Counts failures by backend.

    Args:
        clock: seconds, monotonic.
        wall: Unix time, only to remember across processes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._waiting: dict[str, _Waiting] = {}

    def failed(self, name: str, mark: str | None = None) -> None:
        """``mark`` says what was installed for it (:mod:`gpurt.discovery.installed`)."""
        before = self._waiting.get(name)
        failures = before.failures + 1 if before is not None and before.mark == mark else 1
        # The exponent is bounded as well: 2.0 ** 2000 is an error, not infinity.
        until = self._clock() + min(FIRST_S * 2.0 ** min(failures - 1, 10), LONGEST_S)
        self._waiting[name] = _Waiting(failures, until, mark)

    def succeeded(self, name: str) -> None:
        self._waiting.pop(name, None)

    def is_due(self, name: str, mark: str | None = None) -> bool:
        waiting = self._waiting.get(name)
        return waiting is None or waiting.mark != mark or self._clock() >= waiting.until

    def dump(self) -> dict[str, Attempts]:
        """For the registry."""
        ahead = self._wall() - self._clock()
        return {
            name: Attempts(failures=waiting.failures, retry_at=round(waiting.until + ahead, 3), mark=waiting.mark)
            for name, waiting in self._waiting.items()
        }

    def restore(self, attempts: Mapping[str, Attempts]) -> None:
        """From the registry. A wall clock that jumped delays by the longest delay at most."""
        for name, attempt in attempts.items():
            wait = min(max(attempt.retry_at - self._wall(), 0.0), LONGEST_S)
            self._waiting[name] = _Waiting(attempt.failures, self._clock() + wait, attempt.mark)
