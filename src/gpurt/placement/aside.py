"""A long search beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def aside(search: Callable[[Callable[[], bool]], T]) -> T:
    """Run ``search(cancelled)`` on a thread of its own and await it. When the caller is cancelled it returns at once;
    the search is told, and its thread ends soon."""
    stop = threading.Event()
    result: Future[T] = Future()

    def work() -> None:
        try:
            found = search(stop.is_set)
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(found)

    # From here on the future cannot be cancelled under the thread that will fill it.
    result.set_running_or_notify_cancel()
    # A thread of its own and not the loop's pool: a solver would take a place in it for seconds, and the pool is joined
    # when the loop ends.
    threading.Thread(target=work, name="gpurt-placement", daemon=True).start()
    try:
        return await asyncio.wrap_future(result)
    finally:
        stop.set()
