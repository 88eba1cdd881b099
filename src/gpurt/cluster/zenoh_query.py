"""One question on the bus and everybody's replies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from gpurt.cluster.log_limit import LimitedLog
from gpurt.cluster.reply_budget import ReplyBudget
from gpurt.cluster.zenoh_callbacks import SessionCallbacks

_warnings: Final = LimitedLog(logging.getLogger("gpurt.cluster.zenoh"))


class ZenohQuery:
    """Replies come on zenoh's threads; the lane that asked is free meanwhile.

    Args:
        loop: the one that waits.
        limit: bytes of a reply; longer ones are dropped.
        one: the question is to one node, so that it is over when that has said as much as it may.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int, *, one: bool = False) -> None:
        self._loop, self._limit, self._one = loop, limit, one
        self._budget = ReplyBudget(limit)
        self._done: asyncio.Future[None] = loop.create_future()
        self._replies: list[tuple[Any, Any]] = []

    def ask(
        self,
        zenoh: Any,
        callbacks: SessionCallbacks,
        session: Any,
        key: str,
        *,
        payload: bytes | None,
        timeout: float,
    ) -> None:
        """On the lane. ``timeout`` in seconds is zenoh's own for the replies."""
        session.get(
            key,
            callbacks.wrap(self._collect, on_end=self._finish),
            target=zenoh.QueryTarget.ALL,
            consolidation=zenoh.QueryConsolidation(zenoh.ConsolidationMode.NONE),
            timeout=timeout,
            payload=payload,
        )

    async def replies(self, timeout: float) -> list[tuple[Any, Any]]:
        """Each as (sample, None) or (None, error); those that are there when ``timeout`` seconds are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._done
        return list(self._replies)

    def _collect(self, reply: Any) -> None:
        answer = reply.ok or reply.err
        size = len(answer.payload)
        # An error says not whose it is.
        sender = str(reply.ok.key_expr) if reply.ok else ""
        why = self._budget.refuses(sender, size)
        if why is None:
            self._replies.append((reply.ok, None if reply.ok else answer))
        else:
            _warnings.warning(sender, "ignored: an answer of %d bytes from %s: %s", size, sender or "somebody", why)
            if self._one and self._budget.spent:
                self._finish()

    def _finish(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(lambda: self._done.done() or self._done.set_result(None))
