"""This process's control groups: where they are, and what limits they set. Versions 1 and 2, hybrid and nested.

On a hybrid system a controller lives in one of the two hierarchies; files of the other do not exist, and what does not
exist is no limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gpurt.sources import host_files
from gpurt.sources.host_files import HostFiles
from gpurt.sources.sysfs import parse_number

_LONGEST_PATH: Final = 4096  # PATH_MAX of Linux
_UNLIMITED: Final = 2**63 - 2**16
"""Version 1 writes "no limit" as the largest number of pages times their size, and pages have at most 64 KiB."""

_OCTAL = re.compile(r"\\([0-7]{3})")
Version = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of one level. Bytes."""

    path: Path
    limit_bytes: int
    usage_bytes: int | None
    """Of all processes in it; None where it is not told."""
    reclaimable_bytes: int
    """Page cache in it that the kernel frees before it refuses."""

    @property
    def headroom_bytes(self) -> int:
        """The most that may still be allocated: all of it, where the usage is not told."""
        return max(0, self.limit_bytes - max(0, (self.usage_bytes or 0) - self.reclaimable_bytes))


@dataclass(frozen=True, slots=True)
class _Mount:
    version: Version
    controllers: frozenset[str]
    root: str
    """Which group lies at the mount point."""
    point: Path


def memory_limits(root: Path, files: HostFiles) -> tuple[MemoryLimit, ...]:
    """Every limit on memory that this process is under, innermost first.

    A limit is always told with the usage of its own level: a parent's usage counts siblings, too.
    """
    limits: list[MemoryLimit] = []
    for group, version in cgroup_levels(root, "memory", files):
        limit = _limit(files, group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        stat = _Stat(files, group / "memory.stat")
        if version == 1:
            # Of all levels above, those included that a container does not see.
            above = stat.number("hierarchical_memory_limit")
            above = None if above is None or above >= _UNLIMITED else above
            limit = min((value for value in (limit, above) if value is not None), default=None)
        if limit is None:
            continue
        usage = files.number(group / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        cache = stat.number("inactive_file" if version == 2 else "total_inactive_file") or 0
        limits.append(MemoryLimit(group, limit, usage, cache))
    return tuple(limits)


def cpu_quota(root: Path, files: HostFiles) -> float | None:
    """The smallest share of CPU time that a level grants, in CPUs; None without a limit."""
    quotas: list[float] = []
    for group, version in cgroup_levels(root, "cpu", files):
        if version == 2:
            path = group / "cpu.max"
            text = files.text(path)
            if text is None:
                continue
            quota_text, _, period_text = text.partition(" ")
            quota, period = _share(quota_text), parse_number(period_text.strip())
            sound = quota is not None and period is not None
        else:
            path = group / "cpu.cfs_quota_us"
            text = files.text(path)
            if text is None:
                continue
            quota, period = _share(text), files.number(group / "cpu.cfs_period_us")
            sound = quota is not None
        if not sound or quota == 0 or period == 0:
            files.not_a(path, "quota", text)
        elif quota is not None and quota > 0 and period is not None:
            quotas.append(quota / period)
    return min(quotas, default=None)


def cpuset(root: Path, files: HostFiles) -> frozenset[int] | None:
    """The CPUs that this process's group may use; None where nothing tells."""
    for group, version in cgroup_levels(root, "cpuset", files):
        names = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        for name in names:
            cpus = files.cpus(group / name)
            if cpus:  # an empty one has not been set up: the level above decides
                return cpus
    return None


def cgroup_levels(root: Path, controller: str, files: HostFiles) -> Iterator[tuple[Path, Version]]:
    """Directories of this process's groups for ``controller``, innermost first, each with its version."""
    mounts = _mounts(root, files)
    source = root / "proc/self/cgroup"
    for line in (files.text(source) or "").splitlines():
        number, _, rest = line.partition(":")
        listed, colon, path = rest.partition(":")
        if not colon or not number.isdecimal() or not path.startswith("/") or len(path) > _LONGEST_PATH:
            files.not_a(source, "group", line)
            continue
        if listed and controller not in listed.split(","):
            continue
        version: Version = 1 if listed else 2
        for directory in _levels(root, mounts, version, controller, path, listed):
            yield directory, version


def _levels(
    root: Path, mounts: tuple[_Mount, ...], version: Version, controller: str, path: str, listed: str
) -> Iterator[Path]:
    fitting = [
        mount for mount in mounts if mount.version == version and (version == 2 or controller in mount.controllers)
    ]
    # The mount that shows most levels above ours is the best of several.
    for mount in sorted(fitting, key=lambda mount: len(mount.root)):
        inner = _below(path, mount.root)
        if inner is not None:
            yield from _walk(mount.point, inner)
            return
    base = root / "sys/fs/cgroup"
    points = [mount.point for mount in fitting] or (
        [base, base / "unified"] if version == 2 else [base / listed, base / controller]
    )
    # A path outside of what the mount shows is the host's name for a group of a container: none of its directories
    # exists here, and the walk ends at the mount point, which is our own group.
    for point in dict.fromkeys(points):
        yield from _walk(point, path)


def _walk(point: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        directory = point.joinpath(*parts[:depth])
        if host_files.is_directory(directory):
            yield directory


def _below(path: str, top: str) -> str | None:
    """``path`` as seen from ``top``, or None if it is not in it."""
    if top == "/":
        return path
    return path[len(top) :] if path == top or path.startswith(f"{top}/") else None


def _mounts(root: Path, files: HostFiles) -> tuple[_Mount, ...]:
    """Where the hierarchies are mounted, by proc(5) ``/proc/[pid]/mountinfo``; none where that is not told."""
    mounts: list[_Mount] = []
    for line in (files.text(root / "proc/self/mountinfo") or "").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        point = [part for part in _unescaped(fields[4]).split("/") if part not in ("", ".", "..")]
        mounts.append(
            _Mount(
                2 if kind[0] == "cgroup2" else 1,
                frozenset(kind[2].split(",")),
                _unescaped(fields[3]),
                root.joinpath(*point),
            )
        )
    return tuple(mounts)


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


class _Stat:
    """``memory.stat``, read when it is first asked."""

    def __init__(self, files: HostFiles, path: Path) -> None:
        self._files, self._path = files, path
        self._lines: dict[str, str] | None = None

    def number(self, key: str) -> int | None:
        if self._lines is None:
            text = self._files.text(self._path) or ""
            self._lines = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        text = self._lines.get(key)
        value = None if text is None else parse_number(text.strip())
        if text is not None and (value is None or value < 0):
            self._files.not_a(self._path, f"number of {key}", text)
            return None
        return value


def _limit(files: HostFiles, path: Path) -> int | None:
    """A limit in bytes, or None for the ways to write "unlimited": ``max``, -1, and the largest page-aligned number."""
    text = files.text(path)
    if text is None or text == "max":
        return None
    value = parse_number(text)
    if value is None or value < -1:
        files.not_a(path, "limit", text)
        return None
    return value if 0 <= value < _UNLIMITED else None


def _share(text: str) -> int | None:
    """Microseconds of CPU time, or -1 for "unlimited"; None for anything else."""
    text = text.strip()
    value = -1 if text == "max" else parse_number(text)
    return None if value is None or value < -1 else value
