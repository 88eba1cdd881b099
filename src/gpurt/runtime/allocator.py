"""Device memory of one opening: the ledger of what users have, the pool of what they gave back, and the allocator, the
only place that calls a driver's ``alloc`` and ``free``.

``cudaMalloc`` and ``cudaFree`` take 0.1 to 2 ms and may wait for the whole device; fresh host memory is filled at the
rate of page faults. So freed blocks are kept. A block comes to the pool only when nothing submitted on it is
outstanding, so it can be handed out at once, on the event loop's thread, whatever queue the next user writes from. Two
live allocations never share a block: a block is either in the pool or in exactly one allocation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from gpurt.driver import Driver
from gpurt.errors import GPUError, OutOfMemory
from gpurt.runtime.job import Report, contained
from gpurt.runtime.protocols import PoolStatistics, Usage

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


class Block:
    """Memory that the driver gave out and has not got back."""

    __slots__ = ("index", "nbytes", "token")

    def __init__(self, index: int, nbytes: int, token: Any) -> None:
        self.index = index
        self.nbytes = nbytes
        """What the library gave; at least what was asked for."""
        self.token = token


class Ledger:
    """What every device has given out in one opening, and the limits on it.

    Bytes are reserved when an allocation is submitted, not when it succeeds, so that concurrent calls cannot overshoot
    a limit together. Thread-safe: undone and detached allocations are settled on lane threads.

    Args:
        limits: bytes by device id; None leaves the decision to the library.
    """

    def __init__(self, limits: Mapping[str, int | None]) -> None:
        self._usage = {device_id: Usage(limit_bytes=limit) for device_id, limit in limits.items()}
        self._lock = threading.Lock()

    def usage(self, device_id: str) -> Usage:
        """A snapshot of one device's accounting."""
        with self._lock:
            usage = self._usage[device_id]
            return Usage(
                usage.limit_bytes,
                usage.current_bytes,
                usage.current_count,
                usage.reserved_bytes,
                usage.peak_bytes,
                usage.total_bytes,
                usage.total_count,
            )

    def reserve(self, device_id: str, nbytes: int) -> None:
        """Set ``nbytes`` aside. Follow with ``commit`` or ``cancel``.

        Raises:
            OutOfMemory: the limit would be exceeded; nothing is reserved.
        """
        with self._lock:
            usage = self._usage[device_id]
            limit, committed = usage.limit_bytes, usage.current_bytes + usage.reserved_bytes
            if limit is not None and committed + nbytes > limit:
                raise OutOfMemory(
                    f"{nbytes:,} bytes do not fit the limit of {limit:,}, of which {committed:,} are taken",
                    device_id=device_id,
                    requested_bytes=nbytes,
                    free_bytes=limit - committed,
                    limit_bytes=limit,
                    pooled_bytes=0,
                    hint="free handles, allocate less, or raise memory_limit (GPURT_MEMORY_LIMIT, if that set it)",
                )
            usage.reserved_bytes += nbytes

    def commit(self, device_id: str, nbytes: int) -> None:
        """A reservation became an allocation."""
        with self._lock:
            usage = self._usage[device_id]
            usage.reserved_bytes -= nbytes
            usage.current_bytes += nbytes
            usage.current_count += 1
            if usage.current_bytes > usage.peak_bytes:
                usage.peak_bytes = usage.current_bytes
            usage.total_bytes += nbytes
            usage.total_count += 1

    def cancel(self, device_id: str, nbytes: int) -> None:
        """A reservation came to nothing."""
        with self._lock:
            self._usage[device_id].reserved_bytes -= nbytes

    def release(self, device_id: str, nbytes: int) -> None:
        """An allocation is gone."""
        with self._lock:
            usage = self._usage[device_id]
            usage.current_bytes -= nbytes
            usage.current_count -= 1


