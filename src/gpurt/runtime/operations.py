"""The jobs of a driver backend: what each call does on its lane, and what is given back when nobody takes its outcome.

A large copy is one job that walks the driver's chunks and stops between two of them when its caller has gone. No job
keeps its allocation once it has run: the allocation's chain keeps the last job.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gpurt.driver import Driver
from gpurt.errors import CompileFailed, GPUError
from gpurt.runtime.handles import Allocation
from gpurt.runtime.host_memory import read_bytes
from gpurt.runtime.job import NOTHING, Call, Job
from gpurt.runtime.pieces import pieces
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.opening import Opening
    from gpurt.runtime.views import DeviceView

SMALL_COPY_BYTES: Final = 1 << 20
"""Copies up to here take the ``small`` lane, so that they never wait behind a bulk load on another handle. A small
copy is over in about 0.1 ms at PCIe rates, which is the longest that one of them delays the next."""

HostCopy = Callable[[int, Any, int, memoryview], None]
"""``Driver.write`` or ``Driver.read``."""

_OWNERS: Final = frozenset({bytes, bytearray, array})
_LAYERS: Final = 8
"""Most views of views that are looked through for the memory behind them; NumPy itself keeps one or two."""


class WriteHost(Job):
    """Host bytes to an allocation. The view is released when the driver is done, also after a cancellation."""

    method = "write"
    __slots__ = ("_allocation", "_copy", "_driver", "_offset", "_size", "_view")

    def __init__(
        self, driver: Driver, copy: HostCopy, allocation: Allocation, offset: int, view: memoryview, size: int
    ) -> None:
        super().__init__()
        self._driver = driver
        self._copy = copy
        self._allocation: Allocation | None = allocation
        self._offset = offset
        self._size = size
        self._view = view

    def execute(self) -> int:
        allocation, self._allocation = self._allocation, None
        assert allocation is not None
        view, size = self._view, self._size
        try:
            if size <= SMALL_COPY_BYTES and size <= self._driver.capabilities.chunk_bytes:
                self._copy(allocation.index, allocation.token, self._offset, view)
            else:
                walk(self, self._driver, self._copy, allocation, self._offset, view)
        finally:
            release(view)
        return size

    def revert(self, value: Any) -> None:
        self._allocation = None
        release(self._view)

    def operation(self, name: str) -> str:
        return f"{name}({self._size:,} B at {self._offset:,})"

    @property
    def host_bytes(self) -> int:
        return self._size


class ReadHost(WriteHost):
    """An allocation to host bytes of the caller."""

    method = "read"
    wait_out = True
    __slots__ = ()


class ReadNew(Job):
    """An allocation to new ``bytes``."""

    method = "read"
    __slots__ = ("_allocation", "_driver", "_offset", "_size")

    def __init__(self, driver: Driver, allocation: Allocation, offset: int, size: int) -> None:
        super().__init__()
        self._driver = driver
        self._allocation: Allocation | None = allocation
        self._offset = offset
        self._size = size

    def execute(self) -> bytes:
        allocation, self._allocation = self._allocation, None
        assert allocation is not None
        driver, offset = self._driver, self._offset
        return read_bytes(self._size, lambda view: walk(self, driver, driver.read, allocation, offset, view))

    def revert(self, value: Any) -> None:
        self._allocation = None

    def operation(self, name: str) -> str:
        return f"{name}({self._size:,} B at {self._offset:,})"

    @property
    def host_bytes(self) -> int:
        return self._size


class Allocate(Job):
    """A new block for what is reserved in the ledger. From its making on, the opening's table of handles owns it; it
    counts as live once its caller has it."""

    method = "alloc"
    failure = GPUError
    __slots__ = ("_device_id", "_opening", "_size")

    def __init__(self, opening: Opening, device_id: str, size: int) -> None:
        super().__init__()
        self._opening = opening
        self._device_id = device_id
        self._size = size

    def execute(self) -> MemoryHandle:
        block = self._opening.allocator.make(self.index, self._size)
        return self._opening.handles.add(self._device_id, self._size, block).handle

    def revert(self, value: Any) -> None:
        if value is NOTHING:
            self._opening.ledger.cancel(self._device_id, self._size)
        else:
            self._opening.discard(value)

    def taken(self, value: MemoryHandle) -> None:
        self._opening.deliver(value)

    def operation(self, name: str) -> str:
        return f"{name}({self._size} B)"

    @property
    def requested_bytes(self) -> int:
        return self._size


class Free(Job):
    """The end of an allocation whose handle is dead. Happens whatever becomes of its caller."""

    method = "free"
    failure = GPUError
    droppable = False
    __slots__ = ("_allocation", "_opening")

    def __init__(self, opening: Opening, allocation: Allocation) -> None:
        super().__init__()
        self._opening = opening
        self._allocation: Allocation | None = allocation

    def execute(self) -> None:
        allocation, self._allocation = self._allocation, None
        assert allocation is not None
        opening, handle = self._opening, allocation.handle
        try:
            if allocation.exported:
                try:
                    opening.driver.sync(allocation.index)
                except BaseException:
                    opening.allocator.free(allocation.block)  # not for anybody else: it may still be written to
                    raise
            opening.allocator.release(allocation.block)
        finally:
            opening.ledger.release(handle.device_id, handle.size_bytes)


class PeerCopy(Call):
    """A copy between two allocations of the driver."""

    method = "copy"
    __slots__ = ()


class LoadFile(Call):
    """A file to an allocation."""

    method = "load"
    __slots__ = ()


class Synchronize(Call):
    method = "sync"
    __slots__ = ()


class ReadTelemetry(Call):
    """A reading. Where it fails for lack of memory, no other reading is asked for the figures."""

    method = "telemetry"
    reports_memory = False
    __slots__ = ()


class MakeHostBuffer(Call):
    method = "host_alloc"
    failure = GPUError
    reports_memory = False

    __slots__ = ("_size",)

    def __init__(self, call: Callable[[Job], Any], size: int, undo: Callable[[Any], None]) -> None:
        super().__init__(call, f"host_buffer({size} B)", undo)
        self._size = size

    @property
    def requested_bytes(self) -> int:
        return self._size


class MakeView(Call):
    method = "host_view"
    failure = GPUError

    def taken(self, value: DeviceView) -> None:
        super().taken(value)
        value.lease.delivered = True

    __slots__ = ()


class Trim(Call):
    method = "trim"
    __slots__ = ()


class Compile(Call):
    """A compiler may take longer than a call of a driver should, and the device is free meanwhile."""

    method = "compile"
    failure = CompileFailed
    occupies = False
    __slots__ = ()


class Launch(Call):
    method = "launch"
    failure = GPUError
    __slots__ = ()


def walk(job: Job, driver: Driver, copy: HostCopy, allocation: Allocation, offset: int, view: memoryview) -> None:
    """Lane thread: ``view`` to or from the allocation, piece by piece, as long as somebody wants it."""
    capabilities = driver.capabilities
    size = view.nbytes
    if size <= SMALL_COPY_BYTES and size <= capabilities.chunk_bytes:
        copy(allocation.index, allocation.token, offset, view)
        return
    for start, stop in pieces(
        size, capabilities.chunk_bytes, capabilities.alignment_bytes, paced=capabilities.host_visible
    ):
        if job.abandoned:
            return
        copy(allocation.index, allocation.token, offset + start, view[start:stop])


def release(view: memoryview) -> None:
    try:  # contextlib.suppress takes longer than all the rest
        view.release()
    except BufferError:  # arrays over it still hang in the traceback of a failed call, and go with it
        return


def in_memory(owner: object) -> bool:
    """Whether the bytes of a buffer are certainly this process's own anonymous memory: bytes, arrays that own their
    memory, and views of them. A mapped file is not: touching it may wait for a disk or a network.

    Args:
        owner: the object behind the buffer, ``memoryview(buffer).obj``.
    """
    for _ in range(_LAYERS):
        if type(owner) in _OWNERS or getattr(getattr(owner, "flags", None), "owndata", False) is True:
            return True
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if owner is None:
            return False
    return False
