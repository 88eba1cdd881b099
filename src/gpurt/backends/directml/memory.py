"""Device memory as tensors of bytes, and copies to, from and between parts of them.

ONNX Runtime moves whole tensors only, without offsets. So an allocation is a list of chunks, a tensor each: what covers
a chunk is one call, the rest of a write reads its chunk, changes it, and writes it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpurt.backends.chunked import chunk_sizes, links, pieces
from gpurt.backends.directml.runtime import DeviceType
from gpurt.backends.directml.session import DeviceCopies

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.uint8]

SMALLEST_CHUNK: Final = 64 << 10
"""Direct3D 12 gives every buffer a multiple of this (D3D12_DEFAULT_RESOURCE_PLACEMENT_ALIGNMENT)."""

LARGEST_CHUNK: Final = 16 << 20
"""1.3 ms at 12 GB/s, against which the 0.1 ms of a call is little; ONNX Runtime holds the GIL for it."""

_CALLS: Final = 4
"""A large copy takes so many calls at least: no small write moves more than this part of its allocation."""


def chunk_bytes_for(nbytes: int, largest: int = LARGEST_CHUNK) -> int:
    """How large the chunks of an allocation are, a power of two."""
    part = max(1, nbytes // _CALLS)
    return min(largest, max(SMALLEST_CHUNK, 1 << part.bit_length() - 1))


class Tensors:
    """One allocation."""

    __slots__ = ("chunk_bytes", "sizes", "values")

    def __init__(self, nbytes: int, largest: int) -> None:
        self.chunk_bytes = chunk_bytes_for(nbytes, largest)
        self.sizes = chunk_sizes(nbytes, self.chunk_bytes)
        self.values: list[Any] = []


class TensorMemory:
    """The allocations of one driver, on all of its devices; for one thread.

    Args:
        largest_chunk: bytes, a power of two.
    """

    def __init__(self, runtime: Any, device_type: DeviceType, largest_chunk: int = LARGEST_CHUNK) -> None:
        import numpy as np

        self._np = np
        self._make = runtime.OrtValue.ortvalue_from_shape_and_type
        self._type, self._largest = device_type, largest_chunk
        self._live: set[Tensors] = set()
        self._scratch: Array = np.empty(0, np.uint8)

    def allocate(self, ordinal: int, nbytes: int) -> Tensors:
        """``nbytes`` that nobody has written to."""
        tensors = Tensors(nbytes, self._largest)
        try:
            for size in tensors.sizes:
                tensors.values.append(self._make([size], self._np.uint8, self._type, ordinal))
        except BaseException:
            _drop(tensors)  # not left to the traceback: the next attempt needs it
            raise
        self._live.add(tensors)
        return tensors

    def free(self, tensors: Tensors) -> None:
        self._live.discard(tensors)
        _drop(tensors)

    def write(self, tensors: Tensors, offset: int, src: memoryview) -> None:
        content = self._np.frombuffer(src, self._np.uint8)
        for piece in pieces(offset, len(content), tensors.chunk_bytes):
            self._put(tensors, piece.chunk, piece.start, content[piece.at : piece.at + piece.nbytes])

    def read(self, tensors: Tensors, offset: int, dst: memoryview) -> None:
        target = self._np.frombuffer(dst, self._np.uint8)
        for chunk, start, nbytes, at in pieces(offset, len(target), tensors.chunk_bytes):
            # `numpy()` of host memory is the memory itself: nobody keeps it beyond this line.
            self._np.copyto(target[at : at + nbytes], tensors.values[chunk].numpy()[start : start + nbytes])

    def copy(
        self, src: Tensors, src_offset: int, dst: Tensors, dst_offset: int, nbytes: int, device: DeviceCopies | None
    ) -> None:
        """Whole chunks by ``device``, which is that of both; what is not, or None, by way of the host."""
        held, content = -1, self._scratch
        for link in links(src_offset, dst_offset, nbytes, src.chunk_bytes, dst.chunk_bytes):
            if device is not None and link.nbytes == src.sizes[link.src_chunk] == dst.sizes[link.dst_chunk]:
                device.copy(src.values[link.src_chunk], dst.values[link.dst_chunk])
                continue
            if link.src_chunk != held:
                held, content = link.src_chunk, src.values[link.src_chunk].numpy()
            self._put(dst, link.dst_chunk, link.dst_start, content[link.src_start : link.src_start + link.nbytes])

    def close(self) -> None:
        """Drop what is left of all."""
        while self._live:
            _drop(self._live.pop())
        self._scratch = self._np.empty(0, self._np.uint8)

    def _put(self, tensors: Tensors, chunk: int, start: int, content: Array) -> None:
        """Into one chunk. The library checks the number of elements only, hence bytes of the exact size, always."""
        value, size = tensors.values[chunk], tensors.sizes[chunk]
        if len(content) == size:
            value.update_inplace(content)
            return
        if len(self._scratch) < size:
            self._scratch = self._np.empty(size, self._np.uint8)
        whole = self._scratch[:size]
        self._np.copyto(whole, value.numpy())
        self._np.copyto(whole[start : start + len(content)], content)
        value.update_inplace(whole)


def _drop(tensors: Tensors) -> None:
    """The library has no call for it: memory goes with the last reference. One by one, because it holds the GIL."""
    while tensors.values:
        tensors.values.pop()
