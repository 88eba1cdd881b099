"""A node's presence on a NATS server: who it is, its state, its commands.

Who is there tells so by beats, each with the token of this process and connection. A process that freezes is noticed by
their absence. One that dies is noticed within 0.1 s by the server, which keeps a consumer for as long as the connection
lasts and tells everybody of its end; it bears the token's name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final
from uuid import uuid4

from gpurt.cluster.answering import Answering
from gpurt.cluster.bus import MAX_COMMAND_BYTES, OnAsked, held_text
from gpurt.cluster.errors import BusUnavailable
from gpurt.cluster.keys import COMMAND, LIVE, STATE
from gpurt.cluster.nats_settings import TOKEN, NatsSettings, load_nats, stream_name, subject, who_subject

PART_BYTES: Final = 512 << 10
"""A state goes in pieces of this size: a server takes messages of 1 MiB unless it was told otherwise."""
PART: Final = "Gpurt-Part"
"""Header of a piece: token, number of the piece, number of pieces."""
HELD: Final = "Gpurt-Held"
"""Header of a piece: for how many seconds its sender has held the name."""
ERROR: Final = "Gpurt-Error"
"""Header of a reply that is the text of an error."""
CONSUMER: Final = "live_"
"""A token's consumer: this and the token."""

UP, LEFT, ENDED = b"up", b"left", b"ended"
"""First words of a beat; the token follows. ``ended``: without a goodbye."""

_log = logging.getLogger("gpurt.cluster.nats")


class NatsNode:
    """``connected`` for each connection, and ``disconnected`` at its end."""

    def __init__(
        self,
        cluster: str,
        node: str,
        state: bytes,
        answering: Answering | None,
        on_asked: OnAsked | None,
        settings: NatsSettings,
        on_quiet: OnAsked,
    ) -> None:
        self.node, self.state = node, state
        self._since = time.monotonic()
        self._cluster, self._settings = cluster, settings
        self._answering, self._on_asked, self._on_quiet = answering, on_asked, on_quiet
        self._live = subject(cluster, node, LIVE)
        self._client: Any = None
        self._subscriptions: list[Any] = []
        self._token = ""
        self._beating: asyncio.Task[None] | None = None

    async def connected(self, client: Any) -> None:
        """Appear. The beat comes last: who hears it can have the state."""
        self._token = uuid4().hex
        inbox = client.new_inbox()
        wanted = {
            inbox: _ignore,
            subject(self._cluster, self.node, STATE): self._answer_state,
            who_subject(self._cluster): self._answer_who,
        }
        if self._answering is not None:
            wanted[subject(self._cluster, self.node, COMMAND)] = self._answer_command
        for on, take in wanted.items():
            self._subscriptions.append(await client.subscribe(on, cb=take))
        await self._show_token(client, inbox)
        self._client = client
        await self._beat(client, UP)
        self._beating = asyncio.create_task(self._keep_beating(client), name="gpurt-nats-beat")

    def disconnected(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        self._client, self._beating = None, None
        self._subscriptions.clear()

    async def end(self, word: bytes) -> None:
        """Disappear: ``LEFT`` or ``ENDED``."""
        client, subscriptions = self._client, tuple(self._subscriptions)
        self.disconnected()
        if client is not None and client.is_connected:
            # First nobody can ask any more: who hears the word and looks finds nobody.
            for subscription in subscriptions:
                await subscription.unsubscribe()
            await self._beat(client, word)

    async def _show_token(self, client: Any, inbox: str) -> None:
        """A consumer that never has anything to deliver, and ends with the subscription to ``inbox``."""
        nats, name = load_nats(), stream_name(self._cluster)
        api = nats.js.api
        config = api.ConsumerConfig(
            name=CONSUMER + self._token,
            deliver_subject=inbox,
            filter_subject=subject(self._cluster, self.node, TOKEN),
            deliver_policy=api.DeliverPolicy.NEW,
            ack_policy=api.AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=self._settings.closed_s,
        )
        try:
            await client.jetstream(timeout=self._settings.answer_timeout_s).add_consumer(name, config=config)
        except nats.js.errors.APIError as exc:
            _log.warning(
                "the end of node %s would be noticed after %g s only: %s",
                self.node,
                self._settings.lease_s,
                exc.description,
            )

    async def _keep_beating(self, client: Any) -> None:
        nats = load_nats()
        try:
            while True:
                await asyncio.sleep(self._settings.lease_s / 4)
                await self._beat(client, UP)
        except (OSError, nats.errors.Error) as exc:
            _log.debug("no beats until the next connection: %r", exc)  # whoever watches the connection tells of it

    async def _beat(self, client: Any, word: bytes) -> None:
        await client.publish(self._live, b"%s %s" % (word, self._token.encode()))

    async def _answer_who(self, _: Any) -> None:
        client = self._client
        if client is not None:
            await self._beat(client, UP)

    async def _answer_state(self, message: Any) -> None:
        client, state, token = self._client, self.state, self._token
        if client is None or not message.reply:
            return
        held = held_text(self._since).decode()
        count = max(1, -(-len(state) // PART_BYTES))
        for number in range(count):
            part = state[number * PART_BYTES : (number + 1) * PART_BYTES]
            await client.publish(message.reply, part, headers={PART: f"{token} {number} {count}", HELD: held})
        if message.data:
            self._on_quiet()
        elif self._on_asked is not None:
            self._on_asked()

    async def _answer_command(self, message: Any) -> None:
        assert self._answering is not None
        client = self._client
        if client is None or not message.reply:
            return

        async def reply(payload: bytes, error: bool) -> None:
            nats = load_nats()
            try:
                await client.publish(message.reply, payload, headers={ERROR: "1"} if error else None)
            except (OSError, nats.errors.Error) as exc:
                raise BusUnavailable(f"the connection has ended: {exc!r}") from exc

        size = len(message.data)
        if size > MAX_COMMAND_BYTES:
            await reply(f"command of {size} bytes, over the limit of {MAX_COMMAND_BYTES}".encode(), True)
        else:
            self._answering.take(message.data, reply)


async def _ignore(_: Any) -> None:
    """Nothing is ever delivered here."""