class Pool:
    """The free blocks of one device, or of the host. Thread-safe; never calls the driver.

    Args:
        limit_bytes: most that is kept.
        alignment: what sizes of blocks are multiples of.
    """

    def __init__(self, limit_bytes: int, alignment: int) -> None:
        self.limit_bytes = limit_bytes
        self._alignment = alignment
        self._lock = threading.Lock()
        # Last in, first out: the block that was used last is the one that caches and page tables still know.
        # Exact classes only: splitting and merging would need the pool to know addresses, which tokens hide.
        self._free: dict[int, list[Block]] = {}
        self._cached = 0
        self._count = 0
        self._peak = 0
        self._hits = 0
        self._misses = 0
        self._evicted = 0

    @property
    def cached_bytes(self) -> int:
        return self._cached

    def block_bytes(self, nbytes: int) -> int:
        """How large a block to make for ``nbytes``: a class where it could be kept, else no more than needed."""
        rounded = size_class(nbytes)
        if rounded <= self.limit_bytes and not rounded % self._alignment:
            return rounded
        return -(-nbytes // self._alignment) * self._alignment

    def take(self, nbytes: int) -> Block | None:
        """A free block that serves ``nbytes`` and is hardly larger, or None."""
        block_bytes = self.block_bytes(nbytes)
        with self._lock:
            blocks = self._free.get(block_bytes)
            if not blocks:  # one that was made when memory was short is of no class
                blocks = self._free.get(-(-nbytes // self._alignment) * self._alignment)
            if not blocks:
                self._misses += 1
                return None
            block = blocks.pop()
            self._hits += 1
            self._cached -= block.nbytes
            self._count -= 1
            return block

    def give(self, block: Block) -> bool:
        """Keep a block. False: there is no room, so the caller must free it."""
        nbytes = block.nbytes
        with self._lock:
            if self._cached + nbytes > self.limit_bytes:
                return False
            self._free.setdefault(nbytes, []).append(block)
            self._cached += nbytes
            self._count += 1
            if self._cached > self._peak:
                self._peak = self._cached
            return True

    def evict(self, need_bytes: int | None = None) -> list[Block]:
        """Blocks to free: of at least ``need_bytes``, the largest first, or all with None."""
        with self._lock:
            evicted: list[Block] = []
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
            return evicted

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


class Allocator:
    """Memory of one opened driver, by device index. ``take`` and ``keep`` never call the driver and may run anywhere;
    ``make``, ``release``, ``free_pooled`` and ``trim`` do, and belong on the device's memory lane.

    Args:
        device_ids: in index order; the ledger has them.
        pool_bytes: most that is kept per device; None is what the driver suggests.
        report: takes failures to free a block. Such a block is given up: whether the library still has it cannot be
            known, and to free memory twice ends the process with many libraries.
    """

    def __init__(
        self, driver: Driver, ledger: Ledger, device_ids: Sequence[str], pool_bytes: int | None, report: Report
    ) -> None:
        capabilities = driver.capabilities
        if pool_bytes is None:
            pool_bytes = capabilities.pool_bytes
        if capabilities.pools_memory:
            pool_bytes = 0  # two pools on top of each other would hide memory from each other
        self._driver = driver
        self._ledger = ledger
        self._report = report
        self._device_ids = tuple(device_ids)
        self._alignment = capabilities.alignment_bytes
        self._pools = [Pool(pool_bytes, self._alignment) for _ in device_ids]
        self._made: list[set[Block]] = [set() for _ in device_ids]
        """All that the driver has not been asked to take back. Touched on each device's memory lane alone."""

    def take(self, index: int, nbytes: int) -> Block | None:
        """A pooled block that serves ``nbytes``, or None."""
        pool = self._pools[index]
        return pool.take(nbytes) if pool.limit_bytes else None

    def keep(self, block: Block) -> bool:
        """Pool a block on which nothing is outstanding; False when it must be released instead."""
        return self._pools[block.index].give(block)

    def make(self, index: int, nbytes: int) -> Block:
        """A new block of the library for ``nbytes``. Pooled blocks make room first under the limit, then for the
        library; where even that is not enough, the block is made no larger than it must be.

        Raises:
            Exception: what the library raised last.
        """
        self._fit_limit(index)
        size = self._pools[index].block_bytes(nbytes)
        exact = -(-nbytes // self._alignment) * self._alignment
        ways: list[Callable[[int], int]] = [self._trim_driver, self.free_pooled]
        while True:
            try:
                block = Block(index, size, self._driver.alloc(index, size))
                self._made[index].add(block)
                return block
            except Exception as exc:
                if not is_out_of_memory(self._driver, exc):
                    raise
                if not _first_that_helps(ways, index):
                    if size == exact:
                        raise
                    size = exact

    def release(self, block: Block) -> None:
        """Pool a block, or free it."""
        if not self.keep(block):
            self.free(block)

    def free(self, block: Block) -> None:
        """Give a block back to the library."""
        self._made[block.index].discard(block)
        self._driver.free(block.index, block.token)

    def trim(self, index: int) -> int:
        """Free everything pooled, ours and the library's; returns bytes.

        Raises:
            Exception: the first failure to free a block, after all have been tried; the others are reported.
        """
        failures: list[Exception] = []
        freed = self._free_each(self._pools[index].evict(), failures.append) + self._driver.trim(index)
        for failure in failures[1:]:
            self._report(failure)
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # this frame is in its traceback: a cycle otherwise
        return freed

    def pooled_bytes(self, index: int) -> int:
        return self._pools[index].cached_bytes

    def statistics(self, index: int) -> PoolStatistics:
        return self._pools[index].statistics()

    def free_pooled(self, index: int, need_bytes: int | None = None) -> int:
        """Free ``need_bytes`` of pooled blocks or a little more, or all of them; returns bytes. One that cannot be
        freed is reported, and keeps no other from being freed."""
        return self._free_each(self._pools[index].evict(need_bytes), self._report)

    def holds(self, index: int, used: Collection[Block]) -> bool:
        """Whether the driver has memory of a device to take back besides ``used``."""
        return any(block not in used for block in list(self._made[index]))

    def free_unused(self, index: int, used: Collection[Block]) -> None:
        """Free every block of a device but those in ``used``, also one that never reached its user."""
        self.free_pooled(index)
        self._free_each([block for block in self._made[index] if block not in used], self._report)

    def _free_each(self, blocks: Iterable[Block], failed: Callable[[Exception], None]) -> int:
        freed = 0
        for block in blocks:
            try:
                self.free(block)
            except BaseException as exc:
                failed(contained(exc))
            else:
                freed += block.nbytes
        return freed

    def _trim_driver(self, index: int) -> int:
        try:
            return self._driver.trim(index)
        except Exception as exc:  # the allocation fails for lack of memory, not for this
            self._report(exc)
            return 0

    def _fit_limit(self, index: int) -> None:
        usage = self._ledger.usage(self._device_ids[index])
        if usage.limit_bytes is not None:
            # The new allocation is among the committed bytes already.
            over = usage.committed_bytes + self._pools[index].cached_bytes - usage.limit_bytes
            if over > 0:
                self.free_pooled(index, over)


def is_out_of_memory(driver: Driver, exc: Exception) -> bool:
    """Whether the library means by ``exc`` that memory is short."""
    return issubclass(kind_of(driver, exc) or GPUError, OutOfMemory)


def kind_of(driver: Driver, exc: Exception) -> type[GPUError] | None:
    """Which error of gpurt's ``exc`` is, or means to the library; None where the library does not say."""
    if isinstance(exc, GPUError):
        return type(exc)
    try:
        return driver.classify(exc)
    except Exception:  # what it cannot judge is an ordinary failure
        return None


def _first_that_helps(ways: list[Callable[[int], int]], index: int) -> bool:
    """Try ways to make room, from the end, each once; whether one did."""
    while ways:
        if ways.pop()(index):
            return True
    return False
