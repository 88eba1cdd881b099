"""DeviceView: an allocation as an array, without a copy.

Where the host can address device memory: buffer protocol, NumPy, DLPack. Where the device is CUDA's:
``__cuda_array_interface__`` version 3 and DLPack, which CuPy and PyTorch take without a copy.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpurt.errors import HandleInUse, OutOfRange, Unsupported
from gpurt.runtime.elements import DType, Shape, any_element, extents_of, numpy_dtype
from gpurt.runtime.handles import brief
from gpurt.runtime.lease import Lease
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DeviceView:
    """A live window on an allocation.

    While the view is open, and while an array or a memoryview made from it is alive, ``deallocate`` raises
    ``HandleInUse``. A view that is dropped without ``close`` gives a ``ResourceWarning`` and is closed. Arrays that
    another library made on a device are that library's: close the view when they are gone. Make the device current
    first (``cupy.cuda.Device(n)``), or CuPy copies instead of sharing.

    Reading and writing through a view is ordered after everything submitted on the handle before ``view`` was
    called, and against nothing later: await your copies before you touch the array. Everything before is complete
    when ``view`` returns, so a consumer's stream has nothing to wait for; work that a consumer has queued on streams
    of its own is waited for before the memory is reused.

    Use ``with await backend.view(handle, (4, 4), "float32") as view: view.numpy()``.
    """

    def __init__(self, handle: MemoryHandle, shape: Shape | None, dtype: DType) -> None:
        # Pending counts as in use: a deallocate between the call and its completion must see it.
        self.lease = Lease()
        self.handle = handle
        self.dtype = dtype if isinstance(dtype, str) else brief(dtype)
        """Name of the element type: ``float32``, ``bfloat16``, ``>f4``, …"""
        self._shape = shape
        self._element = dtype
        self._numpy_dtype: np.dtype[Any] | None = None
        self._extents: tuple[int, ...] = ()
        self._nbytes = 0
        self._pointer: int | None = None
        self._device_index = 0

    def attach(self, memory: memoryview) -> None:
        """Fill a view that was announced before. NumPy is imported here: call it off the event loop.

        Raises:
            OutOfRange: unknown dtype, no shape, negative extent, or more bytes than the allocation has.
        """
        self._measure()
        self.lease.attach(memory[: self._nbytes])

    def attach_pointer(self, pointer: int, device_index: int) -> None:
        """As ``attach``, with a device address of CUDA's device ``device_index``."""
        self._measure()
        self._pointer, self._device_index = pointer, device_index

    def _measure(self) -> None:
        np = importlib.import_module("numpy")
        handle = self.handle
        try:
            self.dtype, itemsize, self._numpy_dtype = any_element(np, self._element)
            shape = handle.size_bytes // itemsize if self._shape is None else self._shape
            self._extents = extents_of(shape, least=0)
        except OutOfRange as exc:
            exc.device_id = handle.device_id
            raise
        self._nbytes = math.prod(self._extents) * itemsize
        if self._nbytes > handle.size_bytes:
            raise OutOfRange(
                f"a {self.dtype} array of shape {self._extents} needs {self._nbytes:,} bytes; "
                f"the allocation has {handle.size_bytes:,}",
                device_id=handle.device_id,
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self._extents

    @property
    def closed(self) -> bool:
        return self.lease.closed

    def memoryview(self) -> memoryview:
        """The bytes of the view: one-dimensional, writable."""
        self._check_open()
        return self.lease.memory()

    def numpy(self) -> NDArray[Any]:
        """The view as a NumPy array of its shape and dtype, sharing memory.

        Raises:
            Unsupported: the host cannot address the memory, or NumPy has no such dtype. HandleInUse: closed.
        """
        import numpy as np

        if self._pointer is not None:
            raise Unsupported(
                "the memory is a device's, which NumPy cannot address",
                device_id=self.handle.device_id,
                operation="DeviceView.numpy",
                hint="cupy.asarray(view), torch.from_dlpack(view), or backend.copy_into",
            )
        array: NDArray[Any] = np.frombuffer(self.memoryview(), dtype=self._dtype(np))
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
            "typestr": self._dtype(np).str,
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
        return cupy.ndarray(
            self._extents, self._dtype(importlib.import_module("numpy")), cupy.cuda.MemoryPointer(memory, 0)
        ).__dlpack__(**options)

    def _device_pointer(self) -> int:
        self._check_open()
        assert self._pointer is not None
        return self._pointer

    def _dtype(self, np: Any) -> np.dtype[Any]:
        return numpy_dtype(np, self.dtype) if self._numpy_dtype is None else self._numpy_dtype

    def __copy__(self) -> Self:
        raise TypeError("a view cannot be copied: make another with backend.view, or copy its array")

    def __deepcopy__(self, memo: object) -> Self:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise TypeError("a view cannot be pickled: its memory is of this process")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<DeviceView of {self.handle}: {self.dtype} {self._extents}, {state}>"

    def close(self) -> None:
        """Let go of the memory. Idempotent. What was made from the view keeps the handle in use until it dies."""
        self.lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # The function as a default: at the end of the process the module's names may be gone.
    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if not self.closed:
            _warn(f"a view of {self.handle} was never closed", ResourceWarning, source=self)
            self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise HandleInUse("the view is closed", device_id=self.handle.device_id, operation="DeviceView")
