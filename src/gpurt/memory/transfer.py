"""Bytes between two allocations, wherever they are: in one backend, or in two that know nothing of each other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpurt.backend import GPUBackend
from gpurt.errors import Unsupported
from gpurt.runtime.host_memory import HostBuffer, host_memory_ran_out
from gpurt.types import MemoryHandle

STAGING_BYTES: Final = 16 << 20
"""Each of the two host buffers between two backends. 16 MiB take 0.3 ms or more on any link, against some 0.1 ms for
the calls; and a cancelled transfer runs on for one at most."""

log = logging.getLogger("gpurt.transfer")


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes are or go to."""

    backend: GPUBackend
    handle: MemoryHandle
    offset_bytes: int = 0


async def transfer(
    source: Place, target: Place, size_bytes: int, *, on_progress: Callable[[int], None] | None = None
) -> None:
    """Copy ``size_bytes`` from one place to the other. Inside one backend this is its ``copy_device_to_device``;
    between two, two host buffers of the target's backend take turns, so that one is filled while the other is emptied.

    Cancelled, or failed on one side, it returns at once: what the drivers still do ends with their present call, and
    the host buffers go back after that.

    Args:
        on_progress: called on the event loop with the bytes done so far.

    Raises:
        OutOfRange, InvalidHandle, TransferFailed, DeviceLost, OutOfMemory: as the copies of either backend.
    """
    if source.backend is target.backend:
        await source.backend.copy_device_to_device(
            source.handle,
            target.handle,
            size_bytes,
            src_offset_bytes=source.offset_bytes,
            dst_offset_bytes=target.offset_bytes,
        )
        if on_progress is not None:
            on_progress(size_bytes)
        return
    if size_bytes:
        await _stream(source, target, size_bytes, on_progress)


async def _stream(source: Place, target: Place, size_bytes: int, on_progress: Callable[[int], None] | None) -> None:
    step = min(STAGING_BYTES, size_bytes)

    def read(start: int) -> asyncio.Task[int]:
        memory = buffers[start // step % 2].memory[: min(step, size_bytes - start)]
        filling.append(memory)
        copy = source.backend.copy_into(source.handle, memory, source.offset_bytes + start)
        return asyncio.create_task(copy, name="gpurt:transfer")

    buffers: list[HostBuffer] = []
    filling: deque[memoryview] = deque()
    """Parts of the buffers that are being read into or written from."""
    reading: asyncio.Task[int] | None = None
    try:
        for _ in range(1 if step == size_bytes else 2):
            buffers.append(await _buffer(target, step))
        reading = read(0)
        for start in range(0, size_bytes, step):
            # Not awaited itself: to cancel it would mean to wait for the source's driver, which may hang.
            await asyncio.wait({reading})
            count = reading.result()
            filled = filling[0]
            if start + step < size_bytes:
                reading = read(start + step)
            await target.backend.copy_to_device(filled, target.handle, target.offset_bytes + start)
            _release(filling.popleft())
            if on_progress is not None:
                on_progress(start + count)
    finally:
        if reading is None or reading.done():
            _close(buffers, filling, reading)
        else:
            reading.cancel()
            reading.add_done_callback(lambda task: _close(buffers, filling, task))
        del reading  # its failure has this frame in its traceback


async def _buffer(target: Place, size_bytes: int) -> HostBuffer:
    """The target's own, because it waits for its own copies before it gives a closed buffer to somebody else."""
    with contextlib.suppress(Unsupported):
        return await target.backend.host_buffer(target.handle.device_id, size_bytes)
    try:
        return HostBuffer(memoryview(bytearray(size_bytes)), False, lambda: None)
    except MemoryError as exc:
        raise host_memory_ran_out(size_bytes, "free memory of the host") from exc


def _close(buffers: Sequence[HostBuffer], filling: Iterable[memoryview], reading: asyncio.Task[int] | None) -> None:
    for memory in filling:
        _release(memory)
    for buffer in buffers:
        buffer.close()
    if reading is not None and not reading.cancelled() and (error := reading.exception()) is not None:
        # Either the caller has it, or the other side had failed before, which is what the caller is told.
        log.debug("reading from a peer: %s", error)


def _release(memory: memoryview) -> None:
    """The traceback of a failure would keep it, and so the buffer's block. A copy under way has a view of its own."""
    with contextlib.suppress(BufferError):  # a backend still has an array of it, which will go
        memory.release()
