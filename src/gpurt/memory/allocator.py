"""Allocator: every byte a driver gives out goes through here — pool, limit, one round of making room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpurt.driver import Driver
from gpurt.errors import GPUError, OutOfMemory
from gpurt.memory.ledger import Ledger
from gpurt.memory.pool import Pool, PoolStatistics


class Allocator:
    """Memory of one opened driver, by device index. ``take`` and ``keep`` never call the driver and may run anywhere;
    ``make``, ``release`` and ``trim`` do, and belong on the device's memory lane."""

    def __init__(
        self, driver: Driver, ledger: Ledger, limits: Mapping[str, int | None], pool_bytes: int | None
    ) -> None:
        """
        Args:
            limits: bytes by device id, in index order; None leaves the decision to the library.
            pool_bytes: most that is kept per device; None is what the driver suggests.
        """
        capabilities = driver.capabilities
        if pool_bytes is None:
            pool_bytes = capabilities.pool_bytes
        if capabilities.pools_memory:
            pool_bytes = 0  # two pools on top of each other would hide memory from each other
        self._driver = driver
        self._ledger = ledger
        self._device_ids = tuple(limits)
        self._pools = [Pool(pool_bytes) for _ in limits]
        ledger.open(limits)

    def block_bytes(self, index: int, nbytes: int) -> int:
        """The size of the block that will serve ``nbytes``."""
        return self._pools[index].block_bytes(nbytes, self._driver.capabilities.alignment_bytes)

    def take(self, index: int, block_bytes: int) -> Any | None:
        """A pooled block, or None."""
        pool = self._pools[index]
        return pool.take(block_bytes) if pool.limit_bytes else None

    def keep(self, index: int, block_bytes: int, token: Any) -> bool:
        """Pool a block on which nothing is outstanding; False when it must be released instead."""
        pool = self._pools[index]
        return block_bytes <= pool.limit_bytes and pool.give(block_bytes, token)

    def make(self, index: int, nbytes: int, block_bytes: int) -> tuple[Any, int]:
        """A new block of the library and its size. Pooled blocks make room first under the limit, then for the
        library; where even that is not enough, the block is made no larger than it must be.
        """
        self._fit_limit(index)
        short: Exception | None = None
        for size in self._attempts(index, nbytes, block_bytes):
            try:
                return self._driver.alloc(index, size), size
            except Exception as exc:
                if not self._is_out_of_memory(exc):
                    raise
                short = exc
        assert short is not None
        raise short

    def _attempts(self, index: int, nbytes: int, block_bytes: int) -> Iterator[int]:
        """Sizes to ask for, each after one more way to make room; resumed only when the one before failed."""
        yield block_bytes
        if self.free_pooled(index):
            yield block_bytes
        if self._driver.trim(index):
            yield block_bytes
        alignment = self._driver.capabilities.alignment_bytes
        exact_bytes = -(-nbytes // alignment) * alignment
        if exact_bytes < block_bytes:
            yield exact_bytes

    def release(self, index: int, block_bytes: int, token: Any) -> None:
        """Pool a block, or free it."""
        if not self.keep(index, block_bytes, token):
            self._driver.free(index, token)

    def trim(self, index: int) -> int:
        """Free everything pooled, ours and the library's; returns bytes."""
        return self.free_pooled(index) + self._driver.trim(index)

    def pooled_bytes(self, index: int) -> int:
        return self._pools[index].cached_bytes

    def statistics(self, index: int) -> PoolStatistics:
        return self._pools[index].statistics()

    def _fit_limit(self, index: int) -> None:
        usage = self._ledger.usage(self._device_ids[index])
        if usage.limit_bytes is not None:
            # The new allocation is among the committed bytes already.
            over = usage.committed_bytes + self._pools[index].cached_bytes - usage.limit_bytes
            if over > 0:
                self.free_pooled(index, over)

    def free_pooled(self, index: int, need_bytes: int | None = None) -> int:
        """Free ``need_bytes`` of pooled blocks or a little more, or all of them; returns bytes."""
        tokens, freed = self._pools[index].evict(need_bytes)
        for token in tokens:
            self._driver.free(index, token)
        return freed

    def _is_out_of_memory(self, exc: Exception) -> bool:
        kind = type(exc) if isinstance(exc, GPUError) else self._driver.classify(exc)
        return kind is not None and issubclass(kind, OutOfMemory)
