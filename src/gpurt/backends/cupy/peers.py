"""Which devices of a process reach each other's memory: asked, and enabled, once for each ordered pair."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from gpurt.backends.cupy.runtime import ERROR_PEER_ACCESS_ALREADY_ENABLED, PEERS_REFUSED_STATUSES

log = logging.getLogger("gpurt.cupy")


class Peers:
    """Of one driver; any thread.

    Args:
        name: the backend's, for the log.
        select: makes a device the calling thread's, and gives the runtime.
        retain: makes a device's context.
    """

    def __init__(self, name: str, select: Callable[[int], Any], retain: Callable[[int], None]) -> None:
        self._name = name
        self._select = select
        self._retain = retain
        self._access: dict[tuple[int, int], bool] = {}
        self._lock = threading.Lock()

    def reach(self, src_index: int, dst_index: int) -> bool:
        """Whether ``src_index`` reaches ``dst_index`` directly; enabled on first use.

        Raises:
            CUDARuntimeError: for another reason than that the pair has no such access.
        """
        pair = (src_index, dst_index)
        with self._lock:
            if pair not in self._access:
                self._access[pair] = self._enable(src_index, dst_index)
            return self._access[pair]

    def known(self, src_index: int, dst_index: int) -> bool | None:
        """What ``reach`` has found; None before its first answer. Never waits."""
        return self._access.get((src_index, dst_index))

    def forget(self) -> None:
        """Ask again next time. What is enabled stays so: contexts outlive the driver."""
        self._access.clear()

    def _enable(self, src_index: int, dst_index: int) -> bool:
        runtime = self._select(src_index)
        here, there = f"{self._name}:{src_index}", f"{self._name}:{dst_index}"
        if not runtime.deviceCanAccessPeer(src_index, dst_index):
            log.info("%s cannot reach %s: copies go through the host", here, there)
            return False
        self._retain(dst_index)
        try:
            runtime.deviceEnablePeerAccess(dst_index)
        except runtime.CUDARuntimeError as exc:
            if exc.status in PEERS_REFUSED_STATUSES:
                log.info("%s may not reach %s, copies go through the host: %s", here, there, exc)
                return False
            # By another library of this process, or by us before a close().
            if exc.status != ERROR_PEER_ACCESS_ALREADY_ENABLED:
                raise
        return True
