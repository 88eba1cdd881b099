"""Pinned host memory, and which addresses of this process are in it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_right, insort
from typing import Any

from gpurt.backends.cupy_runtime import HOST_ALLOC_PORTABLE


class PinnedMemory:
    """One allocation of page-locked host memory: copies to and from it run at the link's own speed.

    Made by :meth:`PinnedHost.allocate`. Allocating takes about 0.5 s per GiB: keep it and use it again.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._array: Any = (ctypes.c_ubyte * nbytes).from_address(address)

    def view(self) -> memoryview:
        """The memory as a writable one-dimensional ``memoryview`` of unsigned bytes."""
        import numpy as np

        # memoryview(ctypes array) has format "<B", which memoryview.cast does not take.
        return np.frombuffer(self._array, np.uint8).data

    def retire(self) -> None:
        """The memory goes away: no more views.

        Raises:
            BufferError: a view, or something made from one, still exists. Nothing has changed then.
        """
        # Whatever was made from a view refers to the array in the end, and nothing else does.
        alive = weakref.ref(self._array)
        self._array = None
        array = alive()
        if array is not None:
            self._array = array
            raise BufferError(f"{self.nbytes:,} bytes of pinned host memory are still viewed: drop the views first")


class PinnedHost:
    """All pinned memory that one driver gave out. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def allocate(self, runtime: Any, nbytes: int) -> PinnedMemory:
        """``nbytes`` (> 0), pinned for every device. The calling thread has selected one.

        Raises:
            CUDARuntimeError: status 2 when no more can be pinned.
        """
        memory = PinnedMemory(runtime.hostAlloc(nbytes, HOST_ALLOC_PORTABLE), nbytes)
        with self._lock:
            insort(self._starts, memory.address)
            self._sizes[memory.address] = nbytes
        return memory

    def free(self, runtime: Any, memory: PinnedMemory) -> None:
        """Give it back.

        Raises:
            BufferError: it is still viewed, see :meth:`PinnedMemory.retire`.
        """
        memory.retire()
        with self._lock:
            self._starts.remove(memory.address)
            del self._sizes[memory.address]
        runtime.freeHost(memory.address)

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether the whole range is pinned."""
        with self._lock:
            position = bisect_right(self._starts, address)
            if not position:
                return False
            start = self._starts[position - 1]
            return address + nbytes <= start + self._sizes[start]
