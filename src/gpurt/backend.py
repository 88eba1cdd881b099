"""GPUBackend: the public contract of every backend. Nothing else lives here.

Order. A call is submitted when its coroutine first runs, before its first suspension; effects on one handle
happen in submission order. Calls on different handles may overlap. ``synchronize`` waits for everything that
was submitted on the device before it.

Cancellation never abandons anything: what has not started is dropped without effect, what is inside the driver
runs to its end (or its next chunk) under the backend's ownership, and what it produced is undone. A cancelled
call returns at once, except ``copy_into``, which waits until the driver no longer touches the caller's memory.
A cancelled ``deallocate`` still frees. A cancelled copy leaves its destination range unspecified.

Errors are those of :mod:`gpurt.errors`, all of them ``RuntimeError``. Every method may raise ``BackendClosed``,
``WrongLoop`` and, with a device, ``DeviceNotFound``, ``DeviceLost`` and ``DeviceUnresponsive``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from gpurt.errors import OutOfRange, Unsupported
from gpurt.types import Capabilities, GPUDevice, Kernel, MemoryHandle, MemoryInfo

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    from gpurt.memory.scope import MemoryScope
    from gpurt.runtime.host_memory import HostBuffer
    from gpurt.runtime.views import DeviceView


class GPUBackend(ABC):
    """Devices of one vendor library, asynchronously.

    Use it as ``async with backend:``, or call ``initialize`` and ``shutdown``. An instance belongs to the event
    loop that ran ``initialize`` until ``shutdown``; after that it may be initialised again, on any loop. The
    constructor does no I/O and binds no loop.
    """

    name: ClassVar[str]
    """Short name: ``cuda rocm metal directml vulkan tflite opencl cpu``."""

    @property
    def devices(self) -> tuple[GPUDevice, ...]:
        """The snapshot that ``list_devices`` returns, for code that cannot await. Empty before ``initialize``."""
        return ()

    @property
    def capabilities(self) -> Capabilities:
        """What the library can do. Empty-handed by default: a backend claims what it has."""
        return Capabilities()

    # Lifecycle

    @abstractmethod
    async def initialize(self) -> None:
        """Open the library and its devices. Does nothing when already initialised on this loop.

        Raises:
            BackendUnavailable: with reason code and install hint.
        """

    @abstractmethod
    async def shutdown(self, *, timeout: float | None = 10) -> None:
        """Finish what was submitted, free every allocation, close the library. Idempotent, never raises for a
        driver that hangs: after ``timeout`` seconds its threads are left behind and do not keep the process
        alive. Live handles are reported by ``ResourceWarning``.
        """

    # Devices

    @abstractmethod
    async def list_devices(self) -> tuple[GPUDevice, ...]:
        """Every device of this backend, in index order, with its present state."""

    @abstractmethod
    async def get_device(self, device_id: str) -> GPUDevice | None:
        """One device, or None when this backend has none of that name."""

    # Memory

    @abstractmethod
    async def allocate(self, device_id: str, size_bytes: int) -> MemoryHandle:
        """Allocate ``size_bytes`` (> 0) on a device. Contents are unspecified.

        Raises:
            OutOfRange: size not a positive integer, or over the library's largest allocation.
            OutOfMemory: with requested, free, total, limit and pooled bytes, after one round of trimming.
        """

    @abstractmethod
    async def deallocate(self, handle: MemoryHandle) -> None:
        """Free an allocation once everything submitted on it is done. The handle is dead as of the call.

        Raises:
            InvalidHandle: stale, foreign or already freed. HandleInUse: live views.
        """

    @abstractmethod
    async def copy_to_device(self, src: Buffer, dst_handle: MemoryHandle, offset_bytes: int = 0) -> None:
        """Copy all of ``src`` (any C-contiguous buffer) to ``offset_bytes`` of an allocation.

        ``src`` stays exported until the driver is done, also after a cancellation; do not change it meanwhile.

        Raises:
            OutOfRange: does not fit. InvalidHandle. TransferFailed.
        """

    @abstractmethod
    async def copy_from_device(
        self, src_handle: MemoryHandle, offset_bytes: int = 0, size_bytes: int | None = None
    ) -> bytes:
        """Copy ``size_bytes`` (default: to the end) from ``offset_bytes`` into new ``bytes``.

        For large reads prefer ``copy_into`` with memory that you reuse: fresh memory is limited by page faults.

        Raises:
            OutOfRange: not inside the allocation. InvalidHandle. TransferFailed.
        """

    @abstractmethod
    async def copy_device_to_device(
        self,
        src_handle: MemoryHandle,
        dst_handle: MemoryHandle,
        size_bytes: int,
        *,
        src_offset_bytes: int = 0,
        dst_offset_bytes: int = 0,
    ) -> None:
        """Copy between two allocations of this backend, on one device or on two (peer copy, or staged through
        the host where there is no direct path). One call of the driver whatever its size: a cancelled one that has
        begun runs to its end.

        Raises:
            OutOfRange: not inside the allocations, or the ranges overlap. InvalidHandle. TransferFailed.
        """

    @abstractmethod
    async def synchronize(self, device_id: str) -> None:
        """Wait for everything submitted on the device before this call.

        Raises:
            TransferFailed: the device reports an error for earlier work.
        """

    # Telemetry

    @abstractmethod
    async def get_device_memory_info(self, device_id: str) -> MemoryInfo:
        """Total, used, available and reserved bytes at this moment."""

    @abstractmethod
    async def get_device_temperature(self, device_id: str) -> float | None:
        """Temperature in °C, or None where the device does not report it."""

    @abstractmethod
    async def get_device_power_usage(self, device_id: str) -> float | None:
        """Power draw in W, or None where the device does not report it."""

    @abstractmethod
    async def get_device_clock_rate(self, device_id: str) -> int | None:
        """Compute clock in MHz, or None where the device does not report it."""

    # Built on the above

    async def copy_into(self, src_handle: MemoryHandle, dst: Buffer, offset_bytes: int = 0) -> int:
        """Fill ``dst`` (any writable C-contiguous buffer) from ``offset_bytes`` of an allocation; returns bytes.

        The only call that a cancellation does not return from at once: it waits until the driver has let go of
        ``dst`` (at most one chunk), or hangs: then ``dst`` is the driver's until it returns, and stays exported.

        Raises:
            OutOfRange: ``dst`` is read-only, not contiguous or of Python objects, or the range is not inside the
                allocation. TransferFailed. DeviceUnresponsive: the driver hangs, ``dst`` may still be written to.
        """
        view = byte_view(dst, writable=True)
        view[:] = await self.copy_from_device(src_handle, offset_bytes, view.nbytes)
        return view.nbytes

    @asynccontextmanager
    async def allocation(self, device_id: str, size_bytes: int) -> AsyncGenerator[MemoryHandle]:
        """``async with backend.allocation("cuda:0", n) as handle:`` — freed at the end, also on error and cancel.

        With a view, or an array made from one, still in use it is freed when that is gone. Then the end raises
        ``HandleInUse``, or, where an exception is on its way already, adds a note to that.
        """
        from gpurt.memory.undo import end_allocation

        handle = await self.allocate(device_id, size_bytes)
        try:
            yield handle
        except BaseException as failure:
            await end_allocation(self, handle, failure)
            raise
        await end_allocation(self, handle, None)

    def memory_scope(self, device_id: str | None = None) -> MemoryScope:
        """``async with backend.memory_scope() as scope:`` — everything allocated through it is freed at its end."""
        from gpurt.memory.scope import MemoryScope

        return MemoryScope(self, device_id)

    async def load_file(
        self,
        path: str | os.PathLike[str],
        handle: MemoryHandle,
        *,
        file_offset: int = 0,
        size_bytes: int | None = None,
        handle_offset: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Stream a range of a file (default: all of it) to ``handle_offset`` of an allocation; returns bytes.

        The file is never held whole in host memory. Cancelled, it returns at once and stops at the next chunk.

        Args:
            on_progress: called on the event loop with the bytes done so far; what it raises ends the load.

        Raises:
            OutOfRange: not inside the file or the allocation. TransferFailed: unreadable, shorter than it said, or
                changed meanwhile. InvalidHandle.
        """
        raise Unsupported("this backend cannot load files", backend=self.name, device_id=handle.device_id)

    async def host_buffer(self, device_id: str, size_bytes: int) -> HostBuffer:
        """Reusable host memory for copies with a device: page-locked where the library can, so that copies reach the
        link's speed without a detour, and ordinary (``buffer.pinned`` is False) where it cannot. Close it after use.

        Raises:
            OutOfRange, OutOfMemory: no such size, or the limit on host buffers is reached.
        """
        raise Unsupported("this backend has no host buffers", backend=self.name, device_id=device_id)

    async def view(self, handle: MemoryHandle, shape: Sequence[int] | None = None, dtype: str = "uint8") -> DeviceView:
        """The allocation as an array without a copy, where the device's memory is visible to the host.

        ``shape`` times the item size of ``dtype`` (a NumPy dtype name) must fit the allocation; None is the
        whole allocation in one dimension. ``deallocate`` raises ``HandleInUse`` until the view is closed.

        Raises:
            Unsupported: this device's memory cannot be addressed by the host.
        """
        raise Unsupported("device memory is not visible to the host", backend=self.name, device_id=handle.device_id)

    async def compile(self, device_id: str, source: str, name: str) -> Kernel:
        """Compile a kernel for a device. ``source`` is in a language of ``Capabilities.kernels``, ``name`` is the
        kernel in it; the languages' conventions for parameters stand with the drivers.

        A kernel lives until ``shutdown``. The same source and name on the same device are compiled once. Cancelled, it
        returns at once; a compiler that has begun ends its work.

        Raises:
            CompileFailed: with the compiler's log.
            Unsupported: this backend runs no kernels, or its compiler is not installed.
        """
        raise Unsupported("this backend runs no kernels", backend=self.name, device_id=device_id)

    async def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[MemoryHandle | np.generic] = (),
    ) -> None:
        """Run a kernel over ``grid`` blocks of ``block`` threads, one to three numbers each; returns when it is done.

        ``args`` are the kernel's parameters in order: allocations of the kernel's device, and NumPy scalars, whose
        types must be those of the source (``numpy.float32(2)`` for a ``float``). Their number and their types are
        compared with what the source declares, where it does so in plain words. What the kernel reads and writes
        cannot be kept inside its allocations: as in any program, a wrong kernel may end the process.

        It takes its place in the order of every allocation that it is given. Cancelled, it is dropped if it has not
        begun, and else runs to its end.

        Raises:
            InvalidHandle: a kernel or an allocation that is stale, foreign, freed, or of another device.
            OutOfRange: not one to three positive numbers, a block over the device's ``max_threads_per_block``, an
                argument that is neither an allocation nor a NumPy scalar, or others than the source declares.
        """
        raise Unsupported("this backend runs no kernels", backend=self.name)

    async def execute_kernel(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[MemoryHandle | np.generic],
    ) -> bool:
        """``launch`` by name: the kernel that was compiled last under ``name`` on the device of the first allocation
        in ``args``. Returns True when it has run, and False when there is no such kernel; fails as ``launch`` does.
        """
        return False

    async def trim(self, device_id: str | None = None) -> int:
        """Give cached memory of one device, or of all, back to the device. Returns bytes freed."""
        return 0

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()


