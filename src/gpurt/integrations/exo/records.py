"""The records that travel in exo's events. Importing this module imports exo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Self

from pydantic import ConfigDict

from gpurt.integrations.exo.figures import DeviceFigures
from gpurt.types import GPUDevice

if TYPE_CHECKING:
    from pydantic import BaseModel as FrozenModel
    from pydantic import BaseModel as TaggedModel
else:
    from exo.utils.pydantic_ext import FrozenModel, TaggedModel


class NodeDevice(FrozenModel):
    """One device of a node. Fields as of :class:`~gpurt.integrations.exo.figures.DeviceFigures`; below 1 KiB as JSON.

    Fields that a newer version adds are ignored: exo's records refuse them otherwise, and a refused event ends the
    receiving node's network loop.
    """

    model_config = ConfigDict(extra="ignore")

    device_id: str
    stable_id: str
    backend: str
    kind: str = "unknown"
    vendor: str = "unknown"
    name: str = ""
    memory_total_bytes: int | None = None
    memory_usable_bytes: int | None = None
    memory_pool_id: str | None = None
    unified: bool = False
    healthy: bool
    reason: str | None = None
    compute_capability: str | None = None
    bandwidth_gbps: float | None = None
    driver_version: str | None = None
    uuid: str | None = None
    pci_address: str | None = None

    @classmethod
    def of(cls, device: GPUDevice | DeviceFigures) -> Self:
        figures = device if isinstance(device, DeviceFigures) else DeviceFigures.of(device)
        return cls(**asdict(figures))


class NodeDevices(TaggedModel):
    """All devices of a node: a member of exo's ``GatheredInfo``. Replaces what was said before."""

    model_config = ConfigDict(extra="ignore")

    schema_version: int = 1
    devices: Sequence[NodeDevice]
