"""A node in five fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class NodeFields(BaseModel):
    """The node's own summary; travels with every device event, so that it is never older than the devices."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    gpu_backend: str | None = None
    """Short name of the preferred backend with a usable device (``cuda``, ``cpu``); None when there is none."""
    gpu_discovery_timestamp: str | None = None
    """ISO 8601, UTC: when the devices were looked up; None before the first discovery."""
    primary_gpu_device_id: str | None = None
    """``device_id`` of the first usable device of that backend."""
    discovery_status: str | None = None
    """``complete partial stale failed`` (:class:`gpurt.discovery.result.DiscoveryResult`); ``stale`` devices are
    remembered from an earlier run and not looked up yet."""
    draining: bool = False
    """It takes part in no new placement: none of its devices is available."""
