"""Commands to a node over zenoh: they come on its threads, are worked on by the loop, and are answered by the lane."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gpurt.cluster.answering import Answering
from gpurt.cluster.bus import CommandHandler

Send = Callable[[Any, bytes, bool], Awaitable[None]]
"""Answers a query on the engine's lane, while there is one; True: the payload is the text of an error."""


class ZenohCommands:
    """
    Args:
        loop: the one that works.
        here: False once the node has left.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handler: CommandHandler, send: Send, here: Callable[[], bool]
    ) -> None:
        self._loop, self._send, self._here = loop, send, here
        self._answering = Answering(handler)

    def take(self, payload: bytes, query: Any) -> bool:
        """On a thread of zenoh. False when the loop is closed, and the query is still to be answered."""
        try:
            self._loop.call_soon_threadsafe(self._on_loop, payload, query)
        except RuntimeError:
            return False
        return True

    def cancel(self) -> None:
        """End what is being worked on; who asked hears nothing."""
        self._answering.cancel()

    def _on_loop(self, payload: bytes, query: Any) -> None:
        if not self._here():
            query.drop()
            return

        async def reply(answer: bytes, error: bool) -> None:
            await self._send(query, answer, error)

        self._answering.take(payload, reply, query.drop)
