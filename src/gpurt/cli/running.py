"""A command's event loop, and how a signal ends it.

Python raises ``KeyboardInterrupt`` wherever the main thread happens to be. In the middle of a callback that leaves an
event loop in pieces: tasks that nobody ends, no goodbye. asyncio's own handler for Ctrl-C cancels the main task
instead, but only where nobody has set another, and a shell has its background jobs ignore the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gpurt.cli.signals import left_to_asyncio

T = TypeVar("T")


class _Running:
    task: asyncio.Task[Any] | None = None
    interrupted = False


_running = _Running()


def run_command(
    main: Coroutine[Any, Any, T], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """As ``asyncio.run``, and :func:`interrupt` ends it.

    Raises:
        KeyboardInterrupt: it was interrupted, and the main task has ended.
    """
    _running.task, _running.interrupted = None, False

    async def interruptible() -> T:
        _running.task = asyncio.current_task()
        try:
            if _running.interrupted:
                raise asyncio.CancelledError
            return await main
        finally:
            _running.task = None

    work = interruptible()
    try:
        with left_to_asyncio(), asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(work)
    except asyncio.CancelledError:
        if _running.interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        work.close()  # if it was never begun
        main.close()


def interrupt() -> bool:
    """From a signal handler: end the main task of the running command. False: there is none, or it was told before."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False
    if _running.interrupted:
        return False
    _running.interrupted = True
    if _running.task is not None:
        # Not here and now: the handler may have come in the middle of the loop's own work.
        loop.call_soon_threadsafe(_running.task.cancel)
    return True
