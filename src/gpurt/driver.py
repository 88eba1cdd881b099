"""Driver: the blocking contract that a backend author writes.

A driver is about ten short methods around one vendor library. It raises whatever its library raises, knows
nothing of asyncio, handles, limits, cancellation or other drivers; :class:`gpurt.runtime.backend.DriverBackend`
adds all of that once for every driver. It promises in return:

- every call arrives with a live memory token of that device and a range inside its allocation;
- calls come from gpurt's own lane threads as ``capabilities.threading`` allows, never from the event loop (but see
  ``inline_copy_bytes``);
- on each lane thread ``attach(index)`` is the first call for a device;
- no two calls that touch the same memory run at once, and they come in the order in which users asked;
- ``src`` and ``dst`` are one-dimensional C-contiguous ``memoryview`` of unsigned bytes, of ``chunk_bytes`` at
  most, ``dst`` writable, and stay valid until the call returns.

Methods should be few bytecodes around native calls that release the GIL: a pure Python loop over bytes stalls
the event loop however many threads there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from gpurt.errors import GPUError, OutOfMemory, Unsupported
from gpurt.types import Capabilities, GPUDevice, Telemetry

API_VERSION = 1
"""Version of this contract. A plug-in built for another one is refused with reason ``wrong_api``."""


class Driver(ABC):
    """One vendor library, blocking.

    ``index`` is the position of a device in the sequence that ``open`` returned. ``mem`` is whatever ``alloc``
    returned; the shell never looks into it.
    """

    name: ClassVar[str]
    """Short backend name: ``cuda``. Device ids are ``f"{name}:{index}"``."""

    capabilities: Capabilities = Capabilities()
    """Class default; ``open`` may replace it on the instance once the library has been asked.
    ``threading`` is read before ``open`` and must not change."""

    inline_copy_bytes: int = 0
    """``write`` and ``read`` of up to so many bytes may be called on the event loop's thread, without ``attach``,
    while nothing else is outstanding on the memory. Only where such a call is a plain memory copy of some
    microseconds: 0 for every library that can block or hang. Not a capability, so that a driver that wraps another one
    does not inherit the promise."""

    @abstractmethod
    def open(self) -> Sequence[GPUDevice]:
        """Load the library, return its usable devices in index order.

        Raises:
            BackendUnavailable: with reason code and install hint, when there is nothing to use. Anything else
                that escapes is reported with reason ``error``.
        """

    @abstractmethod
    def attach(self, index: int) -> None:
        """Prepare the calling thread for device ``index``: select it, make this thread's stream."""

    @abstractmethod
    def alloc(self, index: int, nbytes: int) -> Any:
        """Allocate ``nbytes`` (> 0, a multiple of ``alignment_bytes`` after rounding up by the shell)."""

    @abstractmethod
    def free(self, index: int, mem: Any) -> None:
        """Give ``mem`` back. Nothing submitted on it is outstanding."""

    @abstractmethod
    def write(self, index: int, mem: Any, offset: int, src: memoryview) -> None:
        """Copy host bytes to ``mem[offset:offset + len(src)]``; return when ``src`` may be reused."""

    @abstractmethod
    def read(self, index: int, mem: Any, offset: int, dst: memoryview) -> None:
        """Fill ``dst`` from ``mem[offset:offset + len(dst)]``; return when the bytes are there."""

    @abstractmethod
    def copy(
        self, src_index: int, src: Any, src_offset: int, dst_index: int, dst: Any, dst_offset: int, nbytes: int
    ) -> None:
        """Copy between two allocations, of one device or of two; return when the bytes are there.

        Where the devices have no direct path the driver stages through the host itself. Runs on a lane of
        ``src_index``. ``src`` and ``dst`` may be the same allocation with disjoint ranges.
        """

    @abstractmethod
    def sync(self, index: int) -> None:
        """Wait for everything this process has queued on the device."""

    @abstractmethod
    def telemetry(self, index: int) -> Telemetry:
        """One reading of every metric in one go. A metric that fails costs that field, never the reading."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the library. All memory has been freed. ``open`` may follow again."""

    # Optional: the defaults are right for a library that has no such thing.

    def classify(self, exc: Exception) -> type[GPUError] | None:
        """Which error of gpurt this library exception means; None leaves it to the shell."""
        return OutOfMemory if isinstance(exc, MemoryError) else None

    def detach(self, index: int) -> None:  # noqa: B027  (optional: most libraries have nothing to undo)
        """Undo ``attach`` on the calling thread before it ends."""

    def trim(self, index: int) -> int:
        """Make the library give cached memory back to the device; returns bytes freed."""
        return 0

    def host_view(self, index: int, mem: Any) -> memoryview:
        """The allocation as a writable ``memoryview`` of unsigned bytes; only with ``host_visible``."""
        raise NotImplementedError

    def pointer(self, index: int, mem: Any) -> int:
        """The allocation's device address; only with ``cuda_pointers``."""
        raise NotImplementedError

    def load(self, index: int, mem: Any, offset: int, fd: int, file_offset: int, nbytes: int) -> int:
        """Copy a range of an open file to ``mem[offset:]``; returns bytes, fewer only at the end of the file. Only
        with ``loads_files``."""
        raise NotImplementedError

    def compile(self, index: int, source: str, name: str) -> Any:
        """Compile ``source`` for a device and return a token of the kernel ``name`` in it, good until ``close``. Only
        where ``capabilities.kernels`` names a language; the source is in one of those.

        ``name`` is an identifier of C, and each pair of source and name is asked for once per device. Nobody gives
        tokens back: ``close`` lets go of all.

        Raises:
            CompileFailed: with the compiler's log; also if the source has no such kernel.
            Unsupported: the compiler is not installed, with what to install.
        """
        raise Unsupported("this library runs no kernels", backend=self.name)

    def launch(
        self, index: int, kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        """Run a kernel over ``grid`` blocks of ``block`` threads each; return when it is done.

        ``args`` are memory tokens of the device and NumPy scalars (instances of ``numpy.generic``: booleans, integers,
        and floats of four and eight bytes), in the order of the kernel's parameters. All numbers of ``grid`` and
        ``block`` are at least 1, and a block has at most the device's ``max_threads_per_block``.
        """
        raise NotImplementedError

    def peer_access(self, src_index: int, dst_index: int) -> bool | None:
        """Whether copies from the one device reach the other directly; None before the first, or where the library does
        not tell. Must not block: it may be asked on the event loop's thread."""
        return None if self.capabilities.p2p else False

    def host_alloc(self, nbytes: int) -> Any:
        """Page-locked host memory for copies with any device of this driver. Only with ``pins_memory``."""
        raise NotImplementedError

    def host_memory(self, block: Any) -> memoryview:
        """What ``host_alloc`` returned, as a writable ``memoryview`` of unsigned bytes."""
        raise NotImplementedError

    def host_free(self, block: Any) -> None:
        """Give page-locked memory back. No copy uses it any more."""
        raise NotImplementedError
