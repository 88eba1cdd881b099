"""When the next look-up is due, and how thorough it must be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum


class Care(IntEnum):
    """How thorough a look-up is."""

    POLL = 0
    """Leave backends alone whose back-off time has not passed."""
    ASK = 1
    """Ask every backend; believe what was verified before."""
    VERIFY = 2
    """Believe nothing."""


class Pace:
    """Between look-ups of one service; on its event loop.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked_at: float | None = None
        self._wanted: Care | None = None
        self._attended: Care | None = None
        """What the look-up under way was wanted for."""
        self._resting: set[asyncio.Event] = set()

    @property
    def care(self) -> Care:
        """What the next look-up must be at least."""
        return self._wanted or Care.POLL

    def want(self, care: Care) -> None:
        """Something has changed: look up now, and at least so thoroughly."""
        self._wanted = care if self._wanted is None else max(self._wanted, care)
        self.wake()

    def begin(self, care: Care) -> None:
        """A look-up begins: what changes from now on is for another one."""
        if self._wanted is not None and self._wanted <= care:
            self._attended, self._wanted = self._wanted, None

    def ended(self, *, complete: bool) -> None:
        """A look-up has ended. What one that was given up was wanted for is wanted still."""
        attended, self._attended = self._attended, None
        if complete:
            self._looked_at = self._clock()
        elif attended is not None:
            self.want(attended)

    def seconds_left(self, period: float) -> float:
        """Until the next look-up of somebody who wants one every ``period`` seconds."""
        if self._wanted is not None or self._looked_at is None:
            return 0.0
        return self._looked_at + period - self._clock()

    async def rest(self, seconds: float) -> None:
        """Until ``seconds`` have passed, or somebody calls ``wake``."""
        if self._wanted is not None:
            return
        awake = asyncio.Event()
        self._resting.add(awake)
        try:
            async with asyncio.timeout(seconds):
                await awake.wait()
        except TimeoutError:
            return
        finally:
            self._resting.discard(awake)

    def wake(self) -> None:
        for awake in tuple(self._resting):
            awake.set()
