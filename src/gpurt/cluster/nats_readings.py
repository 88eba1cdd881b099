"""Readings over NATS: no stream keeps them, and where the connection is congested they are dropped."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gpurt.cluster.bus import TakeReadings
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.keys import ANY, TELEMETRY
from gpurt.cluster.nats_settings import node_of_subject, subject
from gpurt.cluster.readings_queue import ReadingsQueue

CONGESTED_BYTES: Final = 1 << 20
"""What waits to be sent: events go first."""


async def put_readings(client: Any, cluster: str, node: str, payload: bytes) -> None:
    """Nothing where there is no connection."""
    if client is not None and client.is_connected and client.pending_data_size < CONGESTED_BYTES:
        await client.publish(subject(cluster, node, TELEMETRY), payload)


class NatsReadings(ReadingsQueue):
    """``connected`` for each connection."""

    def __init__(self, cluster: str, take: TakeReadings) -> None:
        super().__init__(asyncio.get_running_loop(), take)
        self._cluster = cluster
        self._subscription: Any = None
        self._client: Any = None

    async def connected(self, client: Any) -> None:
        self._subscription = await client.subscribe(subject(self._cluster, ANY, TELEMETRY), cb=self._on_message)
        await client.flush()  # until the server knows
        self._client = client

    async def end(self) -> None:
        self.closed = True
        subscription, client = self._subscription, self._client
        self._subscription = None
        if subscription is not None and not client.is_closed:
            await subscription.unsubscribe()

    async def _on_message(self, message: Any) -> None:
        try:
            node = node_of_subject(message.subject)
        except InvalidName as exc:
            self.refuse(exc)
            return
        if self.admits(node, len(message.data)):
            self.put(node, bytes(message.data))
