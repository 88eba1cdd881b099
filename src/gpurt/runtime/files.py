"""Ranges of a file to a device, chunk by chunk: the file is never held whole in host memory. And which file a path led
to when it was opened, so that another one is noticed."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, Final, cast

from gpurt.driver import Driver
from gpurt.errors import OutOfRange, TransferFailed

STAGING_BYTES: Final = 16 << 20
"""Most host memory that one load takes where neither the driver reads files itself nor its memory can be addressed."""


_HINTS: Final = {
    errno.ENOENT: "is the path right, and the file on this machine? a relative path begins at the working directory",
    errno.EACCES: "may the user of this process read the file and enter its folders?",
    errno.ENAMETOOLONG: "the path is longer than the file system allows",
    errno.EMFILE: "this process has too many open files: close some, or raise ulimit -n",
}
LONGEST_SHOWN: Final = 256
"""Characters of a path in a message; of longer ones, which may have thousands, the middle is left out."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What tells one version of a file from another.

    Writers can set the time of the last write back, and not that of the last change of the inode (on Windows that is
    the time of its creation, and goes for nothing). A change within one tick of the file system's clock, about 4 ms on
    Linux, after the last one goes unseen, and so does one through memory that another process has mapped, until the
    system writes it out.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    links: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileVersion:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink
        )

    def change(self, now: FileVersion) -> str | None:
        """What is different now, or None."""
        if (self.device, self.inode) != (now.device, now.inode):
            return "another file has its name"
        if self.size != now.size:
            return f"it had {self.size:,} bytes and has {now.size:,}"
        if self.mtime_ns != now.mtime_ns:
            return "it was written to"
        if self.ctime_ns != now.ctime_ns:
            return "it was written to and its time set back, or its name or its owner changed"
        return None


class OpenedFile(os.PathLike[str]):
    """A path that was opened and looked into already: who opens it again must find the same version of the file."""

    def __init__(self, path: str, version: FileVersion) -> None:
        self.path = path
        self.version = version

    def __fspath__(self) -> str:
        return self.path


def path_name(path: object) -> str:
    """The text of a path.

    Raises:
        OutOfRange: it is none.
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        return os.fsdecode(cast("str | bytes | os.PathLike[str]", path))
    raise OutOfRange(f"{type(path).__name__} is not a path", hint="pass a str or a pathlib.Path")


def brief_path(path: str) -> str:
    """Fit for a message."""
    if len(path) <= LONGEST_SHOWN:
        return path
    half = LONGEST_SHOWN // 2
    return f"{path[:half]}…{path[-half:]}"


class FileChanged(TransferFailed):
    """A file is not any more what it was when it was opened."""


def stream_file(
    driver: Driver,
    index: int,
    mem: Any,
    path: str,
    *,
    version: FileVersion | None,
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
        version: what must be found under the name; None is any file.
        size_bytes: None is to the end of the file.
        room_bytes: how much fits.
        wanted: asked before each chunk; when it says no, the load ends where it is.
        on_progress: hears the bytes done after each chunk.

    Raises:
        OutOfRange: not inside the file, or does not fit. FileChanged: it is another version of the file than
            ``version``, is shorter than it said, or was changed meanwhile. TransferFailed: it is unreadable.
    """
    name = brief_path(path)
    with _open(path) as file:
        before = _status(file, path)
        if not stat.S_ISREG(before.st_mode):
            raise TransferFailed(f"{name} is not a regular file")
        found = FileVersion.of(before)
        if version is not None and (change := version.change(found)) is not None:
            raise FileChanged(f"{name} was changed before it was read: {change}", hint="load it again")
        if not found.size:
            _check_empty(file, path)
        if file_offset > found.size:
            raise OutOfRange(f"{name} has {found.size:,} bytes; file_offset {file_offset:,} is not inside")
        size = found.size - file_offset if size_bytes is None else size_bytes
        if file_offset + size > found.size:
            raise OutOfRange(f"{name} has {found.size:,} bytes; {size:,} at {file_offset:,} are not inside")
        if size > room_bytes:
            raise OutOfRange(f"{size:,} bytes of {name} do not fit: the allocation has room for {room_bytes:,}")
        copy = _copier(driver, index, mem, path)
        done = 0
        while done < size and wanted():
            step = min(chunk_bytes, size - done)
            copy(file, file_offset + done, mem_offset + done, step)
            done += step
            on_progress(done)
        change = _changed(found, FileVersion.of(_status(file, path)))
    if change is not None:
        raise FileChanged(f"{name} was changed while it was read: {change}", hint="load it again")
    return done


def _changed(before: FileVersion, after: FileVersion) -> str | None:
    """What happened to the open file. That it lost a name, deleted or replaced by another, is no matter: it is read to
    its end all the same, and that is why its inode changed."""
    if after.links < before.links:
        after = replace(after, ctime_ns=before.ctime_ns)
    return before.change(after)


def _check_empty(file: Any, path: str) -> None:
    """Refuse files whose bytes are made while they are read: their size says nothing."""
    with _reading(path):
        some = file.read(1)
    if some:
        raise TransferFailed(
            f"{brief_path(path)} says that it has no bytes, and has some: it is no ordinary file",
            hint="files such as those in /proc must be copied first",
        )


def _open(path: str) -> IO[bytes]:
    try:
        with _reading(path):
            return open(path, "rb", buffering=0, opener=_open_without_waiting)
    except ValueError as exc:  # a NUL in the name, or what no file system can hold
        raise TransferFailed(f"{brief_path(path)!r}: {exc}") from exc


@contextmanager
def _reading(path: str) -> Generator[None]:
    """Failures of the file, and of the file only: a driver may raise OSError too, and means its device by it."""
    try:
        yield
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: str, exc: OSError) -> TransferFailed:
    return TransferFailed(
        f"{brief_path(path)}: {exc.strerror or type(exc).__name__}", code=exc.errno, hint=_HINTS.get(exc.errno or 0)
    )


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


def _short(path: str, at: int) -> FileChanged:
    return FileChanged(
        f"{brief_path(path)} ended at byte {at:,}: it became shorter while it was read", hint="load it again"
    )
