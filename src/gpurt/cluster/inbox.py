"""The way from a bus library's own thread to one consumer on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final, Generic, Self, TypeVar

from gpurt.cluster.bus import BusItem, EventReceived, EventsDropped, HubAway, HubBack, NodeDown, NodeUp

T = TypeVar("T")

CAPACITY: Final = 8192
"""Events of one node that a subscriber may be behind."""
NODE_BYTES: Final = 16 << 20
"""The same in bytes: 64 of the largest events."""
TOTAL_BYTES: Final = 256 << 20
"""Of all nodes together: past it, each node has an equal share. A master's memory is bounded whatever nodes send."""
ITEM_BYTES: Final = 512
"""What an item takes beside its payload."""
TURN_BYTES: Final = 16 << 10
"""A node whose item is larger lets the others have as many turns as it is times as large."""
WORDS: Final = 4
"""On membership and on events that were dropped, before an event gets its turn."""
MAX_LINES: Final = 8192
"""Nodes that are remembered while nothing of them waits."""
CROWD: Final = 32
"""Items found at once from which on more are expected at once."""
CROWD_WAIT_S: Final = 0.001
"""Before the consumer of a crowd asks to be woken: woken by each event, two threads would hand the GIL to and fro,
which takes more time than the events."""


class _Line(Generic[T]):
    """What waits of one node. ``put`` has one writer, the thread that fills; all else but ``waiting`` the one that
    empties."""

    __slots__ = ("debt", "items", "put", "taken", "waiting")

    def __init__(self) -> None:
        self.items: deque[tuple[int, T]] = deque()
        self.put = self.taken = 0
        """Bytes, ever."""
        self.debt = 0
        """Bytes that it has had beyond its turns."""
        self.waiting = False
        """It is in the ring."""


class FairQueue(Generic[T]):
    """Items of several nodes: each node's in their order, and between nodes in turns by bytes. What one node sends
    delays an item of another by one turn, however much it is. Filled by one thread at a time, emptied by another one.

    Args:
        node_items: of one node at once; more are refused.
        node_bytes: the same in bytes.
        total_bytes: of all nodes, past which each has an equal share.
    """

    def __init__(
        self, node_items: int = CAPACITY, *, node_bytes: int = NODE_BYTES, total_bytes: int = TOTAL_BYTES
    ) -> None:
        self._node_items, self._node_bytes, self._total_bytes = node_items, node_bytes, total_bytes
        # No lock: the consumer must not wait for a thread that the interpreter has paused. Every step on these
        # containers is atomic. A node that gets into the ring twice has a turn too many, once.
        self._lines: dict[str, _Line[T]] = {}
        self._ring: deque[_Line[T]] = deque()
        self._put = self._taken = 0

    def admits(self, node: str, size: int) -> bool:
        """There is room for an item of so many bytes. Where there is none, its payload need not be copied."""
        line = self._lines.get(node)
        if line is None or not line.items:
            return True  # each node may have one, whatever there is of others
        if len(line.items) >= self._node_items:
            return False
        most = self._node_bytes
        if self._put - self._taken > self._total_bytes:
            most = min(most, self._total_bytes // len(self._lines))
        return line.put - line.taken + size + ITEM_BYTES <= most

    def put(self, node: str, item: T, size: int) -> None:
        """At the end of the node's own."""
        size += ITEM_BYTES
        line = self._lines.get(node)
        if line is None:
            if len(self._lines) >= MAX_LINES:
                # Names that nobody has anything of any more. One that gets something just now loses it, which its next
                # event shows.
                self._lines = {name: each for name, each in self._lines.items() if each.items or each.waiting}
            line = self._lines[node] = _Line()
        line.put += size
        self._put += size
        line.items.append((size, item))
        if not line.waiting:
            line.waiting = True
            self._ring.append(line)

    def take(self) -> T | None:
        """The next one; None: there is none."""
        ring = self._ring
        while ring:
            line = ring.popleft()
            if not line.items:
                self._leave(line)
                continue
            if line.debt > TURN_BYTES and ring:
                line.debt -= TURN_BYTES
                ring.append(line)
                continue
            size, item = line.items.popleft()
            line.taken += size
            self._taken += size
            line.debt = max(0, line.debt - TURN_BYTES) + size if ring else 0
            if line.items:
                ring.append(line)
            else:
                self._leave(line)
            return item
        return None

    def _leave(self, line: _Line[T]) -> None:
        """It has nothing any more, unless something has come meanwhile."""
        line.waiting = False
        if line.items and not line.waiting:
            line.waiting = True
            self._ring.append(line)


class Inbox:
    """Bounded for each node and for all, filled from any thread without ever blocking it, emptied by one task: no node
    waits for what another has sent before (:class:`FairQueue`).

    One wake-up is in flight at most: per event it would cost three to four times as much. Membership never
    counts against the bound; only the latest word on each node is kept.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int = CAPACITY) -> None:
        self._loop = loop
        self._items: FairQueue[BusItem] = FairQueue(capacity)
        self._membership: dict[str, BusItem] = {}
        self._dropped_of: dict[str, None] = {}
        self._words = 0
        """Taken since the last event."""
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
            self._wake()
            return
        size = len(item.payload) if isinstance(item, EventReceived) else 0
        if self.admits(item.node, size):
            self.keep(item, size)

    def keep(self, item: BusItem, size: int) -> None:
        """One that was admitted."""
        self._items.put(item.node, item, size)
        self._wake()

    def admits(self, node: str, size: int) -> bool:
        """There is room for an event of so many bytes; where there is none, that is counted and told. Any thread."""
        if self._items.admits(node, size):
            return True
        self.dropped += 1
        self._dropped_of[node] = None
        self._wake()
        return False

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
        # In turns with events: whose token comes and goes at full speed, and whose events are dropped so, does not keep
        # all others waiting.
        if self._words < WORDS and (item := self._word()) is not None:
            self._words += 1
            return item
        self._words = 0
        item = self._items.take()
        return self._word() if item is None else item

    def _word(self) -> BusItem | None:
        if "" in self._membership:  # of the hub: what it means for all nodes comes before the news of each
            return self._membership.pop("")
        if (node := _first(self._membership)) is not None:
            return self._membership.pop(node)
        if (node := _first(self._dropped_of)) is not None:
            del self._dropped_of[node]
            return EventsDropped(node)
        return None


def _first(names: Mapping[str, object]) -> str | None:
    """The one that is there for longest, while another thread adds more."""
    while names:
        try:
            return next(iter(names))
        except RuntimeError:  # one was added between two steps
            continue
    return None
