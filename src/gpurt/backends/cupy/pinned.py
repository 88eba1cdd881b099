"""Pinned host memory, and which addresses of this process are in it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from typing import Any

from gpurt.backends.cupy.runtime import HOST_ALLOC_PORTABLE


class PinnedMemory:
    """One allocation of page-locked host memory: copies to and from it run at the link's own speed."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._array: Any = (ctypes.c_ubyte * nbytes).from_address(address)

    def view(self) -> memoryview:
        """The memory as a writable one-dimensional ``memoryview`` of unsigned bytes."""
        import numpy as np

        # memoryview(ctypes array) has format "<B", which memoryview.cast does not take.
        return np.frombuffer(self._array, np.uint8).data

    def retire(self) -> Any | None:
        """No more views. What the existing ones refer to in the end, None when there are none."""
        reference = weakref.ref(self._array)
        self._array = None
        return reference()


class PinnedHost:
    """All pinned memory that one driver gave out. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self.unviewed: deque[int] = deque()
        """Addresses given back while they were viewed, whose views are gone since."""

    def allocate(self, runtime: Any, nbytes: int) -> PinnedMemory:
        """``nbytes`` (> 0), pinned for every device. The calling thread has selected one.

        Raises:
            CUDARuntimeError: status 2 when no more can be pinned.
        """
        self.sweep(runtime)
        memory = PinnedMemory(runtime.hostAlloc(nbytes, HOST_ALLOC_PORTABLE), nbytes)
        with self._lock:
            insort(self._starts, memory.address)
            self._sizes[memory.address] = nbytes
        return memory

    def free(self, runtime: Any, memory: PinnedMemory) -> None:
        """Give it back: now, or once nothing refers to a view of it any more.

        In that case it is unpinned by a later call here, because views end on any thread, the event loop's too.
        """
        self.sweep(runtime)
        viewed = memory.retire()
        if viewed is None:
            self._release(runtime, memory.address)
        else:
            weakref.finalize(viewed, self.unviewed.append, memory.address).atexit = False

    def sweep(self, runtime: Any) -> None:
        """Unpin what has been given back and is not viewed any more. The calling thread has selected a device."""
        while self.unviewed:
            self._release(runtime, self.unviewed.popleft())

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether the whole range is pinned."""
        with self._lock:
            position = bisect_right(self._starts, address)
            if not position:
                return False
            start = self._starts[position - 1]
            return address + nbytes <= start + self._sizes[start]

    def _release(self, runtime: Any, address: int) -> None:
        with self._lock:
            self._starts.remove(address)
            del self._sizes[address]
        runtime.freeHost(address)
