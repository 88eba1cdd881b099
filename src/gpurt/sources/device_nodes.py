"""Whether this process may open the device nodes that a driver library needs. Opens none of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpurt.errors import ReasonCode


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """One node below ``/dev``. ``reason`` is None exactly when it can be opened for reading and writing."""

    path: str
    reason: ReasonCode | None = None
    message: str = ""
    """What is wrong, and the number of the group that helps."""
    group: int | None = None
    """Numeric id of the group that owns the node: names differ between a host and its containers."""


def may_open(path: Path) -> bool:
    """Whether permissions and access lists let this process read and write ``path``. Does not open it.

    Opening would wake a card that sleeps, and ``/dev/kfd`` makes a process object in the kernel.
    """
    effective = os.access in os.supports_effective_ids
    return os.access(path, os.R_OK | os.W_OK, effective_ids=effective)


def check_node(root: Path, name: str, may: Callable[[Path], bool] = may_open) -> NodeAccess:
    """Access to ``/<name>`` below ``root``, e.g. ``dev/dri/renderD128``. ``may`` answers for the process."""
    path = root / name
    shown = f"/{name}"
    try:
        status = path.stat()
    except FileNotFoundError:
        return NodeAccess(
            shown, ReasonCode.NO_DRIVER, f"there is no {shown}: the driver is not loaded, or a container hides it"
        )
    except OSError as exc:
        return NodeAccess(shown, ReasonCode.ERROR, f"{shown}: {exc.strerror or exc}")
    if may(path):
        return NodeAccess(shown, group=status.st_gid)
    owner = f"mode {status.st_mode & 0o777:04o}, group id {status.st_gid}"
    message = (
        f"this process may not open {shown} ({owner}): add its user to that group, or start the container with "
        f"--group-add {status.st_gid}"
    )
    return NodeAccess(shown, ReasonCode.NO_PERMISSION, message, status.st_gid)
