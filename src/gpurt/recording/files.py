"""The files that readers read, copied out of /sys, /proc, /dev and /etc as plain files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpurt.recording.mask import Masker
from gpurt.recording.nodes import Node
from gpurt.recording.secrets_found import is_secret

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
    groups: set[str] = field(default_factory=set[str])
    """Directories of this process's control groups."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Path → why. Files that this process may not read are part of what discovery saw."""


def read_files(source: Path = Path("/")) -> Files:
    """The files of every reader below ``source``. Blocking; raises nothing for what is there."""
    groups = _groups(source)
    files = Files(groups={group.relative_to(source).as_posix() for group in groups})
    nbytes = 0
    for path in sorted(set(_listed(source, groups))):
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
        if masker is not None:
            name, text = _masked_name(name, files.groups, masker), _masked(name, text, masker)
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(text.encode("utf-8", "surrogateescape"))


def _masked_name(name: str, groups: Set[str], masker: Masker) -> str:
    directory, slash, base = name.rpartition("/")
    return f"{masker.group(directory)}{slash}{base}" if directory in groups else masker.name(name)


def _masked(name: str, text: str, masker: Masker) -> str:
    match name:
        case "proc/self/cgroup":
            return "".join(_with_field(line, ":", (2,), masker) for line in text.splitlines(keepends=True))
        case "proc/self/mountinfo":
            return "".join(_with_field(line, " ", (3, 4), masker) for line in text.splitlines(keepends=True))
        case _ if is_secret(name.rpartition("/")[2]):
            return masker.text(text)
        case _:
            return masker.file(text)


def _with_field(line: str, separator: str, numbers: tuple[int, ...], masker: Masker) -> str:
    """One line with paths of control groups masked in fields ``numbers``, the last of which has the rest of it where
    there are no more."""
    fields = line.split(separator, 2) if separator == ":" else line.split(separator)
    return separator.join(masker.group(text) if number in numbers else text for number, text in enumerate(fields))


def make_stand_ins(nodes: tuple[Node, ...], target: Path) -> None:
    """Empty plain files in the places of device nodes, so that readers find that they are there.

    Raises:
        OSError: ``target`` cannot be written.
    """
    for node in nodes:
        stand_in = target / node.path
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.touch()


def _listed(source: Path, groups: Set[Path]) -> Iterator[Path]:
    from gpurt.discovery.sight import paths_of

    for family in FAMILIES:
        for pattern in paths_of(family):
            if pattern.startswith(_CGROUPS):
                # Of the whole tree only the groups that this process is in: others are none of our business.
                for group in groups:
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
