"""Commands that a node works on: a few at once, each in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gpurt.cluster.bus import CommandHandler
from gpurt.cluster.errors import ClusterError

MAX_COMMANDS: Final = 16
"""Commands that a node works on at once; more are refused."""
MAX_ERROR_BYTES: Final = 1024

Reply = Callable[[bytes, bool], Awaitable[None]]
"""Sends a payload back; True: it is the text of an error."""

_log = logging.getLogger("gpurt.cluster.commands")


class Answering:
    """For one loop, which calls it."""

    def __init__(self, handler: CommandHandler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, payload: bytes, reply: Reply, drop: Callable[[], None] | None = None) -> None:
        """Work on a command. ``drop`` is called where nobody will reply, because ``cancel`` came first."""
        work = self._work(payload, reply, drop) if len(self._tasks) < MAX_COMMANDS else reply(b"busy", True)
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _work(self, payload: bytes, reply: Reply, drop: Callable[[], None] | None) -> None:
        error = False
        try:
            answer = await self._handler(payload)
        except asyncio.CancelledError:
            if drop is not None:
                drop()
            raise
        except Exception as exc:
            _log.warning("a command failed: %r", exc)
            answer, error = error_text(exc), True
        try:
            await reply(answer, error)
        except ClusterError as exc:
            _log.info("the answer to a command could not be sent, so who gave it has none: %s", exc)


def error_text(exc: Exception) -> bytes:
    return str(exc).encode(errors="replace")[:MAX_ERROR_BYTES]
