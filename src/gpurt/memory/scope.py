"""MemoryScope: allocations that end together, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from gpurt.errors import BackendClosed, DeviceNotFound, GPUError, HandleInUse, InvalidHandle
from gpurt.memory.undo import outlived, tell_beside
from gpurt.runtime.elements import DType, Shape, understand_array
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from gpurt.backend import GPUBackend

_current: ContextVar[MemoryScope | None] = ContextVar("gpurt_memory_scope", default=None)


def current_scope() -> MemoryScope | None:
    """The innermost open scope that this task is in. Tasks started inside a scope inherit it; others do not see it."""
    scope = _current.get()
    while scope is not None and not scope.open:  # ended, but not by this task
        scope = scope.outer
    return scope


@dataclass(frozen=True, slots=True)
class ScopedArray:
    """An allocation with a shape: ``shape`` elements of type ``dtype``, C order."""

    handle: MemoryHandle
    shape: tuple[int, ...]
    dtype: str


class MemoryScope:
    """``async with backend.memory_scope("cuda:0") as scope: x = await scope.allocate((1000, 1000), "float32")``.

    Everything allocated through the scope is freed when it ends, also on an exception or a cancellation, last one
    first. Two arrays never share memory. A handle that was deallocated before is not a mistake. One with a view, or an
    array made from it, still in use is freed when that is gone; the end of the scope raises ``HandleInUse`` for it, or,
    where an exception is on its way already, adds a note to that.

    It may end in another task than it began in, as those of asynchronous fixtures do.

    Args:
        backend: initialised.
        device_id: where ``allocate`` allocates when it is not told; None: the backend's first device.
    """

    def __init__(self, backend: GPUBackend, device_id: str | None = None) -> None:
        self.backend = backend
        self.outer: MemoryScope | None = None
        """The one that was current when this one was entered."""
        self._device_id = device_id
        self._handles: list[MemoryHandle] = []
        self._token: Token[MemoryScope | None] | None = None
        self._open = False

    @property
    def open(self) -> bool:
        """Entered, and not left."""
        return self._open

    async def allocate(self, shape: Shape, dtype: DType = "uint8", *, device_id: str | None = None) -> ScopedArray:
        """Allocate an array. ``shape``: extents, or one number of elements; ``dtype``: ``float32``, ``bfloat16``, …, or
        NumPy's names, short codes, dtypes and scalar types for them.

        Raises:
            OutOfRange: unknown dtype, no shape, no element, or a negative extent. OutOfMemory.
        """
        if not self._open:
            raise InvalidHandle("the memory scope is not open", operation="memory_scope")
        extents, name, nbytes = await understand_array(shape, dtype, "memory_scope")
        device = await self._device(device_id)
        handle = await self.backend.allocate(device, nbytes)
        if not self._open:  # the scope ended while the driver was at it
            await self.backend.deallocate(handle)
            raise InvalidHandle("the memory scope has ended", operation="memory_scope", device_id=device)
        self._handles.append(handle)
        return ScopedArray(handle, extents, name)

    async def _device(self, device_id: str | None) -> str:
        for asked in (device_id, self._device_id):
            if asked is not None:
                return asked
        devices = await self.backend.list_devices()
        if not devices:
            raise DeviceNotFound("the backend has no device", backend=self.backend.name, operation="memory_scope")
        return devices[0].device_id

    async def __aenter__(self) -> Self:
        if self._open:
            raise GPUError("the memory scope is open already", operation="memory_scope")
        self._open = True
        self.outer = _current.get()
        self._token = _current.set(self)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        handles, self._handles = self._handles[::-1], []
        errors: list[Exception] = []
        cancelled: asyncio.CancelledError | None = None
        try:
            # A free that was called happens, also when its caller is cancelled; but every one must be called.
            with anyio.CancelScope(shield=True):
                for handle in handles:
                    try:
                        await self._free(handle)
                    except asyncio.CancelledError as again:
                        cancelled = again
                    except Exception as error:
                        errors.append(error)
        finally:
            self._leave()
        failure = cancelled or exc
        if failure is not None:
            for error in errors:
                tell_beside(failure, "freeing a memory scope", error)
        elif errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("freeing a memory scope", errors)
        if cancelled is not None:
            raise cancelled

    async def _free(self, handle: MemoryHandle) -> None:
        try:
            await self.backend.deallocate(handle)
        except (InvalidHandle, BackendClosed):
            return  # freed by hand, or with everything else by a shutdown
        except HandleInUse:
            outlived(self.backend, handle)
            raise

    def _leave(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            # Another task's variable, when that is where the scope began, is not ours to set back.
            with contextlib.suppress(ValueError):
                _current.reset(token)
