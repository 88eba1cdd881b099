"""What a load gives: tensors by name, and the allocations that they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gpurt.backend import GPUBackend
from gpurt.memory.undo import free_all
from gpurt.types import MemoryHandle
from gpurt.weights.header import DTYPES


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor on a device: ``size_bytes`` at ``offset_bytes`` of ``handle``, in C order, little-endian.

    Several tensors share a handle; they are freed together, by :meth:`LoadedWeights.close`.
    """

    name: str
    handle: MemoryHandle
    offset_bytes: int
    """A multiple of 256."""
    size_bytes: int
    dtype: str
    """The name that the file uses: ``BF16``."""
    shape: tuple[int, ...]

    @property
    def device_id(self) -> str:
        return self.handle.device_id

    @property
    def numpy_dtype(self) -> str | None:
        """NumPy's name of the dtype, or None where NumPy has no such type (BF16 and all below 16 bits but I8, U8,
        BOOL)."""
        return DTYPES[self.dtype].numpy


class LoadedWeights(Mapping[str, LoadedTensor]):
    """Tensors by name, in the order of their files. ``async with`` frees everything at its end.

    Attributes:
        files: the files that were read, without the index.
    """

    def __init__(
        self,
        backend: GPUBackend,
        tensors: Mapping[str, LoadedTensor],
        handles: Sequence[MemoryHandle],
        files: Sequence[Path],
    ) -> None:
        self.files = tuple(files)
        self._backend = backend
        self._tensors = dict(tensors)
        self._handles = list(handles)

    def __getitem__(self, name: str) -> LoadedTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<LoadedWeights: {len(self):,} tensors, {self.size_bytes:,} bytes, {len(self._handles)} allocations>"

    def as_dict(self) -> dict[str, LoadedTensor]:
        """A copy. Much quicker than ``dict(weights)``, which asks for every tensor by its name."""
        return dict(self._tensors)

    @property
    def handles(self) -> tuple[MemoryHandle, ...]:
        """The allocations that are live. Empty after ``close``."""
        return tuple(self._handles)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, without the padding between them."""
        return sum(tensor.size_bytes for tensor in self._tensors.values())

    async def close(self) -> None:
        """Free everything. Idempotent. A cancelled close still frees.

        Raises:
            HandleInUse: an allocation has live views; the others are freed, and close may be called again.
        """
        handles = self.handles
        self._handles.clear()
        kept, error = await free_all(self._backend, handles)
        self._handles += kept
        if error is not None:
            try:
                raise error
            finally:
                del error  # this frame is in its traceback: they would keep each other

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
