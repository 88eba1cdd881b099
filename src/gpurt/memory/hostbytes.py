"""New ``bytes`` that a driver can fill directly, without the GIL and without a second copy.

``bytes(memoryview)`` and ``ndarray.tobytes()`` hold the GIL for the whole copy and stall the event loop however
many threads there are. CPython documents that a bytes object made by ``PyBytes_FromStringAndSize(NULL, n)`` may be
written until it is published, so we make one and let the driver's GIL-free copy write into it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Final

from gpurt.errors import OutOfMemory

# Below this the copy is cheaper than the detour, and one-byte objects may be shared singletons.
_DIRECT_MIN_BYTES: Final = 1 << 16
_PyBUF_WRITE: Final = 0x200
_HUGE_MIN_BYTES: Final = 4 << 20
"""From here on NumPy, too, asks for huge pages: two of 2 MiB at least."""


@cache
def _direct() -> tuple[Callable[[None, int], bytes], Callable[[int, int, int], memoryview]]:
    api = ctypes.pythonapi
    new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    return (  # pyright: ignore[reportReturnType]
        new_bytes(("PyBytes_FromStringAndSize", api)),
        view_memory(("PyMemoryView_FromMemory", api)),
    )


def read_bytes(nbytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """``nbytes`` of new bytes with contents by ``fill(writable memoryview of unsigned bytes)``.

    Raises:
        OutOfMemory: the host has not so much. Not for a MemoryError of ``fill``.
    """
    hint = "read in parts, or with copy_into to memory that is there already"
    if nbytes < _DIRECT_MIN_BYTES or sys.implementation.name != "cpython":
        try:
            buffer = bytearray(nbytes)
        except MemoryError as exc:
            raise host_memory_ran_out(nbytes, hint) from exc
        fill(memoryview(buffer))
        return bytes(buffer)
    new_bytes, view_memory = _direct()
    try:
        result = new_bytes(None, nbytes)
    except MemoryError as exc:
        raise host_memory_ran_out(nbytes, hint) from exc
    # The characters end one byte (the terminating NUL) before the end of the object's fixed part.
    address = id(result) + bytes.__basicsize__ - 1
    if nbytes >= _HUGE_MIN_BYTES:
        _prefer_huge_pages(address, nbytes)
    fill(view_memory(address, nbytes, _PyBUF_WRITE).cast("B"))
    return result


def _prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask Linux for pages of 2 MiB in memory that nobody has touched. Filling 256 MiB is 3 times as fast then, and
    giving them back, which whoever drops the result does on the loop's thread, takes 1 ms in place of 20."""
    if sys.platform == "linux":
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # Advice: a kernel without such pages says no, and all is as it was.
        _c_library().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def host_memory_ran_out(nbytes: int, hint: str, operation: str | None = None) -> OutOfMemory:
    """The error for ``nbytes`` of host memory that the system refused. The device's figures would mislead in it."""
    return OutOfMemory(
        f"host memory ran out, not the device's: {nbytes:,} bytes could not be had",
        requested_bytes=nbytes,
        operation=operation,
        hint=hint,
    )
