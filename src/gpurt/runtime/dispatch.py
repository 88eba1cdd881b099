"""Dispatcher: carries blocking driver calls to lanes and brings their outcomes back to the event loop.

Here live the rules that hold for every call: which lane it takes, cancellation, the hang clock, lost devices. What
the calls mean is the business of :mod:`gpurt.runtime.backend`.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final, Literal

import anyio

from gpurt.driver import Driver
from gpurt.errors import BackendClosed, DeviceLost, DeviceUnresponsive, GPUError
from gpurt.runtime.job import Duty, Job, Report, Undo
from gpurt.runtime.lane import HOLD_S, Lane, Mailbox
from gpurt.runtime.order import Chain, Order, Queue
from gpurt.runtime.protocols import LaneActivity

QueueName = Literal["control", "telemetry", "memory", "h2d", "d2h", "small", "peer", "compute", "compile", "sync"]
"""What a call is for. Each is a lane of its own where the driver allows it: both copy directions then run at once, a
small copy, an allocation or a reading never waits behind a large load, and no copy behind a compiler."""

CONTROL: Final = -1
"""Stands for the library itself where a device index is expected."""

_WATCH_FLOOR_S: Final = 0.005  # the hang clock is not looked at more often than this
_WATCH_CEILING_S: Final = 0.05

_REACH: Final = ("other devices go on", "one thread serves all devices of this library")

YIELD_AFTER_S: Final = 0.0001
"""A copy that ends so late in a turn of the loop ends its task's part in the turn: who copies in a loop must not keep
the others waiting, nor be deaf to a cancellation. Time for 25 copies of 4 KiB, which make little of a turn's cost."""

STOP_AFTER_S: Final = 0.0003
"""So late in a turn no copy is made any more: what is left of many callers takes the lane, which serves them a few at a
time. With 0.5 ms the gaps of the loop beside 64 callers that never rest grew from 2 to 3 ms (p99)."""


_NO_CONTEXT: Final = contextvars.Context()
"""Callbacks of the loop would hold the context of whichever caller happens to be the first, and what is in it."""


def _ignore(_: int) -> None: ...


