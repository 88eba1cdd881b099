"""A subscription in a zenoh session: the events and the liveliness tokens of every node of a cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from gpurt.cluster.bus import EventReceived, EventRefused, NodeDown, NodeUp
from gpurt.cluster.envelope import MAX_EVENT_BYTES
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.inbox import Inbox
from gpurt.cluster.keys import ANY, EVENTS, LIVE, leaf_of, node_key, node_of
from gpurt.cluster.log_limit import LimitedLog
from gpurt.cluster.zenoh_callbacks import SessionCallbacks

CHANNEL_EVENTS: Final = 8192
"""Between zenoh and the thread that takes them out. It takes whatever comes, so that it is full only while the
interpreter keeps that thread from running."""

PRESENT_S: Final = 10.0
"""For the hub to say which tokens are there."""

_log = logging.getLogger("gpurt.cluster.zenoh")


class ZenohSubscription(Inbox):
    """``declare`` and ``undeclare`` block and run on the engine's lane; callbacks run on zenoh's threads."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        capacity: int,
        on_close: Callable[[ZenohSubscription], Awaitable[None]],
    ) -> None:
        super().__init__(loop, capacity)
        self._on_close = on_close
        self._declared: list[Any] = []
        self._leaving: set[str] = set()
        self._warnings = LimitedLog(_log)

    def declare(self, zenoh: Any, callbacks: SessionCallbacks, session: Any, cluster: str) -> None:
        ext = zenoh.ext
        self._deleted = zenoh.SampleKind.DELETE
        # One old event per node, only so that the sequence numbers of the bus start there: without, the first
        # heartbeat would have each node's whole cache repeated, and with late-publisher detection a reconnection
        # would bring that one event instead of all that were missed.
        events = ext.declare_advanced_subscriber(
            session,
            node_key(cluster, ANY, EVENTS),
            zenoh.handlers.FifoChannel(CHANNEL_EVENTS),
            history=ext.HistoryConfig(max_samples=1),
            recovery=ext.RecoveryConfig(heartbeat=True, periodic_queries=None),
        )
        self._declared.append(events)
        callbacks.drain(events.handler, self._on_event)
        # One for both kinds of token: each subscriber has a thread, and between threads there is no order.
        self._declared.append(
            session.liveliness().declare_subscriber(
                node_key(cluster, ANY, ANY), callbacks.wrap(self._on_token), history=True
            )
        )

    def ask_who_is_there(
        self, callbacks: SessionCallbacks, session: Any, cluster: str, nobody: Callable[[], None]
    ) -> None:
        """Have a ``NodeUp`` come for every token that is there now. zenoh tells of tokens again after a reconnection,
        but on another thread than of the hub itself: what it tells may come before the word that the hub was away, and
        would count for nothing after it.

        Args:
            nobody: called on a thread of zenoh where there is none.
        """
        found = False

        def present(reply: Any) -> None:
            nonlocal found
            if reply.ok and (node := self._node_of(reply.ok)) is not None:
                found = True
                self.post(NodeUp(node))

        def end() -> None:
            if not found:
                nobody()

        key = node_key(cluster, ANY, LIVE)
        session.liveliness().get(key, callbacks.wrap(present, on_end=end), timeout=PRESENT_S)

    def undeclare(self) -> None:
        while self._declared:
            self._declared.pop().undeclare()

    async def aclose(self) -> None:
        await self._on_close(self)

    def _on_event(self, sample: Any) -> None:
        node = self._node_of(sample)
        if node is None:
            return
        payload = sample.payload
        size = len(payload)
        if not size:
            return  # a mark, which zenoh has looked at
        if size > MAX_EVENT_BYTES:
            self.post(EventRefused(node, size))
        elif self.admits(node, size):
            self.keep(EventReceived(node, payload.to_bytes()), size)

    def _on_token(self, sample: Any) -> None:
        node = self._node_of(sample)
        if node is None:
            return
        gone = sample.kind == self._deleted
        if leaf_of(str(sample.key_expr)) == LIVE:
            self.post(NodeDown(node, node in self._leaving) if gone else NodeUp(node))
        elif gone:
            self._leaving.discard(node)
        else:
            self._leaving.add(node)

    def _node_of(self, sample: Any) -> str | None:
        try:
            return node_of(str(sample.key_expr))
        except InvalidName as exc:
            self._warnings.warning("zenoh", "ignored: %s", exc)
            return None
