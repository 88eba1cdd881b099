"""A node's presence in a zenoh session: event publisher, state and command queryables, liveliness token.

Every function here blocks and runs on the engine's lane; callbacks run on zenoh's threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from gpurt.cluster.bus import MAX_COMMAND_BYTES, held_text
from gpurt.cluster.envelope import CONTENT_TYPE
from gpurt.cluster.keys import COMMAND, EVENTS, FLUSH, LEAVING, LIVE, STATE, node_key
from gpurt.cluster.zenoh_callbacks import SessionCallbacks
from gpurt.cluster.zenoh_settings import ZenohSettings

FLUSH_TIMEOUT_S: Final = 0.2
"""A hub of the same machine answers within 3 ms."""

_log = logging.getLogger("gpurt.cluster.zenoh")


class ZenohNode:
    """
    Args:
        on_command: called on a thread of zenoh with the payload and the query, which it must answer and drop;
            False when it cannot take it.
        on_asked: called on a thread of zenoh when the state was asked for; with True, by who uses the same name.
    """

    def __init__(
        self,
        zenoh: Any,
        callbacks: SessionCallbacks,
        cluster: str,
        node: str,
        state: bytes,
        on_command: Callable[[bytes, Any], bool] | None,
        on_asked: Callable[[bool], None],
    ) -> None:
        self.node = node
        self._since = time.monotonic()
        self.state = state
        """What the state queryable answers with; replaced as a whole, from any thread."""
        self._zenoh = zenoh
        self._callbacks = callbacks
        self._key = {leaf: node_key(cluster, node, leaf) for leaf in (COMMAND, EVENTS, FLUSH, LEAVING, LIVE, STATE)}
        self._on_command, self._on_asked = on_command, on_asked
        self._publisher: Any = None
        self._declared: list[Any] = []

    def declare(self, session: Any, settings: ZenohSettings) -> None:
        """Appear. The token comes last: who sees it can have the state."""
        zenoh, ext = self._zenoh, self._zenoh.ext
        try:
            self._publisher = ext.declare_advanced_publisher(
                session,
                self._key[EVENTS],
                encoding=CONTENT_TYPE,
                congestion_control=zenoh.CongestionControl.BLOCK,
                cache=ext.CacheConfig(settings.cache_events),
                # One after the last event, none while nothing happens: those of a thousand nodes would be a third of
                # the messages that an idle hub reads.
                sample_miss_detection=ext.MissDetectionConfig(heartbeat=None, sporadic_heartbeat=settings.heartbeat_s),
            )
            self._declared.append(self._publisher)
            self._declared.append(session.declare_queryable(self._key[STATE], self._callbacks.wrap(self._answer_state)))
            if self._on_command is not None:
                answer = self._callbacks.wrap(self._answer_command)
                self._declared.append(session.declare_queryable(self._key[COMMAND], answer))
            self._declared.append(session.liveliness().declare_token(self._key[LIVE]))
        except BaseException:
            self.undeclare()
            raise

    def move(self, callbacks: SessionCallbacks) -> None:
        """To another session, in which it will be declared next."""
        self._callbacks = callbacks

    def put(self, payload: bytes) -> None:
        """Send one event; blocks while the link is congested."""
        self._publisher.put(payload)

    def mark(self) -> None:
        """Send an event without content. Whoever has missed events sees by the bus's own number of this one that they
        did, and has them repeated from the cache: an observer whose connection was cut asks for the state when it
        sees the token again, and may have missed the heartbeat after the last event."""
        if self._declared:
            self._publisher.put(b"")

    def leave(self, session: Any) -> None:
        """Disappear on purpose, once the hub has what was put. A hub that does not answer is waited for 0.2 s."""
        zenoh = self._zenoh
        answered = threading.Event()

        def ignore(reply: Any) -> None:
            """Nobody serves this key."""

        try:
            session.get(
                self._key[FLUSH],
                self._callbacks.wrap(ignore, on_end=answered.set),
                priority=zenoh.Priority.DATA,  # that of events: the same queue
                congestion_control=zenoh.CongestionControl.BLOCK,
                timeout=FLUSH_TIMEOUT_S,
            )
            if not answered.wait(FLUSH_TIMEOUT_S):
                _log.info("node %s leaves although the hub has not acknowledged its last events", self.node)
            # The end of a token overtakes events, and who sees it before the goodbye would take the node for dead.
            # Another token does not: tokens come and go in their order.
            leaving = session.liveliness().declare_token(self._key[LEAVING])
            self.undeclare()
            leaving.undeclare()
        finally:
            self.undeclare()

    def undeclare(self) -> None:
        """Disappear: the token first."""
        while self._declared:
            self._declared.pop().undeclare()

    def reply(self, query: Any, payload: bytes, *, error: bool = False) -> None:
        """Answer a command and let go of its query."""
        with query:
            if error:
                query.reply_err(payload)
            else:
                query.reply(self._key[COMMAND], payload)

    def _answer_state(self, query: Any) -> None:
        with query:
            quiet = query.payload is not None
            query.reply(self._key[STATE], self.state, attachment=held_text(self._since))
        self._on_asked(quiet)

    def _answer_command(self, query: Any) -> None:
        payload = query.payload
        size = 0 if payload is None else len(payload)
        if size > MAX_COMMAND_BYTES:
            self.reply(query, f"command of {size} bytes, over the limit of {MAX_COMMAND_BYTES}".encode(), error=True)
            return
        assert self._on_command is not None
        if not self._on_command(b"" if payload is None else payload.to_bytes(), query):
            self.reply(query, b"busy or closing", error=True)
