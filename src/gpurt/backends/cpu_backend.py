"""The host's processor as a device, in NumPy memory: always there, and the reference for every other driver."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gpurt.backend import GPUBackend
from gpurt.backends.cpu.budget import CPUBudget
from gpurt.backends.cpu.kernels import LANGUAGES, CPUKernels
from gpurt.backends.cpu.record import cpu_devices, cpu_telemetry
from gpurt.backends.host_copy import copy_host
from gpurt.driver import Driver
from gpurt.runtime.backend import DriverBackend
from gpurt.types import Capabilities, GPUDevice, Telemetry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.uint8]

UNDER_THE_GIL: Final = 64 << 10
"""Copies up to here keep the GIL, whose hand-over costs more than they do: 1.5 µs from cache, 10 µs from memory."""


class CPUDriver(Driver):
    """NumPy memory within what this host, this process's cgroups and ``memory_limit`` allow.

    Args:
        memory_limit: bytes per device, or None.
        devices: how many devices the host is split into, each with an equal share.
        root: where ``/proc``, ``/sys`` and ``/etc`` are read from.
        taken: bytes of a device, by index, that count against ``memory_limit`` where somebody else keeps to it; None:
            the driver itself does, by the blocks that it has given out.
    """

    name: ClassVar[str] = "cpu"
    capabilities = Capabilities(
        threading="queue",
        p2p=True,
        host_visible=True,
        kernels=LANGUAGES,
        # One memcpy: in shorter ones the C library does not write past the caches, which costs a quarter.
        chunk_bytes=256 << 20,
        # Fresh host memory is filled at the rate of page faults, a tenth of what touched memory takes.
        pool_bytes=256 << 20,
        telemetry=frozenset(
            {"memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "clock_mhz", "temperature_c"}
        ),
    )

    inline_copy_bytes = 1 << 20
    """30 to 100 µs, less than the way to a lane and back, which is 130 µs beside other work. How much of a turn of the
    loop such copies may take, :mod:`gpurt.runtime.dispatch` says."""

    def __init__(
        self,
        *,
        memory_limit: int | None = None,
        devices: int = 1,
        root: Path = Path("/"),
        taken: Callable[[int], int] | None = None,
    ) -> None:
        if devices < 1 or (memory_limit is not None and memory_limit < 0):
            raise ValueError(f"devices must be positive and memory_limit not negative: {devices}, {memory_limit}")
        self._limit, self._count, self._root, self._taken = memory_limit, devices, root, taken
        self._kernels = CPUKernels()

    def open(self) -> Sequence[GPUDevice]:
        devices = cpu_devices(self.name, self._count, self._limit, self._root)
        self._budget = CPUBudget(self.name, limit=self._limit, devices=self._count, root=self._root, taken=self._taken)
        self._kernels.threads = devices[0].compute_units or 1
        return devices

    def attach(self, index: int) -> None: ...

    def alloc(self, index: int, nbytes: int) -> Array:
        import numpy as np

        self._budget.take(index, nbytes)
        try:
            return np.empty(nbytes, np.uint8)
        except MemoryError:
            self._budget.give_back(index, nbytes)
            raise

    def free(self, index: int, mem: Array) -> None:
        self._budget.give_back(index, mem.nbytes)

    def write(self, index: int, mem: Array, offset: int, src: memoryview) -> None:
        if len(src) <= UNDER_THE_GIL:
            mem.data[offset : offset + len(src)] = src
            return
        import numpy as np

        copy_host(mem[offset : offset + len(src)], np.frombuffer(src, np.uint8))

    def read(self, index: int, mem: Array, offset: int, dst: memoryview) -> None:
        if len(dst) <= UNDER_THE_GIL:
            dst[:] = mem.data[offset : offset + len(dst)]
            return
        import numpy as np

        copy_host(np.frombuffer(dst, np.uint8), mem[offset : offset + len(dst)])

    def copy(
        self, src_index: int, src: Array, src_offset: int, dst_index: int, dst: Array, dst_offset: int, nbytes: int
    ) -> None:
        copy_host(dst[dst_offset : dst_offset + nbytes], src[src_offset : src_offset + nbytes])

    def sync(self, index: int) -> None: ...

    def telemetry(self, index: int) -> Telemetry:
        return cpu_telemetry(*self._budget.reading(index))

    def close(self) -> None:
        self._kernels.close()

    def host_view(self, index: int, mem: Array) -> memoryview:
        return mem.data

    def compile(self, index: int, source: str, name: str) -> Callable[..., None]:
        return self._kernels.compile(source, name)

    def launch(self, index: int, kernel: Any, grid: Any, block: Any, args: Sequence[Any]) -> None:
        self._kernels.launch(kernel, grid, block, args)


class CPUBackend(DriverBackend):
    """:class:`CPUDriver` as a backend. ``options`` are those of :class:`gpurt.runtime.backend.DriverBackend`."""

    def __init__(self, *, memory_limit: int | None = None, devices: int = 1, **options: Any) -> None:
        # Both know the limit, but the shell alone keeps to it. It counts what was asked for and what is still on its
        # way; a driver sees blocks, which are up to an eighth larger, and would refuse the end of the limit.
        this = weakref.ref(self)  # the driver outlives a backend that is forgotten, and must not keep it

        def taken(index: int) -> int:
            backend = this()
            return 0 if backend is None else backend.ledger.usage(f"{CPUDriver.name}:{index}").committed_bytes

        driver = CPUDriver(memory_limit=memory_limit, devices=devices, taken=taken)
        super().__init__(driver, memory_limit=memory_limit, **options)


def create() -> GPUBackend:
    """Entry point: the backend for this host."""
    return CPUBackend()
