"""Host buffers: reusable, page-locked host memory that copies go to and from at the link's speed.

Locking a gibibyte takes 0.4 to 0.5 s, so blocks are kept: a closed buffer's block serves the next one of its size.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpurt.driver import Driver
from gpurt.errors import GPUError, OutOfMemory
from gpurt.memory.pool import Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray


class HostBuffer:
    """A piece of host memory: the buffer protocol (``memoryview(buffer)`` from Python 3.12 on, ``buffer.memory``
    everywhere), a NumPy array, a context manager. Contents are unspecified at first.

    Close it when no copy uses it any more; after that its memory belongs to somebody else.
    """

    def __init__(self, memory: memoryview, pinned: bool, on_close: Callable[[], None]) -> None:
        self.nbytes = memory.nbytes
        self.pinned = pinned
        """Page-locked; False where the backend cannot, and copies then take the ordinary way."""
        self._memory: memoryview | None = memory
        self._on_close = on_close

    @property
    def memory(self) -> memoryview:
        """All of it: one-dimensional, writable, unsigned bytes."""
        if self._memory is None:
            raise GPUError("the host buffer is closed", operation="HostBuffer")
        return self._memory

    def numpy(self, dtype: str = "uint8") -> NDArray[Any]:
        """All whole elements of the buffer as a one-dimensional array, sharing memory."""
        import numpy as np

        itemsize = np.dtype(dtype).itemsize
        array: NDArray[Any] = np.frombuffer(self.memory, dtype=dtype, count=self.nbytes // itemsize)
        return array

    if sys.version_info >= (3, 12):

        def __buffer__(self, flags: int) -> memoryview:
            return self.memory

    def close(self) -> None:
        """Give the memory back. Idempotent. On the event loop of the backend."""
        if self._memory is not None:
            self._memory = None
            self._on_close()

    def __len__(self) -> int:
        return self.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class HostPool:
    """Blocks for host buffers of one backend. ``make`` and ``free_all`` call the driver and belong on a lane."""

    def __init__(self, driver: Driver, limit_bytes: int | None) -> None:
        """
        Args:
            limit_bytes: most host memory in use and kept together; None for no limit of ours.
        """
        self._driver = driver
        self._limit = limit_bytes
        self._used = 0
        # Everything that was made stays until the backend closes or somebody trims: it was slow to get.
        self._pool = Pool(sys.maxsize if limit_bytes is None else limit_bytes)

    @property
    def pinned(self) -> bool:
        return self._driver.capabilities.pins_memory

    @property
    def cached_bytes(self) -> int:
        return self._pool.cached_bytes

    def block_bytes(self, nbytes: int) -> int:
        return self._pool.block_bytes(nbytes, mmap.PAGESIZE)

    def reserve(self, block_bytes: int) -> None:
        """
        Raises:
            OutOfMemory: the limit is reached.
        """
        if self._limit is not None and self._used + block_bytes > self._limit:
            raise OutOfMemory(
                f"{block_bytes:,} bytes of host buffer do not fit the limit of {self._limit:,}, "
                f"of which {self._used:,} are in use",
                requested_bytes=block_bytes,
                free_bytes=self._limit - self._used,
                limit_bytes=self._limit,
                hint="close host buffers, or raise host_buffer_limit",
            )
        self._used += block_bytes

    def unreserve(self, block_bytes: int) -> None:
        self._used -= block_bytes

    def take(self, block_bytes: int) -> Any | None:
        return self._pool.take(block_bytes)

    def make(self, block_bytes: int) -> Any:
        """Lane thread: a new block, after giving back kept ones that would break the limit."""
        if self._limit is not None:
            over = self._used + self._pool.cached_bytes - self._limit
            if over > 0:
                self._free(self._pool.evict(over)[0])
        return self._driver.host_alloc(block_bytes) if self.pinned else memoryview(mmap.mmap(-1, block_bytes))

    def memory(self, block: Any) -> memoryview:
        return self._driver.host_memory(block) if self.pinned else block

    def keep(self, block_bytes: int, block: Any) -> None:
        self._used -= block_bytes
        self._pool.give(block_bytes, block)

    def free_all(self) -> int:
        """Lane thread: give back every kept block; returns bytes."""
        blocks, freed = self._pool.evict()
        self._free(blocks)
        return freed

    def _free(self, blocks: list[Any]) -> None:
        if self.pinned:
            for block in blocks:
                self._driver.host_free(block)
