"""Device nodes of a host, as a table: a recording cannot have them, because a copy of one would be the device."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gpurt.discovery.line import ProbeLine
from gpurt.errors import GPUError, ReasonCode
from gpurt.sources.device_nodes import may_open
from gpurt.types import GPUDevice

PATTERNS: Final = (
    "dev/nvidia*",
    "dev/nvidia-caps/*",
    "dev/kfd",
    "dev/dri/*",
    "dev/accel/*",
    "dev/dxg",
    "dev/mali*",
    "dev/kgsl-*",
)
"""Nodes that drivers of accelerators open, relative to the root."""


class Node(BaseModel):
    """One node. ``path`` is relative to the root of the file tree."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    kind: str
    """``char block dir file other``."""
    mode: str
    """Octal, ``0660``."""
    uid: int
    gid: int
    group: str | None = None
    """Name of the group, where it has one here."""
    major: int | None = None
    minor: int | None = None
    may_open: bool
    """Whether this process may read and write it."""


def list_nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """Nodes of accelerators below ``root``, and whether this process may open them. Opens none. Blocking."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern)}
    nodes: list[Node] = []
    for path in sorted(found):
        try:
            status = path.stat()
        except OSError:
            continue  # a link that leads nowhere, or gone meanwhile
        kind = _kind(status.st_mode)
        if kind == "dir":
            continue
        nodes.append(
            Node(
                path=path.relative_to(root).as_posix(),
                kind=kind,
                mode=f"{stat.S_IMODE(status.st_mode):04o}",
                uid=status.st_uid,
                gid=status.st_gid,
                group=_group(status.st_gid),
                major=os.major(status.st_rdev) if kind == "char" and hasattr(os, "major") else None,
                minor=os.minor(status.st_rdev) if kind == "char" and hasattr(os, "minor") else None,
                may_open=may_open(path),
            )
        )
    return tuple(nodes)


def read_nodes(content: Mapping[str, Any]) -> tuple[Node, ...]:
    """``nodes.json`` of a recording.

    Raises:
        GPUError: an entry cannot be understood.
    """
    try:
        return tuple(Node.model_validate(entry) for entry in content.get("nodes", ()))
    except (ValidationError, TypeError) as exc:
        raise GPUError(f"nodes.json cannot be understood: {exc}") from exc


def with_recorded_access(line: ProbeLine, root: Path, nodes: Sequence[Node]) -> ProbeLine:
    """``line`` as the recorded process saw it: a plain file in place of a node opens for everybody."""
    closed = {node.path: node for node in nodes if not node.may_open}
    if not closed or not any(device.vendor in ("amd", "intel") for device in line.devices):
        return line
    refused = _refused(root, closed)
    devices = tuple(_inaccessible(device, refused) for device in line.devices)
    first = next((refused[place] for device in devices if (place := _place(device)) in refused), None)
    if first is None:
        return line
    update: dict[str, Any] = {"devices": devices}
    if all(_place(device) in refused for device in devices):
        update |= {"reason": ReasonCode.NO_PERMISSION, "message": first}
    return line.model_copy(update=update)


_Place = tuple[str | None, str | None]


def _refused(root: Path, closed: Mapping[str, Node]) -> dict[_Place, str]:
    """Why, of each device that the recorded process could not open, by its address and partition."""
    from gpurt.sources.amd import read_amd
    from gpurt.sources.intel import read_intel

    def may(path: Path) -> bool:
        return path.relative_to(root).as_posix() not in closed

    accesses = {(device.pci_address, device.partition): device.access for device in read_amd(root, may).devices}
    accesses |= {(device.pci_address, None): device.access for device in read_intel(root, may).devices}
    return {
        place: _why(closed[access.path.lstrip("/")])
        for place, access in accesses.items()
        if access.reason is ReasonCode.NO_PERMISSION
    }


def _why(node: Node) -> str:
    return (
        f"the recorded process may not open /{node.path} (mode {node.mode}, group id {node.gid}): add its user to that "
        f"group, or start the container with --group-add {node.gid}"
    )


def _inaccessible(device: GPUDevice, refused: Mapping[_Place, str]) -> GPUDevice:
    why = refused.get(_place(device))
    if why is None:
        return device
    reason = f"{ReasonCode.NO_PERMISSION}: inaccessible: {why}"
    return device.model_copy(update={"usable": False, "state_reason": reason})


def _place(device: GPUDevice) -> _Place:
    identity = device.identity
    return (identity.pci_address, identity.partition) if identity else (None, None)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISCHR, "char"), (stat.S_ISBLK, "block"), (stat.S_ISDIR, "dir"), (stat.S_ISREG, "file"))
    return next((name for test, name in kinds if test(mode)), "other")


def _group(gid: int) -> str | None:
    try:
        import grp
    except ImportError:  # Windows
        return None
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return None
