"""What an OpenCL driver has given out: buffers that can be asked for once only, and the budget that OpenCL lacks.

OpenCL has no query of free memory, and its drivers grant more than there is: what they cannot serve shows at the first
copy, or ends the process. So what is live on a device is counted here, and never comes to more than its memory.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

from gpurt.backends.host_budget import HostBudget
from gpurt.errors import InvalidHandle, OutOfRange
from gpurt.sources.opencl_properties import OpenClDevice
from gpurt.types import DeviceKind

_HOST_MEMORY: Final = frozenset({DeviceKind.SOFTWARE, DeviceKind.INTEGRATED_GPU})


class OpenCLMemory:
    """One allocation: what a driver's token is."""

    __slots__ = ("_buffer", "nbytes")

    def __init__(self, buffer: Any, nbytes: int) -> None:
        self._buffer, self.nbytes = buffer, nbytes

    @property
    def buffer(self) -> Any:
        """The library's object.

        Raises:
            InvalidHandle: it was given back. The library would end the process.
        """
        if self._buffer is None:
            raise InvalidHandle("the OpenCL buffer was freed", backend="opencl")
        return self._buffer

    def surrender(self) -> Any:
        """The library's object, for the last time."""
        buffer, self._buffer = self.buffer, None
        return buffer


class OpenCLBudget:
    """How much each device may still give out. Any thread.

    Args:
        root: where ``/proc`` and ``/sys`` are read from.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._lock = threading.Lock()
        # One for all devices in the host's memory: they take it from each other.
        self._host = HostBudget("opencl", root=root)
        self._devices: list[OpenClDevice] = []
        self._live: list[int] = []

    def open(self, devices: list[OpenClDevice]) -> None:
        self._host.reset()
        self._devices, self._live = devices, [0] * len(devices)

    def on_host(self, index: int) -> bool:
        """Whether the device's memory is the host's."""
        return self._devices[index].kind in _HOST_MEMORY

    def take(self, index: int, nbytes: int) -> None:
        """Count an allocation; :meth:`give_back` it if it fails after all.

        Raises:
            MemoryError: there is not so much. OutOfRange: there is, but not in one piece.
        """
        device = self._devices[index]
        with self._lock:
            total = device.memory_total_bytes
            if total is not None and nbytes > total - self._live[index]:
                raise MemoryError(
                    f"{nbytes:,} bytes asked for on opencl:{index}, and this process has {self._live[index]:,} of its "
                    f"{total:,} already; free handles, or allocate less"
                )
            largest = device.max_allocation_bytes
            if largest is not None and nbytes > largest:
                raise OutOfRange(
                    f"the largest single allocation of opencl:{index} is {largest:,} bytes, not {nbytes:,}"
                )
            if self.on_host(index):
                self._host.take(0, nbytes)
            self._live[index] += nbytes

    def give_back(self, index: int, nbytes: int) -> None:
        with self._lock:
            self._live[index] -= nbytes
            if self.on_host(index):
                self._host.give_back(0, nbytes)

    def reading(self, index: int) -> tuple[int | None, int | None]:
        """Total and free bytes of a device now; free is None where only the vendor could tell."""
        device = self._devices[index]
        if not self.on_host(index):
            return device.memory_total_bytes, None
        total, free = self._host.reading(0)
        if device.memory_total_bytes is not None:
            total = min(total, device.memory_total_bytes)
        return total, min(free, max(0, total - self._live[index]))
