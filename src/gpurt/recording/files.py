"""The files that readers read, copied out of /sys, /proc, /dev and /etc as plain files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpurt.recording.mask import Masker
from gpurt.recording.nodes import Node

FAMILIES: Final = ("nvml", "amd", "intel", "host", "vulkan", "opencl", "dxgi", "apple")
"""Whose files are copied: names of :func:`gpurt.discovery.sight.paths_of`."""
MAX_FILE_BYTES: Final = 1 << 20
"""As much as the readers read of one file."""
MAX_FILES: Final = 10_000
"""A host with eight GPUs and 128 CPUs has a tenth of that."""
MAX_TOTAL_BYTES: Final = 32 << 20

_EXTRA: Final = ("etc/os-release", "sys/module/nvidia/version", "sys/module/amdgpu/srcversion", "proc/modules")
"""Not read by discovery; people who read a recording ask for them."""
_NOT_COPIED: Final = frozenset({"etc/machine-id"})
"""Confidential (machine-id(5)): another is in its place."""
_CGROUPS: Final = "sys/fs/cgroup/**/"


@dataclass(slots=True)
class Files:
    """What was read, by path below the root."""

    contents: dict[str, str] = field(default_factory=dict[str, str])
    directories: set[str] = field(default_factory=set[str])
    """Those that tell something by being there."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Path → why. Files that this process may not read are part of what discovery saw."""


def read_files(source: Path = Path("/")) -> Files:
    """The files of every reader below ``source``. Blocking; raises nothing for what is there."""
    files = Files()
    nbytes = 0
    for path in sorted(set(_listed(source))):
        name = path.relative_to(source).as_posix()
        if name in _NOT_COPIED or name.startswith("dev/"):
            continue
        if len(files.contents) >= MAX_FILES or nbytes >= MAX_TOTAL_BYTES:
            files.left_out["…"] = f"more than {MAX_FILES} files or {MAX_TOTAL_BYTES >> 20} MiB"
            break
        if path.is_dir():
            # A link to a driver's directory is left out: the text in uevent says the same.
            if not path.is_symlink():
                files.directories.add(name)
            continue
        try:
            files.contents[name] = _read(path, name)
        except OSError as exc:
            files.left_out[name] = exc.strerror or str(exc)
            continue
        nbytes += len(files.contents[name])
    return files


def write_files(files: Files, target: Path, masker: Masker | None) -> None:
    """Write them below ``target``. Blocking.

    Args:
        masker: has learned everything already.

    Raises:
        OSError: ``target`` cannot be written.
    """
    for name in files.directories:
        (target / (masker.name(name) if masker else name)).mkdir(parents=True, exist_ok=True)
    for name, text in files.contents.items():
        copy = target / (masker.name(name) if masker else name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((masker.text(text) if masker else text).encode("utf-8", "surrogateescape"))


def make_stand_ins(nodes: tuple[Node, ...], target: Path) -> None:
    """Empty plain files in the places of device nodes, so that readers find that they are there.

    Raises:
        OSError: ``target`` cannot be written.
    """
    for node in nodes:
        stand_in = target / node.path
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.touch()


def _listed(source: Path) -> Iterator[Path]:
    from gpurt.discovery.sight import paths_of

    for family in FAMILIES:
        for pattern in paths_of(family):
            if pattern.startswith(_CGROUPS):
                # Of the whole tree only the groups that this process is in: others are none of our business.
                for group in _groups(source):
                    yield from group.glob(pattern.removeprefix(_CGROUPS))
            else:
                yield from source.glob(pattern)
    for name in _EXTRA:
        yield from source.glob(name)


def _groups(source: Path) -> set[Path]:
    from gpurt.sources.host_cgroup import cgroup_levels
    from gpurt.sources.host_files import HostFiles

    files = HostFiles(source)
    return {group for name in ("memory", "cpu", "cpuset") for group, _ in cgroup_levels(source, name, files)}


def _read(path: Path, name: str) -> str:
    # A named pipe would wait for a writer without end.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
    if name == "proc/self/mountinfo":
        # Mounts of file systems name servers, users and projects; nobody reads more than the control groups.
        text = "".join(line for line in text.splitlines(keepends=True) if " - cgroup" in line)
    return text
