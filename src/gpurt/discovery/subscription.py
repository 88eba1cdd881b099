"""A subscriber's events: bounded, in order, and honest about what was dropped."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.result import DiscoveryResult
from gpurt.errors import BackendClosed


class Subscription:
    """An async iterator of events.

    It drives discovery itself: while a subscriber waits, devices are looked up as often as it asked. One that does
    not read for long loses events; it then gets one ``snapshot`` in their place, with ``reason`` ``"overflow"``.
    Ends when the service shuts down. One task at a time may iterate.
    """

    def __init__(
        self,
        poll: Callable[[], Awaitable[object]],
        seconds_to_poll: Callable[[], float],
        current: Callable[[], DiscoveryResult | None],
        maximum: int,
    ) -> None:
        self._poll = poll
        self._seconds_to_poll = seconds_to_poll
        self._current = current
        self._maximum = maximum
        self._events: deque[DeviceEvent] = deque()
        self._greeted = False
        self._overflowed = False
        self._closed = False
        self._wake: asyncio.Event | None = None
        self._looking: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeviceEvent:
        while True:
            if self._overflowed:
                self._overflowed = False
                self._events.clear()
                return DeviceEvent(type=EventType.SNAPSHOT, snapshot=self._current(), reason="overflow")
            if self._events:
                return self._events.popleft()
            if self._closed:
                raise StopAsyncIteration
            await self._wait()

    def publish(self, events: Sequence[DeviceEvent], *, since: DiscoveryResult | None, at_once: bool = True) -> None:
        """Hand over ``events``, which happened after ``since``. On the event loop.

        Args:
            at_once: False: who waits for a look-up of its own gets them when that has ended, and the registry knows
                them, too.
        """
        if not self._greeted and since is not None:
            events = (DeviceEvent(type=EventType.SNAPSHOT, snapshot=since), *events)
        self._greeted = True
        if len(self._events) + len(events) > self._maximum:
            self._overflowed = True
        else:
            self._events.extend(events)
        if at_once or self._looking is None:
            self.wake()

    def stored(self, timestamp: str, *, persisted: bool) -> None:
        """The registry has the look-up of ``timestamp`` or has not: a snapshot of it that nobody has read says so."""
        for position, event in enumerate(self._events):
            snapshot = event.snapshot
            if snapshot is not None and snapshot.timestamp == timestamp and snapshot.persisted is not persisted:
                now = snapshot.model_copy(update={"persisted": persisted})
                self._events[position] = event.model_copy(update={"snapshot": now})

    def close(self) -> None:
        """End the iteration after what is queued."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """Whoever waits here looks whether a look-up is due. On the event loop."""
        if self._wake is not None:
            self._wake.set()

    async def _wait(self) -> None:
        """Until there may be something to read; looks devices up when it is time."""
        delay = self._seconds_to_poll()
        if self._looking is None and delay <= 0:
            self._looking = asyncio.ensure_future(self._look())
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            looked.result()
            return
        self._wake = asyncio.Event()
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            # A look-up may take as long as its slowest backend, and there may be something to tell before that.
            waited = {woken} if self._looking is None else {woken, self._looking}
            await asyncio.wait(waited, timeout=None if self._looking else delay, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Who goes away does not end the look-up: it is over soon, and whoever reads with a short timeout, or reads
            # again, would never see the end of one.
            woken.cancel()
            self._wake = None

    async def _look(self) -> None:
        try:
            await self._poll()
        except BackendClosed:
            if not self._closed:
                raise
