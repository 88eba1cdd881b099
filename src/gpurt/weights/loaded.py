"""What a load gives: tensors by name, and the allocations that they lie in."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gpurt.backend import GPUBackend
from gpurt.memory.undo import free_all
from gpurt.runtime.lane import Lane
from gpurt.runtime.turns import short_turns
from gpurt.types import MemoryHandle
from gpurt.weights.header import DTYPES
from gpurt.weights.quiet import MANY, drop


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
        size_bytes: of all tensors, without the padding between them.
    """

    # Passes over all tensors, of which there may be 500,000: made off the event loop.
    def __init__(
        self,
        backend: GPUBackend,
        tensors: dict[str, LoadedTensor],
        handles: Sequence[MemoryHandle],
        files: Sequence[Path],
    ) -> None:
        self.files = tuple(files)
        self.size_bytes = sum(tensor.size_bytes for tensor in tensors.values())
        self._backend = backend
        self._tensors = tensors
        self._handles = list(handles)
        weakref.finalize(self, _free_later, tensors).atexit = False

    def __getitem__(self, name: str) -> LoadedTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors  # an iterator of the dictionary alone would outlive this object

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


def _free_later(tensors: dict[str, LoadedTensor]) -> None:
    """The weights are gone, mostly on the event loop, where to free 500,000 tensors is one call of 0.1 s."""
    if len(tensors) < MANY:
        return

    def free() -> None:
        with short_turns():
            drop(tensors)

    lane = Lane("gpurt:weights:free")
    try:
        lane.submit(free)
    except RuntimeError:  # no thread can be started: then here, when this returns
        return
    lane.stop()
