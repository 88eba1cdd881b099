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
from statistics import median
from time import perf_counter
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
REMEMBERED: Final = 5
"""Copies of each kind, with help and without, whose median rates are compared. Whether help pays is not to be known
beforehand: on two CPUs it gained a tenth, and beside one busy thread, with which the helper had to share its CPU,
copies of 64 MiB took twice as long."""
AGAIN: Final = 32
"""After so many copies of the better kind one of the other: what else the machine does changes."""
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


class Choice:
    """Whether to have help, by what the last copies with it and without it gave."""

    def __init__(self) -> None:
        self._rates: dict[bool, deque[float]] = {helped: deque(maxlen=REMEMBERED) for helped in (True, False)}
        self._same = 0

    def help(self) -> bool:
        with_help, alone = self._rates[True], self._rates[False]
        if len(alone) < REMEMBERED:
            return len(with_help) <= len(alone)
        better = median(with_help) > median(alone)
        self._same = (self._same + 1) % AGAIN
        return better if self._same else not better

    def took(self, helped: bool, nbytes: int, seconds: float) -> None:
        self._rates[helped].append(nbytes / max(seconds, 1e-9))


class _Helper:
    """A daemon thread ``gpurt:hostcopy``, started by the first long copy."""

    def __init__(self) -> None:
        self.free = threading.Lock()
        """Held by the caller whose copy it helps with, or could."""
        self.choice = Choice()
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
    if len(target) < SHARED_BYTES or _cpus() < 2 or not helper.free.acquire(blocking=False):
        np.copyto(target, source)
        return
    try:
        helped, begin = helper.choice.help(), perf_counter()
        if helped:
            shared = _Shared(target, source)
            helper.ask(shared)
            shared.make()
        else:
            np.copyto(target, source)
        helper.choice.took(helped, len(target), perf_counter() - begin)
    finally:
        helper.free.release()


def _forget() -> None:
    # The thread did not survive the fork, and the lock may have been held.
    global _helper
    _helper = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
