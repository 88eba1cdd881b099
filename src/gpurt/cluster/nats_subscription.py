"""A subscription on a NATS server: events out of the stream, membership from the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final
from uuid import uuid4

from gpurt.cluster.bus import EventReceived, EventRefused, EventsDropped
from gpurt.cluster.envelope import MAX_EVENT_BYTES
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.inbox import Inbox
from gpurt.cluster.keys import ANY, EVENTS
from gpurt.cluster.nats_settings import NatsSettings, header, load_nats, node_of_subject, stream_name, subject

SIGN_OF_LIFE_S: Final = 1.0
"""How often a consumer without news says that it is there."""
SILENT_S: Final = 3.5
"""Without any sign of it, a consumer is made anew."""

_log = logging.getLogger("gpurt.cluster.nats")


class NatsSubscription(Inbox):
    """``connected`` for each connection, ``disconnected`` at its end.

    The consumer is an ordered one: it begins anew behind the last event that came, whenever one is missing, so each
    comes once. What the stream does not have any more is announced.
    """

    def __init__(
        self,
        cluster: str,
        settings: NatsSettings,
        on_close: Callable[[NatsSubscription], Awaitable[None]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop, settings.inbox_events)
        self._cluster, self._settings, self._on_close = cluster, settings, on_close
        self._seen: set[str] = set()
        self._client: Any = None
        self._subscription: Any = None
        self._consumer = ""
        self._last: int | None = None
        """Number in the stream of the last event that came, or was there when this began."""
        self._count = 0
        """Events that the present consumer has delivered."""
        self._heard = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()

    async def aclose(self) -> None:
        await self._on_close(self)

    async def connected(self, client: Any) -> None:
        self._client = client
        await self._begin(client)
        self._watching = asyncio.create_task(self._watch(client), name="gpurt-nats-consumer")

    def disconnected(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._client, self._subscription, self._watching = None, None, None

    async def end(self) -> None:
        """The server drops the consumer when nobody listens any more."""
        subscription, client = self._subscription, self._client
        self.disconnected()
        if subscription is not None and not client.is_closed:
            await subscription.unsubscribe()

    async def _begin(self, client: Any) -> None:
        nats, stream = load_nats(), stream_name(self._cluster)
        api = nats.js.api
        manager = client.jetstream(timeout=self._settings.answer_timeout_s)
        policy, first = api.DeliverPolicy.NEW, None
        if self._last is not None:
            policy, first = await self._where(manager, api, self._last)
        old, inbox, consumer = self._subscription, client.new_inbox(), uuid4().hex
        self._consumer, self._count, self._heard = consumer, 0, self._loop.time()
        self._lost.clear()

        async def take(message: Any) -> None:
            if self._consumer == consumer:
                self._receive(message)

        self._subscription = await client.subscribe(inbox, cb=take)
        if old is not None:
            await old.unsubscribe()
        config = api.ConsumerConfig(
            name=consumer,
            deliver_subject=inbox,
            filter_subject=subject(self._cluster, ANY, EVENTS),
            deliver_policy=policy,
            opt_start_seq=first,
            ack_policy=api.AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            max_deliver=1,
            idle_heartbeat=SIGN_OF_LIFE_S,
            inactive_threshold=5.0,
        )
        made = await manager.add_consumer(stream, config=config)
        if self._last is None:
            self._last = made.delivered.stream_seq

    async def _where(self, manager: Any, api: Any, last: int) -> tuple[Any, int | None]:
        """Behind ``last``, as far as the stream still has what came there."""
        state = (await manager.stream_info(stream_name(self._cluster))).state
        another = state.last_seq < last
        if another or state.first_seq > last + 1:
            _log.warning("events are missing in the stream of cluster %s: their nodes are asked", self._cluster)
            for node in self._seen:
                self.post(EventsDropped(node))
        return (api.DeliverPolicy.ALL, None) if another else (api.DeliverPolicy.BY_START_SEQUENCE, last + 1)

    async def _watch(self, client: Any) -> None:
        nats = load_nats()
        while True:
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await self._lost.wait()
            except TimeoutError:
                if self._loop.time() - self._heard < SILENT_S:
                    continue
            try:
                _log.info("the consumer of events begins anew behind number %s of the stream", self._last)
                await self._begin(client)
            except (OSError, TimeoutError, nats.errors.Error) as exc:
                if client.is_closed:
                    return
                _log.warning("events cannot be had from the NATS server, which is asked again: %s", exc)
                await asyncio.sleep(SIGN_OF_LIFE_S)
                self._lost.set()

    def _receive(self, message: Any) -> None:
        self._heard = self._loop.time()
        if header(message, "Status"):
            # A sign of life, with the number of events before it.
            if int(header(message, "Nats-Last-Consumer") or 0) != self._count:
                self._lost.set()
            return
        if self._lost.is_set():
            return
        number = message.metadata.sequence
        if number.consumer != self._count + 1:
            self._lost.set()
            return
        self._count, self._last = number.consumer, number.stream
        try:
            node = node_of_subject(message.subject)
        except InvalidName as exc:
            _log.warning("ignored: %s", exc)
            return
        size = len(message.data)
        self._seen.add(node)
        self.post(EventRefused(node, size) if size > MAX_EVENT_BYTES else EventReceived(node, bytes(message.data)))
