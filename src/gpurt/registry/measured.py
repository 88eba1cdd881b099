"""The part of the registry file that holds measurements: ``tuning``, ``calibration`` and ``topology``.

Backends and measurements write here without knowing what else discovery keeps in the file; everything else in it
stays as it is. What simulated devices measure has its place in the ``simulated`` part, never beside real hardware.
Every method blocks, and is safe to call from several threads and processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field

from gpurt.errors import UntrustedFile
from gpurt.registry.file import SCHEMA_VERSION, JsonFile
from gpurt.registry.newer import Records
from gpurt.registry.records import (
    CalibrationRecord,
    Link,
    TuningRecord,
    utc_now,
    with_calibrations,
    with_links,
    with_tuning,
)


class Measurements(BaseModel):
    """What was measured, of real devices or of simulated ones; each section has the newest first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    saved_at: str = Field(default_factory=utc_now)
    tuning: tuple[TuningRecord, ...] = ()
    """How copies of each device are done: measured, written and read by backends."""
    calibration: tuple[CalibrationRecord, ...] = ()
    """What devices were measured to do (:mod:`gpurt.calibration`)."""
    topology: tuple[Link, ...] = ()
    """What was measured between devices."""


_log = logging.getLogger("gpurt.registry")


class MeasuredDocument(Measurements):
    """All that was measured."""

    simulated: Measurements | None = None


MEASURED_RECORDS: Records = {
    ("tuning", "*"): lambda record: [record["device"], record["backend"], record["threads"]],
    ("calibration", "*"): lambda record: [record["device"], record["speeds"]["backend"]],
    ("topology", "*"): lambda record: [record["src"], record["dst"]],
}


class MeasuredFile(JsonFile[MeasuredDocument]):
    """The registry file, seen as what was measured on this host."""

    MODEL = MeasuredDocument
    RECORDS: ClassVar[Records] = MEASURED_RECORDS

    def tunings(self) -> tuple[TuningRecord, ...]:
        """The newest first; empty also where the file cannot be read."""
        return self._content().tuning

    def keep_tuning(self, record: TuningRecord) -> None:
        """Add it, or replace the one that it supersedes.

        Raises:
            RegistryTooNew, OSError: as :meth:`JsonFile.update`; nothing was written.
        """
        self._change(lambda old: old.model_copy(update={"tuning": with_tuning(old.tuning, record)}))

    def links(self) -> tuple[Link, ...]:
        """Of real devices, then of simulated ones, each the newest first; empty also where the file cannot be read."""
        content = self._content()
        return content.topology + (content.simulated.topology if content.simulated else ())

    def keep_links(self, links: Iterable[Link]) -> None:
        """Add them; each replaces the last measurement of its ordered pair.

        Raises:
            RegistryTooNew, OSError: as :meth:`JsonFile.update`; nothing was written.
        """
        measured = tuple(links)

        def change(part: Measurements, simulated: bool) -> Measurements:
            ours = [link for link in measured if link.simulated == simulated]
            return part.model_copy(update={"topology": with_links(part.topology, ours)}) if ours else part

        if measured:
            self._change_parts(change)

    def calibrations(self) -> tuple[CalibrationRecord, ...]:
        """Of real devices, then of simulated ones, each the newest first; empty also where the file cannot be read."""
        content = self._content()
        return content.calibration + (content.simulated.calibration if content.simulated else ())

    def keep_calibrations(self, records: Iterable[CalibrationRecord]) -> None:
        """Add them; each replaces the last one of its device and backend.

        Raises:
            RegistryTooNew, OSError: as :meth:`JsonFile.update`; nothing was written.
        """
        measured = tuple(records)

        def change(part: Measurements, simulated: bool) -> Measurements:
            ours = [record for record in measured if record.simulated == simulated]
            return part.model_copy(update={"calibration": with_calibrations(part.calibration, ours)}) if ours else part

        if measured:
            self._change_parts(change)

    def _plain(self, value: Any) -> dict[str, Any]:
        # Without sections of which nothing was measured: this is one of several who write here.
        whole = super()._plain(value)
        parts = [whole, whole["simulated"] or {}]
        for part in parts:
            for section in [section for section, content in part.items() if not content]:
                del part[section]
        return whole

    def _content(self) -> MeasuredDocument:
        # A corrupt file stays for discovery, which tells its users that it was one.
        try:
            return self.load(put_aside=False) or MeasuredDocument()
        except UntrustedFile as exc:
            _log.warning("nothing of what was measured is used: %s", exc)
            return MeasuredDocument()

    def _change_parts(self, change: Callable[[Measurements, bool], Measurements]) -> None:
        """Change the measurements of real devices, and those of simulated ones (True)."""

        def changed(old: MeasuredDocument) -> MeasuredDocument:
            simulated = change(old.simulated or Measurements(), True)
            real = cast("MeasuredDocument", change(old, False))
            has_any = old.simulated is not None or simulated.topology or simulated.calibration
            return real.model_copy(update={"simulated": simulated if has_any else None})

        self._change(changed)

    def _change(self, change: Callable[[MeasuredDocument], MeasuredDocument]) -> None:
        self.update(lambda old: change(old or MeasuredDocument()).model_copy(update={"saved_at": utc_now()}))
