"""ReadingsBoard: the newest readings of every device of a cluster, as an observer has heard them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.errors import MalformedEvent
from gpurt.cluster.readings import DeviceReadings, decode_readings

_log = logging.getLogger("gpurt.cluster.observer")


class ReadingsBoard:
    """Hears readings within ``async with``. Bounded by the devices that there are: forget nodes that are gone.

    Args:
        engine: started.
        clock: seconds, monotonic: ages are counted on from what a node told by this clock, never by any wall clock.
    """

    def __init__(self, engine: EventEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._heard: dict[str, dict[str, tuple[float, DeviceReadings]]] = {}
        self._epochs: dict[str, str] = {}
        self._stop: Callable[[], Awaitable[None]] | None = None
        self.refused = 0
        """Messages that were no readings."""

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

    def forget(self, node: str) -> None:
        """A node that is gone."""
        self._heard.pop(node, None)
        self._epochs.pop(node, None)

    def _take(self, node: str, payload: bytes) -> None:
        try:
            told = decode_readings(payload, node=node)
        except MalformedEvent as exc:
            self.refused += 1
            _log.warning("ignored: %s", exc)
            return
        if self._epochs.get(node) != told.epoch:
            self.forget(node)  # another run of the node: what an earlier one told is over
            self._epochs[node] = told.epoch
        now = self._clock()
        self._heard.setdefault(node, {}).update({each.device: (now, each) for each in told.devices})
