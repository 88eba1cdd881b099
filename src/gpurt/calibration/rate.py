"""How a rate is taken: warmed up, in rounds long enough for the clock, the median of a few, within a bounded time."""

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


async def rate(clock: Clock, amount: float, call: Callable[[], Awaitable[object]]) -> float:
    """``amount`` per second, where one ``call`` moves or computes ``amount``."""

    async def seconds(calls: int) -> float:
        started = clock()
        await asyncio.gather(*(call() for _ in range(calls)))
        return max(clock() - started, 1e-9) / calls

    await seconds(1)  # compiles, makes contexts, touches memory
    began = clock()
    once = await seconds(1)
    queued = max(1, min(QUEUED, int(ROUND_S / once)))
    figures = [once] if queued == 1 else []
    while len(figures) < ROUNDS and (not figures or clock() - began < FIGURE_S):
        figures.append(await seconds(queued))
    return amount / median(figures)
