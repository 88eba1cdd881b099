"""Small files of ``/proc`` and ``/sys`` about the host, with a note of each that is there and cannot be understood."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpurt.sources.sysfs import Skipped, parse_number, read, reason_of

_MOST_CPUS: Final = 1 << 16
"""Eight times what Linux can be built for. A list with larger numbers is not one of CPUs."""


class HostFiles:
    """Files below ``root``. What is not there is not told; what is there and makes no sense is in ``skipped``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.skipped: list[Skipped] = []

    def text(self, path: Path) -> str | None:
        """Text without the blanks around it; None where there is no such file, or it is empty, or may not be read."""
        text, reason = read(path)
        if reason not in (None, "unsupported"):
            self.skip(path, f"cannot be read: {reason}")
        return text or None

    def number(self, path: Path, most: int = 2**64 - 1) -> int | None:
        """A number from 0 to ``most``."""
        text = self.text(path)
        value = None if text is None else parse_number(text)
        if text is not None and (value is None or not 0 <= value <= most):
            self.not_a(path, "number", text)
            return None
        return value

    def cpus(self, path: Path) -> frozenset[int] | None:
        """A list of CPUs; an empty file is an empty list, no file is None."""
        text, reason = read(path)
        if text is None:
            if reason != "unsupported":
                self.skip(path, f"cannot be read: {reason}")
            return None
        return self.cpu_list(path, text)

    def cpu_list(self, path: Path, text: str) -> frozenset[int] | None:
        """``text``, found in ``path``, as a list of CPUs."""
        cpus = parse_cpu_list(text)
        if cpus is None:
            self.not_a(path, "list of CPUs", text)
        return cpus

    def fields(self, path: Path) -> Mapping[str, str]:
        """``key: value`` lines up to the first blank line, keys in lower case."""
        return first_block(self.text(path) or "")

    def names(self, directory: Path) -> list[str]:
        """What is in a directory, sorted; nothing where there is none."""
        names, reason = listed(directory)
        if reason not in (None, "unsupported"):
            self.skip(directory, f"cannot be listed: {reason}")
        return names

    def not_a(self, path: Path, what: str, text: str) -> None:
        """Notes that ``text`` in ``path`` is not what it should be."""
        self.skip(path, f"not a {what}: {text[:40]!r}")

    def skip(self, path: Path, why: str) -> None:
        try:
            where = str(path.relative_to(self._root))
        except ValueError:
            where = str(path)
        self.skipped.append(Skipped(where, why))


def listed(directory: Path) -> tuple[list[str], str | None]:
    """Names in a directory, sorted, and the reason where it cannot be listed."""
    try:
        return sorted(os.listdir(directory)), None
    except (OSError, ValueError) as exc:
        return [], reason_of(exc)


def is_directory(path: Path) -> bool:
    """Also for names that no file system takes, for which ``Path.is_dir`` raises."""
    return os.path.isdir(path)


def first_block(text: str) -> dict[str, str]:
    """``key: value`` lines up to the first line that is none, keys in lower case. The first of equal keys counts."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            break
        fields.setdefault(key.strip().lower(), value.strip())
    return fields


def kibibytes(text: str | None) -> int | None:
    """``1024 kB`` in bytes, or None for anything else."""
    words = (text or "").split()
    value = parse_number(words[0]) if words and words[1:] in (["kB"], []) else None
    return value * 1024 if value is not None and 0 <= value < 2**53 else None


def parse_cpu_list(text: str) -> frozenset[int] | None:
    """``0-3,8,12-13`` as numbers (cpuset(7), "List format"); None for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.strip().partition("-")
        low, high = parse_number(first), parse_number(last if dash else first)
        if low is None or high is None or not 0 <= low <= high < _MOST_CPUS:
            return None
        cpus.update(range(low, high + 1))
    return frozenset(cpus)
