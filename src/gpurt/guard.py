"""GuardedBackend: the door of every driver backend, and its way out.

Every public method comes in through a check here: right process, open, right loop, known device, live handle, device
not lost. Every library failure leaves as an error of :mod:`gpurt.errors`, with its cause chained.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import get_running_loop
from collections.abc import Callable, Mapping
from os import getpid
from typing import Any

from gpurt.activity import CopiedBytes
from gpurt.backend import GPUBackend
from gpurt.dispatch import Dispatcher
from gpurt.driver import Driver
from gpurt.errors import (
    BackendClosed,
    DeviceLost,
    DeviceNotFound,
    DeviceUnresponsive,
    GPUError,
    OutOfMemory,
    TransferFailed,
    WrongLoop,
)
from gpurt.job import Job
from gpurt.kernel_table import KernelTable
from gpurt.memory.allocator import Allocator
from gpurt.memory.handles import Allocation, HandleTable
from gpurt.memory.hostbuffer import HostPool
from gpurt.memory.hostbytes import host_memory_ran_out
from gpurt.memory.ledger import Ledger
from gpurt.types import DeviceState, GPUDevice, MemoryHandle

log = logging.getLogger("gpurt.guard")


class GuardedBackend(GPUBackend):
    """State of a driver backend and the checks around it. Arguments: see :class:`gpurt.shell.DriverBackend`."""

    def __init__(
        self,
        driver: Driver,
        *,
        memory_limit: int | Mapping[str, int] | None = None,
        hang_after: float = 30.0,
        max_pending: int = 1024,
        pool_bytes: int | None = None,
        host_buffer_limit: int | None = None,
        on_background_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        if not hang_after > 0:
            raise ValueError(f"hang_after must be positive seconds, not {hang_after!r}")
        limits = memory_limit.values() if isinstance(memory_limit, Mapping) else (memory_limit,)
        for what, value, least in (
            ("max_pending", max_pending, 1),
            *(("memory_limit", limit, 0) for limit in limits),
            ("pool_bytes", pool_bytes, 0),
            ("host_buffer_limit", host_buffer_limit, 0),
        ):
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__") or value < least):
                raise ValueError(f"{what} must be a whole number, at least {least}, not {value!r}")
        self.driver = driver
        self.ledger = Ledger()
        self.state_listeners: list[Callable[[GPUDevice], None]] = []
        """Called on the event loop with a device whose state has changed (unresponsive, lost, back)."""
        self._memory_limit = memory_limit
        self._pool_bytes = pool_bytes
        self._host_buffer_limit = host_buffer_limit
        self._allocator = Allocator(driver, self.ledger, {}, pool_bytes)
        self._host_pool = HostPool(driver, host_buffer_limit)
        self._hang_after = hang_after
        self._max_pending = max_pending
        self._on_background_error = on_background_error or _log_background_error
        self._copied = CopiedBytes()
        self._pid = getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatch: Dispatcher | None = None
        self._devices: tuple[GPUDevice, ...] = ()
        self._index: dict[str, int] = {}
        self._handles = HandleTable()
        self._kernels = KernelTable()
        self._opening: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._open = False
        self._driver_open = False
        self._arriving = 0
        """Calls of ``allocate`` that have not returned."""

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.driver.name

    @property
    def generation(self) -> int:
        """Random number in every handle of this opening of the backend."""
        return self._handles.generation

    @property
    def live_handles(self) -> int:
        """Allocations not yet given back."""
        return len(self._handles)

    # Devices

    @property
    def devices(self) -> tuple[GPUDevice, ...]:
        return tuple(self._present(index) for index in range(len(self._devices)))

    async def list_devices(self) -> tuple[GPUDevice, ...]:
        self._enter()
        return self.devices

    async def get_device(self, device_id: str) -> GPUDevice | None:
        self._enter()
        index = self._index.get(device_id) if isinstance(device_id, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        return None if index is None else self._present(index)

    def _present(self, index: int) -> GPUDevice:
        device, dispatch = self._devices[index], self._dispatch
        if dispatch is None:
            return device
        lost = dispatch.lost(index)
        if lost is not None:
            change = {"state": DeviceState.LOST, "state_reason": str(lost), "usable": False}
        elif dispatch.unresponsive(index):
            reason = f"the driver has not returned for more than {self._hang_after:g} s"
            change = {"state": DeviceState.UNRESPONSIVE, "state_reason": reason, "usable": False}
        else:
            return device
        return device.model_copy(update=change)

    def _state_changed(self, index: int) -> None:
        if not self._open:
            return
        device = self._present(index)
        for listener in list(self.state_listeners):
            try:
                listener(device)
            except Exception as exc:  # a listener's fault must not stop the hang clock
                self._on_background_error(exc)

    # The door

    def _check_process(self) -> None:
        if getpid() != self._pid:
            raise GPUError(
                "the backend was made in the parent process", backend=self.name, hint="create backends after fork"
            )

    def _wrong_loop(self) -> WrongLoop:
        return WrongLoop(
            "the backend belongs to another event loop",
            backend=self.name,
            hint="use it on the loop that ran initialize(), or shut it down there first",
        )

    def _enter(self) -> Dispatcher:
        if getpid() != self._pid:  # also in there, but every call comes this way and seldom goes on
            self._check_process()
        dispatch = self._dispatch
        if not self._open or dispatch is None:
            raise BackendClosed("the backend is not open", backend=self.name, hint="await backend.initialize()")
        if get_running_loop() is not self._loop:
            raise self._wrong_loop()
        return dispatch

    def _enter_device(self, device_id: str) -> tuple[Dispatcher, int]:
        dispatch = self._enter()
        index = self._index.get(device_id) if isinstance(device_id, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if index is None:
            raise DeviceNotFound(f"no device {device_id!r}; there are: {', '.join(self._index)}", backend=self.name)
        dispatch.check(index, device_id)
        return dispatch, index

    def _enter_handle(self, handle: MemoryHandle, operation: str) -> tuple[Dispatcher, Allocation]:
        dispatch = self._enter()
        try:
            allocation = self._handles.get(handle)
        except GPUError as exc:
            self._tell(exc, None, operation)
            raise
        dispatch.check(allocation.index, handle.device_id)
        return dispatch, allocation

    def _tell(self, exc: GPUError, index: int | None, operation: str) -> GPUError:
        """Add backend, device and operation to an error that was raised without knowing them."""
        if exc.backend is None:
            exc.backend = self.name
        # A shutdown that cut this call off has forgotten the devices by now.
        if exc.device_id is None and index is not None and index < len(self._devices):
            exc.device_id = self._devices[index].device_id
        if exc.operation is None:
            exc.operation = operation
        return exc

    # The way out

    async def _outcome(
        self,
        job: Job,
        index: int,
        operation: str,
        *,
        extent: tuple[int, int] | None = None,
        failure: type[GPUError] = TransferFailed,
        requested: int | None = None,
        also_index: int | None = None,
        droppable: bool = True,
        wait_out: bool = False,
        on_host: bool = False,
    ) -> Any:
        """Await a job; a failure becomes the error of ours that it means, ``failure`` where nothing else fits.

        ``extent``, a size and an offset, is added to the operation's name: only when there is something to report,
        since formatting it takes 0.4 µs.
        """
        dispatch = self._dispatch
        assert dispatch is not None
        try:
            # As Dispatcher.finished, whose coroutine would cost every call half a microsecond.
            try:
                await job.future  # pyright: ignore[reportGeneralTypeIssues]
            except BaseException as exc:
                await dispatch.left(job, exc, droppable=droppable, wait_out=wait_out)
                raise
            if not job.finished:
                await dispatch.interrupted(job, droppable=droppable, wait_out=wait_out)
            return job.take()  # here, not in a coroutine below: one cannot raise StopIteration out of it
        except Exception as exc:
            error = await self._failure(
                exc, dispatch, index, operation, extent, failure, requested, also_index, on_host
            )
            try:
                if error is exc:
                    raise
                raise error from exc
            finally:
                del error  # this frame is in its traceback: a cycle that would hold the caller's buffer

    async def _failure(
        self,
        exc: Exception,
        dispatch: Dispatcher,
        index: int,
        operation: str,
        extent: tuple[int, int] | None = None,
        failure: type[GPUError] = TransferFailed,
        requested: int | None = None,
        also_index: int | None = None,
        on_host: bool = False,
    ) -> GPUError:
        """What to raise for ``exc``; a lost device is marked. Arguments as for ``_outcome``."""
        if extent is not None:
            operation = f"{operation}({extent[0]:,} B at {extent[1]:,})"
        if type(exc) is MemoryError and extent is not None:  # libraries have their own for a device's memory
            hint = "free host memory, or copy a part at a time"
            return self._tell(host_memory_ran_out(extent[0], hint), index, operation)
        error = await self._translate(exc, index, operation, failure, requested, on_host)
        if isinstance(error, DeviceLost) and not isinstance(error, DeviceUnresponsive):
            if also_index is None or also_index == index:
                dispatch.mark_lost(index, error)
            else:
                await self._find_lost(dispatch, (index, also_index), error)
        return error

    async def _find_lost(self, dispatch: Dispatcher, indexes: tuple[int, int], error: GPUError) -> None:
        """One of two devices is lost, and the library does not say which: ask each."""
        jobs = [dispatch.submit(index, "sync", lambda _, index=index: self.driver.sync(index)) for index in indexes]
        for index, job in zip(indexes, jobs, strict=True):
            try:
                await dispatch.finished(job)
                job.take()
            except DeviceUnresponsive:
                continue
            except Exception as exc:
                kind = type(exc) if isinstance(exc, GPUError) else self.driver.classify(exc)
                if kind is not None and issubclass(kind, DeviceLost):
                    dispatch.mark_lost(index, error)

    async def _translate(
        self, exc: Exception, index: int, operation: str, failure: type[GPUError], requested: int | None, on_host: bool
    ) -> GPUError:
        if isinstance(exc, GPUError):
            return self._tell(exc, index, operation)
        device_id = self._devices[index].device_id
        context: dict[str, Any] = {"backend": self.name, "device_id": device_id, "operation": operation}
        kind = self.driver.classify(exc) or failure
        if issubclass(kind, OutOfMemory):
            # The device's figures would mislead where it is host memory that ran out.
            context |= {"requested_bytes": requested or 0}
            context |= {} if on_host else await self._memory_numbers(device_id)
        return kind(str(exc) or type(exc).__name__, **context)

    async def _memory_numbers(self, device_id: str) -> dict[str, Any]:
        numbers: dict[str, Any] = {"pooled_bytes": self._allocator.pooled_bytes(self._index[device_id])}
        numbers["limit_bytes"] = self.ledger.usage(device_id).limit_bytes
        # The numbers are a help; the failure itself is what must get out, so a second one is let go.
        with contextlib.suppress(GPUError):
            info = await self.get_device_memory_info(device_id)
            numbers |= {"free_bytes": info.available_bytes, "total_bytes": info.total_bytes}
        return numbers


def _log_background_error(exc: BaseException) -> None:
    log.error("a driver call failed after its caller had gone: %s", exc, exc_info=exc)
