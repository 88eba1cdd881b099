"""Readings over NATS: no stream keeps them, and where the connection is congested they are dropped."""

from __future__ import annotations

import logging
from typing import Any, Final

from gpurt.cluster.bus import TakeReadings
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.keys import ANY, TELEMETRY
from gpurt.cluster.nats_settings import node_of_subject, subject
from gpurt.cluster.readings import MAX_READINGS_BYTES

CONGESTED_BYTES: Final = 1 << 20
"""What waits to be sent: events go first."""

_log = logging.getLogger("gpurt.cluster.nats")


async def put_readings(client: Any, cluster: str, node: str, payload: bytes) -> None:
    """Nothing where there is no connection."""
    if client is not None and client.is_connected and client.pending_data_size < CONGESTED_BYTES:
        await client.publish(subject(cluster, node, TELEMETRY), payload)


class NatsReadings:
    """``connected`` for each connection."""

    def __init__(self, cluster: str, take: TakeReadings) -> None:
        self._cluster, self._take_readings = cluster, take
        self._subscription: Any = None
        self._client: Any = None

    async def connected(self, client: Any) -> None:
        self._subscription = await client.subscribe(subject(self._cluster, ANY, TELEMETRY), cb=self._take)
        await client.flush()  # until the server knows
        self._client = client

    async def end(self) -> None:
        subscription, client = self._subscription, self._client
        self._subscription = None
        if subscription is not None and not client.is_closed:
            await subscription.unsubscribe()

    async def _take(self, message: Any) -> None:
        try:
            node = node_of_subject(message.subject)
        except InvalidName as exc:
            _log.warning("ignored: %s", exc)
            return
        if len(message.data) > MAX_READINGS_BYTES:
            _log.warning("ignored: readings of node %s of %d bytes", node, len(message.data))
            return
        self._take_readings(node, bytes(message.data))
