"""Files of keys: for their owner alone, whole or not there, and never overwritten."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gpurt.cluster.security.errors import CredentialsRefused

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """A folder beside ``target`` to fill; at the end of the block it is ``target``, whole. After an error nothing is
    left of it.

    Raises:
        CredentialsRefused: ``target`` has something in it, or cannot be made.
    """
    refused = CredentialsRefused(f"{target} exists", hint="keys are never overwritten: choose another place")
    try:
        # Early, so that nothing is made in vain; what counts is the renaming.
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise refused
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))  # 0700
    except OSError as exc:
        raise CredentialsRefused(f"cannot make {target}: {exc.strerror}") from exc
    try:
        yield staged
        _sync(staged)
        if os.name == "nt":
            with suppress(OSError):
                target.rmdir()  # an empty one; there a folder is not renamed to another
        try:
            os.rename(staged, target)
        except OSError as exc:
            raise refused from exc
        _sync(target.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def write_new(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Files that only the user may read.

    Raises:
        FileExistsError: one is there.
    """
    for name, content in contents.items():
        with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """The next version of a register, which is no key: whoever reads it has the old one or the new."""
    staged = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        write_new(staged, {path.name: content})
        os.replace(staged / path.name, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def check_private(path: Path) -> None:
    """
    Raises:
        CredentialsRefused: others than the owner may read or write ``path``. Windows' rights are not looked at.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name != "nt" and mode & _OTHERS:
        raise CredentialsRefused(
            f"{path} can be read by others (mode {mode:04o})",
            hint=f"chmod 600 {path}; if somebody may have read it, make another: gpurt cluster enrol NAME --renew",
        )


def _sync(folder: Path) -> None:
    """The names in it, onto the disk."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
