"""One JSON object in a file that survives crashes, other processes and full disks.

A save writes a file of unique name, flushes it to the disk and renames it over the old one, under a lock; the old
one stays as ``registry.json.bak``. A reader sees one whole version at any moment. A file that cannot be read is
evidence: it is moved to ``registry.json.corrupt-<time>``, never overwritten. Only what is no JSON object, or has no
schema, is such a file. One of a newer schema is left alone.

Every method blocks and is safe to call from several threads and processes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from pydantic import BaseModel

from gpurt.errors import GPUError, UntrustedFile
from gpurt.registry.newer import Reading, Records, Unreadable
from gpurt.registry.trust import check_trusted

M = TypeVar("M", bound=BaseModel)

SCHEMA_VERSION: Final = 1
"""``schema`` of the object. New sections, fields, words and records need no new one: they are kept."""
MAX_FILE_BYTES: Final = 16 << 20
"""Larger is not ours: 1,000 devices take 2 MiB."""
LOCK_TIMEOUT_S: Final = 5.0
"""A save takes milliseconds; who holds the lock for longer is stopped or on a dead file system."""

_log = logging.getLogger("gpurt.registry")


class RegistryTooNew(GPUError):
    """The file was written by a newer gpurt, which may have kept things in it that we would destroy."""


class CorruptRegistry(Exception):
    """The file is not what this gpurt, or any, has written. Stays inside :class:`JsonFile`."""


def default_registry_path() -> Path:
    """``registry.json`` in the user's state directory for gpurt (``~/.local/state/gpurt`` on Linux)."""
    from platformdirs import user_state_path

    return user_state_path("gpurt") / "registry.json"


