"""Waiting for a disk that may never answer, as a dead network file system does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

REGISTRY_WAIT_S: Final = 6.0
"""More than another process may hold the registry's lock, which is 5 s."""

_log = logging.getLogger("gpurt.discovery")


class Patience:
    """One kind of request to one disk.

    Args:
        what: for the warning.
    """

    def __init__(self, what: str, seconds: float = REGISTRY_WAIT_S) -> None:
        self._what = what
        self._seconds = seconds
        self._stuck: asyncio.Future[Any] | None = None

    async def wait(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """What ``start()`` returns, or None when it has not within the time; it goes on. While it does, the next
        request is given up at once: each has a thread."""
        if self._stuck is not None and not self._stuck.done():
            return None
        request = asyncio.ensure_future(start())
        try:
            await asyncio.wait({request}, timeout=self._seconds)
        except asyncio.CancelledError:
            request.cancel()
            raise
        if request.done():
            return request.result()
        self._stuck = request
        request.add_done_callback(_consume)
        _log.warning("%s has not answered for %g s", self._what, self._seconds)
        return None

    def give_up(self) -> None:
        """Leave what is stuck behind."""
        stuck, self._stuck = self._stuck, None
        if stuck is not None and not stuck.get_loop().is_closed():
            stuck.cancel()


def _consume(request: asyncio.Future[Any]) -> None:
    if not request.cancelled() and (failure := request.exception()) is not None:
        _log.warning("a late answer: %s: %s", type(failure).__name__, failure)
