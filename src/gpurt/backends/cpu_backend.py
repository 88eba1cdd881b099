"""The host's processor as a device, in NumPy memory: always there, and the reference for every other driver."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gpurt.backend import GPUBackend
from gpurt.driver import Driver
from gpurt.shell import DriverBackend
from gpurt.sources import host
from gpurt.types import Capabilities, DeviceIdentity, DeviceKind, GPUDevice, Telemetry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.uint8]

_BUDGET_SECONDS = 0.1  # reading /proc and the cgroups takes 0.2 ms, an allocation 0.01 ms

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
    loop such copies may take, :mod:`gpurt.inline` says."""

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
        self._lock = threading.Lock()
        self._live = [0] * devices
        self._idle_rss = 0
        self._measured, self._measured_at = 0, float("-inf")

    def open(self) -> Sequence[GPUDevice]:
        import numpy as np

        self._live = [0] * self._count
        self._idle_rss, self._measured_at = host.resident_bytes(), float("-inf")
        memory, cpu, clock = host.memory_budget(self._root), host.cpu_info(self._root), host.cpu_clock_mhz(highest=True)
        key = f"host:{host.host_fingerprint(self._root)}"
        usable, source = memory.usable_bytes // self._count, memory.source
        if self._limit is not None and self._limit < usable:
            usable, source = self._limit, "limit"
        return tuple(
            GPUDevice(
                device_id=f"{self.name}:{index}",
                name=cpu.name,
                vendor=cpu.vendor,
                backend=self.name,
                compute_capability=cpu.instruction_set,
                memory_bytes=memory.total_bytes // self._count,
                memory_available=memory.usable_bytes // self._count,
                compute_units=max(1, host.cpu_count(self._root) // self._count),
                tensor_core_count=0,
                max_threads_per_block=None,
                clock_rate_mhz=clock,
                bandwidth_gbps=None,
                support_level="full",
                driver_version=f"numpy {np.__version__}, {platform.system()} {platform.release()}",
                backend_name="numpy",
                identity=DeviceIdentity(key=key)
                if self._count == 1
                else DeviceIdentity(key=f"{key}/{index}", partition=str(index)),
                kind=DeviceKind.CPU,
                memory_usable_bytes=usable,
                memory_usable_source=source,
                memory_pool_id=key,
                backends=(self.name,),
            )
            for index in range(self._count)
        )

    def attach(self, index: int) -> None: ...

    def alloc(self, index: int, nbytes: int) -> Array:
        import numpy as np

        with self._lock:
            # Checked here because Linux would grant more than there is, and kill the process once it is touched.
            free = self._free(index)
            if nbytes > free:
                free = self._free(index, fresh=True)
            if nbytes > free:
                raise MemoryError(
                    f"{nbytes:,} bytes asked for on {self.name}:{index}, {max(0, free):,} free for this process; "
                    "free handles, allocate less, or raise the container's or configured memory limit"
                )
            self._live[index] += nbytes
        try:
            return np.empty(nbytes, np.uint8)
        except MemoryError:
            self._give_back(index, nbytes)
            raise

    def free(self, index: int, mem: Array) -> None:
        self._give_back(index, mem.nbytes)

    def write(self, index: int, mem: Array, offset: int, src: memoryview) -> None:
        if len(src) <= UNDER_THE_GIL:
            mem.data[offset : offset + len(src)] = src
            return
        import numpy as np

        np.copyto(mem[offset : offset + len(src)], np.frombuffer(src, np.uint8))

    def read(self, index: int, mem: Array, offset: int, dst: memoryview) -> None:
        if len(dst) <= UNDER_THE_GIL:
            dst[:] = mem.data[offset : offset + len(dst)]
            return
        import numpy as np

        np.copyto(np.frombuffer(dst, np.uint8), mem[offset : offset + len(dst)])

    def copy(
        self, src_index: int, src: Array, src_offset: int, dst_index: int, dst: Array, dst_offset: int, nbytes: int
    ) -> None:
        import numpy as np

        np.copyto(dst[dst_offset : dst_offset + nbytes], src[src_offset : src_offset + nbytes])

    def sync(self, index: int) -> None: ...

    def telemetry(self, index: int) -> Telemetry:
        with self._lock:
            total = host.memory_budget(self._root, self._limit and self._limit * self._count).total_bytes // self._count
            free = min(total, max(0, self._free(index, fresh=True)))
        if self._limit is not None and self._taken is not None:
            free = min(free, max(0, self._limit - self._taken(index)))
        clock, temperature = host.cpu_clock_mhz(), host.cpu_temperature_c()
        missing = {"memory_reserved_bytes", "power_w", "utilization_percent"}
        missing |= {name for name, value in (("clock_mhz", clock), ("temperature_c", temperature)) if value is None}
        return Telemetry(
            memory_total_bytes=total,
            memory_used_bytes=total - free,
            memory_free_bytes=free,
            temperature_c=temperature,
            clock_mhz=clock,
            unavailable=dict.fromkeys(sorted(missing), "unsupported"),
        )

    def close(self) -> None: ...

    def host_view(self, index: int, mem: Array) -> memoryview:
        return mem.data

    def _give_back(self, index: int, nbytes: int) -> None:
        with self._lock:
            self._live[index] -= nbytes

    def _free(self, index: int, *, fresh: bool = False) -> int:
        """Bytes that one more allocation may take; below 0 when there are fewer than before. Under the lock."""
        share = self._share(fresh=fresh)
        if self._limit is not None and self._taken is None:
            share = min(share, self._limit)
        return share - self._live[index]

    def _share(self, *, fresh: bool = False) -> int:
        """Bytes that one device's live allocations may come to at most, as of at most 0.1 s ago. Under the lock."""
        now = time.monotonic()
        if fresh or now - self._measured_at > _BUDGET_SECONDS:
            memory = host.memory_budget(self._root)
            # What our allocations have touched is no longer available to anybody, but it is ours to count.
            touched = min(max(0, host.resident_bytes() - self._idle_rss), sum(self._live))
            self._measured = min(memory.total_bytes, memory.available_bytes + touched) // self._count
            self._measured_at = now
        return self._measured


class CPUBackend(DriverBackend):
    """:class:`CPUDriver` as a backend. ``options`` are those of :class:`gpurt.shell.DriverBackend`."""

    def __init__(self, *, memory_limit: int | None = None, devices: int = 1, **options: Any) -> None:
        # Both know the limit, but the shell alone keeps to it. It counts what was asked for and what is still on its
        # way; a driver sees blocks, which are up to an eighth larger, and would refuse the end of the limit.
        driver = CPUDriver(memory_limit=memory_limit, devices=devices, taken=self._taken)
        super().__init__(driver, memory_limit=memory_limit, **options)

    def _taken(self, index: int) -> int:
        return self.ledger.usage(self._devices[index].device_id).committed_bytes


def create() -> GPUBackend:
    """Entry point: the backend for this host."""
    return CPUBackend()
