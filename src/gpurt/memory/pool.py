"""Pool: freed device memory kept for the next allocation of its size.

``cudaMalloc`` and ``cudaFree`` take 0.1 to 2 ms and may wait for the whole device; fresh host memory is filled at the
rate of page faults. A block comes back to the pool only when nothing submitted on it is outstanding, so it can be
handed out at once, on the event loop's thread, whatever queue the next user writes from. Two live allocations never
share a block: a block is either in the pool or in exactly one allocation.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

_SMALLEST: Final = 512
"""The alignment that CUDA's own allocator keeps: smaller blocks would cost the device as much."""
_CLASSES_PER_DOUBLING: Final = 8
"""At most one eighth of a block is unused, and sizes that differ by less than that share blocks."""


def size_class(nbytes: int) -> int:
    """The block size that serves ``nbytes``: eight classes between two powers of two, 512 B at least."""
    step = (1 << (nbytes - 1).bit_length() >> 1) // _CLASSES_PER_DOUBLING
    if step < _SMALLEST:
        step = _SMALLEST
    return -(-nbytes // step) * step


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One device's pool since ``initialize``."""

    limit_bytes: int
    """Most that is kept; 0 where pooling is off."""
    cached_bytes: int
    cached_count: int
    peak_cached_bytes: int
    hits: int
    misses: int
    """Allocations that the library had to make."""
    evicted_bytes: int
    """Given back to the library by ``trim`` or because memory was short elsewhere."""


class Pool:
    """The free blocks of one device. Thread-safe; never calls the driver."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # Last in, first out: the block that was used last is the one that caches and page tables still know.
        # Exact classes only: splitting and merging would need the pool to know addresses, which tokens hide.
        self._free: dict[int, list[Any]] = {}
        self._cached = 0
        self._count = 0
        self._peak = 0
        self._hits = 0
        self._misses = 0
        self._evicted = 0

    @property
    def cached_bytes(self) -> int:
        return self._cached

    def block_bytes(self, nbytes: int, alignment: int) -> int:
        """How large a block to make for ``nbytes``: a class where it could be kept, else no more than needed."""
        rounded = size_class(nbytes)
        if rounded <= self.limit_bytes and not rounded % alignment:
            return rounded
        return -(-nbytes // alignment) * alignment

    def take(self, block_bytes: int) -> Any | None:
        """A free block of exactly this size, or None."""
        with self._lock:
            blocks = self._free.get(block_bytes)
            if not blocks:
                self._misses += 1
                return None
            self._hits += 1
            self._cached -= block_bytes
            self._count -= 1
            return blocks.pop()

    def give(self, block_bytes: int, token: Any) -> bool:
        """Keep a block. False: there is no room, so the caller must free it."""
        with self._lock:
            if self._cached + block_bytes > self.limit_bytes:
                return False
            self._free.setdefault(block_bytes, []).append(token)
            self._cached += block_bytes
            self._count += 1
            if self._cached > self._peak:
                self._peak = self._cached
            return True

    def evict(self, need_bytes: int | None = None) -> tuple[list[Any], int]:
        """Blocks to free and their bytes: at least ``need_bytes``, the largest first, or all with None."""
        with self._lock:
            evicted: list[Any] = []
            freed = 0
            for block_bytes in sorted(self._free, reverse=True):
                blocks = self._free[block_bytes]
                while blocks and (need_bytes is None or freed < need_bytes):
                    evicted.append(blocks.pop())
                    freed += block_bytes
            self._free = {size: blocks for size, blocks in self._free.items() if blocks}
            self._cached -= freed
            self._count -= len(evicted)
            self._evicted += freed
            return evicted, freed

    def statistics(self) -> PoolStatistics:
        with self._lock:
            return PoolStatistics(
                limit_bytes=self.limit_bytes,
                cached_bytes=self._cached,
                cached_count=self._count,
                peak_cached_bytes=self._peak,
                hits=self._hits,
                misses=self._misses,
                evicted_bytes=self._evicted,
            )
