"""How service managers, containers and closed terminals end a command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator


@contextlib.contextmanager
def interrupted_by_signals(ended_by: list[int]) -> Generator[None]:
    """SIGTERM, which service managers and containers send, and SIGHUP, which a closed terminal does, end a command
    as Ctrl-C does: a worker says goodbye, the demo clears up, a live table gives the terminal back. Those that the
    parent has us ignore stay ignored.

    Args:
        ended_by: gets the numbers of those that came; the exit code is 128 and the first of them.
    """

    def handler(number: int, frame: object) -> None:
        ended_by.append(number)
        if len(ended_by) > 1:
            return  # it is ending already; `timeout` and some service managers send theirs twice
        # asyncio's own handler for Ctrl-C cancels the main task; a background job has none, because its shell
        # ignores the key for it.
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        elif "asyncio" not in sys.modules or not _interrupt_loop():
            raise KeyboardInterrupt

    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # embedded: signals are the host's business
    before = {number: signal.getsignal(number) for number in numbers}
    ours = [number for number in numbers if before[number] is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            # Nothing may cut the end of a command short that a signal has ended.
            signal.signal(number, signal.SIG_IGN if ended_by else signal.SIG_DFL)


@contextlib.contextmanager
def interruptible(at_start: Callable[[int, object], None] | None) -> Generator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` in the block, and ends the process at once again after it: what runs at the
    end of an interpreter would be cut short with tracebacks.

    Wherever it is raised, it comes out of the block as such: in the middle of an import Python may have made another
    error of it, or swallowed it.

    Args:
        at_start: the handler that does so; where another one is set, it stays.
    """
    if at_start is None or signal.getsignal(signal.SIGINT) is not at_start:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    hook, sys.unraisablehook = sys.unraisablehook, _say_unless_interrupted
    try:
        yield
    except Exception as exc:
        if _interrupts.came:
            raise KeyboardInterrupt from exc
        raise
    finally:
        signal.signal(signal.SIGINT, at_start)
        sys.unraisablehook = hook


@contextlib.contextmanager
def left_to_asyncio() -> Generator[None]:
    """asyncio ends a loop's main task at Ctrl-C where nobody else has set a handler: ours is put aside for it.

    Raises:
        KeyboardInterrupt: it came before, and was swallowed.
    """
    if _interrupts.came:
        raise KeyboardInterrupt
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _interrupt
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, _interrupt)


class _Interrupts:
    came = False


_interrupts = _Interrupts()


def _interrupt(number: int, frame: object) -> None:
    _interrupts.came = True
    raise KeyboardInterrupt


def _say_unless_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    if not _interrupts.came:
        sys.__unraisablehook__(unraisable)


def give_up_stdout() -> None:
    """Nobody reads any more. Without this the interpreter would flush once more at exit, and fail with a traceback."""
    with contextlib.suppress(OSError):  # a stdout that is no file has nothing to flush into
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt_loop() -> bool:
    from gpurt.cli.running import interrupt

    return interrupt()
