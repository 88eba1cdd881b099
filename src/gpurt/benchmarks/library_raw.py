"""What the bare libraries have in common with which gpurt's backends are compared: one file each beside this one.

The copies are the library's own, as its documentation shows them, without gpurt's driver. Where the device's memory is
the host's, the ceiling is the host's ``memcpy``; elsewhere it is the best that the library itself can do.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gpurt.benchmarks.raw import Blocking, Direction, HostRaw, Way, bytes_of
from gpurt.types import DeviceKind, GPUDevice

if TYPE_CHECKING:
    from gpurt.benchmarks.raw import Bytes


def shares_host_memory(device: GPUDevice) -> bool:
    """Whether what is taken of the device's memory is taken of the host's."""
    return device.kind in (DeviceKind.CPU, DeviceKind.SOFTWARE) or device.unified_memory or device.simulated


class LibraryRaw(HostRaw):
    """Device memory of one library. Subclasses say how it copies."""

    host_share = 2  # for a ceiling, and for what the library puts between
    device_share = 1

    def __init__(self, nbytes: int, device: GPUDevice, second: GPUDevice | None = None) -> None:
        super().__init__(nbytes)
        self.device = device
        self.index = int(device.device_id.rpartition(":")[2])
        self.on_host = shares_host_memory(device)
        self._second = None if second is None else type(self)(nbytes, second)

    def open(self) -> None:
        self._open()
        super().open()
        if not self.on_host:
            self.ceiling_name = self._best_name
        if self._second is not None:
            self._second.open()

    def close(self) -> None:
        try:
            if self._second is not None:
                self._second.close()
        finally:
            super().close()
            self._close()

    def fastest(self, direction: Direction, host: memoryview, total: int | None = None) -> Blocking:
        if self.on_host:
            return super().fastest(direction, host, total)
        best, repeats = self._best(direction, host), 1 if total is None else total // len(host)

        def copy() -> None:
            for _ in range(repeats):
                best()

        return copy

    def both_ways(self, host: memoryview) -> Blocking:
        if self.on_host:
            return super().both_ways(host)
        half = len(host) // 2
        ways = [self._best("to device", host[:half]), self._best("from device", host[half : 2 * half])]

        def together() -> None:
            for done in wait([self._pool.submit(way) for way in ways]).done:
                done.result()

        return together

    def device_copies(self, nbytes: int, *, across: bool) -> tuple[Way | None, Way]:
        import numpy as np

        if across:
            assert self._second is not None
            between = np.empty(nbytes, np.uint8).data
            ordinary = Way(
                f"{self.copy_name}, through the host", _in_turn(self.reader(between), self._second.writer(between))
            )
        else:
            ordinary = self._within(nbytes)
        if not self.on_host:
            return None, ordinary
        return ordinary, super().device_copies(nbytes, across=across)[1]

    @abstractmethod
    def _open(self) -> None:
        """Make the device's memory, and write to it: see :meth:`HostRaw._made_memory`."""

    @abstractmethod
    def _close(self) -> None:
        """Also after an ``_open`` that failed half-way."""

    @abstractmethod
    def _within(self, nbytes: int) -> Way:
        """The library's copy from one half of the memory to the other."""

    @property
    def _best_name(self) -> str:
        return self.copy_name

    def _best(self, direction: Direction, host: memoryview) -> Blocking:
        """The fastest copy of a device whose memory is its own."""
        return self.writer(host) if direction == "to device" else self.reader(host)


class TensorRaw(LibraryRaw):
    """Libraries whose memory is tensors, which they move whole: a tensor for each size that is asked for.

    One call at a time, because these libraries want one thread.
    """

    allocation_name: ClassVar[str]

    def __init__(self, nbytes: int, device: GPUDevice, second: GPUDevice | None = None) -> None:
        super().__init__(nbytes, device, second)
        self._lock = threading.Lock()
        self._tensors: dict[tuple[int, int], Any] = {}

    def writer(self, src: memoryview) -> Blocking:
        return partial(self._locked, self._write, self._tensor(len(src)), bytes_of(src))

    def reader(self, dst: memoryview) -> Blocking:
        return partial(self._locked, self._read, self._tensor(len(dst)), bytes_of(dst))

    def allocations(self, nbytes: int) -> list[Way]:
        return [Way(self.allocation_name, partial(self._locked, self._allocate_and_free, nbytes))]

    @abstractmethod
    def _make(self, nbytes: int) -> Any:
        """A tensor of at least ``nbytes``."""

    @abstractmethod
    def _drop(self, tensor: Any) -> None:
        """Let go of it, as far as the last reference does not."""

    @abstractmethod
    def _write(self, tensor: Any, src: Bytes) -> None: ...

    @abstractmethod
    def _read(self, tensor: Any, dst: Bytes) -> None: ...

    @abstractmethod
    def _copy(self, src: Any, dst: Any, nbytes: int) -> None:
        """From tensor to tensor."""

    def _close(self) -> None:
        while self._tensors:
            self._drop(self._tensors.popitem()[1])

    def _within(self, nbytes: int) -> Way:
        here, there = self._tensor(nbytes), self._tensor(nbytes, 1)
        return Way(self.copy_name, partial(self._locked, self._copy, here, there, nbytes))

    def _tensor(self, nbytes: int, place: int = 0) -> Any:
        import numpy as np

        with self._lock:
            tensor = self._tensors.get((nbytes, place))
            if tensor is None:
                tensor = self._tensors[nbytes, place] = self._make(nbytes)
                self._write(tensor, np.ones(nbytes, np.uint8))
            return tensor

    def _allocate_and_free(self, nbytes: int) -> None:
        self._drop(self._make(nbytes))

    def _locked(self, call: Any, *arguments: Any) -> None:
        with self._lock:
            call(*arguments)


def _in_turn(*calls: Blocking) -> Blocking:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them
