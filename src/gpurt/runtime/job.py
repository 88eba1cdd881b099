"""Job: one blocking call on its way through a lane, and who owns what comes of it.

Whoever takes its claim first decides whether it runs: the lane (``run``) or the caller that goes away (``abandon``).
A job whose caller is gone still runs to its end under our ownership, and what it produced is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable
from enum import Enum, auto
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gpurt.errors import BackendClosed, GPUError, TransferFailed, text_of

if TYPE_CHECKING:
    from gpurt.runtime.order import Queue

log = logging.getLogger("gpurt.runtime")

Report = Callable[[BaseException], None]
"""Takes the error of a call whose caller is gone. Never raises; any thread."""


class Nothing(Enum):
    """The outcome of a call that produced nothing: it was dropped, or it failed."""

    NOTHING = auto()


NOTHING: Final = Nothing.NOTHING


class _Stage(Enum):
    WAITING = auto()  # parked or queued
    RUNNING = auto()  # inside the driver
    FINISHED = auto()  # outcome there, caller has not seen it
    CLOSED = auto()  # outcome delivered, undone or never to be


# Looking a member up in its class takes 0.1 µs, ten times what a global takes, and every call does it seven times.
_WAITING, _RUNNING, _FINISHED, _CLOSED = _Stage


class Job:
    """One blocking call, its outcome, and who owns that outcome. Each kind of call is a subclass.

    ``execute`` runs on a lane. ``revert`` is called exactly once unless a caller takes the value, on the lane's thread,
    or on the caller's where the call has not begun: with the value when there is one that nobody will see, with
    ``NOTHING`` when the call was dropped or failed.
    """

    method: ClassVar[str] = "call"
    """What runs in the driver, for messages about calls that hang."""
    failure: ClassVar[type[GPUError]] = TransferFailed
    """What a failure of the library means where nothing else fits."""
    droppable: ClassVar[bool] = True
    """A job that has not begun when its caller is cancelled is dropped; otherwise it runs all the same."""
    wait_out: ClassVar[bool] = False
    """A cancelled caller waits until the driver returns, because it writes into memory that belongs to the caller; but
    not longer than its device responds."""
    occupies: ClassVar[bool] = True
    """The call uses its device, which hangs if the call does."""
    reports_memory: ClassVar[bool] = True
    """Where memory runs out it is the device's, and the error has its figures, which another call has to ask for."""

    @property
    def requested_bytes(self) -> int:
        """Device memory that the call was to allocate."""
        return 0

    @property
    def host_bytes(self) -> int | None:
        """Host memory that the call moves: a plain MemoryError means that, libraries have their own for a device's."""
        return None

    __slots__ = (
        "__weakref__",
        "_claim",
        "_context",
        "_stage",
        "abandoned",
        "blockers",
        "complete",
        "dependents",
        "device_indexes",
        "error",
        "future",
        "index",
        "interruption",
        "queue",
        "sent",
        "value",
    )

    def __init__(self) -> None:
        self.value: Any = NOTHING
        self.error: BaseException | None = None
        self.abandoned = False
        """Nobody waits for the outcome any more: a long call may look at it between two chunks."""
        self.future: asyncio.Future[None] | None = None
        self.interruption: BaseException | None = None
        self._stage = _WAITING
        self._claim = Lock()
        # Log records and traces of driver code then carry the caller's context.
        self._context: contextvars.Context | None = contextvars.copy_context()
        # The rest belongs to the dispatcher and to gpurt.runtime.order.Order, which guards it by its lock.
        self.index = -1
        """The device that the lane's thread must be attached to; negative for none."""
        self.device_indexes: tuple[int, ...] = ()
        self.queue: Queue | None = None
        self.blockers = 0
        self.dependents: list[Job] | None = None
        self.sent = False
        self.complete = False

    def execute(self) -> Any:
        """Lane thread: make the call."""
        raise NotImplementedError

    def revert(self, value: Any) -> None:
        """Give back what the job holds: see the class."""

    def operation(self, name: str) -> str:
        """The public method ``name`` with this call's figures, for a message. Only asked for when it fails."""
        return name

    @property
    def finished(self) -> bool:
        """The outcome is there, or there will never be one."""
        stage = self._stage
        return stage is _FINISHED or stage is _CLOSED

    def run(self) -> None:
        """Lane thread: run the call unless it was dropped, then hand the outcome over or revert it."""
        with self._claim:
            if self._stage is not _WAITING:
                return
            self._stage = _RUNNING
        value: Any = NOTHING
        context, self._context = self._context, None  # what it holds is the caller's, and ends with the call
        queue, index = self.queue, self.index
        assert context is not None
        try:
            if index >= 0 and queue is not None and index not in queue.attached:
                context.run(queue.attach, index)
            value = context.run(self.execute)
        except BaseException as exc:
            clear_frames(exc)
            self.error = contained(exc)
        del context
        with self._claim:
            orphan = self.abandoned
            self._stage = _CLOSED if orphan else _FINISHED
            if not orphan:
                self.value = value
        if orphan:
            self._settle(value)

    def fail(self, error: Exception) -> None:
        """There is no lane to run it: the outcome is ``error``."""
        with self._claim:
            if self._stage is not _WAITING:
                return
            self._context = None
            orphan = self.abandoned
            self._stage = _CLOSED if orphan else _FINISHED
            if not orphan:
                self.error = error
        if orphan:
            if not isinstance(error, BackendClosed):
                log_error(error)  # to the log alone: this holds a lock that an owner's function may want
            self._revert(NOTHING)

    def take(self) -> Any:
        """Caller: the value, once ``finished``. Raises the call's own exception."""
        self._stage = _CLOSED  # without the claim: the lane has let go, and the other claimant is the caller
        if self.error is not None:
            error, self.error = self.error, None
            self._revert(NOTHING)
            try:
                raise error
            finally:
                del error  # this frame is in its traceback: a cycle otherwise
        value, self.value = self.value, None
        self.taken(value)
        return value

    def taken(self, value: Any) -> None:
        """The caller has the value: let go of what would have reverted it. The job itself may live on in its chain."""

    def abandon(self) -> Callable[[], None] | None:
        """Caller: it goes away. Returns what must still be run on the job's lane, or None.

        Not started: dropped, reverted here. Running: reverted by the lane when it ends. Finished: the returned
        callable reverts it; freeing belongs on a lane, not on the event loop.
        """
        if not self.droppable:
            self.disown()
            return None
        with self._claim:
            if self._stage is _WAITING:
                self._stage = _CLOSED
                self._context = None
                dropped = True
            elif self._stage is _RUNNING:
                self.abandoned = True
                return None
            elif self._stage is _FINISHED:
                self._stage = _CLOSED
                dropped = False
            else:
                return None
        if dropped:
            self._revert(NOTHING)
            return None
        value, self.value = self.value, None
        return lambda: self._settle(value)

    def disown(self) -> None:
        """Caller: it goes away, but the call must happen all the same. Only its errors are still of interest."""
        with self._claim:
            if self._stage is not _FINISHED:
                self.abandoned = True
                return
            self._stage = _CLOSED
        value, self.value = self.value, None
        if self.error is not None:
            self._settle(value)

    def _settle(self, value: Any) -> None:
        """Nobody takes the outcome: report the error, and revert what there is."""
        error, self.error = self.error, None
        if error is not None:
            self._report(error)
        del error
        self._revert(value)

    def _revert(self, value: Any) -> None:
        try:
            self.revert(value)
        except BaseException as exc:
            if is_users_interrupt(exc):
                raise
            self._report(contained(exc))

    def _report(self, error: BaseException) -> None:
        (log_error if self.queue is None else self.queue.report)(error)