class LoopTurn:
    """The present turn of one event loop, as far as copies on its own thread have used it. Loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loop = loop
        self._clock = clock
        self.began: float | None = None
        """When the first copy of the turn was made; None before it."""

    def has_room(self) -> bool:
        """Whether another copy may be made in this turn."""
        if self.began is None:
            self.began = self._clock()
            self._loop.call_soon(self._end, context=_NO_CONTEXT)
            return True
        return self._clock() - self.began < STOP_AFTER_S

    def is_long(self) -> bool:
        """Whether it is time to let the others have their turn."""
        return self.began is not None and self._clock() - self.began >= YIELD_AFTER_S

    def _end(self) -> None:
        self.began = None


class Dispatcher:
    """Lanes of one opening of a driver, bound to one event loop.

    Which lane a call takes follows from the driver's ``threading`` capability: one thread for everything, one per
    device, or one per device and purpose. Lanes are made when they are first needed; each attaches its thread to a
    device before the first call for it.

    Args:
        driver: asked for ``threading``, ``attach``, ``detach`` and its name.
        loop: the loop that awaits.
        hang_after: seconds in the driver after which a device counts as unresponsive.
        max_pending: jobs in one lane at a time; later callers wait, in order.
        report: gets errors of calls whose caller has gone away; any thread.
        on_state_change: called on the loop when a device starts or stops being unresponsive or is lost.
        on_loop_closed: called when an outcome comes for a loop that is closed; any thread, many times.
    """

    def __init__(
        self,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        *,
        hang_after: float,
        max_pending: int,
        report: Report,
        on_state_change: Callable[[int], None],
        on_loop_closed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop: Final = loop
        self.turn = LoopTurn(loop)
        self._driver = driver
        self._threading = driver.capabilities.threading
        self._one_thread = self._threading == "backend"
        self._hang_after = hang_after
        self._max_pending = max_pending
        self._report = report
        self._on_state_change = on_state_change
        self._clock = clock
        self._mailbox = Mailbox(loop, on_loop_closed)
        self._order = Order(self._mailbox.post)
        self._making = threading.Lock()
        self._queues: dict[tuple[int, str], Queue] = {}
        self._known: dict[tuple[int, QueueName], Queue] = {}
        """What was found for a device and a purpose: callers ask for the same few all the time."""
        self._lost: dict[int, tuple[str, str]] = {}
        """Message and whole text of the error by which a device was lost. Not the error itself, which holds the frames
        of whoever met it."""
        self._hung: set[int] = set()
        self._used: set[int] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._flushing: asyncio.TimerHandle | None = None

    # Submitting

    def submit(
        self,
        job: Job,
        index: int,
        name: QueueName,
        chains: Collection[Chain] = (),
        *,
        also_device: int | None = None,
        after_device: bool = False,
    ) -> Job:
        """Take a place in the order, now. On the loop's thread; await the outcome next, or disown the job.

        Args:
            index: the device whose lane runs the call.
            chains: order of the allocations that the call touches.
            also_device: a second device that the call occupies.
            after_device: wait for everything outstanding on the device first.
        """
        queue = self._known.get((index, name)) or self._find(index, name)
        job.index = index
        if job.occupies:
            job.device_indexes = (index,) if also_device is None or also_device == index else (index, also_device)
        job.future = self.loop.create_future()
        self._order.submit(job, queue, chains, (index,) if after_device else ())
        if self._watch is None:
            self._arm(self._hang_after)
        if queue.holds and queue.pending > 1 and self._flushing is None:
            # The lane may keep the outcome of a short call back while the next one, which may be long, runs.
            self._flushing = self.loop.call_later(HOLD_S, self._flush, context=_NO_CONTEXT)
        return job

    def impose(self, duty: Duty, index: int, name: QueueName, chains: Collection[Chain] = ()) -> None:
        """Submit what must happen and nobody waits for. Any thread."""
        duty.index = index
        self._order.submit(duty, self._known.get((index, name)) or self._find(index, name), chains)

    @property
    def has_control(self) -> bool:
        """Whether the control lane has a thread."""
        return self._known[CONTROL, "control"].lane.started

    def post_control(self, duty: Duty) -> None:
        """As ``impose`` on the control lane, which has run something already, without taking a lock: in the middle of
        a garbage collection."""
        self._known[CONTROL, "control"].lane.post(duty)

    def may_inline(self, chain: Chain) -> bool:
        """Whether a short copy between an allocation and memory that is there may be made on the loop's thread, here
        and now: nothing is before it in the order, and the loop has been kept for long enough not yet."""
        return chain.idle and self.turn.has_room()

    def _find(self, index: int, name: QueueName) -> Queue:
        if self._threading == "backend":
            key = (CONTROL, "all")
        elif index == CONTROL:
            key = (CONTROL, "control")
        elif self._threading == "device":
            key = (index, "telemetry" if name == "telemetry" else "main")
        else:
            key = (index, name)
        with self._making:
            queue = self._queues.get(key)
            if queue is None:
                parts = [str(part) for part in key if part not in (CONTROL, "all")]
                lane = Lane(
                    ":".join(["gpurt", self._driver.name, *parts]),
                    on_done=self._order.done,
                    deliver=self._mailbox.post,
                    report=self._report,
                    clock=self._clock,
                    hold_s=HOLD_S if key[1] == "small" else 0.0,
                )
                queue = Queue(self._driver, lane, self._max_pending, self._report, holds=key[1] == "small")
                self._queues = {**self._queues, key: queue}  # others iterate over it on their threads
            self._known[index, name] = queue
        return queue

    # Awaiting: the protocol itself stands in DriverBackend._finish

    async def leave(self, job: Job, exc: BaseException) -> None:
        """Its caller was thrown out of waiting by ``exc``. Also when the result is there already and asyncio drops it:
        look at the job, not at the future."""
        self._abandon(job)
        if job.wait_out and not isinstance(exc, GeneratorExit):
            await self._settled(job)

    async def interrupted(self, job: Job) -> None:
        """Its caller was woken because of the device's state. Raises the reason, unless there is an outcome by now."""
        interruption, job.interruption = job.interruption, None
        if job.finished or interruption is None:
            return
        self._abandon(job)
        try:
            if job.wait_out and not isinstance(interruption, (DeviceUnresponsive, BackendClosed)):
                await self._settled(job)
            raise interruption
        finally:
            del interruption  # this frame is in its traceback: a cycle otherwise

    def _abandon(self, job: Job) -> None:
        undo = job.abandon()
        if undo is not None:
            # What a job produced is given back on the lane that made it: for a thread-affine library any other thread
            # would be wrong.
            assert job.queue is not None
            duty = Undo(job.method, undo)
            duty.device_indexes = job.device_indexes
            self._order.submit(duty, job.queue)

    async def _settled(self, job: Job) -> None:
        """Wait until the driver has let go of the job, whatever is cancelled meanwhile, in either dialect.

        Not for one that hangs, or is left behind: nobody could say for how long. The job holds the caller's buffer.
        """
        # anyio cancels again on every turn of the loop unless shielded; asyncio cancels once per request.
        with anyio.CancelScope(shield=True):
            while not job.finished and not isinstance(job.interruption, (DeviceUnresponsive, BackendClosed)):
                job.future = self.loop.create_future()
                try:
                    await asyncio.wait({job.future})
                except asyncio.CancelledError:
                    continue
        job.interruption = None

    # Device state

    def check(self, index: int, device_id: str) -> None:
        """Raise what a new call on this device must fail with, if anything."""
        if index in self._lost:
            raise self._gone(index, device_id)
        if self._one_thread:
            self._used.add(index)
        if self._hung and index in self._hung_now():
            raise self._unresponsive(index, device_id)

    def lost(self, index: int) -> str | None:
        """Why the device is lost, or None."""
        return self._lost[index][1] if index in self._lost else None

    def unresponsive(self, index: int) -> bool:
        hung = self._hung_now()
        return index in hung or (self._one_thread and bool(hung))

    def mark_lost(self, index: int, error: GPUError) -> None:
        """The device is gone. Sticky; everybody who waits for it is told."""
        if index in self._lost:
            return
        self._lost[index] = error.message, str(error)
        self._interrupt(index, self._gone)
        self._on_state_change(index)

    def interrupt_all(self, error: Callable[[], GPUError]) -> None:
        """Loop's thread: let everybody go who waits for a call that has not returned. The calls go on."""
        for job in self._order.outstanding():
            self._wake(job, error)

    def abandon_all(self) -> None:
        """The loop is closed, and nobody waits for anything any more: drop what has not begun, and revert what has come
        and what will. Any thread."""
        for job in [*self._order.outstanding(), *self._mailbox.undelivered()]:
            self._abandon(job)

    def _gone(self, index: int, device_id: str | None = None) -> DeviceLost:
        return DeviceLost(
            f"the device is lost: {self._lost[index][0]}",
            backend=self._driver.name,
            device_id=device_id or f"{self._driver.name}:{index}",
            hint="shut the backend down and initialise it again to use its other devices or to retry",
        )

    def _unresponsive(self, index: int, device_id: str | None = None) -> DeviceUnresponsive:
        return DeviceUnresponsive(
            f"the driver has not returned for more than {self._hang_after:g} s",
            backend=self._driver.name,
            device_id=device_id or f"{self._driver.name}:{index}",
            hint=f"{_REACH[self._one_thread]}; the state clears if the driver returns; see hang_after",
        )

    def running(self) -> Iterator[tuple[Lane, Job, float]]:
        """Each lane whose call is in the driver, the call, and since how many seconds. Any thread; a glance."""
        now = self._clock()
        for queue in self._queues.values():
            since, job = queue.lane.running_since, queue.lane.running
            if since is not None and job is not None:
                yield queue.lane, job, now - since

    def _hung_now(self) -> set[int]:
        hung: set[int] = set()
        for _, job, age in self.running():
            if age >= self._hang_after:
                hung.update(job.device_indexes)
        # One thread for all devices: when a call hangs, nothing else of the library can run.
        return hung | self._used if self._one_thread and hung else hung

    def _interrupt(self, index: int, error: Callable[[int], BaseException]) -> None:
        # An error of its own for each: callers add their context to what they catch.
        for job in self._order.outstanding(index):
            self._wake(job, lambda: error(index))

    def _wake(self, job: Job, error: Callable[[], BaseException]) -> None:
        """Let the caller of an unfinished job go, with an error."""
        future = job.future
        if future is not None and not future.done() and not job.finished:
            job.interruption = error()
            future.set_result(None)

    def _arm(self, delay: float) -> None:
        self._watch = self.loop.call_later(
            min(max(delay, _WATCH_FLOOR_S), _WATCH_CEILING_S), self._look, context=_NO_CONTEXT
        )

    def _look(self) -> None:
        """The hang clock. Ticks only while something is outstanding."""
        self._watch = None
        hung = self._hung_now()
        changed = hung ^ self._hung
        self._hung = hung
        for index in hung:
            self._interrupt(index, self._unresponsive)
        for index in changed:
            self._on_state_change(index)
        if not self._order.outstanding():
            return
        young = [self._hang_after - age for _, _, age in self.running() if age < self._hang_after]
        # While a device hangs, look often enough to see it come back.
        self._arm(min([*young, self._hang_after, 1.0] if hung else [*young, self._hang_after]))

    def _flush(self) -> None:
        """Deliver what lanes keep back, and come again while they may."""
        self._flushing = None
        again = False
        for queue in self._queues.values():
            if queue.holds:
                queue.lane.flush()
                again = again or queue.pending > 1
        if again:
            self._flushing = self.loop.call_later(HOLD_S, self._flush, context=_NO_CONTEXT)

    def lanes(self) -> list[LaneActivity]:
        """What each lane is doing. Lanes run on meanwhile: it is a glance."""
        found: list[LaneActivity] = []
        now = self._clock()
        for queue in self._queues.values():
            since, name = queue.lane.running_since, queue.lane.name.removeprefix("gpurt:")
            running_s = None if since is None else max(0.0, now - since)
            found.append(LaneActivity(name, queue.pending, len(queue.held), running_s))
        return found

    # The end: on the thread that closes the opening

    def wait_idle(self) -> None:
        """Block until nothing is outstanding."""
        idle = threading.Event()
        self._order.when_idle(idle.set)
        idle.wait()

    def detach(self) -> None:
        """Undo every attachment, each on the thread that made it, and block until that is done."""
        for queue in self._queues.values():
            if queue.attached:
                self._order.submit(Duty("detach", lambda _, queue=queue: queue.detach()), queue)
        self.wait_idle()

    def stop(self) -> None:
        """End every lane, and block until they have ended. Nothing is outstanding, and nothing is sent any more."""
        self._order.close()
        for queue in self._queues.values():
            queue.lane.stop()
        for queue in self._queues.values():
            queue.lane.wait_stopped()
        # Its opening made the two functions: a cycle otherwise.
        self._on_state_change = _ignore
        self._mailbox.unbind()

    def disarm(self) -> None:
        """Loop's thread: cancel the clocks."""
        for timer in (self._watch, self._flushing):
            if timer is not None:
                timer.cancel()
        self._watch = self._flushing = None
