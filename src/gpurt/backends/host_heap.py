"""Memory that a library has freed and the C library keeps: given back to the system."""

from __future__ import annotations

import functools
from collections.abc import Callable


def give_back_freed() -> None:
    """Return what ``free`` has left in the heaps of this process to the system. 0.1 ms for each MiB of it.

    glibc keeps freed blocks of less than some MiB for the next ones, a gigabyte of them as well, and only the end of a
    heap by itself. Does nothing with other C libraries.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    import ctypes

    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # no such function; Windows takes no None
        return None
