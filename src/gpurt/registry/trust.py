"""Whether a file of state is believed: only where nobody but this user and root can have written it.

A registry says which devices need not be probed, a promise file whom a node obeys, a roster who may speak. Where
another user can plant such a file, that user decides.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpurt.errors import UntrustedFile


def check_trusted(path: Path, descriptor: int | None = None) -> None:
    """Windows' rights are not looked at. Root believes root's files, and under ``sudo`` those of the user who said it.

    A directory that others can write is accepted where it is sticky, as ``/tmp`` is: there a file stays its owner's. A
    group may write where it is the user's own, which has the user's number.

    Args:
        descriptor: of the open file, so that what is checked is what is read.

    Raises:
        UntrustedFile: somebody else owns the file, its directory, or a symbolic link to it, or can write one of them.
        OSError: it is not there.
    """
    if os.name == "nt":
        return
    real = path.resolve()
    _check(path, "file", os.stat(path) if descriptor is None else os.fstat(descriptor))
    for folder in dict.fromkeys((path.parent, real.parent)):
        _check(path, f"directory {folder}", folder.stat())
    if path.is_symlink():
        owner = path.lstat().st_uid
        if owner not in _trusted():
            raise _refused(path, "symbolic link", owner, path.lstat().st_mode, "is owned by another user")


def _check(path: Path, what: str, status: os.stat_result) -> None:
    mode = status.st_mode
    if status.st_uid not in _trusted():
        raise _refused(path, what, status.st_uid, mode, "is owned by another user")
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and status.st_gid != os.geteuid()):
        raise _refused(path, what, status.st_uid, mode, "can be written by others")


def _trusted() -> set[int]:
    me = os.geteuid()
    caller = os.environ.get("SUDO_UID", "")
    return {0, me, int(caller)} if me == 0 and caller.isascii() and caller.isdecimal() else {0, me}


def _refused(path: Path, what: str, owner: int, mode: int, why: str) -> UntrustedFile:
    import pwd

    try:
        name = f"{pwd.getpwuid(owner).pw_name} ({owner})"
    except KeyError:
        name = str(owner)
    its = "the" if what == "file" else "its"
    return UntrustedFile(
        f"{path} is not believed: {its} {what} {why} (owner {name}, mode {stat.S_IMODE(mode):04o})",
        hint=f"look at what it says; then chown it to user {os.geteuid()} and chmod go-w, or remove it",
    )
