"""How a rate is taken: warmed up, in rounds long enough for the clock, the median of a few, within a bounded time, and
without what a call costs that moves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Final

ROUNDS: Final = 5
ROUND_S: Final = 0.02
QUEUED: Final = 8
"""A round is as many calls at once as take ROUND_S, at most so many: the way back to the event loop between two of
them is not the device's."""
FIGURE_S: Final = 0.15
"""No new round begins after so long, so that a slow device costs a call or two and no more."""

Clock = Callable[[], float]


async def rate(
    clock: Clock,
    amount: float,
    call: Callable[[], Awaitable[object]],
    *,
    idle: Callable[[], Awaitable[object]] | None = None,
    at_once: int = QUEUED,
) -> float:
    """``amount`` per second, where one ``call`` moves or computes ``amount``.

    ``idle``: the same call with next to nothing to do; its time is no part of the rate. Where it is more than half of
    a call's, the call is too small to tell, and only half of it is taken off. ``at_once``: so many calls at a time at
    most.
    """
    seconds, calls = await _seconds(clock, call, at_once)
    if idle is not None:
        fixed, _ = await _seconds(clock, idle, at_once, calls)
        seconds -= min(fixed, seconds / 2)
    return amount / seconds


async def _seconds(
    clock: Clock, call: Callable[[], Awaitable[object]], at_once: int, queued: int | None = None
) -> tuple[float, int]:
    """Of one call among so many, which it chooses where it is not told."""

    async def seconds(calls: int) -> float:
        started = clock()
        await asyncio.gather(*(call() for _ in range(calls)))
        return max(clock() - started, 1e-9) / calls

    await seconds(1)  # compiles, makes contexts, touches memory
    began = clock()
    figures: list[float] = []
    if queued is None:
        once = await seconds(1)
        queued = max(1, min(at_once, int(ROUND_S / once)))
        if queued == 1:
            figures.append(once)
    while len(figures) < ROUNDS and (not figures or clock() - began < FIGURE_S):
        figures.append(await seconds(queued))
    return median(figures), queued
