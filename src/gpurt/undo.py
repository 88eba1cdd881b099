"""Taking back what a failed or cancelled call has allocated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gpurt.backend import GPUBackend
from gpurt.errors import GPUError
from gpurt.types import MemoryHandle
from gpurt.weights.loaded import free_all

log = logging.getLogger("gpurt.undo")


async def undo_allocations(backend: GPUBackend, handles: Sequence[MemoryHandle], failure: BaseException) -> None:
    """Free ``handles`` because of ``failure``, which the caller raises next. After a cancellation that is submitted and
    not waited for: who cancels must not wait for a driver that hangs."""
    _, error = await free_all(backend, handles, detach=isinstance(failure, asyncio.CancelledError))
    if isinstance(error, GPUError):
        log.error("an allocation was not freed after a failure: %s", error)
    elif error is not None:
        raise error from failure  # cancelled meanwhile: who cancels must see it
