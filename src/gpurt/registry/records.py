"""What is measured on a host and kept: copy tunings, speeds of devices, and links between them.

Entries are recognised by stable device ids (:attr:`gpurt.types.GPUDevice.stable_id`). They save time and tell what was
true when they were measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from gpurt.types import DeviceSpeeds, GPUDevice, MappingModel

MAX_TUNINGS: Final = 256
MAX_CALIBRATIONS: Final = 1024
MAX_LINKS: Final = 4096
"""All ordered pairs of 64 devices; as many take about 2 MiB of the file."""


class TuningRecord(BaseModel):
    """From which size on one device's copies of pageable memory are striped, and what that was measured with.

    The figures hold for this device, driver version, crew size and revision of the copying code, and no other.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    device: str = Field(min_length=1)
    """Stable id."""
    backend: str = Field(min_length=1)
    driver_version: str = Field(min_length=1)
    threads: int = Field(ge=1)
    revision: int
    write_min_bytes: int | None = Field(ge=1)
    """Smallest copy to the device that is striped; None where plain copies are as fast at every size."""
    read_min_bytes: int | None = Field(ge=1)
    measured_at: str
    """ISO 8601, UTC."""

    @property
    def key(self) -> tuple[str, str, int]:
        """One entry of each is kept. A new driver version or revision replaces the old one; workers of one host whose
        CPU quotas differ have crews of different sizes, and would drive out each other's."""
        return self.device, self.backend, self.threads


class CalibrationRecord(BaseModel):
    """What one device does through one backend. The figures hold for the driver version that is in them."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    device: str = Field(min_length=1)
    """Stable id."""
    revision: int
    """Of the measuring code: what another one has measured is measured anew."""
    speeds: DeviceSpeeds
    simulated: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """One entry of each is kept."""
        return self.device, self.speeds.backend

    def holds_for(self, device: GPUDevice) -> bool:
        """Whether it was measured on this device, through the backend and driver that it has now."""
        speeds = self.speeds
        return self.key == (device.stable_id, device.backend) and speeds.driver_version == device.driver_version


class LinkType(StrEnum):
    """The way that copies from one device to another take."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    HOST = "host"
    """Staged through host memory: the devices do not reach each other."""
    SAME = "same"
    """Within one device."""
    UNKNOWN = "unknown"
    """Nobody tells; ``link_reason`` says who could not. Also a way that this version does not know."""

    @classmethod
    def _missing_(cls, value: object) -> LinkType:
        return cls.UNKNOWN


class Link(MappingModel):
    """One measurement of the way from one device to another. Ordered: the way back is another link."""

    src: str = Field(min_length=1)
    dst: str = Field(min_length=1)
    """Stable ids; the two below are the names that the devices had when they were measured."""
    src_device_id: str
    dst_device_id: str
    link_type: LinkType
    link_reason: str | None = None
    """Why ``link_type`` is ``unknown`` or ``host``, where somebody says."""
    wiring: str | None = None
    """What lies between the devices, whether copies use it or not: ``"18 NVLinks"``, ``"one PCIe host bridge"``."""
    peer_access: bool | None = None
    """Whether the devices reach each other's memory; None where the backend does not tell."""
    bandwidth_gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Median, GB/s (10^9 bytes per second), of large copies in one direction with nothing else going on."""
    latency_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Median microseconds from the call of a copy of 4 KiB to its result in the caller's hands."""
    bytes_measured: int = Field(default=0, ge=0)
    """Size of each large copy."""
    failure: str | None = None
    """Why there are no figures, or, where there are, why the last attempt to measure them anew gave none."""
    failed_at: str | None = None
    """When that was; ISO 8601, UTC."""
    driver_version: str | None = None
    measured_at: str
    """ISO 8601, UTC."""
    simulated: bool = False


def with_tuning(records: Iterable[TuningRecord], new: TuningRecord) -> tuple[TuningRecord, ...]:
    """The newest first."""
    return (new, *(record for record in records if record.key != new.key))[:MAX_TUNINGS]


def with_calibrations(
    records: Iterable[CalibrationRecord], new: Iterable[CalibrationRecord]
) -> tuple[CalibrationRecord, ...]:
    """The newest first."""
    latest = {record.key: record for record in new}
    return (*latest.values(), *(record for record in records if record.key not in latest))[:MAX_CALIBRATIONS]


def with_links(links: Iterable[Link], new: Iterable[Link]) -> tuple[Link, ...]:
    """The newest first; of each ordered pair only the last measurement. One that failed replaces no figures: it is
    told beside them."""
    known = tuple(links)
    measured = {(link.src, link.dst): link for link in known if link.bandwidth_gbps is not None}
    latest: dict[tuple[str, str], Link] = {}
    for link in new:
        before = latest.get((link.src, link.dst)) or measured.get((link.src, link.dst))
        latest[link.src, link.dst] = link if link.failure is None or before is None else _failed_again(before, link)
    rest = (link for link in known if (link.src, link.dst) not in latest)
    return (*latest.values(), *rest)[:MAX_LINKS]


def _failed_again(before: Link, now: Link) -> Link:
    """The figures that there are, with why and when there were no others."""
    if before.bandwidth_gbps is None:
        return now
    names = {"src_device_id": now.src_device_id, "dst_device_id": now.dst_device_id}
    return before.model_copy(update=names | {"failure": now.failure, "failed_at": now.failed_at or now.measured_at})


def between(links: Iterable[Link], ids: Collection[str]) -> tuple[Link, ...]:
    """The links that both begin and end at one of these stable ids."""
    return tuple(link for link in links if link.src in ids and link.dst in ids)


def utc_now() -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
