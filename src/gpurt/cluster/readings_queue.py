"""Readings between a bus and the loop: in turns between nodes, and of each as much as it may send."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from gpurt.cluster.bus import TakeReadings
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.inbox import MAX_LINES, FairQueue
from gpurt.cluster.log_limit import LimitedLog
from gpurt.cluster.readings import MAX_READINGS_BYTES

NODE_WAITING: Final = 128
"""Messages of one node that the loop may be behind: one round of 8,192 devices."""
NODE_BYTES: Final = 4 << 20
BURST: Final = 256
"""Messages that a node may send at once: two rounds of the most devices it may have, and as many for who asks."""
PER_SECOND: Final = 64
"""Afterwards: a round of four thousand devices every second."""
AT_ONCE: Final = 32
"""Messages taken before events get their turn."""

_log = logging.getLogger("gpurt.cluster.observer")


class ReadingsQueue:
    """Readings on their way to ``take`` on the loop: one wake-up for many, in turns between nodes, and of each node as
    much as it may send. What is beyond is dropped, as the network may do, and counted.

    Args:
        loop: the one that takes.
        clock: monotonic seconds.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, take: TakeReadings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop, self._take, self._clock = loop, take, clock
        self._waiting: FairQueue[tuple[str, bytes]] = FairQueue(NODE_WAITING, node_bytes=NODE_BYTES)
        self._budgets: dict[str, tuple[float, float]] = {}
        """Messages that a node may send now, and when that was so."""
        self._woken = False
        self._warnings = LimitedLog(_log, clock=clock)
        self.dropped = 0
        """Messages of nodes that sent more than they may."""
        self.closed = False

    def admits(self, node: str, size: int) -> bool:
        """There is room, and the node has sent no more than it may. Any thread, one at a time."""
        now = self._clock()
        left, at = self._budgets.get(node, (float(BURST), now))
        left = min(float(BURST), left + (now - at) * PER_SECOND)
        if size <= MAX_READINGS_BYTES and left >= 1 and self._waiting.admits(node, size):
            if len(self._budgets) >= MAX_LINES:
                self._budgets.clear()
            self._budgets[node] = left - 1, now
            return True
        self._budgets[node] = left, now
        self.dropped += 1
        self._warnings.warning(
            node, "ignored: readings of node %s of %d bytes: too large, or too many at once", node, size
        )
        return False

    def put(self, node: str, payload: bytes) -> None:
        """What was admitted."""
        self._waiting.put(node, (node, payload), len(payload))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._hand_over)

    def refuse(self, why: InvalidName) -> None:
        """It came under no node's key."""
        self._warnings.warning("bus", "ignored: %s", why)

    def _hand_over(self) -> None:
        self._woken = False  # first: what comes from now on wakes again
        for _ in range(AT_ONCE):
            item = self._waiting.take()
            if item is None:
                return
            if not self.closed:
                self._take(*item)
        if not self._woken:  # events get their turn
            self._woken = True
            self._loop.call_soon(self._hand_over)
