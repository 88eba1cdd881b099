"""The registry: what discovery knows, in one JSON file that survives crashes, other processes and full disks.

A save writes a file of unique name, flushes it to the disk and renames it over the old one, under a lock; the old
one stays as ``registry.json.bak``. A reader sees one whole version at any moment. A file that cannot be read is
evidence: it is moved to ``registry.json.corrupt-<time>``, never overwritten. A file of a newer gpurt is left alone.

Every method blocks and is safe to call from several threads and processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gpurt.discovery.remembered import Remembered
from gpurt.discovery.result import SCHEMA_VERSION, DiscoveryStatus, utc_now
from gpurt.errors import GPUError
from gpurt.types import BackendReport, GPUDevice

MAX_FILE_BYTES: Final = 16 << 20
"""Larger is not ours: 1,000 devices take 2 MiB."""
LOCK_TIMEOUT_S: Final = 5.0
"""A save takes milliseconds; who holds the lock for longer is stopped or on a dead file system."""

_log = logging.getLogger("gpurt.discovery.registry")


class Attempts(BaseModel):
    """How often in a row a backend could not be used, and when to look again."""

    model_config = ConfigDict(frozen=True)

    failures: int = Field(ge=1)
    retry_at: float
    """Unix time. Only a hint across processes: readers bound it, so a clock that jumped cannot block for ever."""
    mark: str | None = None
    """What was installed for it then; with anything else it is asked at once."""


class RegistryDocument(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    epoch: int = 0
    saved_at: str = Field(default_factory=utc_now)
    timestamp: str = Field(default_factory=utc_now)
    backend_name: str | None = None
    discovery_status: DiscoveryStatus = "complete"
    devices: tuple[GPUDevice, ...] = ()
    reports: tuple[BackendReport, ...] = ()
    verified: tuple[str, ...] = ()
    """Keys of passed verifications (:func:`gpurt.discovery.verify.verification_key`)."""
    remembered: Mapping[str, tuple[Remembered, ...]] = Field(default_factory=dict)
    """Verified answers by backend, the newest first. An entry that does not validate is as if it were not there: it
    saves time and nothing else, so it must not cost the rest of the file."""
    attempts: Mapping[str, Attempts] = Field(default_factory=dict)
    """Backends that could not be used, by name."""
    simulated: RegistryDocument | None = None
    """What services of simulated devices remember. Apart, so that it is never taken for this host's hardware."""

    @property
    def discovered(self) -> bool:
        """Whether a discovery was ever written: every one has a report, also one that found nothing."""
        return bool(self.reports)

    @field_validator("remembered", mode="before")
    @classmethod
    def _readable(cls, value: Any) -> dict[str, tuple[Remembered, ...]]:
        return {name: _readable(entries) for name, entries in _items(value) if isinstance(name, str)}


class RegistryTooNew(GPUError):
    """The file was written by a newer gpurt, which may have kept things in it that we would destroy."""


class _Corrupt(Exception):
    pass


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(cast("dict[Any, Any]", value).items()) if isinstance(value, dict) else []


def _readable(entries: Any) -> tuple[Remembered, ...]:
    found: list[Remembered] = []
    for entry in cast("list[Any]", entries) if isinstance(entries, list | tuple) else ():
        try:
            found.append(Remembered.model_validate(entry))
        except ValidationError as exc:
            _log.info("a remembered answer is ignored: %s", exc.errors()[0]["msg"])
    return tuple(found)


def default_registry_path() -> Path:
    """``registry.json`` in the user's state directory for gpurt (``~/.local/state/gpurt`` on Linux)."""
    from platformdirs import user_state_path

    return user_state_path("gpurt") / "registry.json"


