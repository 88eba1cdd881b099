"""A simulated link, over which bytes take their time."""

from __future__ import annotations

import threading


class Wire:
    """A wire: transfers take turns, each for as long as its bytes take."""

    def __init__(self, gbps: float, latency_s: float) -> None:
        self._seconds_per_byte = 1e-9 / gbps
        self._latency_s = latency_s
        self._free_at = float("-inf")
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, now: float) -> float:
        """When a transfer asked for at ``now`` ends."""
        with self._lock:
            self._free_at = max(now, self._free_at) + self._latency_s + nbytes * self._seconds_per_byte
            return self._free_at
