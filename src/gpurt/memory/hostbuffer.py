"""Host buffers: reusable, page-locked host memory that copies go to and from at the link's speed.

Locking a gibibyte takes 0.4 to 0.5 s, so blocks are kept: a closed buffer's block serves the next one of its size.
"""

from __future__ import annotations

import mmap
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpurt.driver import Driver
from gpurt.errors import GPUError, OutOfMemory
from gpurt.memory.elements import DType, any_element, numpy_dtype
from gpurt.memory.hostbytes import host_memory_ran_out
from gpurt.memory.lease import Lease
from gpurt.memory.pool import Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray


class HostBuffer:
    """A piece of host memory: the buffer protocol (``memoryview(buffer)`` from Python 3.12 on, ``buffer.memory``
    everywhere), a NumPy array, a context manager. Contents are unspecified at first.

    Close it when you are done with it. Its memory serves somebody else as soon as nothing looks into it any more:
    arrays and memoryviews made from it, and copies under way, also cancelled ones, keep it to themselves until they are
    gone; they stay valid, and count towards the limit. ``memory`` itself ends with ``close``. A buffer that is dropped
    without it gives a ``ResourceWarning``, and its memory back likewise.

    Args:
        memory: writable, of unsigned bytes.
        give_back: called once nothing looks into the memory, on any thread, also in the middle of a garbage
            collection: it must only hand over, and take no lock.
    """

    _lease: Lease | None = None

    def __init__(self, memory: memoryview, pinned: bool, give_back: Callable[[], object]) -> None:
        self.nbytes = memory.nbytes
        self.pinned = pinned
        """Page-locked; False where the backend cannot, and copies then take the ordinary way."""
        lease = Lease()
        lease.attach(memory)
        lease.when_unused(give_back)
        self._lease = lease

    @property
    def closed(self) -> bool:
        return self._lease is None

    @property
    def memory(self) -> memoryview:
        """All of it: one-dimensional, writable, unsigned bytes."""
        if self._lease is None:
            raise GPUError("the host buffer is closed", operation="HostBuffer")
        return self._lease.memory()

    def numpy(self, dtype: DType = "uint8") -> NDArray[Any]:
        """All whole elements of the buffer as a one-dimensional array, sharing memory.

        Raises:
            OutOfRange: unknown dtype, of no size, or of Python objects. Unsupported: NumPy does not know it.
        """
        import numpy as np

        name, itemsize, known = any_element(np, dtype)
        element = numpy_dtype(np, name) if known is None else known
        array: NDArray[Any] = np.frombuffer(self.memory, dtype=element, count=self.nbytes // itemsize)
        return array

    if sys.version_info >= (3, 12):

        def __buffer__(self, flags: int) -> memoryview:
            return self.memory

    def close(self) -> None:
        """Be done with it. Idempotent, on any thread. Never fails because an array is alive: see above."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def __len__(self) -> int:
        return self.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # The function as a default: at the end of the process the module's names may be gone.
    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if self._lease is not None:
            _warn(f"a host buffer of {self.nbytes:,} bytes was never closed", ResourceWarning, source=self)
            lease, self._lease = self._lease, None
            lease.close(end_view=False)  # who kept the view alone meant to use it


class HostPool:
    """Blocks for host buffers of one backend. Thread-safe. ``make`` and ``free_all`` call the driver and belong on a
    lane."""

    def __init__(self, driver: Driver, limit_bytes: int | None) -> None:
        """
        Args:
            limit_bytes: most host memory in use and kept together; None for no limit of ours.
        """
        self._driver = driver
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._lent = 0
        self._buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._returned: deque[tuple[int, Any]] = deque()
        """Blocks that nothing looks into any more, with their sizes. Buffers and arrays end on any thread, in the
        middle of anything, where a lock may be taken already; a deque needs none."""
        # Everything that was made stays until the backend closes or somebody trims: it was slow to get.
        self._pool = Pool(sys.maxsize if limit_bytes is None else limit_bytes)

    @property
    def pinned(self) -> bool:
        return self._driver.capabilities.pins_memory

    @property
    def _used(self) -> int:
        """Bytes of blocks in somebody's hands."""
        self._collect()
        return self._lent

    @property
    def cached_bytes(self) -> int:
        self._collect()
        return self._pool.cached_bytes

    def block_bytes(self, nbytes: int) -> int:
        return self._pool.block_bytes(nbytes, mmap.PAGESIZE)

    def reserve(self, block_bytes: int) -> None:
        """
        Raises:
            OutOfMemory: the limit is reached.
        """
        self._collect()
        with self._lock:
            used = self._lent
            if self._limit is None or used + block_bytes <= self._limit:
                self._lent += block_bytes
                return
        raise OutOfMemory(
            f"{block_bytes:,} bytes of host buffer do not fit the limit of {self._limit:,}, "
            f"of which {used:,} are in use",
            requested_bytes=block_bytes,
            free_bytes=self._limit - used,
            limit_bytes=self._limit,
            hint="close host buffers and delete arrays made from them, or raise host_buffer_limit",
        )

    def unreserve(self, block_bytes: int) -> None:
        with self._lock:
            self._lent -= block_bytes

    def take(self, block_bytes: int) -> Any | None:
        self._collect()
        return self._pool.take(block_bytes)

    def make(self, block_bytes: int) -> Any:
        """Lane thread: a new block, after giving back kept ones that would break the limit, or that the system needs.

        Raises:
            OutOfMemory: the host has no more, or cannot lock more.
        """
        if self._limit is not None:
            over = self._used + self._pool.cached_bytes - self._limit
            if over > 0:
                self._free(self._pool.evict(over)[0])
        try:
            return self._new(block_bytes)
        except OutOfMemory:
            if not self.free_all():
                raise
        return self._new(block_bytes)

    def _new(self, block_bytes: int) -> Any:
        hint = "ask for less, or close other host buffers"
        if not self.pinned:
            try:
                return memoryview(mmap.mmap(-1, block_bytes))
            except (OSError, MemoryError) as exc:  # memory without a file fails for nothing but lack of it
                raise host_memory_ran_out(block_bytes, hint) from exc
        try:
            return self._driver.host_alloc(block_bytes)
        except Exception as exc:
            kind = type(exc) if isinstance(exc, GPUError) else self._driver.classify(exc)
            if kind is None or not issubclass(kind, OutOfMemory):
                raise
            raise OutOfMemory(
                f"{block_bytes:,} bytes of host memory could not be locked: {exc or type(exc).__name__}",
                requested_bytes=block_bytes,
                hint=f"{hint}; the system's limit is `ulimit -l`",
            ) from exc

    def lend(self, block: Any, block_bytes: int, nbytes: int) -> HostBuffer:
        """A block that was taken or made, in its user's hands: it comes back by itself."""
        memory = self._driver.host_memory(block) if self.pinned else block
        buffer = HostBuffer(memory[:nbytes], self.pinned, partial(self._returned.append, (block_bytes, block)))
        self._buffers.add(buffer)
        return buffer

    def keep(self, block_bytes: int, block: Any) -> None:
        """Take back a block that was not lent."""
        self._returned.append((block_bytes, block))

    def warn_open(self, name: str) -> None:
        """Tell, by ``ResourceWarning``, of buffers that nobody has closed."""
        left = [buffer for buffer in self._buffers if not buffer.closed]
        if left:
            nbytes = sum(buffer.nbytes for buffer in left)
            text = f"{name}: {len(left)} host buffers of {nbytes:,} bytes were never closed"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def free_all(self) -> int:
        """Lane thread: give back every kept block; returns bytes."""
        self._collect()
        blocks, freed = self._pool.evict()
        self._free(blocks)
        return freed

    def _collect(self) -> None:
        if not self._returned:
            return
        with self._lock:  # both at once: whoever asks now finds the block, and its room under the limit
            while self._returned:
                block_bytes, block = self._returned.popleft()
                self._lent -= block_bytes
                self._pool.give(block_bytes, block)

    def _free(self, blocks: list[Any]) -> None:
        if self.pinned:
            for block in blocks:
                self._driver.host_free(block)
