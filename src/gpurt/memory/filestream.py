"""Ranges of a file to a device, chunk by chunk: the file is never held whole in host memory."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import IO, Any, Final

from gpurt.driver import Driver
from gpurt.errors import OutOfRange, TransferFailed

STAGING_BYTES: Final = 16 << 20
"""Most host memory that one load takes where neither the driver reads files itself nor its memory can be addressed."""


def stream_file(
    driver: Driver,
    index: int,
    mem: Any,
    path: str,
    *,
    file_offset: int,
    size_bytes: int | None,
    mem_offset: int,
    room_bytes: int,
    chunk_bytes: int,
    wanted: Callable[[], bool],
    on_progress: Callable[[int], None],
) -> int:
    """Lane thread: copy ``path[file_offset:file_offset + size_bytes]`` to ``mem[mem_offset:]``; returns bytes.

    Args:
        size_bytes: None is to the end of the file.
        room_bytes: how much fits.
        wanted: asked before each chunk; when it says no, the load ends where it is.
        on_progress: hears the bytes done after each chunk.

    Raises:
        OutOfRange: not inside the file, or does not fit. TransferFailed: the file is unreadable, is shorter than it
            said, or was changed meanwhile.
    """
    with _open(path) as file:
        before = _status(file, path)
        if not stat.S_ISREG(before.st_mode):
            raise TransferFailed(f"{path} is not a regular file")
        size = before.st_size - file_offset if size_bytes is None else size_bytes
        if size < 0 or file_offset + size > before.st_size:
            raise OutOfRange(f"{path} has {before.st_size:,} bytes; {size:,} at {file_offset:,} are not inside")
        if size > room_bytes:
            raise OutOfRange(f"{size:,} bytes of {path} do not fit: the allocation has room for {room_bytes:,}")
        copy = _copier(driver, index, mem, path)
        done = 0
        while done < size and wanted():
            step = min(chunk_bytes, size - done)
            copy(file, file_offset + done, mem_offset + done, step)
            done += step
            on_progress(done)
        after = _status(file, path)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise TransferFailed(f"{path} was changed while it was read", hint="load it again")
    return done


def _open(path: str) -> IO[bytes]:
    try:
        with _reading(path):
            return open(path, "rb", buffering=0, opener=_open_without_waiting)
    except ValueError as exc:  # a NUL in the name, or what no file system can hold
        raise TransferFailed(f"{path!r}: {exc}") from exc


@contextmanager
def _reading(path: str) -> Generator[None]:
    """Failures of the file, and of the file only: a driver may raise OSError too, and means its device by it."""
    try:
        yield
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: str, exc: OSError) -> TransferFailed:
    return TransferFailed(f"{path}: {exc.strerror or exc}", code=exc.errno)


def _status(file: Any, path: str) -> os.stat_result:
    with _reading(path):
        return os.fstat(file.fileno())


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a FIFO would wait for a writer, for ever perhaps, before we could see that it is no regular file.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _copier(driver: Driver, index: int, mem: Any, path: str) -> Callable[[Any, int, int, int], None]:
    """How one chunk gets from the file to the device: by the driver itself, straight, or through host memory."""

    def by_driver(file: Any, file_offset: int, mem_offset: int, size: int) -> None:
        try:
            done = driver.load(index, mem, mem_offset, file.fileno(), file_offset, size)
        except OSError as exc:
            # The file's, unless the driver knows it as its own.
            if driver.classify(exc) is not None:
                raise
            raise _unreadable(path, exc) from exc
        if done != size:
            raise _short(path, file_offset + done)

    def straight(file: Any, file_offset: int, mem_offset: int, size: int) -> None:
        with driver.host_view(index, mem)[mem_offset : mem_offset + size] as view:
            _read_exactly(file, file_offset, view, path)

    if driver.capabilities.loads_files:
        return by_driver
    if driver.capabilities.host_visible:
        return straight
    # Anonymous and page-aligned; goes with this function's last reference, without a pool of its own.
    staging = memoryview(mmap.mmap(-1, STAGING_BYTES))

    def staged(file: Any, file_offset: int, mem_offset: int, size: int) -> None:
        for start in range(0, size, STAGING_BYTES):
            view = staging[: min(STAGING_BYTES, size - start)]
            _read_exactly(file, file_offset + start, view, path)
            driver.write(index, mem, mem_offset + start, view)

    return staged


def _read_exactly(file: Any, offset: int, view: memoryview, path: str) -> None:
    done = 0
    with _reading(path):
        file.seek(offset)
        while done < len(view):
            got = file.readinto(view[done:])  # releases the GIL
            if not got:
                raise _short(path, offset + done)
            done += got


def _short(path: str, at: int) -> TransferFailed:
    return TransferFailed(f"{path} ended at byte {at:,}: it became shorter while it was read", hint="load it again")
