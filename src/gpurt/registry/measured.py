"""The part of the registry file that holds measurements: ``tuning``, ``calibration`` and ``topology``.

Backends and measurements write here without knowing what else discovery keeps in the file; everything else in it
stays as it is. What simulated devices measure has its place in the ``simulated`` part, never beside real hardware.
Every method blocks, and is safe to call from several threads and processes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

from gpurt.errors import UntrustedFile
from gpurt.registry.file import SCHEMA_VERSION, JsonFile
from gpurt.registry.records import (
    CalibrationRecord,
    Link,
    TuningRecord,
    readable,
    utc_now,
    with_calibrations,
    with_links,
    with_tuning,
)

_Object: TypeAlias = dict[str, Any]

_log = logging.getLogger("gpurt.registry")


class MeasuredFile(JsonFile[_Object]):
    """The registry file, seen as what was measured on this host."""

    def tunings(self) -> tuple[TuningRecord, ...]:
        """The newest first; empty also where the file cannot be read."""
        return readable(TuningRecord, self._content().get("tuning"))

    def keep_tuning(self, record: TuningRecord) -> None:
        """Add it, or replace the one that it supersedes.

        Raises:
            RegistryTooNew, OSError: as :meth:`JsonFile.update`; nothing was written.
        """

        def change(data: _Object) -> None:
            data["tuning"] = _plain(with_tuning(readable(TuningRecord, data.get("tuning")), record))

        self._change(change)

    def links(self) -> tuple[Link, ...]:
        """Of real devices, then of simulated ones, each the newest first; empty also where the file cannot be read."""
        data = self._content()
        return (*_links(data), *_links(_simulated(data)))

    def keep_links(self, links: Iterable[Link]) -> None:
        """Add them; each replaces the last measurement of its ordered pair.

        Raises:
            RegistryTooNew, OSError: as :meth:`JsonFile.update`; nothing was written.
        """
        measured = tuple(links)
        real = [link for link in measured if not link.simulated]
        simulated = [link for link in measured if link.simulated]

        def change(data: _Object) -> None:
            if real:
                data["topology"] = _plain(with_links(_links(data), real))
            if simulated:
                part = _simulated(data) or _new()
                data["simulated"] = part | {"topology": _plain(with_links(_links(part), simulated))}

        if measured:
            self._change(change)

    def calibrations(self) -> tuple[CalibrationRecord, ...]:
        """Of real devices, then of simulated ones, each the newest first; empty also where the file cannot be read."""
        data = self._content()
        return (*_calibrations(data), *_calibrations(_simulated(data)))

    def keep_calibrations(self, records: Iterable[CalibrationRecord]) -> None:
        """Add them; each replaces the last one of its device and backend.

        Raises:
            RegistryTooNew, OSError: as :meth:`JsonFile.update`; nothing was written.
        """
        measured = tuple(records)
        real = [record for record in measured if not record.simulated]
        simulated = [record for record in measured if record.simulated]

        def change(data: _Object) -> None:
            if real:
                data["calibration"] = _plain(with_calibrations(_calibrations(data), real))
            if simulated:
                part = _simulated(data) or _new()
                kept = with_calibrations(_calibrations(part), simulated)
                data["simulated"] = part | {"calibration": _plain(kept)}

        if measured:
            self._change(change)

    def _content(self) -> _Object:
        # A corrupt file stays for discovery, which tells its users that it was one.
        try:
            return self.load(put_aside=False) or {}
        except UntrustedFile as exc:
            _log.warning("nothing of what was measured is used: %s", exc)
            return {}

    def _change(self, change: Callable[[_Object], None]) -> None:
        def changed(old: _Object | None) -> _Object:
            data = old or _new()
            change(data)
            return data | {"saved_at": utc_now()}

        self.update(changed)

    def _parse(self, raw: bytes, data: _Object) -> _Object:
        return data

    def _dump(self, value: _Object) -> bytes:
        return json.dumps(value).encode()


def _new() -> _Object:
    return {"schema": SCHEMA_VERSION}


def _simulated(data: _Object) -> _Object:
    part = data.get("simulated")
    return cast("_Object", part) if isinstance(part, dict) else {}


def _links(data: _Object) -> tuple[Link, ...]:
    return readable(Link, data.get("topology"))


def _calibrations(data: _Object) -> tuple[CalibrationRecord, ...]:
    return readable(CalibrationRecord, data.get("calibration"))


def _plain(models: Iterable[TuningRecord | CalibrationRecord | Link]) -> list[_Object]:
    return [model.model_dump(mode="json") for model in models]
