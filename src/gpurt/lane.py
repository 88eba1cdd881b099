"""Lanes: gpurt's own ordered executor. One daemon thread, first in first out, for blocking driver calls.

asyncio's default pool is not used because six blocked calls there stall every DNS look-up of the process, and
because ``concurrent.futures`` joins its threads at exit, so that one hung driver call keeps the process alive
for ever. A lane's thread is a daemon; an exit hook asks every lane to stop and waits a second at most.

A :class:`Job` is one call on its way through a lane. Whoever takes its claim first decides whether it runs: the
lane (``start``) or the caller that goes away (``abandon``). A job whose caller is gone still runs to its end
under our ownership, and what it produced is undone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from enum import Enum, auto
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from gpurt.errors import GPUError

if TYPE_CHECKING:
    from gpurt.order import Queue

P = ParamSpec("P")
T = TypeVar("T")

EXIT_WAIT_S: Final = 1.0
"""How long the exit hook waits, for all lanes together."""


class Nothing(Enum):
    """The outcome of a call that produced nothing: it was dropped, or it failed."""

    NOTHING = auto()


NOTHING: Final = Nothing.NOTHING


class _Stage(Enum):
    WAITING = auto()  # parked or queued
    RUNNING = auto()  # inside the driver
    FINISHED = auto()  # outcome there, caller has not seen it
    CLOSED = auto()  # outcome delivered, undone or never to be


class Job:
    """One blocking call, its outcome, and who owns that outcome.

    ``call`` gets the job itself, so that a long call can look at ``abandoned`` between two chunks. ``undo`` is
    called exactly once unless a caller takes the value, on the lane's thread or on the caller's: with the value
    when there is one that nobody will see, with ``NOTHING`` when the call was dropped or failed.
    """

    __slots__ = (
        "__weakref__",
        "_claim",
        "_context",
        "_stage",
        "abandoned",
        "blockers",
        "call",
        "complete",
        "dependents",
        "device_indexes",
        "error",
        "future",
        "interruption",
        "mailbox",
        "on_orphan_error",
        "queue",
        "sent",
        "undo",
        "value",
    )

    def __init__(
        self,
        call: Callable[[Job], Any],
        *,
        undo: Callable[[Any], None] | None = None,
        mailbox: Mailbox | None = None,
        device_indexes: tuple[int, ...] = (),
        on_orphan_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.call: Callable[[Job], Any] | None = call
        self.undo = undo
        self.mailbox = mailbox
        self.device_indexes = device_indexes
        self.on_orphan_error = on_orphan_error
        self.value: Any = NOTHING
        self.error: BaseException | None = None
        self.abandoned = False
        self.future: asyncio.Future[None] | None = None
        self.interruption: BaseException | None = None
        self._stage = _Stage.WAITING
        self._claim = threading.Lock()
        # Log records and traces of driver code then carry the caller's context.
        self._context = contextvars.copy_context()
        # The rest belongs to gpurt.order.Order and is guarded by its lock.
        self.queue: Queue | None = None
        self.blockers = 0
        self.dependents: list[Job] = []
        self.sent = False
        self.complete = False

    def unblock(self) -> bool:
        """One job before this one is complete; True when it was the last. Under the order's lock."""
        self.blockers -= 1
        return self.blockers == 0

    @property
    def finished(self) -> bool:
        """The outcome is there, or there will never be one."""
        return self._stage in (_Stage.FINISHED, _Stage.CLOSED)

    def run(self) -> None:
        """Lane thread: run the call unless it was dropped, then hand the outcome over or undo it."""
        with self._claim:
            if self._stage is not _Stage.WAITING:
                return
            self._stage = _Stage.RUNNING
        call = self.call
        assert call is not None
        value: Any = NOTHING
        error: BaseException | None = None
        try:
            value = self._context.run(call, self)
        except BaseException as exc:
            _clear_frames(exc)
            error = exc
            if not isinstance(exc, Exception):
                # In the caller's task SystemExit would stop the loop, and CancelledError would look like its own.
                error = RuntimeError(f"driver code raised {type(exc).__name__}")
                error.__cause__ = exc
        del call
        self.call = None  # the closure holds the caller's buffers
        with self._claim:
            orphan = self.abandoned
            self._stage = _Stage.CLOSED if orphan else _Stage.FINISHED
            if not orphan:
                self.value, self.error = value, error
        if orphan:
            self._undo(value, error)

    def fail(self, error: Exception) -> None:
        """There is no lane to run it: the outcome is ``error``."""
        with self._claim:
            if self._stage is not _Stage.WAITING:
                return
            self._stage = _Stage.FINISHED
            self.error = error
        self.call = None

    def announce(self) -> None:
        """Lane thread: wake the caller. After the order knows, so that the caller finds its job complete."""
        if self.mailbox is not None:
            self.mailbox.post(self)

    def take(self) -> Any:
        """Caller: the value, once ``finished``. Raises the call's own exception."""
        with self._claim:
            self._stage = _Stage.CLOSED
        if self.error is not None:
            error, self.error = self.error, None
            self._undo(NOTHING, None)
            raise error
        value, self.value, self.undo = self.value, None, None
        return value

    def abandon(self) -> Callable[[], None] | None:
        """Caller: it goes away. Returns an undo that must still be run on a lane, or None.

        Not started: dropped, undone here. Running: undone by the lane when it ends. Finished: the returned
        callable undoes it; freeing belongs on a lane, not on the event loop.
        """
        with self._claim:
            if self._stage is _Stage.WAITING:
                self._stage = _Stage.CLOSED
                dropped = True
            elif self._stage is _Stage.RUNNING:
                self.abandoned = True
                return None
            elif self._stage is _Stage.FINISHED:
                self._stage = _Stage.CLOSED
                dropped = False
            else:
                return None
        if dropped:
            self.call = None
            self._undo(NOTHING, None)
            return None
        value, error = self.value, self.error
        self.value = self.error = None
        if self.undo is None and error is None:
            return None
        return lambda: self._undo(value, error)

    def disown(self) -> None:
        """Caller: it goes away, but the call must happen all the same. Only its errors are still of interest."""
        with self._claim:
            if self._stage is not _Stage.FINISHED:
                self.abandoned = True
                return
            self._stage = _Stage.CLOSED
        if self.error is not None and self.on_orphan_error is not None:
            self.on_orphan_error(self.error)

    def _undo(self, value: Any, error: BaseException | None) -> None:
        if error is not None and self.on_orphan_error is not None:
            self.on_orphan_error(error)
        undo, self.undo = self.undo, None
        if undo is None:
            return
        try:
            undo(value)
        except Exception as exc:
            if self.on_orphan_error is None:
                raise
            self.on_orphan_error(exc)


