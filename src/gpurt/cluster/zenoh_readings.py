"""Readings over zenoh: dropped rather than queued."""

from __future__ import annotations

import asyncio
from typing import Any

from gpurt.cluster.bus import TakeReadings
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.keys import ANY, TELEMETRY, node_key, node_of
from gpurt.cluster.readings_queue import ReadingsQueue
from gpurt.cluster.zenoh_callbacks import SessionCallbacks


def put_readings(zenoh: Any, session: Any, cluster: str, node: str, payload: bytes) -> None:
    """On the engine's lane. Behind events, and dropped where the link is congested."""
    session.put(
        node_key(cluster, node, TELEMETRY),
        payload,
        congestion_control=zenoh.CongestionControl.DROP,
        priority=zenoh.Priority.DATA_LOW,
    )


class ZenohReadings(ReadingsQueue):
    """A subscription to readings; callbacks come on zenoh's threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: TakeReadings) -> None:
        super().__init__(loop, take)
        self._declared: Any = None

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
            self.refuse(exc)
            return
        if self.admits(node, len(sample.payload)):
            self.put(node, sample.payload.to_bytes())