class Call(Job):
    """A job that calls a function, which gets the job.

    Args:
        text: the operation with its figures, for messages; None is the public method's name alone.
        undo: see ``Job.revert``.
    """

    __slots__ = ("_call", "_text", "_undo")

    def __init__(
        self, call: Callable[[Job], Any], text: str | None = None, undo: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__()
        self._call: Callable[[Job], Any] | None = call
        self._text = text
        self._undo = undo

    def execute(self) -> Any:
        call, self._call = self._call, None  # it may hold what belongs to its caller
        assert call is not None
        return call(self)

    def revert(self, value: Any) -> None:
        self._call = None
        undo, self._undo = self._undo, None
        if undo is not None:
            undo(value)

    def taken(self, value: Any) -> None:
        self._undo = None

    def operation(self, name: str) -> str:
        return name if self._text is None else self._text


class Duty(Call):
    """A call that must happen although nobody waits for it. Its errors are reported.

    Args:
        method: what runs in the driver, for messages about calls that hang.
    """

    droppable = False
    __slots__ = ("_method",)

    def __init__(self, method: str, call: Callable[[Job], Any]) -> None:
        super().__init__(call)
        self._method = method
        self.abandoned = True

    @property
    def method(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._method


class Undo(Duty):
    """What an unwanted outcome has to be undone by, on the lane that made it; here and now where there is none any
    more, because the opening is closed and only books are left to be put right."""

    __slots__ = ()

    def __init__(self, method: str, undo: Callable[[], None]) -> None:
        super().__init__(method, lambda _: undo())

    def revert(self, value: Any) -> None:
        if value is NOTHING and self._call is not None:
            self.execute()


def contained(exc: BaseException) -> Exception:
    """``exc`` as an error that may be raised in somebody's task. There SystemExit would stop the event loop, and
    CancelledError would look like the task's own."""
    if isinstance(exc, Exception):
        return exc
    error = RuntimeError(f"driver code raised {type(exc).__name__}")
    error.__cause__ = exc
    return error


def is_users_interrupt(exc: BaseException) -> bool:
    """Whether ``exc`` is Ctrl-C, which arrives in whatever the main thread is doing and is never the driver's."""
    return isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def log_error(exc: BaseException) -> None:
    log.error("a driver call failed after its caller had gone: %s", text_of(exc), exc_info=exc)


class ErrorReport:
    """Reports errors of background work, each once: to its owner's function, and to the log where there is none.

    What that function raises is logged, and so is whatever fails while it runs on the same thread: it is never called
    from within itself.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None) -> None:
        self._on_error = on_error
        self._busy = threading.local()

    def __call__(self, exc: BaseException) -> None:
        if self._on_error is None or getattr(self._busy, "now", False):
            log_error(exc)
            return
        self._busy.now = True
        try:
            self._on_error(exc)
        except BaseException as failure:
            if is_users_interrupt(failure):
                raise
            log_error(exc)
            log.error("on_background_error raised %s", text_of(failure), exc_info=failure)
        finally:
            self._busy.now = False


def clear_frames(exc: BaseException) -> None:
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
