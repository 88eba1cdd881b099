"""DriverBackend: a whole GPUBackend over any blocking Driver.

Each method checks its arguments, submits one job and awaits it, all through ``_begin`` and ``_finish``, where the way
in, the protocol of cancellation and the translation of errors stand once. What belongs to one opening stands in
:mod:`gpurt.runtime.opening`, what the jobs do in :mod:`gpurt.runtime.operations`, threads and the hang clock in
:mod:`gpurt.runtime.dispatch`, order in :mod:`gpurt.runtime.order`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import threading
import weakref
from asyncio import get_running_loop
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from gpurt.backend import GPUBackend, byte_view
from gpurt.driver import Driver
from gpurt.errors import (
    BackendClosed,
    BackendUnavailable,
    DeviceLost,
    DeviceNotFound,
    DeviceUnresponsive,
    GPUError,
    HandleInUse,
    OutOfMemory,
    OutOfRange,
    ReasonCode,
    Unsupported,
    WrongLoop,
    text_of,
)
from gpurt.runtime.allocator import Block, Ledger, kind_of
from gpurt.runtime.elements import DType, Shape
from gpurt.runtime.files import OpenedFile, brief_path, path_name, stream_file
from gpurt.runtime.handles import Allocation, brief, check_range, whole_number
from gpurt.runtime.host_memory import HostBuffer, host_memory_ran_out
from gpurt.runtime.job import NOTHING, ErrorReport, Job, clear_frames, contained, is_users_interrupt
from gpurt.runtime.kernels import arguments, check_shape, check_source, extent, listed, parameters
from gpurt.runtime.opening import Opening, OpeningOptions, OpeningState
from gpurt.runtime.operations import (
    SMALL_COPY_BYTES,
    Allocate,
    Compile,
    HostCopy,
    Launch,
    LoadFile,
    MakeHostBuffer,
    MakeView,
    PeerCopy,
    ReadHost,
    ReadNew,
    ReadTelemetry,
    Synchronize,
    Trim,
    WriteHost,
    in_memory,
    release,
)
from gpurt.runtime.progress import LaneProgress, check_progress
from gpurt.runtime.protocols import Direction, LaneActivity, MemoryLimit, PoolStatistics, Usage
from gpurt.runtime.views import DeviceView
from gpurt.types import Capabilities, GPUDevice, Kernel, MemoryHandle, MemoryInfo, Telemetry

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

log = logging.getLogger("gpurt.runtime")

NEW_BYTES: Final = 64 << 10
"""Results in new memory are made on the loop's thread up to here: 1 MiB of it would keep the loop for 0.9 ms, most of
it page faults."""

FILE_CHUNK_BYTES: Final = 32 << 20
"""Longest read of a file into memory that the host addresses: 0.1 s from a disk of 300 MB/s. Progress is told, and a
cancelled load ends, after each."""


_MOST_BYTES: Final = sys.maxsize
_COPIED: Final = frozenset({int, bytes})
"""What copies return."""
_PENDING: Final[Any] = CoroutineType
"""What ``DriverBackend._begin`` returns where there is something to wait for."""
_OPEN: Final = OpeningState.OPEN  # looking a member up in its class takes 0.1 µs, and every call does it


_process = object()
"""Another one in every forked child: to ask the system for the process's number takes 0.1 µs, and every call checks."""


