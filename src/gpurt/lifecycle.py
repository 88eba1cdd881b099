"""Opening and closing a driver: lanes, devices and handles come and go together.

An instance can be opened and closed many times in one process, each time on another event loop. A cancelled open is
undone; a cancelled shutdown goes on; a driver that hangs costs its threads, never the process's exit.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from gpurt.dispatch import Dispatcher
from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, DeviceUnresponsive, ReasonCode
from gpurt.guard import GuardedBackend
from gpurt.job import NOTHING, Job
from gpurt.kernel_table import KernelTable
from gpurt.memory.allocator import Allocator
from gpurt.memory.handles import Allocation, HandleTable
from gpurt.memory.hostbuffer import HostPool
from gpurt.turns import short_turns
from gpurt.types import GPUDevice

log = logging.getLogger("gpurt.lifecycle")

TAKEOVER_TIMEOUT_S: Final = 1.0
"""For the calls that an event loop left behind when it was closed in the middle of a shutdown."""


class DriverLifecycle(GuardedBackend):
    """Adds ``initialize`` and ``shutdown``."""

    _operator_limit: Callable[[GPUDevice], int | None] | None = None

    def limit_memory(self, limit: Callable[[GPUDevice], int | None]) -> None:
        """From the next ``initialize`` on, allow at most ``limit(device)`` bytes on each device, and no more than
        ``memory_limit`` allows; None sets no limit."""
        self._operator_limit = limit

    async def initialize(self) -> None:
        self._check_process()
        loop = asyncio.get_running_loop()
        await self._settle(loop)
        if self._open:
            if self._loop is loop:
                return
            await self.shutdown()  # its loop is closed: start afresh
        elif self._driver_open:
            await self.shutdown(timeout=TAKEOVER_TIMEOUT_S)  # a shutdown that died with its loop
        self._loop = loop
        opening = self._opening = loop.create_future()
        try:
            await self._open_driver(loop)
        finally:
            self._opening = None
            opening.set_result(None)

    async def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for an initialize or a shutdown under way. Refuse a loop that is not ours while ours lives."""
        while True:
            if self._loop is not None and self._loop is not loop:
                if not self._loop.is_closed() and (self._open or self._opening or self._closing):
                    raise self._wrong_loop()
                self._opening = self._closing = None
            pending = self._opening or self._closing
            if pending is None:
                return
            await asyncio.wait({pending})

    async def _open_driver(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._dispatch is None:
            self._dispatch = Dispatcher(
                self.driver,
                loop,
                hang_after=self._hang_after,
                max_pending=self._max_pending,
                on_background_error=self._on_background_error,
                on_state_change=self._state_changed,
            )
        dispatch = self._dispatch
        dispatch.rebind(loop)

        def undo(value: Any) -> None:
            if value is not NOTHING and self._dispatch in (dispatch, None):  # or it is open for somebody else by now
                self.driver.close()

        job = dispatch.submit(None, "control", lambda _: _open(self.driver), undo=undo)
        try:
            await dispatch.finished(job)
            devices: tuple[GPUDevice, ...] = job.take()
        except DeviceUnresponsive as exc:
            # As after a cancellation, the lanes stay: the next open queues behind this one, never beside it.
            raise BackendUnavailable(
                exc.message, reason=ReasonCode.TIMEOUT, backend=self.name, operation="initialize", hint=exc.hint
            ) from exc
        except Exception as exc:
            dispatch.stop()
            self._dispatch = None
            if isinstance(exc, BackendUnavailable):
                exc.backend = exc.backend or self.name
                raise
            reason = ReasonCode.NO_LIBRARY if isinstance(exc, ImportError) else ReasonCode.ERROR
            raise BackendUnavailable(f"{type(exc).__name__}: {exc}", reason=reason, backend=self.name) from exc
        limits = {device.device_id: self._limit_of(device) for device in devices}
        self._devices = tuple(_limited(device, limits[device.device_id]) for device in devices)
        self._index = {device.device_id: index for index, device in enumerate(devices)}
        self._handles, self._kernels = HandleTable(), KernelTable()
        self._allocator = Allocator(self.driver, self.ledger, limits, self._pool_bytes)
        self._host_pool = HostPool(self.driver, self._host_buffer_limit)
        self._open = self._driver_open = True

    def _limit_of(self, device: GPUDevice) -> int | None:
        own = self._memory_limit
        limits = [own.get(device.device_id) if isinstance(own, Mapping) else own]
        if self._operator_limit is not None:
            limits.append(self._operator_limit(device))
        return min((limit for limit in limits if limit is not None), default=None)

    # Closing

    async def shutdown(self, *, timeout: float | None = 10) -> None:
        self._check_process()
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if not self._loop.is_closed() and (self._open or self._opening or self._closing):
                raise self._wrong_loop()
            self._opening = self._closing = None
        if self._closing is None:
            if self._dispatch is None:
                return
            self._loop = loop
            self._dispatch.rebind(loop)
            # A task of its own: a cancelled caller leaves, the work goes on, and awaiting again rejoins it.
            self._closing = loop.create_task(self._close(self._dispatch, timeout), name=f"gpurt:{self.name}:shutdown")
        await asyncio.shield(self._closing)

    async def _close(self, dispatch: Dispatcher, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                if self._opening is not None:  # opened first, closed then: never half of both
                    await asyncio.wait({self._opening})
                self._open = False
                if self._driver_open:
                    await self._close_driver(dispatch)
                else:
                    # An opening whose caller was cancelled may still be under way, and is undone on the same lane.
                    await dispatch.finished(dispatch.submit(None, "control", lambda _: None), droppable=False)
        except TimeoutError:
            log.warning("%s: driver calls still run after %s s; their threads are left behind", self.name, timeout)
        except Exception as exc:
            self._on_background_error(exc)
        finally:
            dispatch.stop()
            # Not so for a shutdown that died with its loop and is only collected now: another opening may have begun.
            if self._dispatch is dispatch:
                self._dispatch = None
                self._open = self._driver_open = False
                self._handles, self._kernels = HandleTable(), KernelTable()
                self._devices, self._index = (), {}
                self._closing = None

    async def _close_driver(self, dispatch: Dispatcher) -> None:
        leaked = list(self._handles)
        if leaked:
            _warn_leaks(self.name, leaked)
        self._host_pool.warn_open(self.name)
        await dispatch.drain()
        # Allocations that are there and whose callers are told within this turn of the loop or the next.
        while self._arriving:  # noqa: ASYNC110
            await asyncio.sleep(0)
        leaked = list(self._handles)
        present = [index for index in range(len(self._devices)) if not dispatch.lost(index)]
        jobs = [self._submit_free(dispatch, one) for one in leaked if one.index in present]
        jobs += [
            dispatch.submit(index, "memory", lambda _, index=index: self._allocator.free_pooled(index))
            for index in present
            if self._allocator.pooled_bytes(index) or leaked
        ]
        if present and self._host_pool.cached_bytes:
            jobs.append(dispatch.submit(present[0], "memory", lambda _: self._host_pool.free_all()))
        for job in jobs:
            try:
                await dispatch.finished(job, droppable=False)
                job.take()
            except Exception as exc:
                self._on_background_error(exc)
        await dispatch.detach()
        job = dispatch.submit(None, "control", lambda _: self.driver.close())
        await dispatch.finished(job, droppable=False)
        job.take()

    def _submit_free(self, dispatch: Dispatcher, allocation: Allocation) -> Job:
        """From here on the handle is dead; the memory goes when everything submitted on it is done."""
        self._handles.remove(allocation)
        handle, ledger, allocator = allocation.handle, self.ledger, self._allocator

        def free(_: Job) -> None:
            try:
                if allocation.exported:
                    self.driver.sync(allocation.index)
                allocator.release(allocation.index, allocation.block_bytes, allocation.token)
            finally:
                ledger.release(handle.device_id, handle.size_bytes)

        return dispatch.submit(allocation.index, "memory", free, chains=(allocation.chain,))


def _open(driver: Driver) -> tuple[GPUDevice, ...]:
    """Control lane: open the library, refuse when it has nothing to offer."""
    # anyio loads its asyncio half on first use, which would stall the loop for 0.1 s in the middle of a cancellation.
    with short_turns():
        importlib.import_module("anyio._backends._asyncio")
        devices = tuple(driver.open())
    if not devices:
        driver.close()
        raise BackendUnavailable("the library works and lists no device", reason=ReasonCode.NO_DEVICE)
    return devices


def _warn_leaks(name: str, leaked: list[Allocation]) -> None:
    nbytes = sum(allocation.handle.size_bytes for allocation in leaked)
    viewed = sum(1 for allocation in leaked if allocation.open_views)
    text = f"{name}: {len(leaked)} allocations of {nbytes:,} bytes were never deallocated"
    warnings.warn(text + (f", {viewed} of them with open views" if viewed else ""), ResourceWarning, stacklevel=2)


def _limited(device: GPUDevice, limit: int | None) -> GPUDevice:
    """``device`` with no more usable memory than may be allocated on it."""
    usable = device.memory_usable_bytes
    if limit is None or (usable is not None and usable <= limit):
        return device
    return device.model_copy(update={"memory_usable_bytes": limit, "memory_usable_source": "limit"})