class Mailbox:
    """Finished jobs on their way to one event loop; one wake-up is in flight at most.

    Setting results one ``call_soon_threadsafe`` at a time costs a self-pipe write and a GIL hand-over each;
    batched, 64 concurrent calls cost half.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._waking = False

    def post(self, job: Job) -> None:
        """Any thread."""
        with self._lock:
            self._jobs.append(job)
            if self._waking:
                return
            self._waking = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody will ever look, so own the outcomes here
            self._disown()

    def _deliver(self) -> None:
        with self._lock:
            jobs, self._jobs, self._waking = self._jobs, [], False
        for job in jobs:
            future = job.future
            if future is not None and not future.done():
                future.set_result(None)

    def _disown(self) -> None:
        with self._lock:
            jobs, self._jobs, self._waking = self._jobs, [], False
        for job in jobs:
            undo = job.abandon()
            if undo is not None:
                undo()


class Lane(Executor):
    """One ordered executor thread. The thread starts with the first job and is named after the lane.

    ``run_in_executor(lane, …)`` and ``submit`` work as on any executor; gpurt itself uses ``put``, which skips
    the second future.

    Args:
        name: thread name, e.g. ``gpurt:cuda:0:h2d``.
        on_done: called on the lane's thread after each job, also after a dropped one.
        on_stop: called on the lane's thread as its last act.
    """

    def __init__(
        self,
        name: str,
        *,
        on_done: Callable[[Job], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.running: Job | None = None
        self.running_since: float | None = None
        """``clock()`` when the present job entered the driver; None between jobs. The hang clock."""
        self._clock = clock
        self._on_done = on_done
        self._on_stop = on_stop
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

        def call(_: Job) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(result)

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
            while (job := self._queue.get()) is not None:
                self.running, self.running_since = job, self._clock()
                job.run()
                self.running, self.running_since = None, None
                if self._on_done is not None:
                    self._on_done(job)
                job.announce()
                del job  # or the last job's buffers stay alive until the next one comes
            if self._on_stop is not None:
                self._on_stop()
        finally:
            self._stopped.set()


def _clear_frames(exc: BaseException) -> None:
    """Let go of what the frames of a failed call hold: arrays over the caller's buffer must not stay exported for as
    long as somebody keeps the error. Unlike ``traceback.clear_frames`` it leaves suspended coroutines alone, which an
    exception object that is raised twice still has in its traceback: clearing would end them.
    """
    suspendable = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    step = exc.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_flags & suspendable:
            with contextlib.suppress(RuntimeError):  # still executing: ours
                step.tb_frame.clear()
        step = step.tb_next


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
