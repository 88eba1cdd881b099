"""The clocks that all benchmarks use: contenders take turns, and the figure is the median."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

Call = Callable[[], Awaitable[Any]]
"""One operation to be timed; each call does it once."""

Timed = Callable[[], Awaitable[float]]
"""Does one operation, returns its seconds."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs, in µs: of the clock on the wall, and of all CPUs of this process together."""

    wall_us: float
    cpu_us: float


async def seconds(call: Call) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


async def cost_per_call(call: Call, *, calls: int, callers: int) -> Cost:
    """While ``callers`` tasks make ``calls`` calls together, at least one each."""
    each = max(1, calls // callers)

    async def caller() -> None:
        for _ in range(each):
            await call()

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    took, worked = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(took / (each * callers) * 1e6, worked / (each * callers) * 1e6)


async def in_turns(rounds: int, contenders: Mapping[str, Callable[[], Awaitable[T]]]) -> dict[str, list[T]]:
    """What each contender returned in every round. They take turns, so that a busy moment hits all alike, in changing
    order: who comes after another one's copy finds the bytes in a nearer cache."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    order, dice = list(contenders), random.Random(1)
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            results[name].append(await contenders[name]())
    return results


async def medians(rounds: int, contenders: Mapping[str, Callable[[], Awaitable[float]]]) -> dict[str, float]:
    return {name: statistics.median(results) for name, results in (await in_turns(rounds, contenders)).items()}


async def rates(nbytes: int, rounds: int, contenders: Mapping[str, Timed]) -> dict[str, float]:
    """The median rate of each in GB/s. The first round is not counted: it pins, calibrates, and touches memory."""
    await in_turns(1, contenders)
    return {name: nbytes / took / 1e9 for name, took in (await medians(rounds, contenders)).items()}


def summary(figures: Sequence[float]) -> dict[str, float]:
    """``p50``, ``p99`` and ``max`` of at least one figure."""
    percentiles = statistics.quantiles((*figures, *figures[:1]), n=100, method="inclusive")
    return {"p50": statistics.median(figures), "p99": percentiles[98], "max": max(figures)}


class LoopGap:
    """``async with LoopGap() as gap:`` beside some work; ``gap.gaps_ms`` are the pauses of the loop.

    A ticker sleeps 1 ms at a time; a gap is the time between two of its turns, less that millisecond.
    """

    def __init__(self) -> None:
        self.gaps_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def longest_ms(self) -> float:
        return max(self.gaps_ms)

    def summary(self) -> dict[str, float]:
        """``p50``, ``p99`` and ``max``, in ms."""
        return summary(self.gaps_ms)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0.005)
        self.gaps_ms.clear()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        try:
            await asyncio.sleep(0.003)  # or a gap that lasts until now would not be seen
        finally:
            self._task.cancel()

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.gaps_ms.append((now - last) * 1e3 - 1)
            last = now


class PeakMemory:
    """``async with PeakMemory() as peak:`` around some work; ``peak.grown_bytes`` is how far the resident memory of
    this process rose above where it was. Looks every 5 ms, not on the loop's thread."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._before = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._before = await asyncio.to_thread(_resident_bytes)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await self._look()

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(0.005)

    async def _look(self) -> None:
        self.grown_bytes = max(self.grown_bytes, await asyncio.to_thread(_resident_bytes) - self._before)


def _resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss
