"""ReadingsBoard: the newest readings of every device of a cluster, as an observer has heard them."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import InvalidName, MalformedEvent
from gpurt.cluster.log_limit import LimitedLog
from gpurt.cluster.message_limits import Refusals
from gpurt.cluster.readings import DeviceReadings, decode_readings
from gpurt.cluster.view import MAX_DEVICES, MAX_NODES

SILENT_S: Final = 60.0
"""After so long, twice the time within which a node repeats all its readings, a run is over: one with an earlier number
that is heard then is of a node that has lost its registry and counts from 1 again."""

_log = logging.getLogger("gpurt.cluster.observer")


class ReadingsBoard:
    """Hears readings within ``async with``: those of :data:`MAX_NODES` nodes at most, the ones heard last.

    Args:
        engine: started.
        clock: seconds, monotonic: ages are counted on from what a node told by this clock, never by any wall clock.
        refusals: where values beyond all limits are counted.
    """

    def __init__(
        self,
        engine: EventEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
        refusals: Refusals | None = None,
    ) -> None:
        self._engine = engine
        self._refusals = refusals
        self._warnings = LimitedLog(_log, clock=clock)
        self._clock = clock
        self._heard: dict[str, dict[str, tuple[float, DeviceReadings]]] = {}
        self._runs: dict[str, tuple[str, float]] = {}
        """Which run of a node these are of, and when it was heard last."""
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._feeds: weakref.WeakSet[ReadingsFeed] = weakref.WeakSet()
        self.refused = 0
        """Messages that were no readings."""
        self.stale = 0
        """Messages of an earlier run than the one that is heard."""

    async def __aenter__(self) -> Self:
        self._stop = await self._engine.follow_telemetry(self._take)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            await stop()

    def readings(self, node: str) -> dict[str, DeviceReadings]:
        """By device, each with its age as of now; empty for a node that has told nothing."""
        now = self._clock()
        return {
            key: readings.model_copy(update={"age_s": readings.age_s + max(0.0, now - at)})
            for key, (at, readings) in self._heard.get(node, {}).items()
        }

    def changes(self, min_interval_s: float = 1.0) -> ReadingsFeed:
        """Names of nodes whose values are others than before, from this call on, for one consumer of this loop: of each
        node at most every ``min_interval_s`` seconds, and the newest then. What was told already is the first news."""
        feed = ReadingsFeed(self._values, self._clock, min_interval_s)
        for node in self._heard:
            feed.heard(node)
        self._feeds.add(feed)
        return feed

    def forget(self, node: str) -> None:
        """A node that is gone."""
        self._heard.pop(node, None)
        self._runs.pop(node, None)

    def _take(self, node: str, payload: bytes) -> None:
        try:
            told = decode_readings(payload, node=node, refusals=self._refusals)
        except MalformedEvent as exc:
            self.refused += 1
            self._warnings.warning(node, "ignored: %s", exc)
            return
        now = self._clock()
        run = self._runs.get(node)
        if run is not None and run[0] != told.epoch:
            if _earlier(told.epoch, run[0]) and now - run[1] < SILENT_S:
                self.stale += 1
                return
            self.forget(node)  # another run of the node: what an earlier one told is over
        self._runs[node] = told.epoch, now
        heard = self._heard.pop(node, {})  # to the end: the first is the one that has been silent for longest
        for each in told.devices:
            if each.device in heard or len(heard) < MAX_DEVICES:
                heard[each.device] = (now, each)
        self._heard[node] = heard
        if len(self._heard) > MAX_NODES:
            self.forget(next(iter(self._heard)))
        for feed in tuple(self._feeds):
            feed.heard(node)

    def _values(self, node: str) -> Mapping[str, DeviceReadings]:
        """What a node has told, without ages."""
        return {key: each.model_copy(update={"age_s": 0.0}) for key, (_, each) in self._heard.get(node, {}).items()}


def _earlier(epoch: str, known: str) -> bool:
    try:
        return Epoch.parse(epoch) < Epoch.parse(known)
    except InvalidName:
        return False  # no node of ours: it has no order, and the latest word counts


class ReadingsFeed:
    """Names of nodes with new readings: ``async for node in board.changes()``. Never ends.

    However slow its consumer is, it holds one entry for each node. A cancelled ``__anext__`` loses nothing.
    """

    def __init__(
        self, values: Callable[[str], Mapping[str, DeviceReadings]], clock: Callable[[], float], min_interval_s: float
    ) -> None:
        if not min_interval_s >= 0:
            raise ValueError(f"min_interval_s must not be negative: {min_interval_s!r}")
        self._values, self._clock, self._min_interval_s = values, clock, min_interval_s
        self._waiting: dict[str, None] = {}
        self._told: dict[str, tuple[float, Mapping[str, DeviceReadings]]] = {}
        self._wake: asyncio.Event | None = None

    def heard(self, node: str) -> None:
        """A node has told something."""
        self._waiting[node] = None
        if self._wake is not None:
            self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            node, pause = self._next()
            if node is not None:
                return node
            self._wake = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    def _next(self) -> tuple[str | None, float | None]:
        """A node to tell now, or the seconds until one may be told; None for as long as nobody says anything."""
        now = self._clock()
        pauses: list[float] = []
        for node in tuple(self._waiting):
            values = self._values(node)
            at, before = self._told.get(node, (float("-inf"), {}))
            if values == before:
                del self._waiting[node]
            elif (left := at + self._min_interval_s - now) > 0:
                pauses.append(left)
            else:
                del self._waiting[node]
                if values:
                    self._told[node] = (now, values)
                    return node, None
                self._told.pop(node, None)  # forgotten meanwhile
        return None, min(pauses, default=None)
