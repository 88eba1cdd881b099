"""Event-loop helpers of the kit: loop factories, ways to be cancelled, a ticker, waiting for a condition."""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

PATIENCE = 10.0
"""Seconds after which a test gives up on something that must happen. Generous: it bounds a hang, not a speed."""


def loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """``asyncio`` and, where installed, ``uvloop``; for pytest-asyncio's ``pytest_asyncio_loop_factories`` hook."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if sys.platform != "win32":
        try:
            import uvloop
        except ImportError:
            return factories
        factories["uvloop"] = uvloop.new_event_loop
    return factories


async def turns(count: int = 3) -> None:
    """Let every other task run ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait for a condition that another thread makes true; AssertionError with ``what`` after ``patience`` s."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience} s: {what}")
        await asyncio.sleep(0.001)


class Ticker:
    """Measures the longest time, in seconds, that the loop did not run a 1 ms timer.

    ``async with Ticker() as ticker: ...`` then ``ticker.longest_gap``.
    """

    longest_gap = 0.0
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        # The first gap starts when the ticker runs, not when it was made.
        await asyncio.sleep(0.005)
        self.longest_gap = 0.0
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        # A stall that ends with the block is seen by the tick after it.
        await asyncio.sleep(0.002)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.longest_gap = max(self.longest_gap, now - last)
            last = now


class Canceller(ABC):
    """Runs one operation so that it can be cancelled from outside, in one dialect of asyncio."""

    def __init__(self) -> None:
        self.cancelled = False
        """The operation ended with ``CancelledError``."""
        self.completed = False
        """The operation ended normally, with ``value``."""
        self.value: Any = None
        self.error: BaseException | None = None
        """The operation ended with another exception."""
        self.task: asyncio.Task[None] | None = None

    def start(self, operation: Callable[[], Awaitable[Any]]) -> None:
        self.task = asyncio.create_task(self._run(operation))

    @abstractmethod
    async def _run(self, operation: Callable[[], Awaitable[Any]]) -> None: ...

    @abstractmethod
    def cancel(self) -> None: ...

    async def _observe(self, operation: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.value = await operation()
            self.completed = True
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        except Exception as exc:
            self.error = exc

    async def ended_within(self, seconds: float) -> bool:
        assert self.task is not None
        done, _ = await asyncio.wait({self.task}, timeout=seconds)
        return bool(done)

    async def end(self) -> None:
        """Wait for the end; anything but completion or cancellation is raised."""
        assert await self.ended_within(PATIENCE), "the operation did not end after it was cancelled"
        if self.error is not None:
            raise self.error
        assert self.cancelled or self.completed


class TaskCancel(Canceller):
    """``task.cancel()``."""

    async def _run(self, operation: Callable[[], Awaitable[Any]]) -> None:
        await self._observe(operation)

    def cancel(self) -> None:
        assert self.task is not None
        self.task.cancel()


class TimeoutCancel(Canceller):
    """``asyncio.timeout``."""

    def __init__(self) -> None:
        super().__init__()
        self._scope = asyncio.timeout(None)
        self._entered = False
        self._asked = False

    async def _run(self, operation: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with self._scope:
                self._entered = True
                await self._observe(operation)
        except TimeoutError:
            pass

    def cancel(self) -> None:
        assert self.task is not None
        if not self._entered:
            self.task.cancel()  # a task that has not run yet has no deadline
        elif not self._asked and not self.task.done():
            self._asked = True
            # A deadline in the past fires on the next turn of the loop.
            self._scope.reschedule(asyncio.get_running_loop().time() - 1)


class SiblingFailure(Canceller):
    """A sibling in the same ``asyncio.TaskGroup`` fails."""

    def __init__(self) -> None:
        super().__init__()
        self._fail = asyncio.Event()

    async def _run(self, operation: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                sibling = group.create_task(self._sibling())
                observed = group.create_task(self._observe(operation))
                # The sibling must not keep the group open when the operation ends first.
                observed.add_done_callback(lambda _: sibling.cancel())
        except* ZeroDivisionError:
            pass

    async def _sibling(self) -> None:
        await self._fail.wait()
        raise ZeroDivisionError

    def cancel(self) -> None:
        self._fail.set()


class ScopeCancel(Canceller):
    """An ``anyio`` cancel scope."""

    def __init__(self) -> None:
        super().__init__()
        self._scope = anyio.CancelScope()

    async def _run(self, operation: Callable[[], Awaitable[Any]]) -> None:
        with self._scope:
            await self._observe(operation)

    def cancel(self) -> None:
        self._scope.cancel()


CANCELLERS: Mapping[str, type[Canceller]] = {
    "task_cancel": TaskCancel,
    "asyncio_timeout": TimeoutCancel,
    "task_group": SiblingFailure,
    "anyio_scope": ScopeCancel,
}
