"""Small files of ``/sys``, read one by one: each gives a value, or None and the reason.

Reasons are those of :class:`gpurt.types.Telemetry`: ``unsupported`` (there is no such file, or the driver does not
implement it), ``no_permission``, ``invalid`` (it cannot be what it says it is), ``error`` (anything else).
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LARGEST: Final = 1 << 20
"""Bytes. The kernel's own files of this kind end at one page; tables of names are larger."""

_PAGE: Final = 1 << 16
# A named pipe in a recorded tree would wait for a writer without end.
_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")

# What drivers return for a sensor that this device does not have.
_NOT_THERE: Final = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENODEV,
        errno.ENXIO,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.EINVAL,
        errno.ENODATA,
    }
)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that might have been a device and is not listed as one."""

    where: str
    """Path below the root, or PCI address."""
    why: str
    """For people."""


class SysfsReader:
    """Reads files and keeps, by field name, why a field stays empty. Blocking; for one thread.

    A field may be asked of several files in turn: the first value clears the reasons of the tries before it, and the
    most telling reason stays when there is none ("you may not read it" tells more than "there is no such file").
    """

    def __init__(self) -> None:
        self.unavailable: dict[str, str] = {}

    def text(self, field: str, path: Path) -> str | None:
        """The stripped text of a file. An empty file says nothing: None."""
        text, reason = read(path)
        if text:
            self.unavailable.pop(field, None)
            return text
        self.missing(field, reason or "unsupported")
        return None

    def number(self, field: str, path: Path, low: int, high: int) -> int | None:
        """A decimal or ``0x`` number within ``low`` and ``high``; what is not between them is no value."""
        text = self.text(field, path)
        return None if text is None else self.checked(field, parse_number(text), low, high)

    def checked(self, field: str, value: int | None, low: int, high: int) -> int | None:
        """``value`` if it is possible at all, else None with reason ``invalid``."""
        if value is None or not low <= value <= high:
            self.missing(field, "invalid")
            return None
        return value

    def missing(self, field: str, reason: str) -> None:
        """Notes why a field is empty, unless something more telling is known."""
        if self.unavailable.get(field, "unsupported") == "unsupported":
            self.unavailable[field] = reason


def read(path: Path) -> tuple[str | None, str | None]:
    """``(text, None)``, or ``(None, reason)``. Bytes that are no text become replacement characters."""
    try:
        file = os.open(path, _FLAGS)
        try:
            content = os.read(file, _PAGE)
            while (more := os.read(file, _PAGE)) and len(content) < _LARGEST:
                content += more
        finally:
            os.close(file)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in a name
        return None, reason_of(exc)
    return content.decode(errors="replace").strip("\0 \t\r\n"), None


def reason_of(exc: OSError | ValueError) -> str:
    """The reason code of a file that could not be read."""
    code = exc.errno if isinstance(exc, OSError) else None
    if code == errno.EACCES:
        return "no_permission"
    return "unsupported" if code in _NOT_THERE else "error"


def parse_number(text: str) -> int | None:
    """A decimal number or one with ``0x``; None for anything else, ``1_000`` and non-ASCII digits included."""
    if _NUMBER.fullmatch(text):
        return int(text)
    return int(text, 16) if _HEX.fullmatch(text) else None


def numbered(directory: Path, prefix: str) -> tuple[list[tuple[int, Path]], str | None]:
    """Entries ``<prefix><number>`` of a directory by number, and the reason where it cannot be listed."""
    pattern = re.compile(re.escape(prefix) + "([0-9]{1,9})")
    try:
        names = os.listdir(directory)
    except (OSError, ValueError) as exc:
        return [], reason_of(exc)
    # "card01" would be a second card1: the kernel writes no leading zeros.
    found = [
        (int(m[1]), directory / name) for name in names if (m := pattern.fullmatch(name)) and str(int(m[1])) == m[1]
    ]
    return sorted(found), None


def link_name(path: Path) -> str | None:
    """The last part of where a symbolic link leads, which is how ``/sys`` names drivers and bus addresses."""
    try:
        return os.path.basename(os.readlink(path)) or None
    except (OSError, ValueError):
        return None
