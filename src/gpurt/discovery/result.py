"""DiscoveryResult: everything that one discovery found out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from pydantic import Field

from gpurt.errors import ReasonCode
from gpurt.registry.records import Link, utc_now
from gpurt.types import BackendReport, GPUDevice, MappingModel

SCHEMA_VERSION: Final = 1

DiscoveryStatus = Literal["complete", "partial", "stale", "preview", "failed"]

_INCONCLUSIVE: Final = frozenset({ReasonCode.TIMEOUT, ReasonCode.CRASHED, ReasonCode.ERROR})


class DiscoveryResult(MappingModel):
    """Answers ``result.devices`` and ``result["devices"]`` alike."""

    schema_version: int = SCHEMA_VERSION
    """``schema`` in JSON documents."""
    backend_name: str | None
    """Short name of the preferred backend that has a usable device; None when there is none, not even ``cpu``."""
    devices: tuple[GPUDevice, ...]
    """One record per physical device, preferred backends first, unusable devices included."""
    reports: tuple[BackendReport, ...]
    """One per backend that was considered, in the order of preference."""
    discovery_status: DiscoveryStatus
    """``complete``: every backend gave a definite answer. ``partial``: one hung, crashed or failed for reasons
    unknown, or a device failed verification. ``stale``: remembered from an earlier run, not looked up yet.
    ``preview``: what is known while backends are still being asked; the result itself follows.
    ``failed``: nothing usable, not even the CPU."""
    timestamp: str
    """ISO 8601, UTC: when the devices were looked up."""
    pending: tuple[str, ...] = ()
    """In a ``preview``: backends that have not answered yet."""
    topology: tuple[Link, ...] = ()
    """Links between these devices that were measured, now or earlier (:mod:`gpurt.links`)."""
    registry: str | None = None
    """Path of the registry file."""
    persisted: bool = False
    """Whether the registry file holds this result. Simulated devices are kept in a place of their own there, or, when
    a plug-in shows them among this host's, not at all."""
    age_s: float = Field(default=0.0, ge=0.0)
    """Seconds since ``timestamp``."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__("schema_version" if key == "schema" else key)

    def document(self) -> dict[str, Any]:
        """The JSON document of ``python -m gpurt.discover --json``: plain values only.

        ``topology`` is there where a link was measured.
        """
        left_out = {"schema_version", "persisted", "age_s", "pending"}
        if not self.topology:
            left_out.add("topology")
        return {"schema": self.schema_version, **self.model_dump(mode="json", exclude=left_out)}


def summarize(
    devices: Iterable[GPUDevice], reports: Iterable[BackendReport], *, registry: str | None = None
) -> DiscoveryResult:
    """The result of a discovery that has just ended, with backend name and status worked out."""
    devices, reports = tuple(devices), tuple(reports)
    return DiscoveryResult(
        **_verdict(devices, reports), devices=devices, reports=reports, timestamp=utc_now(), registry=registry
    )


def with_devices(result: DiscoveryResult, devices: Iterable[GPUDevice]) -> DiscoveryResult:
    """The result of a look-up with other records of its devices; backend name and status are those of these."""
    devices = tuple(devices)
    return result.model_copy(update={"devices": devices, **_verdict(devices, result.reports)})


def _verdict(devices: tuple[GPUDevice, ...], reports: tuple[BackendReport, ...]) -> dict[str, Any]:
    usable = [device for device in devices if device.usable]
    status: DiscoveryStatus = "complete"
    if not usable:
        status = "failed"
    elif any(report.reason in _INCONCLUSIVE for report in reports) or any(map(_failed_verification, devices)):
        status = "partial"
    return {"backend_name": usable[0].backend if usable else None, "discovery_status": status}


def _failed_verification(device: GPUDevice) -> bool:
    return not device.usable and (device.state_reason or "").startswith("failed verification")
