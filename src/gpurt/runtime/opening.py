"""Opening: everything of one opening of a driver, from ``open`` to the return of ``close``.

A backend has one live opening at most. Jobs and what undoes them hold their opening and never the backend, so that
whatever comes late is settled where it belongs. An opening is bound to the event loop that began it, and only goes
forward: opening, open, closing, closed.

Closing is nobody's task: a thread of the opening waits until the driver has returned from everything, frees what is
left on the lanes, closes the driver on its control lane, and ends the lanes. It starts once, whether by ``shutdown``,
by an ``initialize`` that is cancelled or fails, because the event loop is closed, or because nobody holds the backend
any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Final, NoReturn

from gpurt.driver import Driver
from gpurt.errors import BackendClosed, BackendUnavailable, GPUError, ReasonCode, text_of
from gpurt.runtime.allocator import Allocator, Block, Ledger
from gpurt.runtime.dispatch import CONTROL, Dispatcher
from gpurt.runtime.handles import Allocation, HandleTable
from gpurt.runtime.host_memory import HostPool
from gpurt.runtime.job import Duty, Job, Report, clear_frames, contained, is_users_interrupt
from gpurt.runtime.kernels import KernelTable
from gpurt.runtime.lane import Lane
from gpurt.runtime.operations import Free
from gpurt.runtime.protocols import MemoryLimit
from gpurt.runtime.turns import short_turns
from gpurt.types import DeviceState, GPUDevice, MemoryHandle

HELD_UP_S: Final = 0.1
"""A call that has been in the driver for so long is named as what an opening waits for."""


LOOK_S: Final = 0.5
"""How often an opening that waits for memory in use looks whether its event loop has been closed meanwhile: results on
their way there may be all that keeps it."""


class OpeningState(Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class OpeningOptions:
    """What holds for every opening of a backend. See :class:`gpurt.runtime.backend.DriverBackend`."""

    memory_limit: int | Mapping[str, int] | None
    operator_limit: MemoryLimit | None
    hang_after: float
    max_pending: int
    pool_bytes: int | None
    host_buffer_limit: int | None

    def limit_of(self, device: GPUDevice) -> int | None:
        own = self.memory_limit
        limits = [own.get(device.device_id) if isinstance(own, Mapping) else own]
        if self.operator_limit is not None:
            limits.append(self.operator_limit(device))
        return min((limit for limit in limits if limit is not None), default=None)


class Opening:
    """One opening of ``driver``, begun on ``loop`` by ``start``.

    Args:
        listeners: called on the loop with a device whose state has changed.
        report: gets errors that nobody waits for.

    Attributes:
        devices, index, ledger, allocator, host_pool: there once the driver has been opened, and to the end.
        failure: why it could not be opened.
    """

    def __init__(
        self,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        options: OpeningOptions,
        listeners: list[Callable[[GPUDevice], None]],
        report: Report,
    ) -> None:
        self.driver: Final = driver
        self.loop: Final = loop
        self.state = OpeningState.OPENING
        self.devices: tuple[GPUDevice, ...] = ()
        self.index: dict[str, int] = {}
        self.handles = HandleTable()
        self.kernels = KernelTable()
        self.ledger = Ledger({})
        self.allocator = Allocator(driver, self.ledger, (), None, report)
        self.host_pool = HostPool(driver, options.host_buffer_limit, report)
        self.failure: Exception | None = None
        self.report: Final = report
        self._options = options
        self._listeners = listeners
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._driver_open = False
        self._disowned = False
        self._closer: Lane | None = None
        self._kept: list[Allocation] = []
        """Allocations that views, or arrays made from them, still look into, when all else has been freed."""
        self._host_kept = False
        """Likewise of host buffers."""
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        """For the closing thread: True where memory was let go, False where the process ends. Put to in the middle of
        garbage collections, so it must take no lock."""
        self._observers: list[Callable[[], None]] = []
        self.dispatch: Final = Dispatcher(
            driver,
            loop,
            hang_after=options.hang_after,
            max_pending=options.max_pending,
            report=report,
            on_state_change=self._state_changed,
            on_loop_closed=self.begin_close,
        )

    def __repr__(self) -> str:
        held_up = self.held_up_by()
        return f"<Opening of {self.driver.name}: {self.state.value}{f', waits for {held_up}' if held_up else ''}>"

    # Opening

    def start(self) -> None:
        """Open the driver on the control lane; returns at once."""
        self.dispatch.impose(Duty("open", lambda _: self._open()), CONTROL, "control")
        if not self.dispatch.has_control:
            self.failure = GPUError("no thread can be started in this process", hint="end some of its threads")
            self.begin_close()

    def _open(self) -> None:
        """Control lane."""
        try:
            # anyio loads its asyncio half on first use, which would stall the loop for 0.1 s in the middle of a
            # cancellation.
            with short_turns():
                importlib.import_module("anyio._backends._asyncio")
                devices = self.driver.open()
            self._driver_open = True
            self._make_tables(tuple(devices))
        except BaseException as exc:
            clear_frames(exc)
            with self._lock:
                self.failure = contained(exc)
                disowned = self._disowned
            if disowned:
                self._report_failure()
            self.begin_close()
            return
        with self._lock:
            if self.state is OpeningState.OPENING:
                self.state = OpeningState.OPEN
        self._notify()

    def _make_tables(self, devices: tuple[GPUDevice, ...]) -> None:
        if not devices:
            raise BackendUnavailable("the library works and lists no device", reason=ReasonCode.NO_DEVICE)
        limits = {device.device_id: self._options.limit_of(device) for device in devices}
        if len(limits) < len(devices):
            raise BackendUnavailable(f"the driver lists a device twice: {', '.join(d.device_id for d in devices)}")
        self.ledger = Ledger(limits)
        self.allocator = Allocator(self.driver, self.ledger, tuple(limits), self._options.pool_bytes, self.report)
        self.host_pool = HostPool(self.driver, self._options.host_buffer_limit, self.report)
        self.devices = tuple(_limited(device, limits[device.device_id]) for device in devices)
        self.index = {device.device_id: index for index, device in enumerate(devices)}

    def disown(self) -> None:
        """Whoever began this opening is gone: end it, and report why the driver could not be opened, if it cannot."""
        with self._lock:
            self._disowned = True
        self._report_failure()
        self.begin_close()

    def _report_failure(self) -> None:
        with self._lock:
            failure, self.failure = self.failure, None
        if failure is not None:
            self.report(failure)

    def raise_failure(self) -> NoReturn:
        """Raise why the driver could not be opened. Once: who else waits for this opening begins another."""
        failure, self.failure = self.failure, None
        name = self.driver.name
        try:
            if isinstance(failure, BackendUnavailable):
                failure.backend = failure.backend or name
                raise failure
            reason = ReasonCode.NO_LIBRARY if isinstance(failure, ImportError) else ReasonCode.ERROR
            what = "it was shut down" if failure is None else f"{type(failure).__name__}: {text_of(failure)}"
            raise BackendUnavailable(what, reason=reason, backend=name) from failure
        finally:
            del failure  # this frame is in its traceback: a cycle otherwise

    # Devices

    def present(self, index: int) -> GPUDevice:
        """A device with its present state."""
        device = self.devices[index]
        lost = self.dispatch.lost(index)
        if lost is not None:
            change = {"state": DeviceState.LOST, "state_reason": lost, "usable": False}
        elif self.dispatch.unresponsive(index):
            reason = f"the driver has not returned for more than {self._options.hang_after:g} s"
            change = {"state": DeviceState.UNRESPONSIVE, "state_reason": reason, "usable": False}
        else:
            return device
        return device.model_copy(update=change)

    def _state_changed(self, index: int) -> None:
        if self.state is not OpeningState.OPEN:
            return
        device = self.present(index)
        for listener in list(self._listeners):
            try:
                listener(device)
            except BaseException as exc:  # a listener's fault must not stop the hang clock
                if is_users_interrupt(exc):
                    raise
                self.report(contained(exc))

    # Memory

    def deliver(self, handle: MemoryHandle) -> None:
        """The user has the handle of what was reserved, and the allocation is live.

        Raises:
            BackendClosed: the closing thread was quicker.
        """
        with self._lock:
            allocation = self.handles.find(handle)
            if allocation is None:
                raise BackendClosed("the backend was shut down")
            allocation.delivered = True
            self.ledger.commit(handle.device_id, handle.size_bytes)

    def discard(self, handle: MemoryHandle) -> None:
        """Memory lane: the end of an allocation that never reached its user."""
        allocation = self.handles.find(handle)
        if allocation is not None and self._strike(allocation):
            self.allocator.release(allocation.block)

    def _strike(self, allocation: Allocation) -> bool:
        """Take an allocation out of the table and the books; False when somebody else has done it."""
        with self._lock:
            if not self.handles.remove(allocation):
                return False
            handle = allocation.handle
            if allocation.delivered:
                self.ledger.release(handle.device_id, handle.size_bytes)
            else:
                self.ledger.cancel(handle.device_id, handle.size_bytes)
            return True

    def free(self, allocation: Allocation) -> Job | None:
        """Loop's thread: the handle is dead; what is still to be waited for, or None."""
        handle = allocation.handle
        self.handles.remove(allocation)
        if (allocation.idle and not allocation.exported and self.allocator.keep(allocation.block)) or (
            self.dispatch.lost(allocation.index) is not None  # its memory went with it; only the books are left
        ):
            self.ledger.release(handle.device_id, handle.size_bytes)
            return None
        return self.dispatch.submit(Free(self, allocation), allocation.index, "memory", (allocation,))

    def free_when_unviewed(self, allocation: Allocation) -> None:
        """Loop's thread: free an allocation once no view of it, and no array made from one, is in use."""
        loop = self.loop

        def look() -> None:
            if self.state is not OpeningState.OPEN or self.handles.find(allocation.handle) is not allocation:
                return  # the closing thread frees it, or it was freed by hand
            if allocation.open_views:
                allocation.when_unviewed(unviewed)
            elif (job := self.free(allocation)) is not None:
                job.disown()

        def unviewed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(look)

        look()

    # Waiting

    async def wait(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, on any loop, until ``reached`` is true; False when it is not within ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not reached():
            loop = asyncio.get_running_loop()
            changed: asyncio.Future[None] = loop.create_future()

            def wake(loop: asyncio.AbstractEventLoop = loop, changed: asyncio.Future[None] = changed) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_resolve, changed)

            with self._lock:
                self._observers.append(wake)
            try:
                if reached():  # while this was at it
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                await asyncio.wait({changed}, timeout=left)
            finally:
                with self._lock:
                    self._observers.remove(wake)
        return True

    async def begun(self, timeout: float | None) -> bool:
        """Wait until the driver has been opened, or not; False when neither has happened within ``timeout`` seconds."""
        return await self.wait(lambda: self.state is not OpeningState.OPENING, timeout)

    def _notify(self) -> None:
        with self._lock:
            observers = list(self._observers)
        for observer in observers:
            observer()

    @property
    def opened(self) -> bool:
        """The driver has been opened; it may be closed again."""
        return bool(self.devices)

    @property
    def closed(self) -> bool:
        return self.state is OpeningState.CLOSED

    @property
    def settled(self) -> bool:
        """Closed, or waiting for nothing but memory that somebody looks into."""
        return self.closed or bool(self._kept) or self._host_kept

    def held_up_by(self) -> str | None:
        """What a closing opening waits for: the driver's call that has been in there the longest, or memory in use."""
        if self.state is not OpeningState.CLOSING and self.state is not OpeningState.OPENING:
            return None
        calls = [(age, job.method, job.index, lane.name) for lane, job, age in self.dispatch.running()]
        if calls and max(calls)[0] >= HELD_UP_S:
            age, method, index, lane = max(calls)
            where = f"on {self.devices[index].device_id}, " if 0 <= index < len(self.devices) else ""
            return f"the driver's {method}(), which has not returned for {age:.1f} s ({where}lane {lane})"
        if kept := list(self._kept):
            nbytes = sum(allocation.handle.size_bytes for allocation in kept)
            first = kept[0].handle
            return (
                f"views or arrays over {len(kept)} allocations of {nbytes:,} bytes, among them one of "
                f"{first.size_bytes:,} bytes on {first.device_id}"
            )
        if self._host_kept:
            return f"buffers or arrays over {self.host_pool.lent_bytes:,} bytes of page-locked host memory"
        return None

    # Closing

    def begin_close(self) -> None:
        """Accept no call any more, and end in the background. Idempotent; any thread."""
        with self._lock:
            if self._closer is not None or self.state is OpeningState.CLOSED:
                return
            self.state = OpeningState.CLOSING
            closer = self._closer = Lane(
                f"gpurt:{self.driver.name}:close", on_stop=self._interrupt_closer, report=self.report
            )
        try:
            closer.put(Duty("close", lambda _: self._close()))
        except Exception as exc:  # no thread can be had; whoever asks next tries again
            self._closer = None
            self.report(exc)
        self._notify()

    def forget(self) -> None:
        """Nobody holds the backend any more. In the middle of a garbage collection, so this takes no lock."""
        if self.state is not OpeningState.OPEN or os.getpid() != self._pid:
            return
        live = list(self.handles)
        nbytes = sum(allocation.handle.size_bytes for allocation in live)
        lanes = len(self.dispatch.lanes())
        self.dispatch.post_control(Duty("close", lambda _: self.begin_close()))
        warnings.warn(
            f"{self.driver.name}: a backend was dropped without shutdown(), with {len(live)} live allocations of "
            f"{nbytes:,} bytes, {len(self.host_pool.open_buffers)} host buffers and {lanes} threads; it is closed in "
            "the background",
            ResourceWarning,
            stacklevel=2,
        )

    def warn_leaks(self) -> None:
        """Tell, by ``ResourceWarning``, what was not given back."""
        name, leaked, buffers = self.driver.name, list(self.handles), self.host_pool.open_buffers
        if leaked:
            nbytes = sum(allocation.handle.size_bytes for allocation in leaked)
            viewed = sum(1 for allocation in leaked if allocation.open_views)
            text = f"{name}: {len(leaked)} allocations of {nbytes:,} bytes were never deallocated"
            text += f", {viewed} of them with open views, whose memory stays until they are gone" if viewed else ""
            warnings.warn(text, ResourceWarning, stacklevel=3)
        if buffers:
            nbytes = sum(buffer.nbytes for buffer in buffers)
            text = f"{name}: {len(buffers)} host buffers of {nbytes:,} bytes were never closed"
            warnings.warn(text, ResourceWarning, stacklevel=3)

    def _close(self) -> None:
        """The closing thread, from begin to end."""
        dispatch = self.dispatch
        self._wait_idle()
        if self._driver_open:
            self._free_all()
            while self._kept or self._host_kept:
                self._notify()
                try:
                    if not self._wakeups.get(timeout=LOOK_S):
                        return  # the process ends, and its memory with it
                except Empty:
                    if not self.loop.is_closed():
                        continue
                self._wait_idle()
                self._free_all()
            dispatch.detach()
            dispatch.impose(Duty("close", lambda _: self.driver.close()), CONTROL, "control")
            dispatch.wait_idle()
        dispatch.stop()
        self.host_pool.free_unused()  # ordinary memory, which is no driver's
        with self._lock:
            self.state = OpeningState.CLOSED
            closer, self._closer = self._closer, None
        if self.loop.is_closed():  # then nobody can take it
            self._report_failure()
        self._notify()
        assert closer is not None
        closer.stop()

    def _wait_idle(self) -> None:
        self.dispatch.wait_idle()
        if self.loop.is_closed():  # nobody can take what has come: a view would keep its memory for ever
            self.dispatch.abandon_all()
            self.dispatch.wait_idle()

    def _free_all(self) -> None:
        """Closing thread: free what nobody looks into. Nothing is outstanding, so no order has to be kept."""
        dispatch, wake = self.dispatch, self._wake_closer
        self.host_pool.on_return = wake
        host_kept = self.host_pool.lent_bytes > 0  # asked first: what comes back from here on wakes this thread again
        kept: list[Allocation] = []
        exported: set[int] = set()
        for allocation in self.handles:
            if self.loop.is_closed():
                allocation.end_undelivered()
            if allocation.exported:
                exported.add(allocation.index)
            if allocation.open_views and dispatch.lost(allocation.index) is None:
                kept.append(allocation)
                allocation.when_unviewed(wake)
            else:
                self._strike(allocation)
        used = {allocation.block for allocation in kept}
        present = [index for index in range(len(self.devices)) if dispatch.lost(index) is None]
        for _ in range(2):  # once more where a thread could not be attached to its device
            for index in present:
                if self.allocator.holds(index, used):
                    sync = index in exported
                    duty = Duty("free", lambda _, index=index, sync=sync: self._free_device(index, used, sync=sync))
                    dispatch.impose(duty, index, "memory")
            if self.host_pool.holds:
                free = Duty("host_free", lambda _: self.host_pool.free_unused())
                if present:
                    dispatch.impose(free, present[0], "memory")
                else:  # no thread can be attached, and host memory is of no device
                    dispatch.impose(free, CONTROL, "control")
            dispatch.wait_idle()
        self._kept, self._host_kept = kept, host_kept

    def _free_device(self, index: int, used: set[Block], *, sync: bool) -> None:
        """Memory lane."""
        if sync:
            try:
                self.driver.sync(index)
            except BaseException as exc:
                self.report(exc)
        self.allocator.free_unused(index, used)

    def _wake_closer(self) -> None:
        self._wakeups.put(True)

    def _interrupt_closer(self) -> None:
        self._wakeups.put(False)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _limited(device: GPUDevice, limit: int | None) -> GPUDevice:
    """``device`` with no more usable memory than may be allocated on it."""
    usable = device.memory_usable_bytes
    if limit is None or (usable is not None and usable <= limit):
        return device
    return device.model_copy(update={"memory_usable_bytes": limit, "memory_usable_source": "limit"})
