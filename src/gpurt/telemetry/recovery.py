"""Memory after a release: waiting for it to come back, and noticing that it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

INTERVAL_S: Final = 0.25
"""Drivers give memory back within 0.5 to 1.5 s of its release, as Ollama's users and authors have measured."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of waiting."""

    recovered: bool
    free_bytes: int | None
    """As read last; None when it was never told."""
    waited_s: float


async def wait_for_memory(
    read_free: Callable[[], Awaitable[int | None]],
    wanted_bytes: int,
    *,
    deadline_s: float = 5.0,
    interval_s: float = INTERVAL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Recovery:
    """Wait until ``wanted_bytes`` are free, ``deadline_s`` at most, a reading that does not return included.

    Memory that does not come back is an answer, not an error. What ``read_free`` raises is raised.
    """
    began = clock()
    free: int | None = None
    patience = asyncio.ensure_future(_sleeping(sleep, deadline_s))
    try:
        while True:
            reading = asyncio.ensure_future(read_free())
            try:
                await asyncio.wait({reading, patience}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    return Recovery(False, free, clock() - began)
            finally:
                reading.cancel()
            free = reading.result()
            if free is not None and free >= wanted_bytes:
                return Recovery(True, free, clock() - began)
            left = began + deadline_s - clock()
            if left <= 0:
                return Recovery(False, free, clock() - began)
            await sleep(min(interval_s, left))
    finally:
        patience.cancel()


async def _sleeping(sleep: Callable[[float], Awaitable[object]], seconds: float) -> None:
    await sleep(seconds)


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory in use has grown with every cycle of loading and unloading."""

    grown_bytes: int
    cycles: int


class LeakDetector:
    """Compares the memory in use after each unload; one instance per device.

    Args:
        threshold_bytes: what is no growth, per cycle: caches of libraries settle over the first cycles.
        cycles: how many times in a row it must grow.
    """

    def __init__(self, *, threshold_bytes: int = 64 << 20, cycles: int = 3) -> None:
        if cycles < 1 or threshold_bytes < 0:
            raise ValueError("cycles must be at least 1 and threshold_bytes not negative")
        self._threshold, self._cycles = threshold_bytes, cycles
        self._last: int | None = None
        self._base = 0
        self._grown = 0

    def after_unload(self, used_bytes: int | None) -> Leak | None:
        """Take the memory in use after everything was unloaded; a leak when it has just become one, and again after
        as many cycles more. None, "not told", counts for nothing."""
        if used_bytes is None:
            return None
        last, self._last = self._last, used_bytes
        if last is None or used_bytes - last <= self._threshold:
            self._base, self._grown = used_bytes, 0
            return None
        self._grown += 1
        if self._grown % self._cycles:
            return None
        return Leak(used_bytes - self._base, self._grown)
