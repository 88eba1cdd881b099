"""Host memory: reusable, page-locked buffers that copies go to and from at the link's speed, and new ``bytes`` that a
driver can fill directly.

Locking a gibibyte takes 0.4 to 0.5 s, so blocks are kept: a closed buffer's block serves the next one of its size.

``bytes(memoryview)`` and ``ndarray.tobytes()`` hold the GIL for the whole copy and stall the event loop however
many threads there are. CPython documents that a bytes object made by ``PyBytes_FromStringAndSize(NULL, n)`` may be
written until it is published, so we make one and let the driver's GIL-free copy write into it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from gpurt.driver import Driver
from gpurt.errors import GPUError, OutOfMemory, text_of
from gpurt.runtime.allocator import Block, Pool, is_out_of_memory
from gpurt.runtime.elements import DType, any_element, numpy_dtype
from gpurt.runtime.job import Report, contained
from gpurt.runtime.lease import Lease

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOST: Final = -1
"""Index of blocks that are the host's."""

# Below this the copy is cheaper than the detour, and one-byte objects may be shared singletons.
_DIRECT_MIN_BYTES: Final = 1 << 16
_PyBUF_WRITE: Final = 0x200
_HUGE_MIN_BYTES: Final = 4 << 20
"""From here on NumPy, too, asks for huge pages: two of 2 MiB at least."""


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

    def __repr__(self) -> str:
        kind = "page-locked" if self.pinned else "ordinary"
        return f"<HostBuffer: {self.nbytes:,} bytes of {kind} memory, {'closed' if self.closed else 'open'}>"

    def __copy__(self) -> Self:
        raise TypeError("a host buffer cannot be copied: ask the backend for another, or copy its bytes")

    def __deepcopy__(self, memo: object) -> Self:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise TypeError("a host buffer cannot be pickled: its memory is of this process")

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
    """Blocks for host buffers of one opening, which owns them all. Thread-safe. ``make``, ``free_pooled`` and
    ``free_unused`` call the driver and belong on a lane.

    Args:
        limit_bytes: most host memory in use and kept together; None for no limit of ours.
        report: takes failures to free a block.
    """

    def __init__(self, driver: Driver, limit_bytes: int | None, report: Report) -> None:
        self.pinned: Final = driver.capabilities.pins_memory
        self.on_return: Callable[[], None] | None = None
        """Called when nothing looks into a block any more: on any thread, in the middle of garbage collections, too."""
        self._driver = driver
        self._limit = limit_bytes
        self._report = report
        self._lock = threading.Lock()
        self._used = 0
        self._buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._made: set[Block] = set()
        """All that the driver has not got back."""
        self._lent: set[Block] = set()
        """Those that somebody looks into."""
        self._returned: deque[Block] = deque()
        """Blocks that nothing looks into any more. Buffers and arrays end on any thread, in the middle of anything,
        where a lock may be taken already; a deque needs none."""
        # Everything that was made stays until the backend closes or somebody trims: it was slow to get.
        self._pool = Pool(sys.maxsize if limit_bytes is None else limit_bytes, mmap.PAGESIZE)

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks in somebody's hands, or on their way there."""
        self._collect()
        return self._used

    @property
    def lent_bytes(self) -> int:
        """Bytes of page-locked blocks that a buffer, or something made from one, looks into. Ordinary memory is not the
        driver's, and outlives it."""
        if not self.pinned:
            return 0
        self._collect()
        with self._lock:
            return sum(block.nbytes for block in self._lent)

    @property
    def cached_bytes(self) -> int:
        self._collect()
        return self._pool.cached_bytes

    @property
    def holds(self) -> bool:
        """Whether the driver has blocks to take back. Ordinary memory is not the driver's, and outlives it."""
        return self.pinned and bool(self._made)

    @property
    def open_buffers(self) -> list[HostBuffer]:
        """Buffers that nobody has closed."""
        return [buffer for buffer in list(self._buffers) if not buffer.closed]

    def block_bytes(self, nbytes: int) -> int:
        return self._pool.block_bytes(nbytes)

    def reserve(self, block_bytes: int) -> None:
        """
        Raises:
            OutOfMemory: the limit is reached.
        """
        self._collect()
        with self._lock:
            used = self._used
            if self._limit is None or used + block_bytes <= self._limit:
                self._used += block_bytes
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
            self._used -= block_bytes

    def take(self, block_bytes: int) -> Block | None:
        self._collect()
        return self._pool.take(block_bytes)

    def make(self, block_bytes: int) -> Block:
        """Lane thread: a new block, after giving back kept ones that would break the limit, or that the system needs.

        Raises:
            OutOfMemory: the host has no more, or cannot lock more.
        """
        if self._limit is not None:
            over = self.used_bytes + self._pool.cached_bytes - self._limit
            if over > 0:
                self._free(self._pool.evict(over))
        try:
            memory = self._new(block_bytes)
        except OutOfMemory:
            if not self.free_pooled():
                raise
            memory = self._new(block_bytes)
        block = Block(HOST, block_bytes, memory)
        with self._lock:
            self._made.add(block)
        return block

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
            if not is_out_of_memory(self._driver, exc):
                raise
            raise OutOfMemory(
                f"{block_bytes:,} bytes of host memory could not be locked: {text_of(exc)}",
                requested_bytes=block_bytes,
                hint=f"{hint}; the system's limit is `ulimit -l`",
            ) from exc

    def lend(self, block: Block, nbytes: int) -> HostBuffer:
        """A block that was taken or made, in its user's hands: it comes back by itself."""
        try:
            memory = self._driver.host_memory(block.token) if self.pinned else block.token
            with self._lock:
                self._lent.add(block)
            buffer = HostBuffer(memory[:nbytes], self.pinned, partial(self._give_back, block))
        except BaseException:  # the driver's memory is none
            self._returned.append(block)
            raise
        self._buffers.add(buffer)
        return buffer

    def _give_back(self, block: Block) -> None:
        self._returned.append(block)
        if self.on_return is not None:
            self.on_return()

    def keep(self, block: Block) -> None:
        """Take back a block that was not lent."""
        self._returned.append(block)

    def free_pooled(self) -> int:
        """Lane thread: give back every kept block; returns bytes."""
        self._collect()
        return self._free(self._pool.evict())

    def free_unused(self) -> None:
        """Lane thread: give back every block that nobody looks into, also one whose buffer never reached its user."""
        self.free_pooled()
        with self._lock:
            unused = self._made - self._lent
        self._free(list(unused))

    def _collect(self) -> None:
        if not self._returned:
            return
        with self._lock:  # both at once: whoever asks now finds the block, and its room under the limit
            while self._returned:
                block = self._returned.popleft()
                self._lent.discard(block)
                self._used -= block.nbytes
                self._pool.give(block)

    def _free(self, blocks: list[Block]) -> int:
        freed = 0
        for block in blocks:
            with self._lock:
                if block not in self._made:
                    continue
                self._made.discard(block)
            try:
                if self.pinned:
                    self._driver.host_free(block.token)
            except BaseException as exc:
                self._report(contained(exc))
            else:
                freed += block.nbytes
        return freed


