"""A device check that anybody can repeat: random bytes to the device and back, compared by SHA-256."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from gpurt.backend import GPUBackend
from gpurt.errors import TransferFailed
from gpurt.runtime.lane import Lane

BLOCK_BYTES: Final = 16 << 20
"""One step: large enough that the copy dominates, small enough for a progress bar."""

Phase = Literal["write", "read"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    device_id: str
    nbytes: int
    to_device_gbps: float
    """10^9 bytes per second inside ``copy_to_device``; making and hashing the bytes is not counted."""
    from_device_gbps: float
    """The same for ``copy_into`` a reused buffer."""
    sha256: str

    def document(self) -> dict[str, Any]:
        return asdict(self)


async def check_device(
    backend: GPUBackend, device_id: str, nbytes: int, on_progress: Callable[[Phase, int], None] | None = None
) -> CheckResult:
    """Stream ``nbytes`` of random bytes to a device and back.

    Args:
        on_progress: called after each block with the phase and the bytes done in it.

    Raises:
        TransferFailed: the bytes that came back are others. OutOfMemory and the other errors of a copy.
    """
    loop = asyncio.get_running_loop()
    # Random bytes and hashing release the GIL; a lane of their own keeps them off the loop.
    lane = Lane(f"gpurt:check:{device_id}")
    sent, received = hashlib.sha256(), hashlib.sha256()
    blocks = [(start, min(BLOCK_BYTES, nbytes - start)) for start in range(0, nbytes, BLOCK_BYTES)]
    write_s = read_s = 0.0
    try:
        async with backend.allocation(device_id, nbytes) as handle:
            for start, size in blocks:
                block = await loop.run_in_executor(lane, os.urandom, size)
                await loop.run_in_executor(lane, sent.update, block)
                began = time.perf_counter()
                await backend.copy_to_device(block, handle, start)
                write_s += time.perf_counter() - began
                if on_progress is not None:
                    on_progress("write", start + size)
            await backend.synchronize(device_id)
            buffer = memoryview(bytearray(min(BLOCK_BYTES, nbytes)))
            for start, size in blocks:
                began = time.perf_counter()
                await backend.copy_into(handle, buffer[:size], start)
                read_s += time.perf_counter() - began
                await loop.run_in_executor(lane, received.update, buffer[:size])
                if on_progress is not None:
                    on_progress("read", start + size)
    finally:
        lane.stop()
    if sent.digest() != received.digest():
        raise TransferFailed(
            f"{nbytes:,} bytes came back changed: sent {sent.hexdigest()}, received {received.hexdigest()}",
            device_id=device_id,
            operation="check",
            hint="the device or its driver corrupts data; do not use it",
        )
    return CheckResult(device_id, nbytes, nbytes / write_s / 1e9, nbytes / read_s / 1e9, sent.hexdigest())
