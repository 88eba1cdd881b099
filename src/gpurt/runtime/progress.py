"""Progress told to a caller's function: on the event loop, never after the end, and what it raises ends the work."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from gpurt.errors import GPUError, OutOfRange
from gpurt.runtime.job import Job


def check_progress(on_progress: object) -> None:
    """Refuse what cannot be called, or would only make a coroutine that nobody awaits.

    Raises:
        OutOfRange: it is neither None nor an ordinary function.
    """
    if on_progress is None:
        return
    if not callable(on_progress):
        raise OutOfRange(f"on_progress must be a function or None, not {type(on_progress).__name__}")
    for called in (on_progress, getattr(on_progress, "__call__", None)):  # noqa: B004
        if any(test(called) for test in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)):
            raise OutOfRange(
                "on_progress is an async function, and would not be awaited",
                hint="pass an ordinary function; it may start a task",
            )


def tell_progress(on_progress: Callable[..., Any], *numbers: int) -> None:
    """Call it.

    Raises:
        OutOfRange: it returned a coroutine. And whatever it raises.
    """
    result: object = on_progress(*numbers)
    if inspect.iscoroutine(result):
        result.close()
        raise OutOfRange("on_progress returned a coroutine, which nobody awaits", hint="pass an ordinary function")


class LaneProgress:
    """From a job on a lane to a function on the event loop.

    Attributes:
        failure: what the function raised, for the job's caller to raise.
    """

    def __init__(self, on_progress: Callable[[int], None] | None) -> None:
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_progress = on_progress
        self._job: Job | None = None

    def watch(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        """The job whose caller is woken when the function raises, and the loop of both. Before it is submitted."""
        self._job, self._loop = job, loop

    def tell(self, done: int) -> None:
        """Lane thread."""
        if self._on_progress is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
                self._loop.call_soon_threadsafe(self._deliver, done)

    def close(self) -> None:
        """Nothing is told from here on."""
        self._on_progress = self._job = None

    def raise_failure(self) -> None:
        """Raise what the function raised, if it did."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame: a cycle otherwise

    def _deliver(self, done: int) -> None:
        on_progress, job = self._on_progress, self._job
        if on_progress is None:
            return
        try:
            tell_progress(on_progress, done)
        except BaseException as exc:
            self.failure = exc
            self.close()
            if job is not None and job.future is not None and not job.future.done() and not job.finished:
                job.interruption = GPUError("on_progress raised")
                job.future.set_result(None)
            if isinstance(exc, (SystemExit, KeyboardInterrupt)):
                raise
