"""DriverBackend: a whole GPUBackend over any blocking Driver.

Each method here checks its arguments, submits one job and awaits it. What stands around it lives elsewhere: the door,
opening, closing and error translation in :mod:`gpurt.lifecycle`, threads, cancellation and the hang clock in
:mod:`gpurt.dispatch`, order in :mod:`gpurt.order`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gpurt.backend import byte_view
from gpurt.dispatch import QueueName
from gpurt.errors import DeviceLost, GPUError, HandleInUse, OutOfRange, Unsupported
from gpurt.lane import NOTHING, Job
from gpurt.lifecycle import DriverLifecycle
from gpurt.memory.handles import Allocation, check_range, whole_number
from gpurt.memory.hostbytes import read_bytes
from gpurt.memory.pool import PoolStatistics
from gpurt.memory.views import DeviceView
from gpurt.types import MemoryHandle, MemoryInfo, Telemetry

if TYPE_CHECKING:
    from typing_extensions import Buffer

SMALL_COPY_BYTES: Final = 1 << 20
"""Copies up to here take the ``small`` lane, so that they never wait behind a bulk load on another handle. A small
copy is over in about 0.1 ms at PCIe rates, which is the longest that one of them delays the next."""


class DriverBackend(DriverLifecycle):
    """A backend over ``driver``. See :class:`gpurt.backend.GPUBackend` for what each method promises.

    Args:
        driver: the blocking driver; owned by this backend.
        memory_limit: bytes that may be allocated per device, for all devices or by device id; None leaves the
            decision to the library.
        hang_after: seconds after which a driver call that has not returned makes its device unresponsive: new,
            queued and waiting calls on it fail with ``DeviceUnresponsive`` until the driver returns.
        max_pending: calls handed to one lane at a time; more callers wait for a place, in order.
        pool_bytes: freed memory that is kept per device for the next allocation of its size; None is what the
            driver suggests (``Capabilities.pool_bytes``), 0 keeps none.
        on_background_error: gets the error of a call whose caller was cancelled; default: logged at ERROR.
            May be called on any thread.
    """

    # Memory

    async def allocate(self, device_id: str, size_bytes: int) -> MemoryHandle:
        dispatch, index = self._enter_device(device_id)
        allocator, ledger = self._allocator, self.ledger
        try:
            nbytes = whole_number(size_bytes, "size_bytes")
            if not 0 < nbytes <= sys.maxsize:
                raise OutOfRange(f"size_bytes must be positive and at most {sys.maxsize:,}")
            largest = self.driver.capabilities.max_allocation_bytes
            if largest is not None and nbytes > largest:
                raise OutOfRange(f"the largest single allocation of this library is {largest:,} bytes")
            ledger.reserve(device_id, nbytes)
        except GPUError as exc:
            self._tell(exc, index, f"allocate({size_bytes!r} B)")
            raise
        block_bytes = allocator.block_bytes(index, nbytes)
        token = allocator.take(index, block_bytes)
        if token is None:

            def undo(made: Any) -> None:
                try:
                    if made is not NOTHING:
                        allocator.release(index, made[1], made[0])
                finally:
                    ledger.cancel(device_id, nbytes)

            classed = block_bytes
            job = dispatch.submit(index, "memory", lambda _: allocator.make(index, nbytes, classed), undo=undo)
            operation = f"allocate({nbytes} B)"
            token, block_bytes = await self._outcome(job, index, operation, failure=GPUError, requested=nbytes)
        ledger.commit(device_id, nbytes)
        return self._handles.add(device_id, index, nbytes, token, block_bytes)

    async def deallocate(self, handle: MemoryHandle) -> None:
        dispatch = self._enter()
        try:
            allocation = self._handles.get(handle)
            if allocation.open_views:
                raise HandleInUse(
                    f"{allocation.open_views} views of the allocation are open",
                    device_id=handle.device_id,
                    hint="close them and delete arrays made from them",
                )
        except GPUError as exc:
            self._tell(exc, None, "deallocate")
            raise
        index = allocation.index
        if dispatch.lost(index) or (  # its memory went with it; only the books are left
            allocation.chain.idle and self._allocator.keep(index, allocation.block_bytes, allocation.token)
        ):
            self._handles.remove(allocation)
            self.ledger.release(handle.device_id, handle.size_bytes)
            return
        job = self._submit_free(dispatch, allocation)
        if dispatch.unresponsive(index):
            job.disown()  # done when the driver returns; nobody must wait for that
            return
        # A lost or hung device takes its memory with it, or gives it back later: either way the handle is gone.
        with contextlib.suppress(DeviceLost):
            await self._outcome(job, index, "deallocate", failure=GPUError, droppable=False)

    # Copies

    async def copy_to_device(self, src: Buffer, dst_handle: MemoryHandle, offset_bytes: int = 0) -> None:
        dispatch, allocation = self._enter_handle(dst_handle, "copy_to_device")
        index, driver, token = allocation.index, self.driver, allocation.token
        try:
            view = byte_view(src)
            offset, size = check_range(allocation, offset_bytes, view.nbytes, driver.capabilities.alignment_bytes)
        except GPUError as exc:
            self._tell(exc, index, "copy_to_device")
            raise
        if not size:
            return
        step = self._chunk()

        def write(job: Job) -> None:
            try:
                for start in range(0, size, step):
                    if job.abandoned:
                        return
                    driver.write(index, token, offset + start, view[start : start + step])
            finally:
                _release(view)

        job = dispatch.submit(
            index,
            "small" if size <= SMALL_COPY_BYTES else "h2d",
            write,
            chains=(allocation.chain,),
            undo=lambda _: _release(view),
        )
        await self._outcome(job, index, f"copy_to_device({size:,} B at {offset:,})")

    async def copy_from_device(
        self, src_handle: MemoryHandle, offset_bytes: int = 0, size_bytes: int | None = None
    ) -> bytes:
        dispatch, allocation = self._enter_handle(src_handle, "copy_from_device")
        index = allocation.index
        try:
            if size_bytes is None:
                size_bytes = src_handle.size_bytes - whole_number(offset_bytes, "offset_bytes")
            offset, size = check_range(allocation, offset_bytes, size_bytes, self.driver.capabilities.alignment_bytes)
        except GPUError as exc:
            self._tell(exc, index, "copy_from_device")
            raise
        if not size:
            return b""

        def read(job: Job) -> bytes:
            return read_bytes(size, lambda view: self._read(job, allocation, offset, view))

        job = dispatch.submit(index, _read_queue(size), read, chains=(allocation.chain,))
        return await self._outcome(job, index, f"copy_from_device({size:,} B at {offset:,})")

    async def copy_into(self, src_handle: MemoryHandle, dst: Buffer, offset_bytes: int = 0) -> int:
        dispatch, allocation = self._enter_handle(src_handle, "copy_into")
        index = allocation.index
        try:
            view = byte_view(dst, writable=True)
            offset, size = check_range(allocation, offset_bytes, view.nbytes, self.driver.capabilities.alignment_bytes)
        except GPUError as exc:
            self._tell(exc, index, "copy_into")
            raise
        if not size:
            return 0

        def read(job: Job) -> int:
            try:
                self._read(job, allocation, offset, view)
            finally:
                _release(view)
            return size

        job = dispatch.submit(index, _read_queue(size), read, chains=(allocation.chain,), undo=lambda _: _release(view))
        return await self._outcome(job, index, f"copy_into({size:,} B at {offset:,})", wait_out=True)

    def _read(self, job: Job, allocation: Allocation, offset: int, view: memoryview) -> None:
        """Lane thread: fill ``view`` chunk by chunk, as long as somebody wants it."""
        step = self._chunk()
        for start in range(0, view.nbytes, step):
            if job.abandoned:
                return
            self.driver.read(allocation.index, allocation.token, offset + start, view[start : start + step])

    async def copy_device_to_device(
        self,
        src_handle: MemoryHandle,
        dst_handle: MemoryHandle,
        size_bytes: int,
        *,
        src_offset_bytes: int = 0,
        dst_offset_bytes: int = 0,
    ) -> None:
        dispatch, src = self._enter_handle(src_handle, "copy_device_to_device")
        _, dst = self._enter_handle(dst_handle, "copy_device_to_device")
        alignment = self.driver.capabilities.alignment_bytes
        try:
            src_offset, size = check_range(src, src_offset_bytes, size_bytes, alignment)
        except GPUError as exc:
            self._tell(exc, src.index, "copy_device_to_device")
            raise
        try:
            dst_offset, size = check_range(dst, dst_offset_bytes, size_bytes, alignment)
            if src is dst and abs(src_offset - dst_offset) < size:
                raise OutOfRange(f"{size:,} bytes at {src_offset:,} and at {dst_offset:,} overlap")
        except GPUError as exc:
            self._tell(exc, dst.index, "copy_device_to_device")
            raise
        if not size:
            return

        def copy(_: Job) -> None:
            self.driver.copy(src.index, src.token, src_offset, dst.index, dst.token, dst_offset, size)

        job = dispatch.submit(src.index, "peer", copy, chains={src.chain, dst.chain}, also_device=dst.index)
        operation = f"copy_device_to_device({size:,} B to {dst_handle.device_id})"
        await self._outcome(job, src.index, operation, also_index=dst.index)

    async def synchronize(self, device_id: str) -> None:
        dispatch, index = self._enter_device(device_id)
        job = dispatch.submit(index, "sync", lambda _: self.driver.sync(index), after_device=True)
        await self._outcome(job, index, "synchronize")

    async def view(self, handle: MemoryHandle, shape: Sequence[int] | None = None, dtype: str = "uint8") -> DeviceView:
        dispatch, allocation = self._enter_handle(handle, "view")
        index = allocation.index
        if not self.driver.capabilities.host_visible:
            raise Unsupported(
                "device memory is not visible to the host",
                backend=self.name,
                device_id=handle.device_id,
                operation="view",
                hint="use copy_into",
            )

        view = DeviceView(handle, shape, dtype)
        allocation.add_view(view)
        job = dispatch.submit(
            index,
            "memory",
            lambda _: view.attach(self.driver.host_view(index, allocation.token)),
            chains=(allocation.chain,),
        )
        try:
            await self._outcome(job, index, "view", failure=GPUError)
        except BaseException:
            view.close()
            raise
        return view

    async def trim(self, device_id: str | None = None) -> int:
        if device_id is None:
            self._enter()
            return sum([await self.trim(device.device_id) for device in self._devices])
        dispatch, index = self._enter_device(device_id)
        job = dispatch.submit(index, "memory", lambda _: self._allocator.trim(index))
        return await self._outcome(job, index, "trim")

    def pool_statistics(self, device_id: str) -> PoolStatistics:
        """Hits, misses and what the pool of a device holds. Does not wait; any time while the backend is open."""
        _, index = self._enter_device(device_id)
        return self._allocator.statistics(index)

    # Telemetry

    async def get_telemetry(self, device_id: str) -> Telemetry:
        """Every metric of a device in one reading; a metric that is None has its reason in ``unavailable``."""
        dispatch, index = self._enter_device(device_id)
        job = dispatch.submit(index, "telemetry", lambda _: self.driver.telemetry(index))
        return await self._outcome(job, index, "telemetry")

    async def get_device_memory_info(self, device_id: str) -> MemoryInfo:
        reading = await self.get_telemetry(device_id)
        device, usage = self._devices[self._index[device_id]], self.ledger.usage(device_id)
        total = reading.memory_total_bytes if reading.memory_total_bytes is not None else device.memory_bytes
        if total is None:
            raise Unsupported(
                "the library does not tell how much memory the device has",
                backend=self.name,
                device_id=device_id,
                operation="get_device_memory_info",
            )
        pooled = self._allocator.pooled_bytes(self._index[device_id])
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

    def _chunk(self) -> int:
        capabilities = self.driver.capabilities
        alignment = capabilities.alignment_bytes
        return max(alignment, capabilities.chunk_bytes - capabilities.chunk_bytes % alignment)


def _read_queue(size: int) -> QueueName:
    return "small" if size <= SMALL_COPY_BYTES else "d2h"


def _release(view: memoryview) -> None:
    # Arrays over the view may still hang in the traceback of a failed call; they go with it.
    with contextlib.suppress(BufferError):
        view.release()