class RegistryFile:
    """One registry file.

    Args:
        path: the file; None is :func:`default_registry_path`. Nothing is touched before the first call.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_registry_path() if path is None else Path(path)
        self.quarantined: Path | None = None
        """Where the last corrupt file of this instance went."""

    @property
    def backup_path(self) -> Path:
        """The last good copy before the present one."""
        return self.path.with_name(self.path.name + ".bak")

    def load(self) -> RegistryDocument | None:
        """The document; None when there is none, or none that can be read. Never raises for what is in the file."""
        try:
            return self._read(self.path)
        except FileNotFoundError:
            return None
        except RegistryTooNew as exc:
            _log.warning("%s", exc)
            return None
        except OSError as exc:
            _log.warning("registry %s cannot be read: %s", self.path, exc)
            return None
        except _Corrupt:
            return self._recover()

    def save(self, document: RegistryDocument) -> RegistryDocument:
        """Replace the file's content; returns what was written. The stored epoch never decreases.

        Raises:
            RegistryTooNew: the file is of a newer schema; it is unchanged.
            OSError: no permission, disk full, lock not granted; the file is unchanged.
        """
        return self.update(lambda _: document)

    def update(self, change: Callable[[RegistryDocument | None], RegistryDocument]) -> RegistryDocument:
        """Replace the content by ``change(content)`` while no other process can write.

        Raises:
            RegistryTooNew, OSError: as ``save``. Of the directories only the last is made, but for the user's state
                directory, which is.
        """
        self._make_directory()
        with self._locked():
            try:
                old = self._read(self.path)
            except FileNotFoundError:
                old = None
            except _Corrupt:
                old = self._quarantine_and_fall_back()
            new = change(old)
            if old is not None and old.epoch > new.epoch:
                new = new.model_copy(update={"epoch": old.epoch})
            new = new.model_copy(update={"saved_at": utc_now()})
            self._replace(json.dumps(new.model_dump(mode="json", by_alias=True), allow_nan=False).encode())
        return new

    def next_epoch(self) -> int:
        """A number larger than at every earlier start of a service with this registry, and store it.

        Where nothing is stored yet, or nothing can be, it is the Unix time: that grows, too.
        """

        def increment(old: RegistryDocument | None) -> RegistryDocument:
            base = old or RegistryDocument()
            return base.model_copy(update={"epoch": base.epoch + 1 if base.epoch else int(time.time())})

        try:
            return self.update(increment).epoch
        except (OSError, RegistryTooNew) as exc:
            _log.warning("the epoch could not be stored: %s", exc)
            return int(time.time())

    def _make_directory(self) -> None:
        directory = self.path.parent
        if not directory.exists():
            # A path that somebody wrote may be misspelt: no tree of directories is made for it.
            directory.mkdir(parents=self.path == default_registry_path(), exist_ok=True)

    def _read(self, path: Path) -> RegistryDocument:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise _Corrupt(f"larger than {MAX_FILE_BYTES} bytes")
        try:
            data: Any = json.loads(raw)
            version = data["schema"]
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise _Corrupt(str(exc)) from exc
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise RegistryTooNew(
                f"registry {path} has schema {version}, this gpurt knows {SCHEMA_VERSION}",
                hint="upgrade gpurt, or name another registry file",
            )
        try:
            # JSON mode: a tuple may come as a list, but "1" is no integer.
            return RegistryDocument.model_validate_json(raw, strict=True)
        except ValidationError as exc:
            raise _Corrupt(str(exc)) from exc

    def _recover(self) -> RegistryDocument | None:
        try:
            with self._locked():
                try:
                    # Another process may have repaired it while we waited.
                    return self._read(self.path)
                except FileNotFoundError:
                    return self._last_good()
                except _Corrupt:
                    return self._quarantine_and_fall_back()
        except (OSError, RegistryTooNew) as exc:
            _log.warning("registry %s is corrupt and could not be put aside: %s", self.path, exc)
            return self._last_good()

    def _quarantine_and_fall_back(self) -> RegistryDocument | None:
        """Under the lock: put the corrupt file aside, once, with a warning."""
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{time.time_ns() % 1_000_000_000:09d}"
        aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
        os.replace(self.path, aside)
        self.quarantined = aside
        document = self._last_good()
        _log.warning(
            "registry %s was corrupt; moved to %s, %s",
            self.path,
            aside,
            "starting empty" if document is None else "using the last good copy",
        )
        return document

    def _last_good(self) -> RegistryDocument | None:
        try:
            return self._read(self.backup_path)
        except (OSError, _Corrupt, RegistryTooNew):
            return None

    @contextlib.contextmanager
    def _locked(self) -> Any:
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
