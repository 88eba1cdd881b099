"""Copies that take the event loop's own thread: where the way to a lane and back costs ten times the copy.

Only for drivers whose memory is ordinary memory of this process (``Driver.inline_copy_bytes``), and only for buffers
that are sure to be in memory: the loop must never wait for a library, a disk or a network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

YIELD_AFTER_S: Final = 0.0001
"""A copy that ends so late in a turn of the loop ends its task's part in the turn: who copies in a loop must not keep
the others waiting, nor be deaf to a cancellation. Time for 25 copies of 4 KiB, which make little of a turn's cost."""

STOP_AFTER_S: Final = 0.0003
"""So late in a turn no copy is made any more: what is left of many callers takes the lane, which serves them a few at a
time. With 0.5 ms the gaps of the loop beside 64 callers that never rest grew from 2 to 3 ms (p99)."""


class LoopTurn:
    """The present turn of one event loop, as far as inline copies have used it. Loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loop = loop
        self._clock = clock
        self._began: float | None = None
        """When the first copy of the turn was made."""

    def has_room(self) -> bool:
        """Whether another copy may be made in this turn."""
        if self._began is None:
            self._began = self._clock()
            self._loop.call_soon(self._end)
            return True
        return self._clock() - self._began < STOP_AFTER_S

    async def give_way(self) -> None:
        """After a copy: let the others have their turn if it is time."""
        if self._began is not None and self._clock() - self._began >= YIELD_AFTER_S:
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._began = None


def in_memory(buffer: object) -> bool:
    """Whether the bytes of ``buffer`` are certainly this process's own anonymous memory.

    A mapped file is not: touching it may wait for a disk. An array knows whether it owns its memory; a slice does not
    tell whose it is.
    """
    return isinstance(buffer, bytes | bytearray) or getattr(getattr(buffer, "flags", None), "owndata", False) is True
