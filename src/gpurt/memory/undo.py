"""Freeing many allocations at once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gpurt.backend import GPUBackend
from gpurt.errors import BackendClosed, GPUError, HandleInUse, InvalidHandle
from gpurt.runtime.protocols import FreesWhenUnviewed
from gpurt.types import MemoryHandle

log = logging.getLogger("gpurt.memory")


async def undo_allocations(backend: GPUBackend, handles: Sequence[MemoryHandle], failure: BaseException) -> None:
    """Free ``handles`` because of ``failure``, which the caller raises next. After a cancellation that is submitted and
    not waited for: who cancels must not wait for a driver that hangs."""
    _, error = await free_all(backend, handles, detach=isinstance(failure, asyncio.CancelledError))
    try:
        if isinstance(error, GPUError):
            log.error("an allocation was not freed after a failure: %s", error)
        elif error is not None:
            raise error from failure  # cancelled meanwhile: who cancels must see it
    finally:
        del error, failure  # this frame is in their tracebacks: they would keep each other


async def end_allocation(
    backend: GPUBackend, handle: MemoryHandle, failure: BaseException | None, *, may_be_gone: bool = False
) -> None:
    """Free the allocation of an owner that ends, normally or because of ``failure``, which the caller raises next and
    which wins over whatever fails here. With live views it is freed when they are gone.

    Args:
        may_be_gone: it may have been freed by hand, or with everything else by a shutdown.

    Raises:
        GPUError: it could not be freed, or has live views; not beside ``failure``.
    """
    try:
        await backend.deallocate(handle)
    except GPUError as error:
        if may_be_gone and isinstance(error, (InvalidHandle, BackendClosed)):
            return
        if isinstance(error, HandleInUse):
            outlived(backend, handle)
        if failure is None:
            raise
        tell_beside(failure, "freeing an allocation", error)


def outlived(backend: GPUBackend, handle: MemoryHandle) -> None:
    """An owner ends before the views of its allocation do: let the backend free it when they are gone, where it can
    (one that cannot tells of it at shutdown)."""
    if isinstance(backend, FreesWhenUnviewed):
        backend.free_when_unviewed(handle)


def tell_beside(failure: BaseException, what: str, error: Exception) -> None:
    """``error`` happened while ``failure`` was on its way out, which goes on: a note on it, and a line in the log."""
    text = f"{what}: {error}"
    failure.add_note(text)
    log.warning("%s; beside %s", text, type(failure).__name__)


async def free_all(
    backend: GPUBackend, handles: Sequence[MemoryHandle], *, detach: bool = False
) -> tuple[list[MemoryHandle], BaseException | None]:
    """Free every handle, whatever happens on the way.

    Args:
        detach: return as soon as all are submitted. A cancelled call does the same: it frees, and does not wait.

    Returns:
        The handles with live views, which are still there, and the cancellation or the first error, for the caller
        to raise. Further errors are logged.
    """
    tasks = {asyncio.create_task(backend.deallocate(handle)): handle for handle in handles}
    if not tasks:
        return [], None
    cancelled: asyncio.CancelledError | None = None
    try:
        # Every task has had its first step, and so submitted, before this one is resumed; also when cancelled.
        await asyncio.sleep(0)
        if not detach:
            await asyncio.wait(tasks)
    except asyncio.CancelledError as exc:
        cancelled = exc.with_traceback(None)  # this frame is in it: they would keep each other
    for task in tasks:
        task.cancel()  # what was submitted is freed all the same
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as exc:
            cancelled = exc.with_traceback(None)
    kept: list[MemoryHandle] = []
    failed: BaseException | None = None
    for task, handle in tasks.items():
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, BackendClosed):
            continue  # a shutdown has freed everything
        if isinstance(error, HandleInUse):
            kept.append(handle)
        if failed is not None or cancelled is not None:
            log.error("an allocation was not freed: %s", error)
        failed = failed or error
    return kept, cancelled or failed
