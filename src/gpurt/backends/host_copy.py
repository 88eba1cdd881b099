"""Copies from host memory to host memory, long ones with the help of a second thread.

One thread moves 8 to 12 GB/s, which is not what the memory does; two move half as much again. There is one helper a
process, since it is the host's memory that its callers share: a copy that finds it at work is made by its caller alone,
and so is what the helper has not begun when the caller is through.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from gpurt.sources.host import cpu_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.uint8]

SHARED_BYTES: Final = 8 << 20
"""Shorter copies are over before a thread that slept has come to help: 0.1 to 0.2 ms."""
STRIPES: Final = 8
"""Few, because each takes the GIL once, which a busy event loop gives away every 5 ms; and more than two, so that the
faster of both threads does more."""
LEAST_CPUS: Final = 3
"""With two, a helper that has to share its CPU with other work holds its stripe for milliseconds: copies of 64 MiB took
twice as long beside one busy thread, and a tenth less without."""
_PAGE: Final = 4096


class _Shared:
    """One copy that two threads work on, from its two ends."""

    def __init__(self, target: Array, source: Array) -> None:
        size = -(-len(target) // STRIPES // _PAGE) * _PAGE or _PAGE
        self._stripes = deque((target[at : at + size], source[at : at + size]) for at in range(0, len(target), size))
        self._inside = threading.Lock()
        """Whoever has it first: the helper, which lets it go when it is through, or the caller, who then is alone."""
        self._failure: BaseException | None = None

    def help(self) -> None:
        """The helper: from the far end."""
        if not self._inside.acquire(blocking=False):
            return
        try:
            self._work(self._stripes.pop)
        except BaseException as exc:
            self._failure = exc
        finally:
            self._inside.release()

    def make(self) -> None:
        """The caller: from the near end, until nothing is left and nobody is inside."""
        try:
            self._work(self._stripes.popleft)
        finally:
            self._inside.acquire()
        if self._failure is not None:
            raise self._failure

    def _work(self, take: Callable[[], tuple[Array, Array]]) -> None:
        import numpy as np

        while True:
            try:
                target, source = take()
            except IndexError:
                return
            np.copyto(target, source)


class _Helper:
    """A daemon thread ``gpurt:hostcopy``, started by the first long copy."""

    def __init__(self) -> None:
        self.free = threading.Lock()
        """Held by the caller whose copy it helps with."""
        self._work: SimpleQueue[_Shared] = SimpleQueue()
        self._started = False

    def ask(self, shared: _Shared) -> None:
        if not self._started:
            threading.Thread(target=self._serve, name="gpurt:hostcopy", daemon=True).start()
            self._started = True
        self._work.put(shared)

    def _serve(self) -> None:
        while True:
            self._work.get().help()


_helper = _Helper()
_cpus = cache(cpu_count)


def copy_host(target: Array, source: Array) -> None:
    """``target[:] = source``, of equal lengths, which do not overlap. Blocks; any thread."""
    import numpy as np

    helper = _helper
    if len(target) < SHARED_BYTES or _cpus() < LEAST_CPUS or not helper.free.acquire(blocking=False):
        np.copyto(target, source)
        return
    try:
        shared = _Shared(target, source)
        helper.ask(shared)
        shared.make()
    finally:
        helper.free.release()


def _forget() -> None:
    # The thread did not survive the fork, and the lock may have been held.
    global _helper
    _helper = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