class JsonFile(Generic[M]):
    """The file as values of ``M``. Whoever has the file open as another type sees the same versions and locks.

    What a newer gpurt has put in it stays there, whatever is written: see :mod:`gpurt.registry.newer`.

    Args:
        path: the file; None is :func:`default_registry_path`. Nothing is touched before the first call.
    """

    MODEL: type[M]
    RECORDS: ClassVar[Records] = {}
    NESTED: ClassVar[str] = "simulated"
    """The member that is a document of its own."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_registry_path() if path is None else Path(path)
        self.quarantined: Path | None = None
        """Where the last corrupt file of this instance went."""

    @property
    def backup_path(self) -> Path:
        """The last good copy before the present one."""
        return self.path.with_name(self.path.name + ".bak")

    def load(self, *, put_aside: bool = True) -> M | None:
        """The content; None when there is none, or none that can be read. Never raises for what is in the file.

        Records and fields that are not understood are left out, with a line in the log for each.
        Of a corrupt file it is the last good copy. The file is put aside, unless that is left to somebody else.

        Raises:
            UntrustedFile: another user can have written it.
        """
        reading = self._load(put_aside=put_aside)
        return None if reading is None else cast("M", reading.value)

    def _load(self, *, put_aside: bool) -> Reading | None:
        try:
            return self._read(self.path)
        except FileNotFoundError:
            return None
        except RegistryTooNew as exc:
            _log.warning("%s", exc)
            return None
        except UntrustedFile:
            raise
        except OSError as exc:
            _log.warning("registry %s cannot be read: %s", self.path, exc)
            return None
        except CorruptRegistry:
            return self._recover() if put_aside else self._last_good()

    def update(self, change: Callable[[M | None], M]) -> M:
        """Replace the content by ``change(content)`` while no other process can write; returns what was written.

        Raises:
            RegistryTooNew: the file is of a newer schema; it is unchanged.
            UntrustedFile: another user can have written it; it is unchanged.
            OSError: no permission, disk full, lock not granted; the file is unchanged. Of the directories only the
                last is made, but for the user's state directory, which is.
        """
        self._make_directory()
        with self._locked():
            try:
                old = self._read(self.path)
            except FileNotFoundError:
                old = None
            except CorruptRegistry:
                old = self._quarantine_and_fall_back()
            before = None if old is None else self._plain(old.value)
            new = change(None if old is None else cast("M", old.value))
            content = self._plain(new)
            json.dumps(content, allow_nan=False)  # ours has none; what others have put there stays
            if old is not None and before is not None:
                content = old.changed(before, content)
            self._replace(json.dumps(content).encode())
        return new

    def _plain(self, value: Any) -> dict[str, Any]:
        """``value`` as JSON values: what is written where there is no file yet."""
        return cast("BaseModel", value).model_dump(mode="json", by_alias=True)

    def _make_directory(self) -> None:
        directory = self.path.parent
        if not directory.exists():
            # A path that somebody wrote may be misspelt: no tree of directories is made for it.
            directory.mkdir(parents=self.path == default_registry_path(), exist_ok=True)

    def _read(self, path: Path) -> Reading:
        # A pipe has to be opened without waiting for its other end to be seen for one.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        # Before fdopen, which leaves a directory open, and names it by its number.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with os.fdopen(descriptor, "rb") as file:
            check_trusted(path, descriptor)
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise CorruptRegistry(f"larger than {MAX_FILE_BYTES} bytes")
        try:
            data: Any = json.loads(raw)
            version = data["schema"]
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise CorruptRegistry(str(exc)) from exc
        if not isinstance(version, int) or isinstance(version, bool):
            raise CorruptRegistry(f"schema {version!r} is not a number")
        if version > SCHEMA_VERSION:
            raise RegistryTooNew(
                f"registry {path} has schema {version}, this gpurt knows {SCHEMA_VERSION}",
                hint="upgrade gpurt, or name another registry file",
            )
        try:
            return Reading(self.MODEL, data, self.RECORDS, self.NESTED, str(path))
        except Unreadable as exc:
            raise CorruptRegistry(str(exc)) from exc

    def _recover(self) -> Reading | None:
        try:
            with self._locked():
                try:
                    # Another process may have repaired it while we waited.
                    return self._read(self.path)
                except FileNotFoundError:
                    return self._last_good()
                except CorruptRegistry:
                    return self._quarantine_and_fall_back()
        except (OSError, RegistryTooNew) as exc:
            _log.warning("registry %s is corrupt and could not be put aside: %s", self.path, exc)
            return self._last_good()

    def _quarantine_and_fall_back(self) -> Reading | None:
        """Under the lock: put the corrupt file aside, once, with a warning."""
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{time.time_ns() % 1_000_000_000:09d}"
        aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
        os.replace(self.path, aside)
        self.quarantined = aside
        content = self._last_good()
        _log.warning(
            "registry %s was corrupt; moved to %s, %s",
            self.path,
            aside,
            "starting empty" if content is None else "using the last good copy",
        )
        return content

    def _last_good(self) -> Reading | None:
        try:
            return self._read(self.backup_path)
        except (OSError, CorruptRegistry, RegistryTooNew):
            return None

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(f"{self.path}.lock", mode=0o600)
        if not os.path.lexists(lock.lock_file):
            # Where no file can be made the lock may keep trying, and then another process would be blamed.
            try:
                tempfile.TemporaryFile(dir=self.path.parent).close()
            except OSError as exc:
                raise OSError(exc.errno, f"no file can be made in {self.path.parent}: {exc.strerror}") from exc
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S, poll_interval=0.005)
        except Timeout as exc:
            raise OSError(f"{self.path}.lock is held by another process for more than {LOCK_TIMEOUT_S:g} s") from exc
        try:
            yield
        finally:
            lock.release()

    def _replace(self, content: bytes) -> None:
        """Under the lock: write beside the file, flush, keep the old one as the good copy, rename."""
        prefix = f".{self.path.name}."
        for orphan in self.path.parent.glob(f"{prefix}*.tmp"):
            # We hold the lock, so its writer was killed.
            orphan.unlink(missing_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=self.path.parent)  # mode 0600
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if self.path.exists():
                self._keep_good_copy(temporary.with_suffix(".bak.tmp"))
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        _flush_directory(self.path.parent)

    def _keep_good_copy(self, temporary: Path) -> None:
        try:
            try:
                os.link(self.path, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.path, temporary)
            os.replace(temporary, self.backup_path)
        finally:
            # Renaming one name of a file over another name of it does nothing, so the first name may remain.
            temporary.unlink(missing_ok=True)


def _flush_directory(directory: Path) -> None:
    """Make the rename itself survive a power cut. Windows has no such call and flushes by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
