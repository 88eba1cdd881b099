"""Lease: memory in the hands of people who may make arrays of it, and the moment when nobody looks into it any more.

A memoryview of a memoryview counts nowhere, so nobody could see that an array still hangs on it. What a lease hands
out hangs on an object of the lease's own, which lives exactly as long as the lease is open or anything made from it is
alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any, Final


class _Nothing:
    """Stands for memory that is not there yet, or that only a device can address."""

    __slots__ = ("__weakref__",)


class Lease:
    """Open from the start; ``memory`` is for after ``attach``."""

    __slots__ = ("_closed", "_keeper", "_view", "_watch", "delivered")

    def __init__(self) -> None:
        self._closed = False
        self.delivered = False
        """Whoever asked for the memory has it."""
        self._view: memoryview | None = None
        self._hold(_Nothing())

    def _hold(self, keeper: Any) -> None:
        # First the watch: another thread must never see it dead while the lease is open.
        self._watch: weakref.ref[Any] = weakref.ref(keeper)
        self._keeper: Any = keeper

    def attach(self, memory: memoryview) -> None:
        """``memory``: writable, contiguous. It stays exported as long as ``in_use``."""
        self._hold((ctypes.c_ubyte * memory.nbytes).from_buffer(memory))

    def memory(self) -> memoryview:
        """All of it: one-dimensional, writable, unsigned bytes. Only while open and attached.

        One view, which ends with the lease unless something is made from it: who keeps it, in the frames of an
        exception for example, does not keep the memory.
        """
        if self._view is None or _is_released(self._view):
            self._view = memoryview(self._keeper).cast("B")
        return self._view

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> bool:
        """Open, or something made from the memory is alive."""
        return self._watch() is not None

    def close(self, *, end_view: bool = True) -> None:
        """Idempotent. ``end_view``: release the view that ``memory`` gave."""
        self._closed = True
        view, self._view = self._view, None
        if end_view and view is not None:
            with contextlib.suppress(BufferError):  # an array, a view or a copy under way hangs on it
                view.release()
        self._keeper = None

    def when_unused(self, callback: Callable[[], object]) -> None:
        """Call back when this is in use no more: now if so. Any thread, also in the middle of a garbage collection: the
        callback must take no lock. ``attach`` counts as an end."""
        keeper: Final = self._watch()
        if keeper is None:
            callback()
        else:
            weakref.finalize(keeper, callback).atexit = False


def _is_released(view: memoryview) -> bool:
    try:
        return view.nbytes < 0
    except ValueError:
        return True
