"""HostTensor: what somebody passes as a tensor, understood as shape, dtype and bytes in C order.

Nothing is imported for it: an object is PyTorch's or NumPy's only where that library is loaded already, and everything
else speaks DLPack, the buffer protocol or ``__array__``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from gpurt.errors import GPUError, OutOfRange, Unsupported
from gpurt.runtime.elements import load_numpy
from gpurt.runtime.host_memory import HostBuffer, host_memory_ran_out
from gpurt.runtime.lane import off_loop

T = TypeVar("T")

INLINE_BYTES: Final = 64 << 10
"""Up to here putting elements in order takes some 10 µs, less than a thread for it."""
_HOST_DLPACK: Final = frozenset({1, 3, 11, 13})
"""DLPack's device types of memory that the host can read: CPU, pinned by CUDA or ROCm, managed by CUDA."""
_OPERATION: Final = "to_device"


@dataclass(frozen=True, slots=True)
class HostTensor:
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    in_order: bool
    """The bytes lie in C order already, so that ``pack`` copies nothing."""
    pack: Callable[[], memoryview]
    """The bytes in C order, flat. Copies where they are not in order; on any thread."""

    async def packed(self) -> memoryview:
        """``pack``, off the event loop where it is long.

        Raises:
            OutOfMemory: the host's, for the copy in order.
        """
        try:
            if self.in_order or self.nbytes <= INLINE_BYTES:
                return self.pack()
            return await off_loop("host", self.pack)
        except MemoryError as exc:
            raise host_memory_ran_out(self.nbytes, "pass it in C order, which needs no copy", _OPERATION) from exc


async def understand(tensor: object) -> HostTensor:
    """What ``tensor`` is: a NumPy array or scalar, a PyTorch tensor on the CPU, a host buffer, or anything with DLPack,
    the buffer protocol or ``__array__``. Copies nothing.

    Raises:
        OutOfRange: not a tensor, or its elements cannot be copied: objects, text, times, records, foreign byte order,
            masked, sparse or nested arrays.
        Unsupported: its memory is a device's.
    """
    torch: Any = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)
    if kind is not None and isinstance(tensor, kind):
        with _torch_answers():
            return _from_torch(cast(Any, tensor), torch)
    if isinstance(tensor, HostBuffer):
        return _from_buffer(tensor.memory)
    if isinstance(tensor, bytes | bytearray):
        return _from_buffer(memoryview(tensor))
    np = await load_numpy()
    if isinstance(tensor, np.ndarray | np.generic):
        return _from_numpy(tensor, np)
    return _from_protocol(tensor, np)


def _from_numpy(value: Any, np: Any) -> HostTensor:
    if "numpy.ma" in sys.modules and isinstance(value, np.ma.MaskedArray):
        raise _refused("a masked array would lose its mask", "pass array.filled(value)")
    array = np.asarray(value)
    dtype = array.dtype
    if dtype.hasobject:
        raise _refused(
            "an array of objects holds references, which mean nothing on a device", "pass array.astype('float32')"
        )
    if not dtype.isnative:
        raise _refused(
            f"the elements ({dtype.str}) are not in the byte order of this machine",
            "pass array.astype(array.dtype.newbyteorder('='))",
        )

    def pack() -> memoryview:
        return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    return HostTensor(array.shape, dtype.name, array.nbytes, array.flags.c_contiguous, pack)


def _from_torch(tensor: Any, torch: Any) -> HostTensor:
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"the tensor is on PyTorch's device {tensor.device}",
            operation=_OPERATION,
            hint="pass tensor.cpu()",
        )
    if tensor.is_nested:  # of layout strided or jagged, and without a shape
        raise _refused("a nested tensor has no shape", "pass its tensors one by one, or to_padded_tensor()")
    if tensor.layout is not torch.strided:
        raise _refused(f"the tensor is stored as {tensor.layout}", "pass tensor.to_dense()")
    # Whoever asks for the bytes does not ask for their history.
    tensor = tensor.detach()
    in_order = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

    def pack() -> memoryview:
        with _torch_answers():
            flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
            return memoryview(flat.view(torch.uint8).numpy())  # as bytes: NumPy has not all of PyTorch's dtypes

    dtype = str(tensor.dtype).removeprefix("torch.")
    return HostTensor(tuple(tensor.shape), dtype, tensor.nbytes, in_order, pack)