def byte_view(buffer: Buffer, *, writable: bool = False) -> memoryview:
    """``buffer`` as a flat ``memoryview`` of unsigned bytes, without a copy.

    Raises:
        OutOfRange: not a buffer, not C-contiguous, of Python objects, or read-only although ``writable`` is asked for.
    """
    if type(buffer) is bytes and buffer and not writable:
        return memoryview(buffer)
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as exc:  # also released views, and arrays of types without a format
        raise OutOfRange(f"{type(buffer).__name__} gives no buffer: {exc}", hint="pass bytes or an array") from exc
    if not view.c_contiguous:
        view.release()
        raise OutOfRange("the buffer is not C-contiguous", hint="pass numpy.ascontiguousarray(array)")
    if writable and view.readonly:
        view.release()
        raise OutOfRange("the destination buffer is read-only", hint="pass a bytearray or a writable array")
    if view.nbytes == 0:
        # cast() refuses views with a zero in their shape.
        view.release()
        return memoryview(bytearray() if writable else b"")
    if "O" in view.format and _holds_objects(view.format):
        view.release()
        # Their bytes are addresses in this process: nonsense on a device, and a crash when read back.
        raise OutOfRange(
            "the buffer holds Python objects, not data", hint="convert it to an array of numbers, or pickle it"
        )
    if view.format == "B" and view.ndim == 1:
        return view
    try:
        return view.cast("B")
    except ValueError:  # elements of a format that struct knows and cast() does not: ctypes arrays, structured dtypes
        from pickle import PickleBuffer  # costs 8 ms, and nearly nobody needs it

        return PickleBuffer(view).raw()


def _holds_objects(buffer_format: str) -> bool:
    """Whether a format of PEP 3118 has an ``O`` that is not in the name of a field."""
    import re

    return "O" in re.sub(r":[^:]*:", "", buffer_format)
