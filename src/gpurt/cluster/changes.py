"""Bounded fan-out of what changes in a view, to any number of consumers on one event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

BUFFER_CHANGES: Final = 1024


class ChangeKind(StrEnum):
    NODE_JOINED = "node_joined"
    NODE_UPDATED = "node_updated"
    """Summary, host or reports of the node, whether it is draining; also a new run of its process."""
    NODE_SUSPECT = "node_suspect"
    NODE_UNKNOWN = "node_unknown"
    """The hub is away."""
    NODE_LOST = "node_lost"
    NODE_BACK = "node_back"
    NODE_LEFT = "node_left"
    NODE_FORGOTTEN = "node_forgotten"
    NODE_PLACEMENT = "node_placement"
    """What the node holds of models."""
    NODE_LINKS = "node_links"
    """What the node has measured of its ways to others."""
    DEVICE_ADDED = "device_added"
    DEVICE_UPDATED = "device_updated"
    DEVICE_HEALTH = "device_health"
    """Its own state. That it is not available because of its node, the node's change says."""
    DEVICE_REMOVED = "device_removed"
    CONFLICT = "conflict"
    CONFLICT_OVER = "conflict_over"
    PLAN_TROUBLE = "plan_trouble"
    """Nodes follow a plan only in part, or two plans at once; also when others are concerned than before. Of no one
    node."""
    PLAN_TROUBLE_OVER = "plan_trouble_over"
    TERM_DOUBTED = "term_doubted"
    """A node names a term that does not count, because no other names one near it."""
    MISSED = "missed"
    """This consumer was too slow: look at ``view.snapshot()`` again."""


@dataclass(frozen=True, slots=True)
class Change:
    kind: ChangeKind
    node: str | None = None
    device: str | None = None
    """Key of the device within the node."""
    message: str | None = None
    """For people, where there is more to say."""
    missed: int = 0
    """With ``MISSED``: how many changes."""
    minor: bool = False
    """Of a node or a device that was updated: only what moves by itself (free memory, clocks, when devices were looked
    up). To people it is no news."""


class Changes:
    """What changed since this object was made: ``async for change in changes``. For one consumer.

    A cancelled ``__anext__`` loses nothing. Ends after ``close``.
    """

    def __init__(self, limit: int) -> None:
        self._queue: deque[Change] = deque()
        self._limit = limit
        self._missed = 0
        self._wake: asyncio.Event | None = None
        self._closed = False

    def post(self, change: Change) -> None:
        if self._missed or len(self._queue) >= self._limit:
            # From the first one missed on, each one more would only be a puzzle with a piece missing.
            self._missed += 1
        else:
            self._queue.append(change)
        self._notify()

    def close(self) -> None:
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while True:
            if self._queue:
                return self._queue.popleft()
            if self._missed:
                missed, self._missed = self._missed, 0
                return Change(ChangeKind.MISSED, missed=missed)
            if self._closed:
                raise StopAsyncIteration
            # Made here and not before: the view itself knows no loop.
            self._wake = asyncio.Event()
            await self._wake.wait()


class ChangeFeed:
    """Where a view posts. Consumers that went away without ``close`` are forgotten."""

    def __init__(self) -> None:
        self._consumers: set[weakref.ref[Changes]] = set()
        """Not a WeakSet: whether it is empty is asked twice for every event."""

    def open(self, limit: int = BUFFER_CHANGES) -> Changes:
        consumer = Changes(limit)
        self._consumers.add(weakref.ref(consumer, self._consumers.discard))
        return consumer

    @property
    def watched(self) -> bool:
        """Somebody consumes: it is worth making a change."""
        return bool(self._consumers)

    def post(self, change: Change) -> None:
        for known in tuple(self._consumers):
            consumer = known()
            if consumer is not None:
                consumer.post(change)
