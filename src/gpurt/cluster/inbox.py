"""The way from a bus library's own thread to one consumer on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Self

from gpurt.cluster.bus import BusItem, EventsDropped, HubAway, HubBack, NodeDown, NodeUp

CAPACITY: Final = 8192
"""Events that a subscriber may be behind."""
CROWD: Final = 32
"""Items found at once from which on more are expected at once."""
CROWD_WAIT_S: Final = 0.001
"""Before the consumer of a crowd asks to be woken: woken by each event, two threads would hand the GIL to and fro,
which takes more time than the events."""


class Inbox:
    """Bounded, filled from any thread without ever blocking it, emptied by one task.

    One wake-up is in flight at most: per event it would cost three to four times as much. Membership never
    counts against the bound; only the latest word on each node is kept.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int = CAPACITY) -> None:
        self._loop = loop
        self._capacity = capacity
        # No lock: the consumer must not wait for a thread that the interpreter has paused. Every step on these
        # containers is atomic, and only the consumer takes out.
        self._items: deque[BusItem] = deque()
        self._membership: dict[str, BusItem] = {}
        self._dropped_of: dict[str, None] = {}
        self._waking = False
        self._taken = 0
        """Since the consumer last waited."""
        self._closed = False
        self._ready = asyncio.Event()
        self.dropped = 0

    def post(self, item: BusItem) -> None:
        """Any thread; one at a time for the events."""
        if self._closed:
            return
        if isinstance(item, (NodeUp, NodeDown, HubAway, HubBack)):
            self._membership[item.node] = item
        elif len(self._items) >= self._capacity:
            self.dropped += 1
            self._dropped_of[item.node] = None
        else:
            self._items.append(item)
        self._wake()

    def close(self) -> None:
        """What is in it can still be read; then the iteration ends. Any thread."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # After the item is in: the consumer clears the flag before its last look.
        if self._waking:
            return
        self._waking = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is closed: there is no consumer any more
            self._closed = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BusItem:
        while True:
            item = self._take()
            if item is None and self._taken >= CROWD:
                self._taken = 0
                await asyncio.sleep(CROWD_WAIT_S)
                item = self._take()
            if item is None:
                self._taken = 0
                self._ready.clear()
                self._waking = False
                item = self._take()
            if item is not None:
                self._taken += 1
                return item
            if self._closed:
                raise StopAsyncIteration
            await self._ready.wait()

    def _take(self) -> BusItem | None:
        if self._membership:
            if "" in self._membership:  # of the hub: what it means for all nodes comes before the news of each
                return self._membership.pop("")
            # popitem, not the first key: an iterator fails when the other thread adds a node between two steps.
            return self._membership.popitem()[1]
        if self._dropped_of:
            return EventsDropped(self._dropped_of.popitem()[0])
        return self._items.popleft() if self._items else None
