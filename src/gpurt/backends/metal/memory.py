"""MLX's arrays as plain bytes, and how many of them there may be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from gpurt.backends.host_budget import HostBudget
from gpurt.sources import host

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WORD_BYTES: Final = 8
MOST_ELEMENTS: Final = 2**31 - 1
"""MLX counts the elements of a dimension in 32 bits."""

_SLOW_TO_UNMAP: Final = 32 << 20
"""The C library gives larger blocks back to the kernel at once, 60 to 90 ms per GiB."""


class Block:
    """One allocation: an evaluated array and its bytes, which are the same memory."""

    __slots__ = ("array", "bytes", "nbytes")

    def __init__(self, array: Any, nbytes: int) -> None:
        import numpy as np

        self.nbytes = nbytes
        self.array: Any = array
        # The array's own buffer protocol shares; numpy.asarray(array) would go through DLPack, which is read-only.
        flat: NDArray[np.uint8] = np.asarray(memoryview(array)).reshape(-1).view(np.uint8)
        self.bytes: NDArray[np.uint8] | None = flat[:nbytes]


def words_shape(nbytes: int, most: int = MOST_ELEMENTS) -> tuple[int, int]:
    """Rows and columns of 64-bit words that hold ``nbytes`` with less than a word a row to spare."""
    words = -(-nbytes // WORD_BYTES)
    rows = -(-words // most)
    return rows, -(-words // rows)


def make_block(mx: Any, stream: Any, nbytes: int) -> Block:
    """New memory, zeros: MLX has no other. Let go of the GIL while it is filled."""
    array = mx.zeros(words_shape(nbytes), dtype=mx.uint64, stream=stream)
    mx.eval(array)
    return Block(array, nbytes)


def drop_block(mx: Any, stream: Any, block: Block, *, unmaps: bool) -> None:
    """Give a block back. Memory that somebody still looks into stays until they are done.

    Args:
        unmaps: a large block goes straight back to the system, not to a cache of MLX's.
    """
    array, block.array, block.bytes = block.array, None, None
    if unmaps and block.nbytes >= _SLOW_TO_UNMAP:
        # Python drops its references under the GIL. The last reference shall be that of a piece of work.
        last = mx.add(mx.as_strided(array, (1,), (1,), 0, stream=stream), 1, stream=stream)
        del array
        mx.eval(last)


class Budget(Protocol):
    """Keeps allocations within what there is. MLX would go on until the process dies."""

    def take(self, nbytes: int) -> None:
        """Make sure that ``nbytes`` can be allocated now, out of what MLX keeps where it must be.

        Raises:
            MemoryError: there is not so much.
        """
        ...

    def give_back(self, nbytes: int) -> None:
        """An allocation of ``nbytes`` has ended."""
        ...

    def reading(self) -> MemoryReading:
        """As it is now."""
        ...


class MemoryReading(NamedTuple):
    """Bytes."""

    total: int
    free: int
    """What one more allocation may take beside what MLX keeps."""
    reserved: int
    """What MLX keeps of freed memory, and what the system keeps from the GPU."""


class GpuBudget:
    """Of a GPU that works in the host's memory, of which Metal recommends it a part: beyond that everything on the
    computer gets slow, and far beyond it command buffers fail, for which MLX ends the process.

    Args:
        total_bytes: the host's memory.
        most_bytes: Metal's recommended working set.
    """

    def __init__(self, mx: Any, total_bytes: int, most_bytes: int, root: Path) -> None:
        self._mx, self._total, self._most, self._root = mx, total_bytes, most_bytes, root

    def take(self, nbytes: int) -> None:
        if nbytes > self._room():
            self._mx.clear_cache()
            if nbytes > (room := self._room()):
                raise MemoryError(
                    f"{nbytes:,} bytes asked for, and {max(0, room):,} of Metal's recommended working set of "
                    f"{self._most:,} are free; free handles, allocate less, or raise iogpu.wired_limit_mb with sysctl"
                )

    def give_back(self, nbytes: int) -> None:
        """MLX counts by itself."""

    def reading(self) -> MemoryReading:
        reserved = min(self._total, self._total - self._most + self._mx.get_cache_memory())
        # Others on this computer may have taken what the working set would allow.
        free = min(self._room(), host.memory_budget(self._root).available_bytes, self._total - reserved)
        return MemoryReading(self._total, max(0, free), reserved)

    def _room(self) -> int:
        # All arrays of this process count, not only ours.
        return self._most - self._mx.get_active_memory() - self._mx.get_cache_memory()


class CpuBudget:
    """Of the host's memory as this process may use it."""

    def __init__(self, mx: Any, name: str, root: Path) -> None:
        self._mx = mx
        self._host = HostBudget(name, root=root)

    def take(self, nbytes: int) -> None:
        import numpy as np

        try:
            self._host.take(0, nbytes)
        except MemoryError:
            self._mx.clear_cache()
            self._host.take(0, nbytes)
        try:
            # Where the address space is limited (RLIMIT_AS), or the kernel promises no more than it has, the C library
            # refuses. MLX does not look, and writes to address 0.
            np.empty(nbytes + WORD_BYTES, np.uint8)
        except MemoryError:
            self._host.give_back(0, nbytes)
            raise

    def give_back(self, nbytes: int) -> None:
        self._host.give_back(0, nbytes)

    def reading(self) -> MemoryReading:
        total, free = self._host.reading(0)
        reserved = min(total, self._mx.get_cache_memory())
        return MemoryReading(total, max(0, min(free, total - reserved)), reserved)
