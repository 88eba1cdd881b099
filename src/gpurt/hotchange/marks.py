"""What the system shows of devices and their drivers without any library: compared from time to time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpurt.hotchange.cause import Cause

_NODES: Final = (
    ("dev", "nvidiactl"),
    ("dev", "nvidia[0-9]*"),
    ("dev/nvidia-caps", "nvidia-cap[0-9]*"),
    ("dev", "kfd"),
    ("dev/dri", "renderD[0-9]*"),
    ("dev/accel", "accel[0-9]*"),
    ("dev", "dxg"),
)
"""Folder and pattern. Without ``nvidia-uvm``, which the first use of CUDA makes: our own probes do."""
_VERSIONS: Final = (
    "proc/driver/nvidia/version",
    "sys/module/nvidia/version",
    "sys/module/amdgpu/srcversion",
    "sys/module/i915/srcversion",
    "sys/module/xe/srcversion",
)
_VERSION_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Marks:
    """One look."""

    nodes: frozenset[str]
    """Paths below the root, ``dev/nvidia0``."""
    versions: tuple[str | None, ...]
    """What the kernel's drivers say of themselves; None for those that are not loaded."""


def read_marks(root: Path = Path("/")) -> Marks:
    """Blocking, well under a millisecond. Never raises: what cannot be read is not there."""
    nodes = (f"{folder}/{path.name}" for folder, pattern in _NODES for path in _matching(root / folder, pattern))
    return Marks(frozenset(nodes), tuple(_version(root / file) for file in _VERSIONS))


def changes(before: Marks, after: Marks) -> frozenset[Cause]:
    """Why to look again, if at all."""
    causes: set[Cause] = set()
    if before.nodes != after.nodes:
        causes.add(Cause.NODES)
    if before.versions != after.versions:
        causes.add(Cause.DRIVER)
    return frozenset(causes)


def _matching(folder: Path, pattern: str) -> Iterable[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return ()


def _version(file: Path) -> str | None:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(_VERSION_BYTES)
    except OSError:
        return None
