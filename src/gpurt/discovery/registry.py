"""The registry: what discovery knows, as a document in the registry file (:mod:`gpurt.registry.file`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gpurt.discovery.remembered import Remembered
from gpurt.discovery.result import DiscoveryStatus
from gpurt.errors import UntrustedFile
from gpurt.health.evidence import SEVERITY
from gpurt.registry.file import JsonFile, RegistryTooNew
from gpurt.registry.measured import MEASURED_RECORDS, Measurements
from gpurt.registry.newer import Records
from gpurt.registry.records import utc_now
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


class _Believed(BaseModel):
    """What is believed of one device, as :meth:`gpurt.health.HealthMonitor.export` gives it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    state: str
    reason: str | None
    xids: list[int]

    @field_validator("state")
    @classmethod
    def _known_state(cls, value: str) -> str:
        if value not in SEVERITY:
            raise ValueError(f"{value!r} is no state that this version knows")
        return value


class RegistryDocument(Measurements):
    """The content of the file."""

    epoch: int = 0
    timestamp: str = Field(default_factory=utc_now)
    backend_name: str | None = None
    discovery_status: DiscoveryStatus = "complete"
    devices: tuple[GPUDevice, ...] = ()
    reports: tuple[BackendReport, ...] = ()
    verified: tuple[str, ...] = ()
    """Keys of passed verifications (:func:`gpurt.discovery.verify.verification_key`)."""
    remembered: Mapping[str, tuple[Remembered, ...]] = Field(default_factory=dict)
    """Verified answers by backend, the newest first."""
    attempts: Mapping[str, Attempts] = Field(default_factory=dict)
    """Backends that could not be used, by name."""
    health: Mapping[str, Any] = Field(default_factory=dict)
    """What is believed of devices that are not healthy (:meth:`gpurt.health.HealthMonitor.export`)."""
    simulated: RegistryDocument | None = None
    """What services of simulated devices remember. Apart, so that it is never taken for this host's hardware."""

    @property
    def discovered(self) -> bool:
        """Whether a discovery was ever written: every one has a report, also one that found nothing."""
        return bool(self.reports)

    @field_validator("health")
    @classmethod
    def _known_health(cls, value: Mapping[str, Any]) -> dict[str, Any]:
        """What is understood of it, which alone may be replaced."""
        known: dict[str, Any] = {}
        if "boot_id" in value and isinstance(value["boot_id"], str | None):
            known["boot_id"] = value["boot_id"]
        devices: Any = value.get("devices")
        if isinstance(devices, Mapping):
            known["devices"] = dict(_believed_devices(cast("Mapping[Any, Any]", devices)))
        return known


def _believed_devices(devices: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, entry in devices.items():
        try:
            yield str(key), _Believed.model_validate(entry).model_dump()
        except ValidationError as exc:
            _log.info("remembered health of %s is not understood: %s", key, exc.errors()[0]["msg"])


def _stable_id(device: Any) -> object:
    identity = device["identity"]
    return identity["key"] if identity else device["device_id"]


class RegistryFile(JsonFile[RegistryDocument]):
    """The registry file as discovery's document."""

    MODEL = RegistryDocument
    RECORDS: ClassVar[Records] = {
        **MEASURED_RECORDS,
        ("devices", "*"): _stable_id,
        ("reports", "*"): lambda report: report["name"],
        ("verified", "*"): lambda key: key,
        ("remembered", "*", "*"): lambda answer: answer["signature"],
        ("attempts", "*"): lambda attempts: None,  # by name
    }

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
