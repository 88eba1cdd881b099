"""The staging crew: threads that move ordinary host memory to and from devices at the link's speed.

A CUDA library moves pageable memory with one thread through one small pinned buffer, 7 to 16 GB/s where the link
does 55. Here a copy is cut into stripes, and every thread of the crew takes the next one: it copies the stripe
between the host and a pinned buffer of its own while the device works on its other buffer. There is one crew a
process, for both directions and all devices, because it is the host's memory that it shares out.

Work is shared among the transfers of the moment by the threads' numbers, so that two directions, or a short copy
beside a long one, go on together. A thread holds stripes of one device at a time: when a device hangs, it holds
up the threads that are inside, and the others' transfers go on without them (:data:`STALL_S`).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from gpurt.backends.cupy.staging_member import Member
from gpurt.backends.cupy.transfer import Transfer
from gpurt.errors import GPUError
from gpurt.sources.host import cpu_count

CREW_LIMIT: Final = 8
"""More threads move little more, because host memory is the limit then, and each costs the event loop its turn at
the GIL. Measured with 16 CPUs and PCIe 5: 1 GiB to and from the device with 4 threads 29 and 24 GB/s, 6 40 and 33,
8 49 and 40, 10 49 and 45, 12 49 and 43; a 4 KiB copy beside it (p99) with 6 threads 0.8 ms, 8 1.0, 12 2.8."""

STALL_S: Final = 1.0
"""A transfer that gets no thread for so long is done by the thread that waits for it."""

EXIT_WAIT_S: Final = 0.5
"""How long the exit hook waits for a crew. Lanes have their second besides."""

CLOSE_WAIT_S: Final = 5.0

log = logging.getLogger("gpurt.staging")


def crew_size() -> int:
    """Threads of a crew: a quarter of the CPUs stays free for the event loop and the lanes."""
    return min(CREW_LIMIT, max(1, cpu_count() * 3 // 4))


class Crew:
    """Daemon threads ``gpurt:stage:N`` over one runtime module. The constructor waits until all are ready.

    Args:
        runtime: CuPy's runtime module.
        index: a device whose context exists; pinning memory needs one.
        size: how many threads. ``size`` of the crew is less where no more memory could be pinned, and 0 where
            none could.

    Raises:
        CUDARuntimeError: a thread failed for another reason than memory.
    """

    def __init__(self, runtime: Any, index: int, size: int) -> None:
        self._lock = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._idle = 0
        self._stopping = False
        self._active: tuple[Transfer, ...] = ()
        self._threads: list[threading.Thread] = []
        reports: SimpleQueue[BaseException | None] = SimpleQueue()
        for number in range(size):
            member = Member(number, runtime, self._choose, self._rest)
            thread = threading.Thread(
                target=member.work, args=(index, reports), name=f"gpurt:stage:{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        failures = [failure for _ in self._threads if (failure := reports.get()) is not None]
        self.size = size - len(failures)
        for failure in failures:
            if not isinstance(failure, MemoryError):
                self.stop(CLOSE_WAIT_S)
                raise failure
        if failures:
            log.warning("%d of %d staging threads got no pinned memory: %s", len(failures), size, failures[0])

    def run(self, transfer: Transfer, plain: Callable[[int, int], None]) -> None:
        """Do it, and return when nothing touches its memory any more. Any thread; several at once.

        ``plain(start, size)`` copies a range without the crew, when all of that is held up elsewhere.

        Raises:
            GPUError: the crew has been stopped.
            Exception: the first error of a stripe; stripes that had not begun have been given up.
        """
        with self._lock:
            if self._stopping:
                raise GPUError("the staging crew has been stopped", hint="copy before the backend is shut down")
            self._active = (*self._active, transfer)
            woken = min(self._idle, len(transfer.stripes))
            self._idle -= woken
        for _ in range(woken):
            self._wake.put(None)
        try:
            left = transfer.left
            while not transfer.wait(STALL_S):
                if transfer.left == left:
                    transfer.finish_with(plain)
                left = transfer.left
        finally:
            with self._lock:
                self._active = tuple(each for each in self._active if each is not transfer)
        transfer.raise_error()

    def stop(self, timeout: float) -> bool:
        """End the threads once nothing is left to do. False when some have not ended within ``timeout`` seconds."""
        with self._lock:
            self._stopping = True
            woken, self._idle = self._idle, 0
        for _ in range(woken):
            self._wake.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _choose(self, number: int) -> Transfer | None:
        """Where thread ``number`` takes its next stripe, or None."""
        active = self._active
        count = len(active)
        for step in range(count):
            transfer = active[(number + step) % count]
            if transfer.stripes:
                return transfer
        return None

    def _rest(self) -> bool:
        """Wait for more to do; False when there will be nothing."""
        with self._lock:
            if any(transfer.stripes for transfer in self._active):
                return True
            if self._stopping:
                return False
            self._idle += 1
        self._wake.get()
        return True


_lock = threading.Lock()
_crews: dict[Any, tuple[Crew, int]] = {}
"""Runtime module → its crew and how many drivers use it."""


def join_crew(runtime: Any, index: int) -> Crew:
    """The process's crew over ``runtime``, made now if there is none. Each call needs its :func:`leave_crew`."""
    with _lock:
        crew, users = _crews.get(runtime, (None, 0))
        if crew is None:
            crew = Crew(runtime, index, crew_size())
        _crews[runtime] = crew, users + 1
        return crew


def leave_crew(runtime: Any) -> None:
    """The driver is done with the crew; the last one to leave ends it. Blocks until its threads have ended."""
    with _lock:
        crew, users = _crews.pop(runtime, (None, 0))
        if crew is None:  # in a forked child, which has none of the parent's threads
            return
        if users > 1:
            _crews[runtime] = crew, users - 1
            return
    if not crew.stop(CLOSE_WAIT_S):
        log.warning("the staging crew has not ended within %.0f s: a device does not answer", CLOSE_WAIT_S)


@atexit.register
def _at_exit() -> None:
    # As gpurt.runtime.lane does: idle threads end in order; one that hangs in the driver is left behind.
    for crew, _ in _crews.values():
        crew.stop(EXIT_WAIT_S)


def _forget() -> None:
    # The threads did not survive the fork, and the lock may have been held.
    global _lock
    _lock = threading.Lock()
    _crews.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
