"""What a benchmark returns, and the clocks that all of them use."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, Self

Unit = Literal["GB/s", "µs", "ms", "s"]
"""GB/s are 10^9 bytes per second. More GB/s are better, less time is better."""


Call = Callable[[], Awaitable[Any]]
"""One operation to be timed; each call does it once."""


class Skipped(Exception):
    """This topic cannot be measured on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """gpurt's figure, next to the best ordinary way (``peer``) and to what the machine can do (``ceiling``).

    All three come from the same run. ``target`` is the bound that gpurt promises, in the same unit.
    """

    topic: str
    name: str
    unit: Unit
    ours: float
    peer: float | None = None
    peer_name: str = ""
    ceiling: float | None = None
    ceiling_name: str = ""
    target: float | None = None

    @property
    def of_peer(self) -> float | None:
        """How good ours is beside the peer: 1 is as good, 2 is twice as fast."""
        return self._ratio(self.peer)

    @property
    def of_ceiling(self) -> float | None:
        """The share of the ceiling that ours reaches."""
        return self._ratio(self.ceiling)

    @property
    def on_target(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        return self.ours >= self.target if self.unit == "GB/s" else self.ours <= self.target

    def _ratio(self, other: float | None) -> float | None:
        if not other or not self.ours:
            return None
        return self.ours / other if self.unit == "GB/s" else other / self.ours

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "of_peer": self.of_peer,
            "of_ceiling": self.of_ceiling,
            "on_target": self.on_target,
        }


class LoopGap:
    """``async with LoopGap() as gap:`` beside some work; ``gap.longest_ms`` is the longest pause of the loop.

    A ticker sleeps 1 ms at a time; a gap is the time between two of its turns, less that millisecond.
    """

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0.005)
        self.longest_ms = 0.0
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.sleep(0.002)  # or a gap that lasts until now would not be seen
        assert self._task is not None
        self._task.cancel()

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.longest_ms = max(self.longest_ms, (now - last) * 1e3 - 1)
            last = now


def in_executor(executor: Executor, function: Callable[..., Any], *arguments: Any) -> Call:
    """A blocking function the ordinary way: ``loop.run_in_executor``."""
    loop = asyncio.get_running_loop()
    return lambda: loop.run_in_executor(executor, function, *arguments)


async def seconds(call: Call) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


async def microseconds_per_call(call: Call, *, calls: int, callers: int) -> float:
    """Wall time per call while ``callers`` tasks make ``calls`` calls together."""

    async def caller() -> None:
        for _ in range(calls // callers):
            await call()

    async def all_callers() -> None:
        await asyncio.gather(*(caller() for _ in range(callers)))

    return await seconds(all_callers) / (calls // callers * callers) * 1e6


async def gb_per_second(nbytes: int, call: Call) -> float:
    return nbytes / await seconds(call) / 1e9


async def medians(rounds: int, *contenders: Callable[[], Awaitable[float]]) -> list[float]:
    """The median figure of each contender over ``rounds``, taking turns so that a busy moment hits all alike."""
    figures: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, results in zip(contenders, figures, strict=True):
            results.append(await contender())
    return [statistics.median(results) for results in figures]
