"""The registry: what discovery knows, as a document in the registry file (:mod:`gpurt.registry.file`)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gpurt.discovery.remembered import Remembered
from gpurt.discovery.result import DiscoveryStatus
from gpurt.errors import UntrustedFile
from gpurt.registry.file import SCHEMA_VERSION, CorruptRegistry, JsonFile, RegistryTooNew
from gpurt.registry.records import CalibrationRecord, Link, TuningRecord, readable, utc_now
from gpurt.types import BackendReport, GPUDevice

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
    """Verified answers by backend, the newest first. Of these and of measurements, an entry that does not validate is
    as if it were not there: it saves time and nothing else, so it must not cost the rest of the file."""
    attempts: Mapping[str, Attempts] = Field(default_factory=dict)
    """Backends that could not be used, by name."""
    tuning: tuple[TuningRecord, ...] = ()
    """How copies of each device are done: measured, written and read by backends (:mod:`gpurt.registry.measured`)."""
    calibration: tuple[CalibrationRecord, ...] = ()
    """What devices were measured to do, the newest first (:mod:`gpurt.calibration`)."""
    topology: tuple[Link, ...] = ()
    """What was measured between devices, the newest first."""
    health: Mapping[str, Any] = Field(default_factory=dict)
    """What is believed of devices that are not healthy (:meth:`gpurt.health.HealthMonitor.export`)."""
    simulated: RegistryDocument | None = None
    """What services of simulated devices remember. Apart, so that it is never taken for this host's hardware."""

    @property
    def discovered(self) -> bool:
        """Whether a discovery was ever written: every one has a report, also one that found nothing."""
        return bool(self.reports)

    @field_validator("remembered", mode="before")
    @classmethod
    def _readable_remembered(cls, value: Any) -> dict[str, tuple[Remembered, ...]]:
        return {name: readable(Remembered, entries) for name, entries in _items(value) if isinstance(name, str)}

    @field_validator("health", mode="before")
    @classmethod
    def _readable_health(cls, value: Any) -> dict[str, Any]:
        return {name: each for name, each in _items(value) if isinstance(name, str)}

    @field_validator("tuning", mode="before")
    @classmethod
    def _readable_tuning(cls, value: Any) -> tuple[TuningRecord, ...]:
        return readable(TuningRecord, value)

    @field_validator("calibration", mode="before")
    @classmethod
    def _readable_calibration(cls, value: Any) -> tuple[CalibrationRecord, ...]:
        return readable(CalibrationRecord, value)

    @field_validator("topology", mode="before")
    @classmethod
    def _readable_topology(cls, value: Any) -> tuple[Link, ...]:
        return readable(Link, value)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(cast("dict[Any, Any]", value).items()) if isinstance(value, dict) else []


class RegistryFile(JsonFile[RegistryDocument]):
    """The registry file as discovery's document."""

    def save(self, document: RegistryDocument) -> RegistryDocument:
        """Replace the file's content; returns what was written. The stored epoch never decreases.

        Raises:
            RegistryTooNew, OSError: as ``update``.
        """
        return self.update(lambda _: document)

    def update(self, change: Callable[[RegistryDocument | None], RegistryDocument]) -> RegistryDocument:
        """As :meth:`JsonFile.update`. The stored epoch never decreases."""

        def stamped(old: RegistryDocument | None) -> RegistryDocument:
            new = change(old)
            if old is not None and old.epoch > new.epoch:
                new = new.model_copy(update={"epoch": old.epoch})
            return new.model_copy(update={"saved_at": utc_now()})

        return super().update(stamped)

    def next_epoch(self) -> int:
        """A number larger than at every earlier start of a service with this registry, and store it.

        Where nothing is stored yet, or nothing can be, it is the Unix time: that grows, too.

        Raises:
            UntrustedFile: another user can have written the file.
        """

        def increment(old: RegistryDocument | None) -> RegistryDocument:
            base = old or RegistryDocument()
            return base.model_copy(update={"epoch": base.epoch + 1 if base.epoch else int(time.time())})

        try:
            return self.update(increment).epoch
        except UntrustedFile:
            raise
        except (OSError, RegistryTooNew) as exc:
            _log.warning("the epoch could not be stored: %s", exc)
            return int(time.time())

    def _parse(self, raw: bytes, data: dict[str, Any]) -> RegistryDocument:
        try:
            # JSON mode: a tuple may come as a list, but "1" is no integer.
            return RegistryDocument.model_validate_json(raw, strict=True)
        except ValidationError as exc:
            raise CorruptRegistry(str(exc)) from exc

    def _dump(self, value: RegistryDocument) -> bytes:
        return json.dumps(value.model_dump(mode="json", by_alias=True), allow_nan=False).encode()
