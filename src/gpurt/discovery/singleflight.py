"""One run at a time, shared by everybody who wants it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from gpurt.errors import BackendClosed

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Runs coroutines one after the other; concurrent callers share the one in flight.

    Cancelling a caller leaves the run to the others; when the last is cancelled, the run is. Belongs to one event
    loop at a time.
    """

    def __init__(self) -> None:
        self._flight: _Flight[T] | None = None

    async def run(self, start: Callable[[], Coroutine[Any, Any, T]], *, thorough: int = 1) -> T:
        """The result of the run in flight, or of a new one. A caller does not share one that is less thorough.

        Raises:
            BackendClosed: ``stop`` was called meanwhile.
        """
        while True:
            flight = self._flight
            if flight is None or flight.over:
                flight = self._flight = _Flight(asyncio.ensure_future(start()), thorough)
            if flight.thorough >= thorough and not flight.abandoned:
                return await self._join(flight)
            await asyncio.wait({flight.task})

    async def stop(self, timeout: float) -> None:
        """Cancel the run in flight and wait up to ``timeout`` seconds until it has ended."""
        flight, self._flight = self._flight, None
        if flight is not None and not flight.over:
            flight.abandon()
            await asyncio.wait({flight.task}, timeout=timeout)

    async def _join(self, flight: _Flight[T]) -> T:
        flight.waiters += 1
        try:
            # Not the task itself: awaiting it would hand our cancellation on to it.
            await asyncio.wait({flight.task})
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                flight.abandon()
        if flight.task.cancelled():
            raise BackendClosed("discovery was shut down while it ran", operation="discover_all_devices")
        return flight.task.result()


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Future[T], thorough: int) -> None:
        self.task = task
        self.thorough = thorough
        self.waiters = 0
        self.abandoned = False

    @property
    def over(self) -> bool:
        """Ended, or left behind on an event loop that is no longer ours."""
        return self.task.done() or self.task.get_loop() is not asyncio.get_running_loop()

    def abandon(self) -> None:
        self.abandoned = True
        self.task.cancel()
