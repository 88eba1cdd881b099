"""One message per discovery, for workers that keep the state of their cluster by folding such messages.

::

    async for event in gathered(service, node_id):       # a worker: says all of its node each time it has changed
        await event_sender.send(event)

    state = fold(state, event)                            # a master: a plain function of state and event

For clusters of gpurt's own see :mod:`gpurt.cluster`, which adds order, gaps, health and the absence of nodes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from gpurt.cluster.state import device_keys, summarize_devices
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.registry.records import utc_now
from gpurt.types import GPUDevice


class StaticNodeInformation(BaseModel):
    """What a node says of its devices."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    gpu_backend: str | None = None
    """Short name of the preferred backend with a usable device, ``cpu`` on a host without GPU; None where nothing can
    be used at all."""
    gpu_devices: tuple[GPUDevice, ...] = ()
    """In the node's order of preference, unusable ones included."""
    gpu_discovery_timestamp: str | None = None
    """ISO 8601, UTC: when they were looked up."""
    primary_gpu_device_id: str | None = None
    """``device_id`` of the first usable device of that backend."""

    @classmethod
    def of(cls, result: DiscoveryResult) -> Self:
        fields = summarize_devices(result.devices, timestamp=result.timestamp, status=result.discovery_status)
        return cls(
            gpu_backend=fields.gpu_backend,
            gpu_devices=result.devices,
            gpu_discovery_timestamp=fields.gpu_discovery_timestamp,
            primary_gpu_device_id=fields.primary_gpu_device_id,
        )


class NodeGatheredInfo(BaseModel):
    """A node has been looked at: replaces all that it said before."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node_id: str = Field(min_length=1)
    info: StaticNodeInformation
    when: str = Field(default_factory=utc_now)
    """ISO 8601, UTC: when it was said."""


class DeviceGPUStateUpdated(BaseModel):
    """One device of a node has changed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node_id: str = Field(min_length=1)
    device: GPUDevice
    """After the change."""
    removed: bool = False
    when: str = Field(default_factory=utc_now)

    @classmethod
    def of(cls, node_id: str, event: DeviceEvent) -> Self | None:
        """None for events that are not about one device."""
        if event.device is None:
            return None
        removed = event.type is EventType.REMOVED
        return cls(node_id=node_id, device=event.device, removed=removed, when=event.observed_at)


class GatheredState(BaseModel):
    """What a master knows of all nodes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    nodes: Mapping[str, StaticNodeInformation] = Field(default_factory=dict[str, StaticNodeInformation])

    @property
    def devices(self) -> dict[tuple[str, str], GPUDevice]:
        """By node and stable id."""
        return {(node, key): device for node, info in self.nodes.items() for key, device in _keyed(info).items()}


def fold(state: GatheredState, event: NodeGatheredInfo | DeviceGPUStateUpdated) -> GatheredState:
    """The state after ``event``. Pure. A device of a node that has said nothing yet changes nothing."""
    if isinstance(event, NodeGatheredInfo):
        return GatheredState(nodes={**state.nodes, event.node_id: event.info})
    info = state.nodes.get(event.node_id)
    if info is None:
        return state
    devices = _keyed(info)
    if event.removed:
        devices.pop(event.device.stable_id, None)
    else:
        devices[event.device.stable_id] = event.device
    fields = summarize_devices(devices.values(), timestamp=event.when, status=None)
    after = StaticNodeInformation(
        gpu_backend=fields.gpu_backend,
        gpu_devices=tuple(devices.values()),
        gpu_discovery_timestamp=event.when,
        primary_gpu_device_id=fields.primary_gpu_device_id,
    )
    return GatheredState(nodes={**state.nodes, event.node_id: after})


def without(state: GatheredState, node_id: str) -> GatheredState:
    """The state when a node is gone: nothing of it stays."""
    return GatheredState(nodes={node: info for node, info in state.nodes.items() if node != node_id})


async def gathered(
    service: GPUDiscoveryService, node_id: str, *, interval: float | None = None
) -> AsyncIterator[NodeGatheredInfo]:
    """One message now, and one whenever a discovery has found something else. Ends when the service is shut down.

    Args:
        interval: seconds between two look-ups; None is the service's.
    """
    async for result in service.watch(interval):
        yield NodeGatheredInfo(node_id=node_id, info=StaticNodeInformation.of(result))


def _keyed(info: StaticNodeInformation) -> dict[str, GPUDevice]:
    return device_keys(info.gpu_devices)
