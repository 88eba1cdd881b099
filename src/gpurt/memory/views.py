"""DeviceView: an allocation as an array, without a copy, where the host can address device memory."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpurt.errors import HandleInUse, OutOfRange
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DeviceView:
    """A live window on an allocation.

    While the view is open, and while an array made from it is alive, ``deallocate`` raises ``HandleInUse``. A
    ``memoryview`` taken from it ends with ``close``.

    Reading and writing through a view is ordered after everything submitted on the handle before ``view`` was
    called, and against nothing later: await your copies before you touch the array.

    Use ``with await backend.view(handle, (4, 4), "float32") as view: view.numpy()``.
    """

    def __init__(self, handle: MemoryHandle, shape: Sequence[int] | None, dtype: str) -> None:
        self.handle = handle
        self.dtype = dtype
        self._shape = shape
        self._extents: tuple[int, ...] = ()
        self._memory: memoryview | None = None
        # Pending counts as in use: a deallocate between the call and its completion must see it.
        self._closed = False
        self._arrays: list[weakref.ref[NDArray[Any]]] = []

    def attach(self, memory: memoryview) -> None:
        """Fill a view that was announced before. NumPy is imported here: call it off the event loop.

        Raises:
            OutOfRange: unknown dtype, negative extent, or more bytes than the allocation has.
        """
        self._extents, nbytes = _extent(self.handle, self._shape, self.dtype)
        self._memory = memory[:nbytes]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._extents

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> bool:
        """Something may still look into the memory."""
        # NumPy keeps the root array alive as the base of everything sliced from it.
        return not self._closed or any(array() is not None for array in self._arrays)

    def memoryview(self) -> memoryview:
        """The bytes of the view: one-dimensional, writable."""
        return self._open()

    def numpy(self) -> NDArray[Any]:
        """The view as a NumPy array of its shape and dtype, sharing memory."""
        import numpy as np

        root: NDArray[Any] = np.frombuffer(self._open(), dtype=self.dtype)
        self._arrays.append(weakref.ref(root))
        return root.reshape(self._extents)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"a {self.dtype} view cannot become {dtype} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    if sys.version_info >= (3, 12):

        def __buffer__(self, flags: int) -> memoryview:
            return self._open()

    def close(self) -> None:
        """Let go of the memory. Idempotent. Arrays made from the view keep the handle in use until they die."""
        self._closed = True
        memory, self._memory = self._memory, None
        if memory is not None and not self.in_use:
            memory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> memoryview:
        if self._memory is None:
            raise HandleInUse("the view is closed", device_id=self.handle.device_id, operation="DeviceView")
        return self._memory


def _extent(handle: MemoryHandle, shape: Sequence[int] | None, dtype: str) -> tuple[tuple[int, ...], int]:
    import numpy as np

    try:
        itemsize = np.dtype(dtype).itemsize
    except TypeError as exc:
        raise OutOfRange(f"{dtype!r} is not a NumPy dtype", device_id=handle.device_id) from exc
    extents = (handle.size_bytes // itemsize,) if shape is None else tuple(int(extent) for extent in shape)
    nbytes = math.prod(extents) * itemsize
    if any(extent < 0 for extent in extents) or nbytes > handle.size_bytes:
        raise OutOfRange(
            f"a {dtype} array of shape {extents} needs {nbytes:,} bytes; the allocation has {handle.size_bytes:,}",
            device_id=handle.device_id,
        )
    return extents, nbytes