def _after_fork() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class DriverBackend(GPUBackend):
    """A backend over ``driver``. See :class:`gpurt.backend.GPUBackend` for what each method promises.

    Args:
        driver: the blocking driver; owned by this backend.
        memory_limit: bytes that may be allocated per device, for all devices or by device id; None leaves the
            decision to the library.
        hang_after: seconds after which a driver call that has not returned makes its device unresponsive: new,
            queued and waiting calls on it fail with ``DeviceUnresponsive`` until the driver returns. Also how long
            ``initialize`` waits for an earlier opening to end.
        max_pending: calls handed to one lane at a time; more callers wait for a place, in order.
        pool_bytes: freed memory that is kept per device for the next allocation of its size; None is what the
            driver suggests (``Capabilities.pool_bytes``), 0 keeps none.
        host_buffer_limit: bytes of host memory for ``host_buffer``, in use and kept together; None sets no limit.
        on_background_error: gets the error of a call whose caller was cancelled, once; default: logged at ERROR.
            May be called on any thread. What it raises is logged.
    """

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
        self.state_listeners: list[Callable[[GPUDevice], None]] = []
        """Called on the event loop with a device whose state has changed (unresponsive, lost, back)."""
        self._options = OpeningOptions(memory_limit, None, hang_after, max_pending, pool_bytes, host_buffer_limit)
        self._report = ErrorReport(on_background_error)
        self._copied: defaultdict[tuple[str, Direction], int] = defaultdict(int)
        self._process = _process
        self._opening: Opening | None = None
        """The last one, whatever its state."""
        self._choosing = threading.Lock()
        self._no_ledger = Ledger({})
        self._finalizer: weakref.finalize[[Opening], DriverBackend] | None = None

    def __repr__(self) -> str:
        opening = self._opening
        if opening is None or opening.closed:
            return f"<{type(self).__name__} {self.name}: closed>"
        live = list(opening.handles)
        nbytes = sum(allocation.handle.size_bytes for allocation in live)
        return (
            f"<{type(self).__name__} {self.name}: {opening.state.value}, {len(opening.devices)} devices, "
            f"{len(live)} live allocations of {nbytes:,} bytes>"
        )

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.driver.name

    @property
    def capabilities(self) -> Capabilities:
        return self.driver.capabilities

    @property
    def generation(self) -> int:
        """Random number in every handle of this opening of the backend; 0 before the first."""
        return 0 if self._opening is None else self._opening.handles.generation

    @property
    def live_handles(self) -> int:
        """Allocations not yet given back."""
        return 0 if self._opening is None else len(self._opening.handles)

    @property
    def ledger(self) -> Ledger:
        """The accounts of the last opening."""
        return self._no_ledger if self._opening is None else self._opening.ledger

    # The beginning and the end

    def limit_memory(self, limit: MemoryLimit) -> None:
        """From the next ``initialize`` on, allow at most ``limit(device)`` bytes on each device, and no more than
        ``memory_limit`` allows; None sets no limit."""
        own = self._options
        self._options = OpeningOptions(
            own.memory_limit, limit, own.hang_after, own.max_pending, own.pool_bytes, own.host_buffer_limit
        )

    async def initialize(self) -> None:
        self._check_process()
        loop = self._running_loop()
        while (opening := self._opening) is not None and not opening.closed:
            if opening.state is OpeningState.CLOSING:
                await self._until_ended(opening)
            elif opening.loop is loop:
                if opening.state is OpeningState.OPEN:
                    return
                await opening.begun(None)
            elif opening.loop.is_closed():
                opening.begin_close()  # whoever had it left it behind
            else:
                raise self._wrong_loop()
        ended, opening = opening, Opening(self.driver, loop, self._options, self.state_listeners, self._report)
        with self._choosing:
            first = self._opening is ended
            if first:
                self._opening = opening
        if not first:  # another loop waited for the same end, and was quicker
            await self.initialize()
            return
        opening.start()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, Opening.forget, opening)
        self._finalizer.atexit = False
        hang_after = self._options.hang_after
        try:
            if not await opening.begun(hang_after):
                raise BackendUnavailable(
                    f"the driver has not returned for more than {hang_after:g} s",
                    reason=ReasonCode.TIMEOUT,
                    backend=self.name,
                    operation="initialize",
                    hint="initialize() works again once its open() returns; see hang_after",
                )
            if opening.failure is not None:
                await opening.wait(lambda: opening.closed, hang_after)
                opening.raise_failure()
            if not opening.opened:
                raise BackendClosed("shut down while it was opened", backend=self.name, operation="initialize")
        except BaseException:
            opening.disown()
            raise

    async def _until_ended(self, opening: Opening) -> None:
        """Wait for an earlier opening to end: a library is never opened before its last close has returned."""
        hang_after = self._options.hang_after
        opening.begin_close()  # where it could not begin before
        while not await opening.wait(lambda: opening.closed, hang_after):
            held_up = opening.held_up_by()
            if held_up is not None:
                raise BackendUnavailable(
                    f"its last opening has not ended: it waits for {held_up}",
                    reason=ReasonCode.TIMEOUT,
                    backend=self.name,
                    operation="initialize",
                    hint="initialize() works again once that is over",
                )

    async def shutdown(self, *, timeout: float | None = 10) -> None:
        if timeout is not None:
            _check_timeout(timeout)
        self._check_process()
        loop = self._running_loop()
        opening = self._opening
        if opening is None or opening.closed:
            return
        closing = opening.state is OpeningState.CLOSING
        if opening.loop is not loop and not opening.loop.is_closed() and not closing:
            raise self._wrong_loop()
        if not closing:
            # Opened first, closed then: never half of both.
            if opening.state is OpeningState.OPENING:
                began = loop.time()
                opened = await opening.begun(timeout)
                if timeout is not None:
                    timeout = max(0.0, timeout - (loop.time() - began)) if opened else 0.0
            if opening.state is OpeningState.OPEN:
                opening.warn_leaks()
        opening.begin_close()  # also where it could not begin before
        await self._ended(opening, timeout)

    async def _ended(self, opening: Opening, timeout: float | None) -> None:
        """Wait until everything is closed, or only waits for memory that somebody looks into, or for as long as may be;
        then let everybody go who waits for a call."""
        in_time = await opening.wait(lambda: opening.settled, timeout)
        if opening.loop is get_running_loop():
            opening.dispatch.interrupt_all(
                lambda: BackendClosed("shut down while this call was under way", backend=self.name)
            )
        if opening.closed:
            opening.dispatch.disarm()
        elif in_time:
            log.warning("%s: the driver is closed when there are no more %s", self.name, opening.held_up_by())
        else:
            log.warning(
                "%s: after %s s the driver is not closed yet, which goes on in the background: it waits for %s",
                *(self.name, timeout, opening.held_up_by() or "calls under way"),
            )

    # The way in, and the way out

    def _check_process(self) -> None:
        if self._process is not _process:
            raise GPUError(
                "the backend was made in the parent process", backend=self.name, hint="create backends after fork"
            )

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return get_running_loop()
        except RuntimeError as exc:
            raise WrongLoop(
                "no asyncio event loop runs here",
                backend=self.name,
                hint="gpurt runs on asyncio; under trio run it in an asyncio loop of its own thread",
            ) from exc

    def _wrong_loop(self) -> WrongLoop:
        return WrongLoop(
            "the backend belongs to another event loop",
            backend=self.name,
            hint="use it on the loop that ran initialize(), or shut it down there first",
        )

    def _enter(self) -> Opening:
        opening = self._opening
        if self._process is not _process:
            self._check_process()
        if opening is None or opening.state is not _OPEN:
            raise BackendClosed("the backend is not open", backend=self.name, hint="await backend.initialize()")
        try:
            if get_running_loop() is opening.loop:
                return opening
        except RuntimeError:
            self._running_loop()
        raise self._wrong_loop()

    def _begin(self, operation: str, prepare: Callable[..., Any], *args: Any) -> Any:
        """The way in of every call.

        Args:
            operation: the public method, for messages.
            prepare: called with the opening and ``args``; checks them, and returns a job that it has submitted, or the
                result where there is nothing to wait for. Its errors need not know the backend or the operation.

        Returns:
            A coroutine to be awaited at once, or the result: a coroutine that ends at once costs half a microsecond.
        """
        opening = self._enter()
        try:
            job = prepare(opening, *args)
        except GPUError as exc:
            self._complete(exc, operation, _device_of(opening, args))
            raise
        if isinstance(job, Job):
            return self._finish(opening, job, operation)
        turn = opening.dispatch.turn
        # Only what was copied: a cancellation in that turn would lose a handle or a block, which somebody has to undo.
        return _give_way(job) if turn.began is not None and type(job) in _COPIED and turn.is_long() else job

    async def _call(self, operation: str, prepare: Callable[..., Any], *args: Any) -> Any:
        """``_begin``, awaited."""
        result = self._begin(operation, prepare, *args)
        return await result if type(result) is _PENDING else result

    async def _finish(self, opening: Opening, job: Job, operation: str) -> Any:
        """The way out of every call: its outcome, the protocol of cancellation, and the translation of errors.

        Raises:
            GPUError: also for every failure of the library, as ``Job.failure`` where nothing else fits.
        """
        try:
            try:
                await job.future  # pyright: ignore[reportGeneralTypeIssues]
            except BaseException as exc:
                await opening.dispatch.leave(job, exc)
                raise
            if job.interruption is not None:
                await opening.dispatch.interrupted(job)
            return job.take()  # here, not in a coroutine below: one cannot raise StopIteration out of it
        except Exception as exc:
            error = await self._translate(opening, job, exc, operation)
            try:
                if error is exc:
                    raise
                raise error from exc
            finally:
                del error  # this frame is in its traceback: a cycle that would hold the caller's buffer

    def _complete(self, exc: GPUError, operation: str, device_id: str | None = None) -> GPUError:
        """Add backend, device and operation to an error that was raised without knowing them."""
        if exc.backend is None:
            exc.backend = self.name
        if exc.device_id is None:
            exc.device_id = device_id
        if exc.operation is None:
            exc.operation = operation
        return exc

    async def _translate(self, opening: Opening, job: Job, exc: Exception, operation: str) -> GPUError:
        """The error to raise for the failure of a job; a lost device is marked."""
        index, operation = job.index, job.operation(operation)
        device_id = opening.devices[index].device_id
        host_bytes = job.host_bytes
        if isinstance(exc, GPUError):
            error = self._complete(exc, operation, device_id)
        elif type(exc) is MemoryError and host_bytes is not None:
            hint = "free host memory, or copy a part at a time"
            error = self._complete(host_memory_ran_out(host_bytes, hint), operation, device_id)
        else:
            kind = kind_of(opening.driver, exc) or job.failure
            context: dict[str, Any] = {"backend": self.name, "device_id": device_id, "operation": operation}
            if issubclass(kind, OutOfMemory):
                context["requested_bytes"] = job.requested_bytes
                if job.reports_memory:
                    context |= await self._memory_figures(opening, index)
            error = kind(text_of(exc), **context)
        if isinstance(error, DeviceLost) and not isinstance(error, DeviceUnresponsive):
            if len(job.device_indexes) > 1:
                await self._find_lost(opening, job.device_indexes)
            else:
                opening.dispatch.mark_lost(index, error)
        return error

    async def _find_lost(self, opening: Opening, indexes: Sequence[int]) -> None:
        """One of two devices is lost, and the library does not say which: ask each, which marks the one that is."""
        for index in indexes:
            with contextlib.suppress(GPUError):
                await self._call("synchronize", self._prepare_synchronize, opening.devices[index].device_id, False)

    async def _memory_figures(self, opening: Opening, index: int) -> dict[str, Any]:
        device_id = opening.devices[index].device_id
        figures: dict[str, Any] = {
            "pooled_bytes": opening.allocator.pooled_bytes(index),
            "limit_bytes": opening.ledger.usage(device_id).limit_bytes,
        }
        # The figures are a help; the failure itself is what must get out, so a second one is let go.
        with contextlib.suppress(Exception):
            info = await self.get_device_memory_info(device_id)
            figures |= {"free_bytes": info.available_bytes, "total_bytes": info.total_bytes}
        return figures

    def _device_index(self, opening: Opening, device_id: str) -> int:
        try:
            index = opening.index[device_id]
        except (KeyError, TypeError):  # TypeError: something that cannot be a key
            raise DeviceNotFound(f"no device {device_id!r}; there are: {', '.join(opening.index)}") from None
        opening.dispatch.check(index, device_id)
        return index

    def _allocation(self, opening: Opening, handle: MemoryHandle) -> Allocation:
        allocation = opening.handles.get(handle)
        opening.dispatch.check(allocation.index, handle.device_id)
        return allocation

    # Devices

    @property
    def devices(self) -> tuple[GPUDevice, ...]:
        opening = self._opening
        if opening is None or opening.state is not OpeningState.OPEN:
            return ()
        return tuple(opening.present(index) for index in range(len(opening.devices)))

    async def list_devices(self) -> tuple[GPUDevice, ...]:
        self._enter()
        return self.devices

    async def get_device(self, device_id: str) -> GPUDevice | None:
        opening = self._enter()
        index = opening.index.get(device_id) if isinstance(device_id, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        return None if index is None else opening.present(index)

    # Memory

    async def allocate(self, device_id: str, size_bytes: int) -> MemoryHandle:
        result = self._begin("allocate", self._prepare_allocate, device_id, size_bytes)
        return await result if type(result) is _PENDING else result

    def _prepare_allocate(self, opening: Opening, device_id: str, size_bytes: int) -> Job | MemoryHandle:
        index = self._device_index(opening, device_id)
        try:
            size = whole_number(size_bytes, "size_bytes")
            if not 0 < size <= _MOST_BYTES:
                raise OutOfRange(f"size_bytes must be positive and at most {_MOST_BYTES:,}")
            largest = self.driver.capabilities.max_allocation_bytes
            if largest is not None and size > largest:
                raise OutOfRange(f"the largest single allocation of this library is {largest:,} bytes")
            opening.ledger.reserve(device_id, size)
        except GPUError as exc:
            self._complete(exc, f"allocate({brief(size_bytes)} B)", device_id)
            raise
        block = opening.allocator.take(index, size)
        if block is not None:
            opening.ledger.commit(device_id, size)
            return opening.handles.add(device_id, size, block, delivered=True).handle
        return opening.dispatch.submit(Allocate(opening, device_id, size), index, "memory")

    async def deallocate(self, handle: MemoryHandle) -> None:
        # A lost or hung device takes its memory with it, or gives it back later: either way the handle is gone.
        try:  # contextlib.suppress takes a tenth of all the rest
            result = self._begin("deallocate", self._prepare_deallocate, handle)
            if result is not None:
                await result
        except DeviceLost:
            return

    def _prepare_deallocate(self, opening: Opening, handle: MemoryHandle) -> Job | None:
        allocation = opening.handles.get(handle)
        if views := allocation.open_views:
            raise HandleInUse(
                f"{views} views of the allocation are open",
                device_id=handle.device_id,
                hint="close them and delete arrays made from them",
            )
        job = opening.free(allocation)
        if job is not None and opening.dispatch.unresponsive(allocation.index):
            job.disown()  # done when the driver returns; nobody must wait for that
            return None
        return job

    def free_when_unviewed(self, handle: MemoryHandle) -> None:
        """Free an allocation once no view of it, and no array made from one, is in use: for an owner that ends before
        they do. Until then it is live. Returns at once.

        Raises:
            InvalidHandle, BackendClosed, WrongLoop.
        """
        opening = self._enter()
        opening.free_when_unviewed(opening.handles.get(handle))

    async def trim(self, device_id: str | None = None) -> int:
        """As :meth:`gpurt.backend.GPUBackend.trim`. Of all devices, those that are known to be lost are left out; the
        first error of another is raised when all have been asked."""
        if device_id is not None:
            return await self._call("trim", self._prepare_trim, device_id)
        opening = self._enter()
        freed, failures = 0, list[GPUError]()
        for each, index in opening.index.items():
            if opening.dispatch.lost(index) is not None:
                continue
            try:
                freed += await self._call("trim", self._prepare_trim, each)
            except BackendClosed:
                raise
            except GPUError as exc:
                failures.append(exc)
        try:
            if failures:
                raise failures[0]
        finally:
            del failures
        return freed

    def _prepare_trim(self, opening: Opening, device_id: str) -> Job:
        index = self._device_index(opening, device_id)
        job = Trim(lambda _: opening.allocator.trim(index) + opening.host_pool.free_pooled())
        return opening.dispatch.submit(job, index, "memory")

    # Copies

    async def copy_to_device(self, src: Buffer, dst_handle: MemoryHandle, offset_bytes: int = 0) -> None:
        size: Any = self._begin("copy_to_device", self._prepare_write, src, dst_handle, offset_bytes)
        if type(size) is _PENDING:
            size = await size
        if size:
            self._copied[dst_handle.device_id, "host_to_device"] += size

    def _prepare_write(self, opening: Opening, src: Buffer, handle: MemoryHandle, offset_bytes: int) -> Job | int:
        allocation, driver = opening.handles.get(handle), opening.driver
        opening.dispatch.check(allocation.index, handle.device_id)
        view = byte_view(src)
        try:
            offset, size = check_range(allocation, offset_bytes, view.nbytes, driver.capabilities.alignment_bytes)
        except BaseException:
            release(view)  # an error must not keep the caller's buffer exported
            raise
        if not size:
            return 0
        if size <= driver.inline_copy_bytes and in_memory(view.obj) and opening.dispatch.may_inline(allocation):
            return self._copy_here(opening, driver.write, allocation, offset, view, "copy_to_device")
        job = WriteHost(driver, driver.write, allocation, offset, view, size)
        return opening.dispatch.submit(
            job, allocation.index, "small" if size <= SMALL_COPY_BYTES else "h2d", (allocation,)
        )

    async def copy_from_device(
        self, src_handle: MemoryHandle, offset_bytes: int = 0, size_bytes: int | None = None
    ) -> bytes:
        data: Any = self._begin("copy_from_device", self._prepare_read, src_handle, offset_bytes, size_bytes)
        if type(data) is _PENDING:
            data = await data
        if data:
            self._copied[src_handle.device_id, "device_to_host"] += len(data)
        return data

    def _prepare_read(
        self, opening: Opening, handle: MemoryHandle, offset_bytes: int, size_bytes: int | None
    ) -> Job | bytes:
        allocation, driver = self._allocation(opening, handle), self.driver
        if size_bytes is None:
            size_bytes = handle.size_bytes - whole_number(offset_bytes, "offset_bytes")
        offset, size = check_range(allocation, offset_bytes, size_bytes, driver.capabilities.alignment_bytes)
        if not size:
            return b""
        if size <= driver.inline_copy_bytes and size <= NEW_BYTES and opening.dispatch.may_inline(allocation):
            buffer = bytearray(size)
            self._copy_here(opening, driver.read, allocation, offset, memoryview(buffer), "copy_from_device")
            return bytes(buffer)
        return opening.dispatch.submit(
            ReadNew(driver, allocation, offset, size),
            allocation.index,
            "small" if size <= SMALL_COPY_BYTES else "d2h",
            (allocation,),
        )

    async def copy_into(self, src_handle: MemoryHandle, dst: Buffer, offset_bytes: int = 0) -> int:
        size: Any = self._begin("copy_into", self._prepare_read_into, src_handle, dst, offset_bytes)
        if type(size) is _PENDING:
            size = await size
        if size:
            self._copied[src_handle.device_id, "device_to_host"] += size
        return size

    def _prepare_read_into(self, opening: Opening, handle: MemoryHandle, dst: Buffer, offset_bytes: int) -> Job | int:
        allocation, driver = self._allocation(opening, handle), self.driver
        view = byte_view(dst, writable=True)
        try:
            offset, size = check_range(allocation, offset_bytes, view.nbytes, driver.capabilities.alignment_bytes)
        except BaseException:
            release(view)  # an error must not keep the caller's buffer exported
            raise
        if not size:
            return 0
        if size <= driver.inline_copy_bytes and in_memory(view.obj) and opening.dispatch.may_inline(allocation):
            return self._copy_here(opening, driver.read, allocation, offset, view, "copy_into")
        job = ReadHost(driver, driver.read, allocation, offset, view, size)
        return opening.dispatch.submit(
            job, allocation.index, "small" if size <= SMALL_COPY_BYTES else "d2h", (allocation,)
        )

    def _copy_here(
        self,
        opening: Opening,
        copy: HostCopy,
        allocation: Allocation,
        offset: int,
        view: memoryview,
        operation: str,
    ) -> int:
        """A short copy on the event loop's own thread, where the way to a lane and back costs ten times as much. Only
        for drivers whose memory is ordinary memory of this process (``Driver.inline_copy_bytes``), and only for buffers
        that are sure to be in memory: the loop must never wait for a library, a disk or a network.

        Raises:
            GPUError: the failure of the driver.
        """
        size = view.nbytes
        try:
            copy(allocation.index, allocation.token, offset, view)
        except BaseException as exc:
            if is_users_interrupt(exc):
                raise
            clear_frames(exc)
            failure = contained(exc)
            try:
                if isinstance(failure, GPUError):
                    raise self._complete(failure, f"{operation}({size:,} B at {offset:,})", allocation.handle.device_id)
                kind = kind_of(self.driver, failure) or WriteHost.failure
                if issubclass(kind, OutOfMemory):
                    raise host_memory_ran_out(size, "free host memory, or copy a part at a time") from failure
                error = kind(text_of(failure), operation=f"{operation}({size:,} B at {offset:,})")
                error.device_id = allocation.handle.device_id
                if isinstance(error, DeviceLost):
                    opening.dispatch.mark_lost(allocation.index, error)
                raise error from failure
            finally:
                failure = error = None
        finally:
            release(view)
        return size

    async def copy_device_to_device(
        self,
        src_handle: MemoryHandle,
        dst_handle: MemoryHandle,
        size_bytes: int,
        *,
        src_offset_bytes: int = 0,
        dst_offset_bytes: int = 0,
    ) -> None:
        size = await self._call(
            "copy_device_to_device",
            self._prepare_peer_copy,
            *(src_handle, dst_handle, size_bytes, src_offset_bytes, dst_offset_bytes),
        )
        if size:
            self._copied[src_handle.device_id, "device_to_device"] += size

    def _prepare_peer_copy(
        self,
        opening: Opening,
        src_handle: MemoryHandle,
        dst_handle: MemoryHandle,
        size_bytes: int,
        src_offset_bytes: int,
        dst_offset_bytes: int,
    ) -> Job | int:
        src, dst = self._allocation(opening, src_handle), self._allocation(opening, dst_handle)
        alignment = self.driver.capabilities.alignment_bytes
        src_offset, size = check_range(src, src_offset_bytes, size_bytes, alignment)
        dst_offset, size = check_range(dst, dst_offset_bytes, size_bytes, alignment)
        if not size:
            return 0
        if src is dst and abs(src_offset - dst_offset) < size:
            raise OutOfRange(
                f"{size:,} bytes at {src_offset:,} and at {dst_offset:,} overlap", device_id=dst_handle.device_id
            )

        def copy(_: Job) -> int:
            self.driver.copy(src.index, src.token, src_offset, dst.index, dst.token, dst_offset, size)
            return size

        return opening.dispatch.submit(
            PeerCopy(copy, f"copy_device_to_device({size:,} B to {dst_handle.device_id})"),
            src.index,
            "peer",
            {src, dst},
            also_device=dst.index,
        )

    async def load_file(
        self,
        path: str | os.PathLike[str],
        handle: MemoryHandle,
        *,
        file_offset: int = 0,
        size_bytes: int | None = None,
        handle_offset: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        progress = LaneProgress(on_progress)
        done = 0
        try:
            done = await self._call(
                "load_file",
                self._prepare_load,
                *(path, handle, file_offset, size_bytes, handle_offset, on_progress, progress),
            )
        except GPUError:
            if progress.failure is None:
                raise
        finally:
            progress.close()
        progress.raise_failure()
        if done:
            self._copied[handle.device_id, "file_to_device"] += done
        return done

    def _prepare_load(
        self,
        opening: Opening,
        path: str | os.PathLike[str],
        handle: MemoryHandle,
        file_offset: int,
        size_bytes: int | None,
        handle_offset: int,
        on_progress: Callable[[int], None] | None,
        progress: LaneProgress,
    ) -> Job:
        allocation, driver = self._allocation(opening, handle), self.driver
        capabilities, operation = driver.capabilities, "load_file"
        try:
            name = path_name(path)
            operation = f"load_file({brief_path(name)!r})"
            check_progress(on_progress)
            start = whole_number(file_offset, "file_offset")
            if start < 0:
                raise OutOfRange(f"file_offset must not be negative: {start:,}")
            offset, size = check_range(
                allocation, handle_offset, 0 if size_bytes is None else size_bytes, capabilities.alignment_bytes
            )
        except GPUError as exc:
            self._complete(exc, operation, handle.device_id)
            raise
        most = capabilities.chunk_bytes if capabilities.loads_files else min(capabilities.chunk_bytes, FILE_CHUNK_BYTES)
        chunk_bytes = max(capabilities.alignment_bytes, most - most % capabilities.alignment_bytes)

        def load(job: Job) -> int:
            return stream_file(
                driver,
                allocation.index,
                allocation.token,
                name,
                version=path.version if isinstance(path, OpenedFile) else None,
                file_offset=start,
                size_bytes=None if size_bytes is None else size,
                mem_offset=offset,
                room_bytes=handle.size_bytes - offset,
                chunk_bytes=chunk_bytes,
                wanted=lambda: not job.abandoned,
                on_progress=progress.tell,
            )

        job = LoadFile(load, operation)
        progress.watch(job, opening.loop)
        return opening.dispatch.submit(job, allocation.index, "h2d", (allocation,))

    async def synchronize(self, device_id: str) -> None:
        await self._call("synchronize", self._prepare_synchronize, device_id, True)

    def _prepare_synchronize(self, opening: Opening, device_id: str, after_device: bool) -> Job:
        index = self._device_index(opening, device_id)
        job = Synchronize(lambda _: self.driver.sync(index))
        return opening.dispatch.submit(job, index, "sync", after_device=after_device)

    # Host memory and views

    async def host_buffer(self, device_id: str, size_bytes: int) -> HostBuffer:
        opening = self._enter()
        block, size = await self._call("host_buffer", self._prepare_host_buffer, device_id, size_bytes)
        if opening.state is not OpeningState.OPEN:
            raise BackendClosed("the backend was shut down", backend=self.name, operation="host_buffer")
        return opening.host_pool.lend(block, size)

    def _prepare_host_buffer(self, opening: Opening, device_id: str, size_bytes: int) -> Job | tuple[Block, int]:
        index, pool = self._device_index(opening, device_id), opening.host_pool
        try:
            size = whole_number(size_bytes, "size_bytes")
            if not 0 < size <= sys.maxsize >> 1:
                raise OutOfRange(f"size_bytes must be positive and at most {sys.maxsize >> 1:,}")
            block_bytes = pool.block_bytes(size)
            pool.reserve(block_bytes)
        except GPUError as exc:
            self._complete(exc, f"host_buffer({brief(size_bytes)} B)", device_id)
            raise
        block = pool.take(block_bytes)
        if block is not None:
            return block, size

        def undo(made: Any) -> None:
            if made is NOTHING:
                pool.unreserve(block_bytes)
            else:
                pool.keep(made[0])

        job = MakeHostBuffer(lambda _: (pool.make(block_bytes), size), size, undo)
        return opening.dispatch.submit(job, index, "memory")

    async def view(self, handle: MemoryHandle, shape: Shape | None = None, dtype: DType = "uint8") -> DeviceView:
        return await self._call("view", self._prepare_view, handle, shape, dtype)

    def _prepare_view(self, opening: Opening, handle: MemoryHandle, shape: Shape | None, dtype: DType) -> Job:
        allocation, driver = self._allocation(opening, handle), self.driver
        index, capabilities = allocation.index, driver.capabilities
        if not (capabilities.host_visible or capabilities.cuda_pointers):
            raise Unsupported(
                "device memory is visible neither to the host nor to other libraries",
                device_id=handle.device_id,
                hint="use copy_into",
            )
        view = DeviceView(handle, shape, dtype)

        def attach(_: Job) -> DeviceView:
            if capabilities.host_visible:
                view.attach(driver.host_view(index, allocation.token))
            else:
                allocation.exported = True
                view.attach_pointer(driver.pointer(index, allocation.token), index)
            return view

        allocation.add_view(view.lease)
        job = MakeView(attach, undo=lambda _: view.close())
        return opening.dispatch.submit(job, index, "memory", (allocation,))

    # Kernels

    async def compile(self, device_id: str, source: str, name: str) -> Kernel:
        return await self._call("compile", self._prepare_compile, device_id, source, name)

    def _prepare_compile(self, opening: Opening, device_id: str, source: str, name: str) -> Job | Kernel:
        index = self._device_index(opening, device_id)
        try:
            check_source(source, name)
        except GPUError as exc:
            self._complete(exc, "compile", device_id)
            raise
        driver, kernels = self.driver, opening.kernels
        kernel = kernels.find(device_id, source, name)
        if kernel is not None:
            kernels.remember(kernel)
            return kernel

        def build(_: Job) -> Kernel:
            # On the lane, so that of two calls for the same text the second one finds what the first has made.
            kernel = kernels.find(device_id, source, name) or kernels.add(
                device_id,
                index,
                source,
                name,
                driver.compile(index, source, name),
                # The range of the index space comes first in C, from the driver.
                parameters(source, name, 2 if "c" in driver.capabilities.kernels else 0),
            )
            kernels.remember(kernel)
            return kernel

        return opening.dispatch.submit(Compile(build, f"compile({name})"), index, "compile")

    async def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[MemoryHandle | np.generic] = (),
    ) -> None:
        await self._call("launch", self._prepare_launch, kernel, grid, block, args)

    def _prepare_launch(
        self,
        opening: Opening,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[MemoryHandle | np.generic],
    ) -> Job:
        compiled = opening.kernels.get(kernel)
        index, operation = compiled.index, f"launch({kernel.name})"
        opening.dispatch.check(index, kernel.device_id)
        try:
            blocks, threads = extent(grid, "grid"), extent(block, "block")
            check_shape(blocks, threads, opening.devices[index].max_threads_per_block)
            passed, allocations = arguments(args, opening.handles, compiled)
        except GPUError as exc:
            self._complete(exc, operation, kernel.device_id)
            raise

        def run(_: Job) -> None:
            self.driver.launch(index, compiled.token, blocks, threads, passed)

        chains = set(allocations)
        return opening.dispatch.submit(Launch(run, operation), index, "compute", chains)

    async def execute_kernel(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[MemoryHandle | np.generic],
    ) -> bool:
        opening = self._enter()
        try:
            device_id = next((each.device_id for each in listed(args) if isinstance(each, MemoryHandle)), "")
            kernel = opening.kernels.named(device_id, name)
        except GPUError as exc:
            self._complete(exc, "execute_kernel")
            raise
        if kernel is None:
            return False
        await self.launch(kernel, grid, block, args)
        return True

    # What it is doing, and what is left

    def memory_usage(self, device_id: str) -> Usage:
        """What has been allocated on a device since ``initialize``, and its limit. Does not wait."""
        opening = self._enter()
        if device_id not in opening.index:
            raise DeviceNotFound(f"no device {device_id!r}; there are: {', '.join(opening.index)}", backend=self.name)
        return opening.ledger.usage(device_id)

    def pool_statistics(self, device_id: str) -> PoolStatistics:
        """Hits, misses and what the pool of a device holds. Does not wait; any time while the backend is open."""
        opening = self._enter()
        try:
            return opening.allocator.statistics(self._device_index(opening, device_id))
        except GPUError as exc:
            self._complete(exc, "pool_statistics")
            raise

    def peer_access(self, src_device_id: str, dst_device_id: str) -> bool | None:
        """Whether copies from one device reach the other directly, as far as the driver knows. Does not wait."""
        opening = self._enter()
        src, dst = self._device_index(opening, src_device_id), self._device_index(opening, dst_device_id)
        return self.driver.peer_access(src, dst)

    def lanes(self) -> list[LaneActivity]:
        """What each lane is doing; nothing where there are none, as before ``initialize``. Does not wait."""
        opening = self._opening
        return [] if opening is None or opening.closed else opening.dispatch.lanes()

    def copied_bytes(self) -> Mapping[tuple[str, Direction], int]:
        """Bytes of completed copies by device id and direction, since this object was made. Does not wait."""
        return dict(self._copied)

    async def get_telemetry(self, device_id: str) -> Telemetry:
        """Every metric of a device in one reading; a metric that is None has its reason in ``unavailable``."""
        return await self._call("telemetry", self._prepare_telemetry, device_id)

    def _prepare_telemetry(self, opening: Opening, device_id: str) -> Job:
        index = self._device_index(opening, device_id)

        def read(_: Job) -> Telemetry:
            reading = self.driver.telemetry(index)
            if not isinstance(reading, Telemetry):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"the driver's telemetry() returned {type(reading).__name__}, not Telemetry")
            return reading

        return opening.dispatch.submit(ReadTelemetry(read), index, "telemetry")

    async def get_device_memory_info(self, device_id: str) -> MemoryInfo:
        opening = self._enter()
        reading = await self.get_telemetry(device_id)
        index = opening.index[device_id]
        device, usage = opening.devices[index], opening.ledger.usage(device_id)
        total = reading.memory_total_bytes if reading.memory_total_bytes is not None else device.memory_bytes
        if total is None:
            raise Unsupported(
                "the library does not tell how much memory the device has",
                backend=self.name,
                device_id=device_id,
                operation="get_device_memory_info",
            )
        pooled = opening.allocator.pooled_bytes(index)
        reserved = min((reading.memory_reserved_bytes or 0) + pooled, total)
        free = reading.memory_free_bytes
        if free is None:
            # The library does not tell: what we have given out is the most that can be known.
            used = reading.memory_used_bytes if reading.memory_used_bytes is not None else usage.current_bytes
            free = max(0, total - reserved - used)
        free = min(free, total - reserved)
        available = free if usage.limit_bytes is None else min(free, usage.limit_bytes - usage.committed_bytes)
        return MemoryInfo(
            total_bytes=total,
            used_bytes=max(0, total - reserved - free),
            available_bytes=max(0, available),
            reserved_bytes=reserved,
        )

    async def get_device_temperature(self, device_id: str) -> float | None:
        return (await self.get_telemetry(device_id)).temperature_c

    async def get_device_power_usage(self, device_id: str) -> float | None:
        return (await self.get_telemetry(device_id)).power_w

    async def get_device_clock_rate(self, device_id: str) -> int | None:
        return (await self.get_telemetry(device_id)).clock_mhz


async def _give_way(result: Any) -> Any:
    """After a copy on the loop's own thread: let the others have their turn."""
    await asyncio.sleep(0)
    return result


def _device_of(opening: Opening, args: Sequence[Any]) -> str | None:
    """The device that a call is about, by its arguments."""
    for each in args:
        device_id = each.device_id if isinstance(each, MemoryHandle) else each
        if isinstance(device_id, str) and device_id in opening.index:
            return device_id
    return None


def _check_timeout(timeout: object) -> None:
    """
    Raises:
        OutOfRange: not a number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout) or timeout < 0:
        raise OutOfRange(
            f"timeout must be seconds, at least 0, or None to wait without limit, not {brief(timeout)}",
            operation="shutdown",
        )
