"""Which file a path led to when it was opened, and names of files for messages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, cast

from gpurt.errors import OutOfRange

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
