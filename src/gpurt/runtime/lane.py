"""Lanes: gpurt's own ordered executor. One daemon thread, first in first out, for blocking driver calls.

asyncio's default pool is not used because six blocked calls there stall every DNS look-up of the process, and
because ``concurrent.futures`` joins its threads at exit, so that one hung driver call keeps the process alive
for ever. A lane's thread is a daemon; an exit hook asks every lane to stop and waits a second at most.

Finished jobs go back to the event loop through a :class:`Mailbox`.
"""

from __future__ import annotations

import asyncio
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
from gpurt.runtime.job import Call, Job, Report, log_error

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
    """One ordered executor thread. The thread starts with the first job and is named after the lane. Nothing that a
    job, a callback or the reporting of an error raises ends it.

    ``run_in_executor(lane, …)`` and ``submit`` work as on any executor; gpurt itself uses ``put``, which skips
    the second future.

    Args:
        name: thread name, e.g. ``gpurt:cuda:0:h2d``.
        on_done: called on the lane's thread after each job, also after a dropped one.
        deliver: called on the lane's thread, or on one that calls ``flush``, with each job after ``on_done``.
        on_stop: called by ``stop``, on its thread: makes a job that waits return.
        report: takes what escapes from any of these.
        hold_s: keep results of short calls back so long at most while more wait, see :data:`HOLD_S`. Somebody has to
            call ``flush`` meanwhile, because the next call may be a long one.
    """

    def __init__(
        self,
        name: str,
        *,
        on_done: Callable[[Job], None] | None = None,
        deliver: Callable[[Job], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        report: Report = log_error,
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = 0.0,
    ) -> None:
        self.name = name
        self.running: Job | None = None
        self.running_since: float | None = None
        """``clock()`` when the present job entered the driver; None between jobs. The hang clock."""
        self._clock = clock
        self._on_done = on_done
        self._deliver = deliver
        self._on_stop = on_stop
        self._report = report
        self._hold_s = hold_s
        self._held: deque[Job] = deque()
        self._pid = os.getpid()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.started = False
        self._stopping = False
        self._stopped = threading.Event()
        self.post: Callable[[Job], None] = self._queue.put
        """Queue a job without a check and without taking a lock, also in the middle of a garbage collection. Only for
        a lane that has started, and for whom nobody stops it meanwhile."""

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
                self.started = True
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

        self.put(Call(call))
        return future

    def stop(self) -> None:
        """Let the thread end after what is queued. Returns at once; idempotent."""
        with self._start_lock:
            if self._stopping:
                return
            self._stopping = True
            self.started = False  # nobody may post past the end
            if self._thread is None:
                self._stopped.set()
            else:
                self._queue.put(None)
        if self._on_stop is not None:
            self._on_stop()

    def flush(self) -> None:
        """Deliver every result that is kept back. Any thread."""
        deliver = self._deliver
        while self._held:
            try:
                job = self._held.popleft()
            except IndexError:  # another thread was quicker
                return
            if deliver is not None:
                deliver(job)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As ``concurrent.futures.Executor.shutdown``; queued jobs always run."""
        self.stop()
        if wait:
            self._stopped.wait()

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Block until the thread has ended; False when it has not within ``timeout`` seconds. Not on that thread."""
        ended = self._stopped.wait(timeout)
        if ended and self._thread is not None:
            self._thread.join()
        return ended

    def _work(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            self._stopped.set()

    def _serve(self) -> bool:
        """Run jobs; False after the last one, True when something that no job lets out has ended the round."""
        on_done, deliver, held = self._on_done, self._deliver, self._held
        held_since = 0.0
        try:
            while (job := self._queue.get()) is not None:
                self.running, self.running_since = job, (began := self._clock())
                try:
                    try:
                        job.run()
                    finally:
                        self.running, self.running_since = None, None
                        if on_done is not None:
                            on_done(job)
                finally:
                    if not self._hold_s or (not held and self._queue.empty()):
                        if deliver is not None:
                            deliver(job)
                    else:
                        now = self._clock()
                        if not held:
                            held_since = began
                        held.append(job)
                        if (
                            self._queue.empty()
                            or now - held_since >= self._hold_s
                            or now - began >= self._hold_s / LONG_CALLS
                        ):
                            self.flush()
                del job  # or the last job's buffers stay alive until the next one comes
            self.flush()
        except BaseException as exc:
            self._survive(exc)
            return True
        return False

    def _survive(self, exc: BaseException) -> None:
        try:
            self._report(exc)
        except BaseException as failure:
            log_error(failure)


class Mailbox:
    """Finished jobs on their way to one event loop; one wake-up is in flight, as a rule.

    Setting results one ``call_soon_threadsafe`` at a time costs a self-pipe write and a GIL hand-over each;
    batched, 64 concurrent calls cost half.

    Args:
        on_loop_closed: called instead of a delivery when the loop is closed; any thread, many times.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_loop_closed: Callable[[], None]) -> None:
        self.loop = loop
        self._on_loop_closed = on_loop_closed
        self._jobs: deque[Job] = deque()
        # No lock: deques are atomic, and both sides look twice. A job is appended before the flag is read, and the
        # flag is lowered before the deque is emptied, so that one of the two sees the other. At worst two threads
        # wake the loop at once.
        self._waking = False

    def post(self, job: Job) -> None:
        """Any thread."""
        if job.future is None:  # nobody waits
            return
        self._jobs.append(job)
        if self._waking and not self.loop.is_closed():  # closed before it woke, it never will
            return
        self._waking = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and nobody will ever look
            self._on_loop_closed()

    def undelivered(self) -> list[Job]:
        """Jobs that a loop which is closed will never see. Each once."""
        jobs: list[Job] = []
        while self._jobs:
            jobs.append(self._jobs.popleft())
        return jobs

    def unbind(self) -> None:
        """No job will come any more."""
        self._on_loop_closed = lambda: None

    def _deliver(self) -> None:
        self._waking = False
        jobs = self._jobs
        # As many as there are now: what comes meanwhile has its own wake-up, and the loop its turn.
        for _ in range(len(jobs)):
            future = jobs.popleft().future
            if future is not None and not future.done():
                future.set_result(None)


async def off_loop(what: str, call: Callable[[], T]) -> T:
    """Run ``call`` on a daemon thread of its own and await it.

    A thread for each call: there are a few a minute, and one that hangs (a registry on a dead network file system)
    must neither hold up the next nor keep the process alive. A cancelled caller returns at once; the call runs to its
    end.

    Args:
        what: for the thread's name.
    """
    lane = Lane(f"gpurt:{what}")
    try:
        return await asyncio.wrap_future(lane.submit(call))
    finally:
        lane.stop()


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
