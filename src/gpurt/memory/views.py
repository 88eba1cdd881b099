"""DeviceView: an allocation as an array, without a copy.

Where the host can address device memory: buffer protocol, NumPy, DLPack. Where the device is CUDA's:
``__cuda_array_interface__`` version 3 and DLPack, which CuPy and PyTorch take without a copy.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpurt.errors import HandleInUse, OutOfRange, Unsupported
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DeviceView:
    """A live window on an allocation.

    While the view is open, and while an array or a memoryview made from it is alive, ``deallocate`` raises
    ``HandleInUse``. Arrays that another library made on a device are that library's: close the view when they are
    gone. Make the device current first (``cupy.cuda.Device(n)``), or CuPy copies instead of sharing.

    Reading and writing through a view is ordered after everything submitted on the handle before ``view`` was
    called, and against nothing later: await your copies before you touch the array. Everything before is complete
    when ``view`` returns, so a consumer's stream has nothing to wait for; work that a consumer has queued on streams
    of its own is waited for before the memory is reused.

    Use ``with await backend.view(handle, (4, 4), "float32") as view: view.numpy()``.
    """

    def __init__(self, handle: MemoryHandle, shape: Sequence[int] | None, dtype: str) -> None:
        self.handle = handle
        self.dtype = dtype
        self._shape = shape
        self._extents: tuple[int, ...] = ()
        self._memory: memoryview | None = None
        self._pointer: int | None = None
        self._device_index = 0
        # Pending counts as in use: a deallocate between the call and its completion must see it.
        self._closed = False
        self._users: list[weakref.ref[Any]] = []
        """What keeps a piece of this view alive in somebody's hands."""

    def attach(self, memory: memoryview) -> None:
        """Fill a view that was announced before. NumPy is imported here: call it off the event loop.

        Raises:
            OutOfRange: unknown dtype, negative extent, or more bytes than the allocation has.
        """
        self._extents, nbytes = _extent(self.handle, self._shape, self.dtype)
        self._memory = memory[:nbytes]

    def attach_pointer(self, pointer: int, device_index: int) -> None:
        """As ``attach``, with a device address of CUDA's device ``device_index``."""
        self._extents, self._nbytes = _extent(self.handle, self._shape, self.dtype)
        self._pointer, self._device_index = pointer, device_index

    @property
    def shape(self) -> tuple[int, ...]:
        return self._extents

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> bool:
        """Something may still look into the memory."""
        return not self._closed or self._users_alive()

    def _users_alive(self) -> bool:
        return any(user() is not None for user in self._users)

    def memoryview(self) -> memoryview:
        """The bytes of the view: one-dimensional, writable."""
        memory = self._open()
        # A memoryview of a memoryview counts nowhere, so nobody could see that an array still hangs on it. This one
        # hangs on an object of its own, which lives exactly as long as anything made from it.
        exporter = (ctypes.c_ubyte * memory.nbytes).from_buffer(memory)
        self._users.append(weakref.ref(exporter))
        return memoryview(exporter).cast("B")

    def numpy(self) -> NDArray[Any]:
        """The view as a NumPy array of its shape and dtype, sharing memory."""
        import numpy as np

        if self._pointer is not None:
            raise Unsupported(
                "the memory is a device's, which NumPy cannot address",
                device_id=self.handle.device_id,
                operation="DeviceView.numpy",
                hint="cupy.asarray(view), torch.from_dlpack(view), or backend.copy_into",
            )
        array: NDArray[Any] = np.frombuffer(self.memoryview(), dtype=self.dtype)
        return array.reshape(self._extents)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"a {self.dtype} view cannot become {dtype} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    if sys.version_info >= (3, 12):

        def __buffer__(self, flags: int) -> memoryview:
            return self.memoryview()

    def __getattr__(self, name: str) -> Any:
        # An attribute only where it is true: consumers choose their way by hasattr.
        if name == "__cuda_array_interface__" and self._pointer is not None:
            return self._cuda_array_interface()
        raise AttributeError(f"{type(self).__name__} object has no attribute {name!r}")

    def _cuda_array_interface(self) -> dict[str, Any]:
        """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3."""
        import numpy as np

        return {
            "shape": self._extents,
            "typestr": np.dtype(self.dtype).str,
            "data": (self._device_pointer(), False),
            "version": 3,
            "strides": None,  # C order
            "stream": None,  # nothing to wait for
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type (1 host, 2 CUDA) and number."""
        return (1, 0) if self._pointer is None else (2, self._device_index)

    def __dlpack__(self, **options: Any) -> Any:
        """https://dmlc.github.io/dlpack/latest/python_spec.html; the options are the standard's."""
        if self._pointer is None:
            return self.numpy().__dlpack__(**options)
        cupy: Any = importlib.import_module("cupy")
        options.pop("stream", None)  # complete already, so no stream need wait
        memory = cupy.cuda.UnownedMemory(self._device_pointer(), self._nbytes, self, self._device_index)
        return cupy.ndarray(self._extents, self.dtype, cupy.cuda.MemoryPointer(memory, 0)).__dlpack__(**options)

    def _device_pointer(self) -> int:
        if self._closed or self._pointer is None:
            raise HandleInUse("the view is closed", device_id=self.handle.device_id, operation="DeviceView")
        return self._pointer

    def close(self) -> None:
        """Let go of the memory. Idempotent. What was made from the view keeps the handle in use until it dies."""
        memory, self._memory, self._closed = self._memory, None, True
        if memory is not None and not self._users_alive():
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