@cache
def _direct() -> tuple[Callable[[None, int], bytes], Callable[[int, int, int], memoryview]]:
    api = ctypes.pythonapi
    new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    return (  # pyright: ignore[reportReturnType]
        new_bytes(("PyBytes_FromStringAndSize", api)),
        view_memory(("PyMemoryView_FromMemory", api)),
    )


def read_bytes(nbytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """``nbytes`` of new bytes with contents by ``fill(writable memoryview of unsigned bytes)``.

    Raises:
        OutOfMemory: the host has not so much. Not for a MemoryError of ``fill``.
    """
    hint = "read in parts, or with copy_into to memory that is there already"
    if nbytes < _DIRECT_MIN_BYTES or sys.implementation.name != "cpython":
        try:
            buffer = bytearray(nbytes)
        except MemoryError as exc:
            raise host_memory_ran_out(nbytes, hint) from exc
        fill(memoryview(buffer))
        return bytes(buffer)
    new_bytes, view_memory = _direct()
    try:
        result = new_bytes(None, nbytes)
    except MemoryError as exc:
        raise host_memory_ran_out(nbytes, hint) from exc
    # The characters end one byte (the terminating NUL) before the end of the object's fixed part.
    address = id(result) + bytes.__basicsize__ - 1
    if nbytes >= _HUGE_MIN_BYTES:
        _prefer_huge_pages(address, nbytes)
    fill(view_memory(address, nbytes, _PyBUF_WRITE).cast("B"))
    return result


def _prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask Linux for pages of 2 MiB in memory that nobody has touched. Filling 256 MiB is 3 times as fast then, and
    giving them back, which whoever drops the result does on the loop's thread, takes 1 ms in place of 20."""
    if sys.platform == "linux":
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # Advice: a kernel without such pages says no, and all is as it was.
        _c_library().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def host_memory_ran_out(nbytes: int, hint: str, operation: str | None = None) -> OutOfMemory:
    """The error for ``nbytes`` of host memory that the system refused. The device's figures would mislead in it."""
    return OutOfMemory(
        f"host memory ran out, not the device's: {nbytes:,} bytes could not be had",
        requested_bytes=nbytes,
        operation=operation,
        hint=hint,
    )
