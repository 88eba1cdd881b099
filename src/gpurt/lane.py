"""Lanes: gpurt's own ordered executor. One daemon thread, first in first out, for blocking driver calls.

asyncio's default pool is not used because six blocked calls there stall every DNS look-up of the process, and
because ``concurrent.futures`` joins its threads at exit, so that one hung driver call keeps the process alive
for ever. A lane's thread is a daemon; an exit hook asks every lane to stop and waits a second at most.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Final, ParamSpec, TypeVar

from gpurt.errors import GPUError
from gpurt.job import Job

P = ParamSpec("P")
T = TypeVar("T")

EXIT_WAIT_S: Final = 1.0
"""How long the exit hook waits, for all lanes together."""

HOLD_S: Final = 0.001
"""How long a lane of short calls keeps results back while it has more to run. A result told at once wakes the loop,
which then wants the GIL in the middle of the next call: on a host with an H200, 64 callers' copies of 4 KiB cost 93 µs
of CPU each in that way, 39 with the results of 0.1 ms told together, and 28 to 31 with those of 1 ms."""

LONG_CALLS: Final = 10
"""After a call that took more than this part of the hold, what is kept back is told: beside it a wake-up is nothing."""


class Lane(Executor):
    """One ordered executor thread. The thread starts with the first job and is named after the lane.

    ``run_in_executor(lane, …)`` and ``submit`` work as on any executor; gpurt itself uses ``put``, which skips
    the second future.

    Args:
        name: thread name, e.g. ``gpurt:cuda:0:h2d``.
        on_done: called on the lane's thread after each job, also after a dropped one.
        on_stop: called on the lane's thread as its last act.
        hold_s: keep results of short calls back so long at most while more wait, see :data:`HOLD_S`. If one of those
            hangs, somebody has to call ``flush``.
    """

    def __init__(
        self,
        name: str,
        *,
        on_done: Callable[[Job], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = 0.0,
    ) -> None:
        self.name = name
        self.running: Job | None = None
        self.running_since: float | None = None
        """``clock()`` when the present job entered the driver; None between jobs. The hang clock."""
        self._clock = clock
        self._on_done = on_done
        self._on_stop = on_stop
        self._hold_s = hold_s
        self._held: deque[Job] = deque()
        self._pid = os.getpid()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._stopped = threading.Event()

    def put(self, job: Job) -> None:
        """Queue a job. Any thread.

        Raises:
            GPUError: in a forked child (the thread did not survive the fork), or after ``stop``.
            RuntimeError: the process can have no more threads.
        """
        if os.getpid() != self._pid:
            raise GPUError(f"lane {self.name} belongs to the parent process", hint="create backends after fork")
        with self._start_lock:
            # Under the lock, so that no job can slip in behind the stop sentinel.
            if self._stopping:
                raise GPUError(f"lane {self.name} is stopped")
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                thread.start()
                self._thread = thread  # only now: one that could not be started may be tried again
                _lanes.add(self)
            self._queue.put(job)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As ``concurrent.futures.Executor.submit``."""
        future: Future[T] = Future()
        held = [future]

        def call(_: Job) -> None:
            promise = held.pop()
            try:
                if not promise.set_running_or_notify_cancel():
                    return
                result = fn(*args, **kwargs)
            except BaseException as exc:
                promise.set_exception(exc)
            else:
                promise.set_result(result)
            finally:
                del promise  # this frame is behind those of its exception: they would keep each other

        self.put(Job(call))
        return future

    def stop(self) -> None:
        """Let the thread end after what is queued. Returns at once; idempotent."""
        with self._start_lock:
            if self._stopping:
                return
            self._stopping = True
            if self._thread is None:
                self._stopped.set()
            else:
                self._queue.put(None)

    def flush(self) -> None:
        """Tell every result that is kept back. Any thread."""
        while self._held:
            try:
                job = self._held.popleft()
            except IndexError:  # another thread was quicker
                return
            job.announce()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As ``concurrent.futures.Executor.shutdown``; queued jobs always run."""
        self.stop()
        if wait:
            self._stopped.wait()

    def wait_stopped(self, timeout: float) -> bool:
        """Block until the thread has run ``on_stop``; False when it has not within ``timeout`` seconds."""
        return self._stopped.wait(timeout)

    def _work(self) -> None:
        try:
            held_since = 0.0
            while (job := self._queue.get()) is not None:
                self.running, self.running_since = job, (began := self._clock())
                job.run()
                self.running, self.running_since = None, None
                if self._on_done is not None:
                    self._on_done(job)
                if self._hold_s:
                    now = self._clock()
                    if not self._held:
                        held_since = began
                    self._held.append(job)
                    if (
                        self._queue.empty()
                        or now - held_since >= self._hold_s
                        or now - began >= self._hold_s / LONG_CALLS
                    ):
                        self.flush()
                else:
                    job.announce()
                del job  # or the last job's buffers stay alive until the next one comes
            self.flush()
            if self._on_stop is not None:
                self._on_stop()
        finally:
            self._stopped.set()


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _stop_lanes(lanes: Iterable[Lane], timeout: float) -> None:
    for lane in lanes:
        lane.stop()
    deadline = time.monotonic() + timeout
    for lane in lanes:
        lane.wait_stopped(max(0.0, deadline - time.monotonic()))


@atexit.register
def _at_exit() -> None:
    # Idle threads end here in order, before the interpreter's own teardown, in which a daemon thread that comes
    # back from native code would unwind through C++ frames and abort. A hung one is left behind.
    _stop_lanes([lane for lane in _lanes if lane._pid == os.getpid()], EXIT_WAIT_S)  # pyright: ignore[reportPrivateUsage]
