"""Blocking calls that belong to no device, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gpurt.lane import Lane

T = TypeVar("T")


async def off_loop(what: str, call: Callable[[], T]) -> T:
    """Run ``call`` on a daemon thread of its own and await it.

    A thread for each call: there are a few a minute, and one that hangs (a registry on a dead network file system)
    must neither hold up the next nor keep the process alive. A cancelled caller returns at once; the call runs to its
    end.

    Args:
        what: for the thread's name.
    """
    lane = Lane(f"gpurt:{what}")
    try:
        return await asyncio.wrap_future(lane.submit(call))
    finally:
        lane.stop()
