"""Job: one blocking call on its way through a lane, and who owns what comes of it.

Whoever takes its claim first decides whether it runs: the lane (``run``) or the caller that goes away (``abandon``).
A job whose caller is gone still runs to its end under our ownership, and what it produced is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gpurt.mailbox import Mailbox
    from gpurt.order import Queue


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
        self._stage = _WAITING
        self._claim = threading.Lock()
        # Log records and traces of driver code then carry the caller's context.
        self._context = contextvars.copy_context()
        # The rest belongs to gpurt.order.Order and is guarded by its lock.
        self.queue: Queue | None = None
        self.blockers = 0
        self.dependents: list[Job] | None = None
        self.sent = False
        self.complete = False

    def unblock(self) -> bool:
        """One job before this one is complete; True when it was the last. Under the order's lock."""
        self.blockers -= 1
        return self.blockers == 0

    @property
    def finished(self) -> bool:
        """The outcome is there, or there will never be one."""
        stage = self._stage
        return stage is _FINISHED or stage is _CLOSED

    def run(self) -> None:
        """Lane thread: run the call unless it was dropped, then hand the outcome over or undo it."""
        with self._claim:
            if self._stage is not _WAITING:
                return
            self._stage = _RUNNING
        call = self.call
        assert call is not None
        value: Any = NOTHING
        error: BaseException | None = None
        try:
            value = self._context.run(call, self)
        except BaseException as exc:
            clear_frames(exc)
            error = exc
            if not isinstance(exc, Exception):
                # In the caller's task SystemExit would stop the loop, and CancelledError would look like its own.
                error = RuntimeError(f"driver code raised {type(exc).__name__}")
                error.__cause__ = exc
        del call
        self.call = None  # the closure holds the caller's buffers
        with self._claim:
            orphan = self.abandoned
            self._stage = _CLOSED if orphan else _FINISHED
            if not orphan:
                self.value, self.error = value, error
        try:
            if orphan:
                self._undo(value, error)
        finally:
            del error  # this frame is in its traceback: they would keep each other

    def fail(self, error: Exception) -> None:
        """There is no lane to run it: the outcome is ``error``."""
        with self._claim:
            if self._stage is not _WAITING:
                return
            self._stage = _FINISHED
            self.error = error
        self.call = None

    def announce(self) -> None:
        """Wake the caller. After the order knows, so that the caller finds its job complete."""
        if self.mailbox is not None:
            self.mailbox.post(self)

    def take(self) -> Any:
        """Caller: the value, once ``finished``. Raises the call's own exception."""
        self._stage = _CLOSED  # without the claim: the lane has let go, and the other claimant is the caller
        if self.error is not None:
            error, self.error = self.error, None
            try:
                self._undo(NOTHING, None)
                raise error
            finally:
                del error  # as in `run`
        value, self.value, self.undo = self.value, None, None
        return value

    def abandon(self) -> Callable[[], None] | None:
        """Caller: it goes away. Returns an undo that must still be run on a lane, or None.

        Not started: dropped, undone here. Running: undone by the lane when it ends. Finished: the returned
        callable undoes it; freeing belongs on a lane, not on the event loop.
        """
        with self._claim:
            if self._stage is _WAITING:
                self._stage = _CLOSED
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
            if self._stage is not _FINISHED:
                self.abandoned = True
                return
            self._stage = _CLOSED
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
