"""An event loop whose clock moves only when a test says so, for tests that try thousands of orders."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing here waits in real time; work on threads is not seen and not waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def settle(self) -> None:
        """Run everything that can go on without time passing."""
        while True:
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:  # type: ignore[attr-defined]
                return

    def advance(self, seconds: float) -> None:
        """Let time pass, with everything that is due meanwhile."""
        until = self._now + seconds
        self.settle()
        while (due := self._next_timer()) is not None and due <= until:
            # The loop takes what is due within the resolution of its clock.
            self._now = max(self._now, due)
            self.settle()
        self._now = until
        self.settle()

    def complete(self, work: Coroutine[Any, Any, T], within_s: float = 1e4) -> T:
        """The result of ``work``, with as much time as it takes."""
        task = self.create_task(work)
        until = self._now + within_s
        self.settle()
        while not task.done():
            due = self._next_timer()
            assert due is not None, f"{task} waits for something that does not come"
            assert due <= until, f"{task} takes more than {within_s:g} s"
            self.advance(max(0.0, due - self._now))
        return task.result()

    def _next_timer(self) -> float | None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return min((timer.when() for timer in timers if not timer.cancelled()), default=None)

    def end(self, *tasks: asyncio.Task[Any]) -> None:
        """Cancel ``tasks`` and wait for them."""
        for task in tasks:
            task.cancel()
        self.settle()
        for task in tasks:
            assert task.done()
            if not task.cancelled():
                task.exception()
