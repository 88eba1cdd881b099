"""Who is there, as an observer hears it: beats, the end of tokens, silence."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, Final

from gpurt.cluster.bus import NodeDown, NodeUp
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.keys import ANY, LIVE
from gpurt.cluster.nats_node import CONSUMER, LEFT, UP
from gpurt.cluster.nats_settings import node_of_subject, stream_name, subject, who_subject

MAX_TOKENS: Final = 8
"""Processes under one name."""

_BEAT = re.compile(rb"(up|left|ended) ([0-9a-f]{32})")
_log = logging.getLogger("gpurt.cluster.nats")


class Tokens:
    """Which processes of which nodes live. No I/O; time comes in by argument, in seconds of one clock.

    Args:
        tell: of each change.
    """

    def __init__(self, lease_s: float, tell: Callable[[NodeUp | NodeDown], None]) -> None:
        self._lease_s, self._tell = lease_s, tell
        self._nodes: dict[str, dict[str, float]] = {}
        """Node, token, when it was heard last."""
        self._owner: dict[str, str] = {}

    @property
    def nodes(self) -> list[str]:
        return list(self._nodes)

    def count(self, node: str) -> int:
        return len(self._nodes.get(node, ()))

    def owner(self, token: str) -> str | None:
        return self._owner.get(token)

    def heard(self, node: str, token: str, now: float) -> None:
        if self._owner.get(token, node) != node:
            _log.warning("ignored: node %s shows the token of node %s", node, self._owner[token])
            return
        tokens = self._nodes.setdefault(node, {})
        known = token in tokens
        if not known and len(tokens) >= MAX_TOKENS:
            _log.warning("ignored: node %s has %d processes already", node, len(tokens))
            return
        tokens[token] = now
        self._owner[token] = node
        if not known:
            # Also for another process under a name that is in use: somebody should look.
            self._tell(NodeUp(node))

    def gone(self, token: str, *, left: bool = False) -> None:
        node = self._owner.pop(token, None)
        if node is None:
            return
        tokens = self._nodes[node]
        del tokens[token]
        if not tokens:
            del self._nodes[node]
            self._tell(NodeDown(node, left))

    def expire(self, now: float) -> None:
        """End what was not heard for a lease."""
        silent = [
            token
            for tokens in tuple(self._nodes.values())
            for token, heard in tokens.items()
            if now - heard > self._lease_s
        ]
        for token in silent:
            self.gone(token)

    def forgive(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        for tokens in self._nodes.values():
            for token in tokens:
                tokens[token] += seconds

    def clear(self) -> None:
        for token in tuple(self._owner):
            self.gone(token)


class NatsMembership:
    """What an engine knows of the nodes of its cluster. ``connected`` for each connection, ``disconnected`` at its end:
    who cannot be heard is taken for gone."""

    def __init__(self, cluster: str, lease_s: float, tell: Callable[[NodeUp | NodeDown], None]) -> None:
        self._cluster, self._interval_s = cluster, lease_s / 8
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.tokens = Tokens(lease_s, tell)

    async def connected(self, client: Any) -> None:
        advisories = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{stream_name(self._cluster)}.*"
        await client.subscribe(subject(self._cluster, ANY, LIVE), cb=self._on_beat)
        await client.subscribe(advisories, cb=self._on_end)
        await client.publish(who_subject(self._cluster))
        self._arm()

    def disconnected(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.tokens.clear()

    async def _on_beat(self, message: Any) -> None:
        beat = _BEAT.fullmatch(message.data)
        try:
            node = node_of_subject(message.subject)
        except InvalidName as exc:
            _log.warning("ignored: %s", exc)
            return
        if beat is None:
            _log.warning("ignored: a beat of node %s that is none, of %d bytes", node, len(message.data))
            return
        word, token = beat[1], beat[2].decode()
        if word == UP:
            self.tokens.heard(node, token, self._loop.time())
        elif self.tokens.owner(token) == node:
            self.tokens.gone(token, left=word == LEFT)

    async def _on_end(self, message: Any) -> None:
        consumer = message.subject.rpartition(".")[2]
        if consumer.startswith(CONSUMER):
            self.tokens.gone(consumer.removeprefix(CONSUMER))

    def _arm(self) -> None:
        due = self._loop.time() + self._interval_s
        self._timer = self._loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        late = self._loop.time() - due
        if late > self._interval_s:
            # This loop was busy or this machine asleep: beats wait in the socket.
            self.tokens.forgive(late)
        self.tokens.expire(self._loop.time())
        self._arm()
