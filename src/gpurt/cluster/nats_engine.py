"""The bus between processes and machines, over a NATS server with JetStream.

The server is a program of its own: it keeps events on disk and repeats what a connection has missed, also for nodes
that have ended since. States and commands are questions to the node itself, so that what it answers is of the moment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from gpurt.cluster.answering import Answering
from gpurt.cluster.bus import (
    MAX_COMMAND_BYTES,
    MAX_STATE_BYTES,
    CommandHandler,
    HubAway,
    HubBack,
    NodeDown,
    NodeUp,
    OnAsked,
    StateReply,
    TakeReadings,
)
from gpurt.cluster.envelope import MAX_EVENT_BYTES, check_size
from gpurt.cluster.errors import BusClosed, BusUnavailable, ClusterError, NoAnswer
from gpurt.cluster.keys import ANY, COMMAND, EVENTS, STATE, check_name
from gpurt.cluster.nats_link import NatsLink, in_task, plain, within
from gpurt.cluster.nats_membership import NatsMembership, Tokens
from gpurt.cluster.nats_node import ENDED, LEFT, NatsNode
from gpurt.cluster.nats_outbox import NatsOutbox
from gpurt.cluster.nats_query import OTHERS_S, StateQuery, ask_command
from gpurt.cluster.nats_readings import NatsReadings, put_readings
from gpurt.cluster.nats_settings import NatsSettings, check_nats_endpoint, load_nats, stream_name, subject
from gpurt.cluster.nats_stream import have_stream
from gpurt.cluster.nats_subscription import NatsSubscription
from gpurt.cluster.readings import MAX_READINGS_BYTES
from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.security.protection import Protection
from gpurt.errors import GPUError

T = TypeVar("T")

GOODBYE_S: Final = 1.0
"""How long the last events and the word that a node ends may take."""


class NatsEngine:
    """
    Args:
        endpoint: ``nats://HOST:PORT`` of a server with JetStream.
        tls: folder with the certificate to show (:mod:`gpurt.cluster.security.enrolment`); read for each connection.
        insecure: without one, use a server on another machine all the same.

    Raises:
        InvalidName: cluster or endpoint malformed. InsecureEndpoint: other machines could reach the endpoint
            unprotected.
    """

    def __init__(
        self,
        *,
        cluster: str = "default",
        endpoint: str,
        settings: NatsSettings | None = None,
        tls: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        self._cluster = check_name(cluster, "cluster")
        self.endpoint = check_nats_endpoint(endpoint)
        check_protected(self.endpoint, tls=tls is not None, insecure=insecure)
        self.settings = settings or NatsSettings()
        self._protection = None if tls is None else Protection(tls, cluster, self.endpoint, listen=False)
        self._link: NatsLink | None = None
        self._opening: asyncio.Future[None] | None = None
        self._client: Any = None
        self._node: NatsNode | None = None
        self._outbox: NatsOutbox | None = None
        self._membership: NatsMembership | None = None
        self._answering: Answering | None = None
        self._subscriptions: list[NatsSubscription] = []
        self._readings: list[NatsReadings] = []
        self.on_return: Callable[[], None] | None = None
        self.on_quiet: Callable[[], None] | None = None
        self._away = False

    @property
    def cluster(self) -> str:
        return self._cluster

    # Lifecycle

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._opening is not None and self._opening.get_loop() is loop:
            await asyncio.wait({self._opening})
        if self._link is not None:
            return
        opening = self._opening = loop.create_future()
        link = self._link = NatsLink(
            self.endpoint, self.settings, self._protection, self._connected, self._disconnected
        )
        self._outbox = NatsOutbox(stream_name(self._cluster), self.settings)
        try:
            await link.open()
            if self._protection is not None:
                self._protection.remind()
        except BaseException:
            if self._link is link:
                self._link = None
            raise
        finally:
            self._opening = None
            opening.set_result(None)

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        if self._opening is not None and self._opening.get_loop() is asyncio.get_running_loop():
            await link.close()  # start() sees that it is closed
            return
        if self._protection is not None:
            self._protection.forget()
        self._answer_nothing()
        node, self._node = self._node, None
        for subscription in self._subscriptions:
            subscription.close()
        try:
            await within(GOODBYE_S, self._end(node, ENDED))
        finally:
            await link.close()
            self._subscriptions.clear()
            self._readings.clear()
            self._membership = None

    async def _connected(self, client: Any) -> None:
        # All at once: what is added from now on is declared by who adds it.
        self._client = client
        parts = [self._membership, *self._subscriptions, *self._readings, self._node, self._outbox]
        may_create = self._protection is None or self._protection.role is Role.MASTER
        await have_stream(client, self._cluster, self.settings, may_create=may_create)
        for subscription in self._subscriptions:
            subscription.post(HubBack())
        for part in parts:
            if part is not None:
                await part.connected(client)
        if self._away and self.on_return is not None:
            self.on_return()
        self._away = False

    def _disconnected(self) -> None:
        self._client, self._away = None, True
        # First: what the end of the connection means for each node is no news of that node.
        for subscription in self._subscriptions:
            subscription.post(HubAway())
        for part in (*self._subscriptions, self._membership, self._node, self._outbox):
            if part is not None:
                part.disconnected()

    # A node

    async def join(
        self, node: str, state: bytes, on_command: CommandHandler | None = None, on_asked: OnAsked | None = None
    ) -> None:
        self._running()
        check_name(node, "node")
        check_size(state, f"state of node {node}", MAX_STATE_BYTES)
        if self._node is not None:
            raise ClusterError(f"already joined as node {self._node.node}")
        if self._protection is not None:
            self._protection.check_node(node)
        self._answer_nothing()  # of a run before
        self._answering = None if on_command is None else Answering(on_command)
        joined = self._node = NatsNode(
            self._cluster, node, state, self._answering, on_asked, self.settings, self._asked_quietly
        )
        try:
            await self._declare(joined.connected)
        except BaseException:
            self._node = None
            await within(GOODBYE_S, joined.end(ENDED))
            raise

    async def leave(self) -> None:
        node, self._node = self._node, None
        if node is not None and self._link is not None:
            await within(GOODBYE_S, self._end(node, LEFT))

    async def _end(self, node: NatsNode | None, word: bytes) -> None:
        """The word comes last: who hears it has what was published before, or can have it."""
        assert self._outbox is not None
        await self._outbox.flush()
        if node is not None:
            await node.end(word)

    async def set_state(self, state: bytes) -> None:
        node = self._joined()
        check_size(state, f"state of node {node.node}", MAX_STATE_BYTES)
        node.state = state

    async def publish(self, payload: bytes) -> None:
        """Returns when the server has stored the event. While there is no server, when it is kept to be sent later."""
        node = self._joined()
        check_size(payload, f"event of node {node.node}", MAX_EVENT_BYTES)
        assert self._outbox is not None
        await self._outbox.put(subject(self._cluster, node.node, EVENTS), payload)

    async def publish_telemetry(self, payload: bytes) -> None:
        node = self._joined()
        check_size(payload, f"readings of node {node.node}", MAX_READINGS_BYTES)
        await put_readings(self._client, self._cluster, node.node, payload)

    # An observer

    async def follow_telemetry(self, take: TakeReadings) -> Callable[[], Awaitable[None]]:
        self._running()
        readings = NatsReadings(self._cluster, take)
        self._readings.append(readings)

        async def stop() -> None:
            if readings in self._readings:
                self._readings.remove(readings)
                await readings.end()

        try:
            await self._declare(readings.connected)
        except BaseException:
            await stop()
            raise
        return stop

    async def subscribe(self) -> NatsSubscription:
        self._running()
        subscription = NatsSubscription(self._cluster, self.settings, self._unsubscribe)
        self._subscriptions.append(subscription)
        try:
            for node in (await self._members()).nodes:
                subscription.post(NodeUp(node))
            await self._declare(subscription.connected)
        except BaseException:
            await self._unsubscribe(subscription)
            raise
        return subscription

    async def snapshot(self, node: str, *, timeout: float = 2.0, quiet: bool = False) -> tuple[StateReply, ...]:
        self._running()
        if node != ANY:
            return await self._states(check_name(node, "node"), timeout, quiet=quiet)
        if self._membership is None:
            await self._members()
            await asyncio.sleep(min(OTHERS_S, timeout))  # until they have said that they are there
        nodes = (await self._members()).nodes
        answers = await asyncio.gather(*(self._states(each, timeout, quiet=quiet) for each in nodes))
        return tuple(reply for replies in answers for reply in replies)

    async def command(self, node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        self._running()
        check_size(payload, f"command for node {node}", MAX_COMMAND_BYTES)
        to = subject(self._cluster, check_name(node, "node"), COMMAND)
        client = self._client
        if client is None:
            raise NoAnswer(f"node {node} cannot be asked: there is no NATS server at {self.endpoint} now")
        return await self._call(ask_command(client, node, to, payload, timeout))

    async def _states(self, node: str, timeout: float, *, quiet: bool) -> tuple[StateReply, ...]:
        client, members = self._client, self._membership
        if client is None:
            return ()
        query = StateQuery(node, lambda: 0 if members is None else members.tokens.count(node))
        answers = await self._call(query.ask(client, subject(self._cluster, node, STATE), timeout, quiet=quiet))
        return tuple(StateReply(node, answer, held) for answer, held in answers)

    async def _members(self) -> Tokens:
        members = self._membership
        if members is None:
            members = self._membership = NatsMembership(self._cluster, self.settings.lease_s, self._tell)
            await self._declare(members.connected)
        return members.tokens

    def _tell(self, item: NodeUp | NodeDown) -> None:
        for subscription in self._subscriptions:
            subscription.post(item)

    async def _unsubscribe(self, subscription: NatsSubscription) -> None:
        subscription.close()
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            await subscription.end()

    # Inside

    def _asked_quietly(self) -> None:
        if self.on_quiet is not None:
            self.on_quiet()

    def _answer_nothing(self) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def _running(self) -> None:
        if self._link is None or self._opening is not None:
            raise BusClosed("the bus is not started", hint="await engine.start()")

    def _joined(self) -> NatsNode:
        self._running()
        if self._node is None:
            raise ClusterError("this engine has not joined as a node", hint="await engine.join(node, state)")
        return self._node

    async def _declare(self, declare: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Now; or at the next connection, when there is none or it has just ended."""
        client = self._client
        if client is None:
            return
        try:
            await self._call(declare(client))
        except BusUnavailable:
            if not client.is_closed:
                raise

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        nats = load_nats()
        try:
            return await in_task(work)
        except GPUError:
            raise
        except (OSError, nats.errors.Error) as exc:
            raise BusUnavailable(f"the NATS server at {self.endpoint} refused: {plain(exc)}") from exc
