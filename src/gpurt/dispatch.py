"""Dispatcher: carries blocking driver calls to lanes and brings their outcomes back to the event loop.

Here live the rules that hold for every call: cancellation, the hang clock, lost devices. Which lane a call takes is
the business of :mod:`gpurt.routes`, what the calls mean that of :mod:`gpurt.shell`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn

import anyio

from gpurt.activity import LaneActivity
from gpurt.driver import Driver
from gpurt.errors import BackendClosed, DeviceLost, DeviceUnresponsive, GPUError
from gpurt.inline import LoopTurn, in_memory
from gpurt.job import Job
from gpurt.mailbox import Mailbox
from gpurt.order import Chain, Order, Queue
from gpurt.routes import CONTROL, QueueName, Routes

log = logging.getLogger("gpurt.dispatch")

_WATCH_FLOOR_S: Final = 0.005  # the hang clock is not looked at more often than this
_FLUSH_S: Final = 0.05
"""The most that a result waits which its lane keeps back when the lane's next call hangs."""


class Dispatcher:
    """Lanes of one opened driver, bound to one event loop.

    Args:
        driver: whose methods the calls run; asked only for ``threading``, ``attach``, ``detach``, ``classify``.
        loop: the loop that awaits.
        hang_after: seconds in the driver after which a device counts as unresponsive.
        max_pending: jobs in one lane at a time; later callers wait, in order.
        on_background_error: gets errors of calls whose caller has gone away; any thread.
        on_state_change: called on the loop when a device starts or stops being unresponsive or is lost.
    """

    def __init__(
        self,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        *,
        hang_after: float,
        max_pending: int,
        on_background_error: Callable[[BaseException], None],
        on_state_change: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self.loop: asyncio.AbstractEventLoop = loop
        self._hang_after = hang_after
        self._on_background_error = on_background_error
        self._on_state_change = on_state_change
        self._clock = clock
        self._mailbox = Mailbox(loop)
        self.turn = LoopTurn(loop)
        self._order = Order()
        self._routes = Routes(driver, max_pending, on_done=self._order.done, on_error=on_background_error, clock=clock)
        self._lost: dict[int, GPUError] = {}
        self._hung: set[int] = set()
        # One thread for all devices: when a call hangs, nothing else of the library can run.
        self._one_thread = driver.capabilities.threading == "backend"
        self._used: set[int] = set()
        self._watch: asyncio.TimerHandle | None = None

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve another loop; the old one is closed. Calls still under way are settled by their lanes."""
        if loop is not self.loop:
            self.loop = loop
            self._mailbox = Mailbox(loop)
            self.turn = LoopTurn(loop)
            self._watch = None

    # Submitting and awaiting

    def submit(
        self,
        index: int | None,
        queue_name: QueueName,
        call: Callable[[Job], Any],
        *,
        chains: Collection[Chain] = (),
        also_device: int | None = None,
        after_device: bool = False,
        undo: Callable[[Any], None] | None = None,
        occupies: bool = True,
    ) -> Job:
        """Take a place in the order, now. Pass the job to ``finished`` next, or ``disown`` it.

        Args:
            index: the device whose lane runs the call; None for the control lane.
            chains: order of the allocations that the call touches.
            also_device: a second device that the call occupies.
            after_device: wait for everything outstanding on the device first.
            undo: see :class:`gpurt.job.Job`.
            occupies: the call uses the device, which hangs if the call does.
        """
        queue = self._routes.queue(index, queue_name)
        if index is None:
            index = CONTROL
        elif index not in queue.attached:
            call = self._routes.attaching(index, queue, call)
        if not occupies:
            devices: tuple[int, ...] = ()
        elif also_device is None or also_device == index:
            devices = (index,)
        else:
            devices = (index, also_device)
        job = Job(call, undo, self._mailbox, devices, self._on_background_error)
        job.future = self.loop.create_future()
        self._order.submit(job, queue, chains, devices if after_device else ())
        if self._watch is None:
            self._arm(self._hang_after)
        return job

    async def finished(self, job: Job, *, droppable: bool = True, wait_out: bool = False) -> None:
        """Wait until a submitted job has its outcome; ``job.take()`` it next, without awaiting in between.

        Args:
            droppable: a cancelled job that has not started is dropped; otherwise it runs all the same.
            wait_out: a cancelled job that has started is waited for before the cancellation goes on, because
                it writes into memory that belongs to the caller; but not longer than its device responds.

        Raises:
            DeviceUnresponsive, DeviceLost: the device failed meanwhile; the job is then dropped or detached.
        """
        assert job.future is not None
        try:
            await job.future
        except BaseException as exc:
            await self.left(job, exc, droppable=droppable, wait_out=wait_out)
            raise
        if not job.finished:
            await self.interrupted(job, droppable=droppable, wait_out=wait_out)

    async def left(self, job: Job, exc: BaseException, *, droppable: bool, wait_out: bool) -> None:
        """Its caller was thrown out of waiting by ``exc``. Also when the result is there already and asyncio drops it:
        look at the job, not at the future."""
        await self._leave(job, droppable=droppable, wait_out=wait_out and not isinstance(exc, GeneratorExit))

    async def interrupted(self, job: Job, *, droppable: bool, wait_out: bool) -> NoReturn:
        """Its caller was woken because of the device's state. Raises what it is to be told."""
        interruption = job.interruption
        assert interruption is not None
        await self._leave(job, droppable=droppable, wait_out=wait_out)
        job.interruption = None
        try:
            raise interruption
        finally:
            del interruption  # frames of its traceback have both: they would keep each other

    async def _leave(self, job: Job, *, droppable: bool, wait_out: bool) -> None:
        if not droppable:
            job.disown()
            return
        undo = job.abandon()
        if undo is not None:
            self._order.submit(Job(lambda _: undo(), on_orphan_error=self._on_background_error), self._undo_queue(job))
        if wait_out:
            await self._settled(job)

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

    def _undo_queue(self, job: Job) -> Queue:
        # What a job produced is given back on the lane that made it: for a thread-affine library any other
        # thread would be wrong.
        assert job.queue is not None
        return job.queue

    def may_inline(self, chain: Chain, buffer: object) -> bool:
        """Whether a short copy between an allocation and ``buffer`` may be made here and now, see :mod:`gpurt.inline`:
        nothing is before it in the order, nothing in it can wait, and the loop has been kept for long enough not yet.
        """
        return chain.idle and in_memory(buffer) and self.turn.has_room()

    def lanes(self) -> list[LaneActivity]:
        """What each lane is doing."""
        return self._routes.activity(self._clock())

    # Device state

    def check(self, index: int, device_id: str) -> None:
        """Raise what a new call on this device must fail with, if anything."""
        if index in self._lost:
            raise self._gone(index, device_id)
        self._used.add(index)
        if self._hung and index in self._hung_now():
            raise self._unresponsive(index, device_id)

    def lost(self, index: int) -> GPUError | None:
        """Why the device is lost, or None."""
        return self._lost.get(index)

    def unresponsive(self, index: int) -> bool:
        hung = self._hung_now()
        return index in hung or (self._one_thread and bool(hung - {CONTROL}))

    def mark_lost(self, index: int, error: GPUError) -> None:
        """The device is gone. Sticky; everybody who waits for it is told."""
        if index in self._lost:
            return
        self._lost[index] = error
        self._interrupt(index, self._gone)
        self._on_state_change(index)

    def _gone(self, index: int, device_id: str | None = None) -> DeviceLost:
        return DeviceLost(
            f"the device is lost: {self._lost[index].message}",
            backend=self._driver.name,
            device_id=device_id or f"{self._driver.name}:{index}",
            hint="shut the backend down and initialise it again to use its other devices or to retry",
        )

    def _unresponsive(self, index: int, device_id: str | None = None) -> DeviceUnresponsive:
        return DeviceUnresponsive(
            f"the driver has not returned for more than {self._hang_after:g} s",
            backend=self._driver.name,
            device_id=device_id or (None if index == CONTROL else f"{self._driver.name}:{index}"),
            hint=("one thread serves all devices of this library" if self._one_thread else "other devices go on")
            + "; the state clears if the driver returns; see hang_after",
        )

    def _hung_now(self) -> set[int]:
        now = self._clock()
        hung: set[int] = set()
        for queue in self._routes:
            since, job = queue.lane.running_since, queue.lane.running
            if since is not None and job is not None and now - since >= self._hang_after:
                hung.update(job.device_indexes)
        return hung | self._used if self._one_thread and hung - {CONTROL} else hung

    def _interrupt(self, index: int, error: Callable[[int], BaseException]) -> None:
        # An error of its own for each: callers add their context to what they catch.
        for job in self._order.outstanding(index):
            self._wake(job, lambda: error(index))

    def _wake(self, job: Job, error: Callable[[], BaseException]) -> None:
        """Let the caller of an unfinished job go, with an error; not one of a loop that is closed."""
        future = job.future
        if future is not None and not future.done() and not job.finished and future.get_loop() is self.loop:
            job.interruption = error()
            future.set_result(None)

    def _arm(self, delay: float) -> None:
        self._watch = self.loop.call_later(min(max(delay, _WATCH_FLOOR_S), _FLUSH_S), self._look)

    def _look(self) -> None:
        """The hang clock. Ticks only while something is outstanding."""
        self._watch = None
        for queue in self._routes:
            queue.lane.flush()
        hung = self._hung_now()
        changed = hung ^ self._hung
        self._hung = hung
        for index in hung:
            self._interrupt(index, self._unresponsive)
        for index in changed - {CONTROL}:
            self._on_state_change(index)
        if not self._order.outstanding():
            return
        now = self._clock()
        starts = [queue.lane.running_since for queue in self._routes]
        ages = [now - since for since in starts if since is not None]
        young = [self._hang_after - age for age in ages if age < self._hang_after]
        # While a device hangs, look often enough to see it come back.
        self._arm(min([*young, self._hang_after, 1.0] if hung else [*young, self._hang_after]))

    # The end

    async def drain(self) -> None:
        """Wait until nothing is outstanding."""
        loop, idle = self.loop, asyncio.Event()

        def wake() -> None:
            # The loop may close before a left-behind call returns; then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(idle.set)

        self._order.when_idle(wake)
        await idle.wait()

    async def detach(self) -> None:
        """Undo every ``attach``, each on the thread that made it. Nothing is outstanding; a close may follow."""
        jobs: list[Job] = []
        for queue in self._routes:
            if not queue.attached:
                continue
            job = Job(lambda _, queue=queue: self._routes.detach(queue), mailbox=self._mailbox)
            job.future = self.loop.create_future()
            self._order.submit(job, queue)
            jobs.append(job)
        for job in jobs:
            await self.finished(job, droppable=False)

    def stop(self) -> None:
        """Stop every lane; nothing is sent any more. Calls still inside the driver are left to themselves."""
        self._order.close()
        for queue in self._routes:
            queue.lane.flush()
        name = self._driver.name
        for job in self._order.outstanding():
            self._wake(job, lambda: BackendClosed("shut down while this call was under way", backend=name))
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for queue in self._routes:
            queue.lane.stop()