@contextmanager
def _torch_answers() -> Generator[None]:
    """Some of PyTorch's tensors stand for others, and answer the simplest questions with an error of PyTorch's."""
    try:
        yield
    except (RuntimeError, TypeError) as exc:
        if isinstance(exc, GPUError):
            raise
        raise _refused(f"PyTorch cannot give the tensor's bytes: {exc}", "pass tensor.detach().clone()") from exc


def _from_protocol(tensor: Any, np: Any) -> HostTensor:
    refusal: Exception | None = None
    foreign = False
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        foreign = tensor.__dlpack_device__()[0] not in _HOST_DLPACK
        if not foreign:
            try:
                return _from_numpy(np.from_dlpack(tensor), np)
            except (BufferError, RuntimeError, TypeError) as exc:
                if isinstance(exc, GPUError):
                    raise
                refusal = exc  # NumPy's DLPack knows neither bfloat16 nor, in old versions, read-only memory
    try:
        return _from_buffer(memoryview(tensor))
    except (TypeError, BufferError) as exc:
        refusal = refusal or exc
    except ValueError as exc:
        raise _refused(f"the memory is gone: {exc}", "keep the memoryview open") from exc
    if foreign:
        raise Unsupported(
            f"the {type(tensor).__name__} lies in memory of a device that the host cannot read",
            operation=_OPERATION,
            hint="copy it to the host with its own library first",
        ) from refusal
    if hasattr(tensor, "__array__"):
        return _from_numpy(np.asarray(tensor), np)
    raise _refused(f"{type(tensor).__name__} is not a tensor", "pass a NumPy array, a tensor or bytes") from refusal


def _from_buffer(memory: memoryview) -> HostTensor:
    contiguous, shape = memory.c_contiguous, memory.shape or ()

    def pack() -> memoryview:
        if memory.format == "B" and contiguous:
            return memory.cast("B")
        np = importlib.import_module("numpy")
        if contiguous:
            return memoryview(np.frombuffer(memory, np.uint8))  # also of formats that memoryview.cast refuses
        # NumPy lets go of the GIL while it copies; memoryview.tobytes() does not.
        return memoryview(np.ascontiguousarray(memory).reshape(-1).view(np.uint8))

    return HostTensor(shape, _dtype_of(memory.format, memory.itemsize), memory.nbytes, contiguous, pack)


def _dtype_of(form: str, itemsize: int) -> str:
    """NumPy's name of an element that the ``struct`` module would write as ``form``."""
    order, kind = (form[0], form[1:]) if form[:1] in tuple("@=<>!") else ("@", form)
    if itemsize > 1 and order in (">!" if sys.byteorder == "little" else "<"):
        raise _refused(
            f"the elements ({form}) are not in the byte order of this machine", "swap their bytes before, with NumPy"
        )
    if kind == "?":
        return "bool"
    if kind == "c":
        return "uint8"
    for kinds, name in (("bhilqn", "int"), ("BHILQNP", "uint"), ("efd", "float")):
        if len(kind) == 1 and kind in kinds:
            return f"{name}{8 * itemsize}"
    if kind in ("Zf", "Zd"):
        return f"complex{8 * itemsize}"
    raise _refused(f"elements of format {form!r} are no numbers", "pass an array of numbers, or bytes")


def _refused(message: str, hint: str) -> OutOfRange:
    return OutOfRange(message, operation=_OPERATION, hint=hint)
