"""DeviceArray: an allocation with a shape that knows its backend, and so can be read, shared and freed by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpurt.backend import GPUBackend
from gpurt.errors import Unsupported
from gpurt.memory.scope import ScopedArray
from gpurt.memory.undo import end_allocation
from gpurt.runtime.elements import load_numpy, numpy_dtype
from gpurt.runtime.host_memory import host_memory_ran_out
from gpurt.runtime.views import DeviceView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DeviceArray(ScopedArray):
    """An array of a :class:`gpurt.memory.manager.MemoryManager` or of ``to_device``: ``shape`` elements of type
    ``dtype``, C order, on the device of ``handle``.

    It is freed by ``await array.free()``, at the end of ``async with array:``, or by the memory scope that it was
    made in; never by the garbage collector, since its handle may be in use elsewhere.
    """

    backend: GPUBackend = field(repr=False, compare=False)

    @property
    def device_id(self) -> str:
        return self.handle.device_id

    @property
    def nbytes(self) -> int:
        return self.handle.size_bytes

    async def numpy(self, *, copy: bool | None = True) -> NDArray[Any]:
        """The array in host memory. ``copy`` means what it means to NumPy:

        - True: a new array, independent of the device.
        - False: the device's own memory, without copying a byte, where the host can address it (the CPU, unified
          memory). The allocation cannot be freed before the array is gone.
        - None: the second where that is possible, else the first.

        Raises:
            Unsupported: ``copy`` is False and the host cannot address the memory; or NumPy has no such dtype.
            OutOfMemory: the host's.
        """
        np = await load_numpy()
        dtype = self._numpy_dtype(np)
        if copy is not True:
            try:
                return await self._shared()
            except Unsupported:
                if copy is False:
                    raise
        try:
            array: Any = np.empty(self.shape, dtype)
        except MemoryError as exc:
            hint = "numpy(copy=False) where the host can address the memory, or copy_into in parts"
            raise host_memory_ran_out(self.nbytes, hint, "DeviceArray.numpy") from exc
        # As bytes: dtypes that other packages add to NumPy have no buffer protocol.
        await self.backend.copy_into(self.handle, array.reshape(-1).view(np.uint8))
        return array

    async def tobytes(self) -> bytes:
        """A copy of the bytes, in C order. Works with every dtype."""
        return await self.backend.copy_from_device(self.handle)

    async def view(self) -> DeviceView:
        """The array without a copy, for NumPy, CuPy, PyTorch or whoever reads DLPack. Close it after use.

        Raises:
            Unsupported: the device's memory is visible to no other library.
        """
        return await self.backend.view(self.handle, self.shape, self.dtype)

    async def free(self) -> None:
        """Give the memory back, once everything submitted on it is done.

        Raises:
            InvalidHandle: freed already. HandleInUse: a view, or an array that shares the memory, is alive.
        """
        await self.backend.deallocate(self.handle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await end_allocation(self.backend, self.handle, exc, may_be_gone=True)

    async def _shared(self) -> NDArray[Any]:
        if not self.backend.capabilities.host_visible:
            # Asked before a view is made: it would count as an export, which costs its block a synchronisation when it
            # is freed.
            raise Unsupported(
                "the host cannot address the memory of this device",
                backend=self.backend.name,
                device_id=self.device_id,
                operation="DeviceArray.numpy(copy=False)",
                hint="numpy() copies; view() shares with libraries of the device",
            )
        with await self.view() as view:
            return view.numpy()

    def _numpy_dtype(self, np: Any) -> np.dtype[Any]:
        try:
            return numpy_dtype(np, self.dtype)
        except Unsupported as exc:
            exc.device_id, exc.operation = self.device_id, "DeviceArray"
            raise
