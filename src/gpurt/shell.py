"""DriverBackend: a whole GPUBackend over any blocking Driver.

Each method here checks its arguments, submits one job and awaits it. What stands around it lives elsewhere: the door
and error translation in :mod:`gpurt.guard`, opening and closing in :mod:`gpurt.lifecycle`, copies in
:mod:`gpurt.copies`, kernels in :mod:`gpurt.kernels`, threads, cancellation and the hang clock in
:mod:`gpurt.dispatch`, order in :mod:`gpurt.order`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from gpurt.activity import Direction, LaneActivity
from gpurt.copies import DriverCopies
from gpurt.dispatch import Dispatcher
from gpurt.errors import DeviceLost, GPUError, HandleInUse, InvalidHandle, OutOfRange, Unsupported
from gpurt.job import NOTHING, Job
from gpurt.kernels import DriverKernels
from gpurt.memory.elements import DType, Shape
from gpurt.memory.handles import Allocation, brief, whole_number
from gpurt.memory.hostbuffer import HostBuffer
from gpurt.memory.pool import PoolStatistics
from gpurt.memory.views import DeviceView
from gpurt.types import DeviceState, MemoryHandle, MemoryInfo, Telemetry


class DriverBackend(DriverCopies, DriverKernels):
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
        host_buffer_limit: bytes of host memory for ``host_buffer``, in use and kept together; None sets no limit.
        on_background_error: gets the error of a call whose caller was cancelled; default: logged at ERROR.
            May be called on any thread.
    """

    # Memory

    async def allocate(self, device_id: str, size_bytes: int) -> MemoryHandle:
        dispatch, index = self._enter_device(device_id)
        ledger = self.ledger
        try:
            nbytes = whole_number(size_bytes, "size_bytes")
            if not 0 < nbytes <= sys.maxsize:
                raise OutOfRange(f"size_bytes must be positive and at most {sys.maxsize:,}")
            largest = self.driver.capabilities.max_allocation_bytes
            if largest is not None and nbytes > largest:
                raise OutOfRange(f"the largest single allocation of this library is {largest:,} bytes")
            ledger.reserve(device_id, nbytes)
        except GPUError as exc:
            self._tell(exc, index, f"allocate({brief(size_bytes)} B)")
            raise
        block_bytes = self._allocator.block_bytes(index, nbytes)
        token = self._allocator.take(index, block_bytes)
        if token is not None:
            ledger.commit(device_id, nbytes)
            return self._handles.add(device_id, index, nbytes, token, block_bytes)
        # On its own: closures would make a hit, too, pay for their cells.
        self._arriving += 1
        try:
            token, block_bytes = await self._make(dispatch, index, device_id, nbytes, block_bytes)
            ledger.commit(device_id, nbytes)
            return self._handles.add(device_id, index, nbytes, token, block_bytes)
        finally:
            self._arriving -= 1

    async def _make(
        self, dispatch: Dispatcher, index: int, device_id: str, nbytes: int, block_bytes: int
    ) -> tuple[Any, int]:
        """A new block for what is reserved; the reservation ends with the call if that fails."""
        allocator, ledger = self._allocator, self.ledger

        def undo(made: Any) -> None:
            try:
                if made is not NOTHING:
                    allocator.release(index, made[1], made[0])
            finally:
                ledger.cancel(device_id, nbytes)

        job = dispatch.submit(index, "memory", lambda _: allocator.make(index, nbytes, block_bytes), undo=undo)
        return await self._outcome(job, index, f"allocate({nbytes} B)", failure=GPUError, requested=nbytes)

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
        job = self._free(dispatch, allocation)
        if job is None:
            return
        if dispatch.unresponsive(index):
            job.disown()  # done when the driver returns; nobody must wait for that
            return
        # A lost or hung device takes its memory with it, or gives it back later: either way the handle is gone.
        with contextlib.suppress(DeviceLost):
            await self._outcome(job, index, "deallocate", failure=GPUError, droppable=False)

    def _free(self, dispatch: Dispatcher, allocation: Allocation) -> Job | None:
        """The handle is dead; what is still to be waited for, or None."""
        if dispatch.lost(allocation.index) or (  # its memory went with it; only the books are left
            allocation.chain.idle
            and not allocation.exported
            and self._allocator.keep(allocation.index, allocation.block_bytes, allocation.token)
        ):
            self._handles.remove(allocation)
            self.ledger.release(allocation.handle.device_id, allocation.handle.size_bytes)
            return None
        return self._submit_free(dispatch, allocation)

    def free_when_unviewed(self, handle: MemoryHandle) -> None:
        """Free an allocation once no view of it, and no array made from one, is in use: for an owner that ends before
        they do. Until then it is live. Returns at once.

        Raises:
            InvalidHandle, BackendClosed, WrongLoop.
        """
        dispatch = self._enter()
        handles, loop = self._handles, dispatch.loop
        allocation = handles.get(handle)

        def look() -> None:
            if self._dispatch is not dispatch:
                return  # shut down, which frees everything
            with contextlib.suppress(InvalidHandle):  # freed by hand
                if handles.get(handle).open_views:
                    allocation.when_unviewed(unviewed)
                elif (job := self._free(dispatch, allocation)) is not None:
                    job.disown()

        def unviewed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(look)

        look()

    # Host memory and views

    async def host_buffer(self, device_id: str, size_bytes: int) -> HostBuffer:
        dispatch, index = self._enter_device(device_id)
        pool = self._host_pool
        try:
            nbytes = whole_number(size_bytes, "size_bytes")
            if not 0 < nbytes <= sys.maxsize >> 1:
                raise OutOfRange(f"size_bytes must be positive and at most {sys.maxsize >> 1:,}")
            block_bytes = pool.block_bytes(nbytes)
            pool.reserve(block_bytes)
        except GPUError as exc:
            self._tell(exc, index, f"host_buffer({brief(size_bytes)} B)")
            raise
        block = pool.take(block_bytes)
        if block is None:

            def undo(made: Any) -> None:
                if made is NOTHING:
                    pool.unreserve(block_bytes)
                else:
                    pool.keep(block_bytes, made)

            job = dispatch.submit(index, "memory", lambda _: pool.make(block_bytes), undo=undo)
            block = await self._outcome(
                job, index, f"host_buffer({nbytes} B)", failure=GPUError, requested=nbytes, on_host=True
            )
        return pool.lend(block, block_bytes, nbytes)

    async def view(self, handle: MemoryHandle, shape: Shape | None = None, dtype: DType = "uint8") -> DeviceView:
        dispatch, allocation = self._enter_handle(handle, "view")
        index = allocation.index
        capabilities = self.driver.capabilities
        if not (capabilities.host_visible or capabilities.cuda_pointers):
            raise Unsupported(
                "device memory is visible neither to the host nor to other libraries",
                backend=self.name,
                device_id=handle.device_id,
                operation="view",
                hint="use copy_into",
            )

        def attach(_: Job) -> None:
            if capabilities.host_visible:
                view.attach(self.driver.host_view(index, allocation.token))
            else:
                allocation.exported = True
                view.attach_pointer(self.driver.pointer(index, allocation.token), index)

        view = DeviceView(handle, shape, dtype)
        allocation.add_view(view.lease)
        job = dispatch.submit(index, "memory", attach, chains=(allocation.chain,))
        try:
            await self._outcome(job, index, "view", failure=GPUError)
        except BaseException:
            view.close()
            raise
        return view

    async def trim(self, device_id: str | None = None) -> int:
        if device_id is None:
            self._enter()
            present = [device.device_id for device in self.devices if device.state is not DeviceState.LOST]
            return sum([await self.trim(device_id) for device_id in present])
        dispatch, index = self._enter_device(device_id)
        job = dispatch.submit(index, "memory", lambda _: self._allocator.trim(index) + self._host_pool.free_all())
        return await self._outcome(job, index, "trim")

    def pool_statistics(self, device_id: str) -> PoolStatistics:
        """Hits, misses and what the pool of a device holds. Does not wait; any time while the backend is open."""
        _, index = self._enter_device(device_id)
        return self._allocator.statistics(index)

    def lanes(self) -> list[LaneActivity]:
        """What each lane is doing; nothing where there are none, as before ``initialize``. Does not wait."""
        return [] if self._dispatch is None else self._dispatch.lanes()

    def copied_bytes(self) -> Mapping[tuple[str, Direction], int]:
        """Bytes of completed copies by device id and direction, since this object was made. Does not wait."""
        return self._copied.totals()

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
