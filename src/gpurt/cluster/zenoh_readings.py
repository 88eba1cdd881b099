"""Readings over zenoh: dropped rather than queued."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Final

from gpurt.cluster.bus import TakeReadings
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.keys import ANY, TELEMETRY, node_key, node_of
from gpurt.cluster.readings import MAX_READINGS_BYTES
from gpurt.cluster.zenoh_callbacks import SessionCallbacks

MAX_WAITING: Final = 1024
"""Messages that the loop may be behind: four of each node of a large cluster."""

_log = logging.getLogger("gpurt.cluster.zenoh")


def put_readings(zenoh: Any, session: Any, cluster: str, node: str, payload: bytes) -> None:
    """On the engine's lane. Behind events, and dropped where the link is congested."""
    session.put(
        node_key(cluster, node, TELEMETRY),
        payload,
        congestion_control=zenoh.CongestionControl.DROP,
        priority=zenoh.Priority.DATA_LOW,
    )


class ZenohReadings:
    """Readings on their way from zenoh's threads to ``take`` on the loop: one wake-up for many, and a loop that is slow
    gets the newest."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: TakeReadings) -> None:
        self._loop, self._take = loop, take
        self._waiting = deque[tuple[str, bytes]](maxlen=MAX_WAITING)
        self._woken = False
        self._declared: Any = None
        self.closed = False

    def declare(self, callbacks: SessionCallbacks, session: Any, cluster: str) -> None:
        key = node_key(cluster, ANY, TELEMETRY)
        self._declared = session.declare_subscriber(key, callbacks.wrap(self._on_sample))

    def undeclare(self) -> None:
        declared, self._declared = self._declared, None
        if declared is not None:
            declared.undeclare()

    def _on_sample(self, sample: Any) -> None:
        try:
            node = node_of(str(sample.key_expr))
        except InvalidName as exc:
            _log.warning("ignored: %s", exc)
            return
        size = len(sample.payload)
        if size > MAX_READINGS_BYTES:
            _log.warning("ignored: readings of node %s of %d bytes", node, size)
            return
        self._waiting.append((node, sample.payload.to_bytes()))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        self._woken = False  # first: what comes from now on wakes again
        while self._waiting:
            node, payload = self._waiting.popleft()
            if not self.closed:
                self._take(node, payload)
