"""MemoryScope: allocations that end together, whatever happens in between."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import anyio

from gpurt.errors import GPUError, InvalidHandle, OutOfRange
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from gpurt.backend import GPUBackend

_current: ContextVar[MemoryScope | None] = ContextVar("gpurt_memory_scope", default=None)


def current_scope() -> MemoryScope | None:
    """The innermost scope that this task is in. Tasks started inside a scope inherit it; others do not see it."""
    return _current.get()


@dataclass(frozen=True, slots=True)
class ScopedArray:
    """An allocation with a shape: ``shape`` elements of type ``dtype``, C order."""

    handle: MemoryHandle
    shape: tuple[int, ...]
    dtype: str


class MemoryScope:
    """``async with backend.memory_scope("cuda:0") as scope: x = await scope.allocate((1000, 1000), "float32")``.

    Everything allocated through the scope is freed when it ends, also on an exception or a cancellation, last one
    first. Two arrays never share memory. A handle that was deallocated before is not a mistake.

    Args:
        backend: initialised.
        device_id: where ``allocate`` allocates when it is not told; None: the backend's first device.
    """

    def __init__(self, backend: GPUBackend, device_id: str | None = None) -> None:
        self._backend = backend
        self._device_id = device_id
        self._handles: list[MemoryHandle] = []
        self._token: Token[MemoryScope | None] | None = None
        self._open = False

    async def allocate(
        self, shape: int | Sequence[int], dtype: str = "uint8", *, device_id: str | None = None
    ) -> ScopedArray:
        """Allocate an array. ``shape``: extents, or one number of elements; ``dtype``: ``float32``, ``bfloat16``, …

        Raises:
            OutOfRange: unknown dtype, no element, or a negative extent. OutOfMemory.
        """
        if not self._open:
            raise InvalidHandle("the memory scope is not open", operation="memory_scope")
        extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
        if any(extent < 1 for extent in extents):
            raise OutOfRange(f"an array of shape {extents} has no element", operation="memory_scope")
        device = device_id or self._device_id or self._backend.devices[0].device_id
        handle = await self._backend.allocate(device, math.prod(extents) * itemsize(dtype))
        if not self._open:  # the scope ended while the driver was at it
            await self._backend.deallocate(handle)
            raise InvalidHandle("the memory scope has ended", operation="memory_scope", device_id=device)
        self._handles.append(handle)
        return ScopedArray(handle, extents, dtype)

    async def __aenter__(self) -> Self:
        if self._open:
            raise GPUError("the memory scope is open already", operation="memory_scope")
        self._open = True
        self._token = _current.set(self)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        if self._token is not None:
            _current.reset(self._token)
        handles, self._handles = self._handles[::-1], []
        errors: list[Exception] = []
        cancelled: asyncio.CancelledError | None = None
        # A free that was called happens, also when its caller is cancelled; but every one must be called.
        with anyio.CancelScope(shield=True):
            for handle in handles:
                try:
                    await self._backend.deallocate(handle)
                except InvalidHandle:
                    continue  # freed by hand
                except asyncio.CancelledError as again:
                    cancelled = again
                except Exception as error:
                    errors.append(error)
        if cancelled is not None:
            raise cancelled
        if errors and exc is None:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("freeing a memory scope", errors)


# A table and not NumPy: importing that takes 0.1 s, and this runs on the event loop. Checkpoints also have types that
# NumPy does not know.
_ITEM_BYTES: Final = {
    "bool": 1,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64)},
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
}


def itemsize(dtype: str) -> int:
    size = _ITEM_BYTES.get(dtype)
    if size is None:
        raise OutOfRange(f"{dtype!r} is not one of {', '.join(_ITEM_BYTES)}", operation="memory_scope")
    return size
