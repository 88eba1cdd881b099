"""Bandwidths that every backend has: to the device, from it, within its memory, and from files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Final

from gpurt.backend import GPUBackend
from gpurt.calibration.rate import Clock, rate
from gpurt.errors import Unsupported
from gpurt.runtime.lane import off_loop
from gpurt.types import MemoryHandle

COPY_BYTES: Final = 64 << 20
"""Of one copy with the host, and of page-locked memory that is taken for it."""
LITTLE: Final = 4096
"""A copy of so many bytes is what any copy costs beside its bytes."""
PATTERN_BYTES: Final = 1 << 20


async def fill(backend: GPUBackend, handle: MemoryHandle) -> None:
    """Random bytes, repeated to the end by the device itself: memory that was never touched is read faster than it
    can be."""
    pattern = os.urandom(min(PATTERN_BYTES, handle.size_bytes))
    await backend.copy_to_device(pattern, handle)
    done = len(pattern)
    while done < handle.size_bytes:
        more = min(done, handle.size_bytes - done)
        await backend.copy_device_to_device(handle, handle, more, dst_offset_bytes=done)
        done += more


async def host_copies(backend: GPUBackend, handle: MemoryHandle, clock: Clock) -> tuple[float, float]:
    """Bytes/s to the device and from it, in page-locked host memory where the library can."""
    nbytes = min(COPY_BYTES, handle.size_bytes)
    async with contextlib.AsyncExitStack() as stack:
        try:
            buffer = await backend.host_buffer(handle.device_id, nbytes)
        except Unsupported:
            memory = memoryview(bytearray(nbytes))
        else:
            stack.callback(buffer.close)
            memory = buffer.memory
        little = memory[:LITTLE]
        there = await rate(
            clock,
            nbytes - LITTLE,
            lambda: backend.copy_to_device(memory, handle),
            idle=lambda: backend.copy_to_device(little, handle),
        )
        back = await rate(
            clock,
            nbytes - LITTLE,
            lambda: backend.copy_into(handle, memory),
            idle=lambda: backend.copy_into(handle, little),
        )
    return there, back


async def within(backend: GPUBackend, source: MemoryHandle, target: MemoryHandle, clock: Clock) -> float:
    """Bytes/s of a copy within the device, reads and writes counted."""
    nbytes = min(source.size_bytes, target.size_bytes)
    return await rate(
        clock,
        2 * (nbytes - LITTLE),
        lambda: backend.copy_device_to_device(source, target, nbytes),
        idle=lambda: backend.copy_device_to_device(source, target, LITTLE),
    )


@contextlib.asynccontextmanager
async def weights_file(directory: str | os.PathLike[str] | None, nbytes: int) -> AsyncGenerator[Path]:
    """A file of random bytes in the host's page cache, gone at the end; None: the directory of temporary files.

    Raises:
        OSError: it cannot be written.
    """

    def write() -> Path:
        descriptor, name = tempfile.mkstemp(prefix="gpurt-calibration-", dir=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                pattern, left = os.urandom(PATTERN_BYTES), nbytes
                while left:
                    left -= file.write(pattern[:left])
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return Path(name)

    writing = asyncio.ensure_future(off_loop("calibration", write))
    try:
        path = await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(_remove)
        raise
    try:
        yield path
    finally:
        await off_loop("calibration", lambda: path.unlink(missing_ok=True))


def _remove(writing: asyncio.Future[Path]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        writing.result().unlink(missing_ok=True)


async def file_loads(backend: GPUBackend, path: Path, nbytes: int, device_ids: Sequence[str], clock: Clock) -> float:
    """Bytes/s from the file to all of these devices at once; the sum.

    As :func:`gpurt.weights.load_safetensors` does it: into new memory, which on a host comes at the rate of page
    faults, and into two allocations of a device at a time.
    """
    half = nbytes // 2

    async def load_half(device_id: str, position: int, size: int) -> None:
        async with backend.allocation(device_id, half) as handle:
            await backend.load_file(path, handle, file_offset=position * half, size_bytes=size)

    async def load(size: int) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for device_id in device_ids:
                    for position in (0, 1):
                        group.create_task(load_half(device_id, position, size))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others were cut short by it, or fail alike

    # Without what each load costs beside its bytes: a checkpoint is many times this file, and pays it as seldom.
    little = min(LITTLE, half)
    return await rate(
        clock, 2 * (half - little) * len(device_ids), lambda: load(half), idle=lambda: load(little), at_once=1
    )
