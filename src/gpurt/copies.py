"""The copies of a driver backend: between host and device, between devices, from files.

Each checks its arguments, submits one job on the lane that fits it, and awaits it. Large copies are one job that walks
the driver's chunks and stops between two of them when its caller has gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpurt.backend import byte_view
from gpurt.dispatch import Dispatcher
from gpurt.errors import GPUError, OutOfRange
from gpurt.job import Job, clear_frames
from gpurt.lifecycle import DriverLifecycle
from gpurt.memory.filestream import stream_file
from gpurt.memory.handles import Allocation, check_range, whole_number
from gpurt.memory.hostbytes import read_bytes
from gpurt.memory.openedfile import OpenedFile, brief_path, path_name
from gpurt.memory.progress import LaneProgress, check_progress
from gpurt.pieces import pieces
from gpurt.routes import QueueName
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from typing_extensions import Buffer

SMALL_COPY_BYTES: Final = 1 << 20
"""Copies up to here take the ``small`` lane, so that they never wait behind a bulk load on another handle. A small
copy is over in about 0.1 ms at PCIe rates, which is the longest that one of them delays the next."""

NEW_BYTES: Final = 64 << 10
"""Results in new memory are made on the loop's thread up to here: 1 MiB of it would keep the loop for 0.9 ms, most of
it page faults."""

FILE_CHUNK_BYTES: Final = 32 << 20
"""Longest read of a file into memory that the host addresses: 0.1 s from a disk of 300 MB/s. Progress is told, and a
cancelled load ends, after each."""

HostCopy = Callable[[int, Any, int, memoryview], None]
"""``Driver.write`` or ``Driver.read``."""


class DriverCopies(DriverLifecycle):
    """Adds the copies and ``synchronize``."""

    async def copy_to_device(self, src: Buffer, dst_handle: MemoryHandle, offset_bytes: int = 0) -> None:
        dispatch, allocation = self._enter_handle(dst_handle, "copy_to_device")
        index, driver = allocation.index, self.driver
        try:
            view = byte_view(src)
            offset, size = check_range(allocation, offset_bytes, view.nbytes, driver.capabilities.alignment_bytes)
        except GPUError as exc:
            self._tell(exc, index, "copy_to_device")
            raise
        if not size:
            return
        if size <= driver.inline_copy_bytes and dispatch.may_inline(allocation.chain, view.obj):
            await self._inline(dispatch, driver.write, allocation, offset, view, "copy_to_device")
            self._copied.add(dst_handle.device_id, "host_to_device", size)
            return

        job = dispatch.submit(
            index,
            "small" if size <= SMALL_COPY_BYTES else "h2d",
            partial(self._walk, driver.write, allocation, offset, view),
            chains=(allocation.chain,),
            undo=partial(_release, view),
        )
        await self._outcome(job, index, "copy_to_device", extent=(size, offset))
        self._copied.add(dst_handle.device_id, "host_to_device", size)

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

        if size <= min(self.driver.inline_copy_bytes, NEW_BYTES) and dispatch.may_inline(allocation.chain, b""):
            buffer = bytearray(size)
            await self._inline(dispatch, self.driver.read, allocation, offset, memoryview(buffer), "copy_from_device")
            self._copied.add(src_handle.device_id, "device_to_host", size)
            return bytes(buffer)

        def read(job: Job) -> bytes:
            return read_bytes(size, lambda view: self._walk(self.driver.read, allocation, offset, view, job))

        job = dispatch.submit(index, _read_queue(size), read, chains=(allocation.chain,))
        read_out: bytes = await self._outcome(job, index, "copy_from_device", extent=(size, offset))
        self._copied.add(src_handle.device_id, "device_to_host", size)
        return read_out

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

        if size <= self.driver.inline_copy_bytes and dispatch.may_inline(allocation.chain, view.obj):
            await self._inline(dispatch, self.driver.read, allocation, offset, view, "copy_into")
            self._copied.add(src_handle.device_id, "device_to_host", size)
            return size

        job = dispatch.submit(
            index,
            _read_queue(size),
            partial(self._walk, self.driver.read, allocation, offset, view),
            chains=(allocation.chain,),
            undo=partial(_release, view),
        )
        await self._outcome(job, index, "copy_into", extent=(size, offset), wait_out=True)
        self._copied.add(src_handle.device_id, "device_to_host", size)
        return size

    def _walk(self, copy: HostCopy, allocation: Allocation, offset: int, view: memoryview, job: Job) -> None:
        """Lane thread: ``view`` to or from the allocation, piece by piece, as long as somebody wants it."""
        capabilities = self.driver.capabilities
        try:
            if view.nbytes <= SMALL_COPY_BYTES and view.nbytes <= capabilities.chunk_bytes:
                copy(allocation.index, allocation.token, offset, view)
                return
            for start, stop in pieces(
                view.nbytes, capabilities.chunk_bytes, capabilities.alignment_bytes, paced=capabilities.host_visible
            ):
                if job.abandoned:
                    return
                copy(allocation.index, allocation.token, offset + start, view[start:stop])
        finally:
            _release(view)

    async def _inline(
        self,
        dispatch: Dispatcher,
        copy: HostCopy,
        allocation: Allocation,
        offset: int,
        view: memoryview,
        operation: str,
    ) -> None:
        """Event loop's thread: see :mod:`gpurt.inline`. Whether cancelled or not, the copy is complete."""
        size = view.nbytes
        try:
            copy(allocation.index, allocation.token, offset, view)
        except Exception as exc:
            clear_frames(exc)
            error = await self._failure(exc, dispatch, allocation.index, operation, (size, offset))
            try:
                if error is exc:
                    raise
                raise error from exc
            finally:
                del error
        finally:
            _release(view)
        await dispatch.turn.give_way()

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
        self._copied.add(src_handle.device_id, "device_to_device", size)

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
        dispatch, allocation = self._enter_handle(handle, "load_file")
        index, operation = allocation.index, "load_file"
        alignment = self.driver.capabilities.alignment_bytes
        try:
            name = path_name(path)
            operation = f"load_file({brief_path(name)!r})"
            check_progress(on_progress)
            start = whole_number(file_offset, "file_offset")
            if start < 0:
                raise OutOfRange(f"file_offset must not be negative: {start:,}")
            offset, size = check_range(allocation, handle_offset, 0 if size_bytes is None else size_bytes, alignment)
        except GPUError as exc:
            self._tell(exc, index, operation)
            raise
        progress = LaneProgress(dispatch.loop, on_progress)
        job = dispatch.submit(
            index,
            "h2d",
            lambda job: stream_file(
                self.driver,
                index,
                allocation.token,
                name,
                version=path.version if isinstance(path, OpenedFile) else None,
                file_offset=start,
                size_bytes=None if size_bytes is None else size,
                mem_offset=offset,
                room_bytes=handle.size_bytes - offset,
                chunk_bytes=self._file_chunk(),
                wanted=lambda: not job.abandoned,
                on_progress=progress.tell,
            ),
            chains=(allocation.chain,),
        )
        progress.watch(job)
        done = 0
        try:
            done = await self._outcome(job, index, operation)
        except GPUError:
            if progress.failure is None:
                raise
        finally:
            progress.close()
        progress.raise_failure()
        self._copied.add(handle.device_id, "file_to_device", done)
        return done

    def _file_chunk(self) -> int:
        capabilities = self.driver.capabilities
        most, alignment = capabilities.chunk_bytes, capabilities.alignment_bytes
        if not capabilities.loads_files:
            most = min(most, FILE_CHUNK_BYTES)
        return max(alignment, most - most % alignment)

    async def synchronize(self, device_id: str) -> None:
        dispatch, index = self._enter_device(device_id)
        job = dispatch.submit(index, "sync", lambda _: self.driver.sync(index), after_device=True)
        await self._outcome(job, index, "synchronize")


def _read_queue(size: int) -> QueueName:
    return "small" if size <= SMALL_COPY_BYTES else "d2h"


def _release(view: memoryview, _: object = None) -> None:
    try:  # contextlib.suppress takes longer than all the rest
        view.release()
    except BufferError:  # arrays over it still hang in the traceback of a failed call, and go with it
        return
