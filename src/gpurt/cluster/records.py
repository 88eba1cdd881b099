"""What the master believes: frozen records, safe to keep, compare and send."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.shards import NodePlacement
from gpurt.cluster.state import HostInfo, NodeFields
from gpurt.cluster.terms import TERM_STEP, believed, doubted
from gpurt.placement.devices import ResidentRange
from gpurt.types import BackendReport, GPUDevice


class NodeState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Its liveliness token is gone; not given up yet."""
    UNKNOWN = "unknown"
    """The hub is away from the observer: nothing can be known of the node, and nothing is against it."""
    LOST = "lost"
    """Gone for longer than the grace."""
    LEFT = "left"
    """Said goodbye."""


class DeviceRecord(BaseModel):
    """One device of one node."""

    model_config = ConfigDict(frozen=True)

    device: GPUDevice
    available: bool
    """Its node is healthy and not draining, and the device itself usable: work may be placed on it."""


class NodeRecord(NodeFields):
    """One node, as of ``(epoch, seq)`` of its events."""

    model_config = ConfigDict(frozen=True)

    node: str
    state: NodeState
    state_since: float
    """Monotonic seconds of the receiver."""
    epoch: str
    seq: int
    host: HostInfo
    devices: Mapping[str, DeviceRecord] = Field(default_factory=dict[str, DeviceRecord])
    reports: tuple[BackendReport, ...] = ()
    placement: NodePlacement = NodePlacement()
    """What it holds of models."""
    links: NodeLinks = NodeLinks()
    """What it has measured of its ways to others."""

    @property
    def offers_devices(self) -> bool:
        """Its usable devices are available."""
        return self.state is NodeState.HEALTHY and not self.draining

    @property
    def gpu_devices(self) -> tuple[GPUDevice, ...]:
        """The devices in the node's order of preference."""
        return tuple(record.device for record in self.devices.values())


class Conflict(BaseModel):
    """Two live processes use one node name. The devices of the second are known, but not part of the view."""

    model_config = ConfigDict(frozen=True)

    node: str
    kept: HostInfo
    refused: HostInfo
    refused_epoch: str
    refused_devices: tuple[str, ...]
    """Stable ids."""

    @property
    def message(self) -> str:
        devices = ", ".join(self.refused_devices) or "none"
        return (
            f"node name {self.node!r} is used twice: by {_who(self.kept)}, which is kept, and by "
            f"{_who(self.refused)}, which is refused (its devices: {devices}); start one under another name"
        )


class PlanTroubleKind(StrEnum):
    TWO_MASTERS = "two_masters"
    """Two masters of one term have decided on different plans of one version."""
    TWO_PLANS = "two_plans"
    """Nodes follow an earlier plan beside the latest one."""
    NOT_FOLLOWED = "not_followed"
    """Nodes of the latest plan do not follow it."""


class PlanTrouble(BaseModel):
    """Something is wrong about the plans of one instance of a model."""

    model_config = ConfigDict(frozen=True)

    instance: str
    kind: PlanTroubleKind
    nodes: Mapping[str, str]
    """What each node that it is about does or does not do."""
    message: str
    since: float = 0.0
    """Monotonic seconds of the receiver."""


class ClusterSnapshot(BaseModel):
    """The whole view at one moment."""

    model_config = ConfigDict(frozen=True)

    nodes: Mapping[str, NodeRecord]
    conflicts: tuple[Conflict, ...] = ()
    plan_troubles: tuple[PlanTrouble, ...] = ()
    """Plans that are followed only in part, or contradict each other, for longer than it takes to reach all nodes."""

    @property
    def devices(self) -> dict[tuple[str, str], DeviceRecord]:
        """Every device of every node, also the unavailable ones, by (node, device key)."""
        return {(node.node, key): record for node in self.nodes.values() for key, record in node.devices.items()}

    @property
    def term(self) -> int:
        """The latest term of a master that nodes have heard of; 0: none has. One that a single node names, far beyond
        all others, does not count (:mod:`gpurt.cluster.terms`)."""
        return believed((node.placement.term for node in self.nodes.values()), TERM_STEP)

    @property
    def doubted_terms(self) -> dict[str, int]:
        """Nodes that name a term which does not count, with that term."""
        return doubted({name: node.placement.term for name, node in self.nodes.items()})

    @property
    def available_devices(self) -> dict[tuple[str, str], GPUDevice]:
        return {key: record.device for key, record in self.devices.items() if record.available}

    def held_bytes(self, instance: str) -> dict[tuple[str, str], int]:
        """What one instance of a model takes on devices of healthy nodes now, by (node, device key): a plan that
        replaces the present one has these bytes again. A device that exchanges its layers just now is not in it."""
        shards = (
            (name, node.placement.shard(instance))
            for name, node in self.nodes.items()
            if node.state is NodeState.HEALTHY
        )
        return {
            (name, layers.device): layers.bytes
            for name, shard in shards
            if shard is not None
            for layers in shard.resident
            if layers.bytes is not None
        }

    @property
    def resident(self) -> dict[tuple[str, str], tuple[ResidentRange, ...]]:
        """The layers that lie on devices of healthy nodes, by (node, device key): for ``devices_from_view``."""
        return {
            (name, key): ranges
            for name, node in self.nodes.items()
            if node.state is NodeState.HEALTHY
            for key, ranges in node.placement.resident().items()
        }


def _who(host: HostInfo) -> str:
    return f"{host.hostname} (host {host.fingerprint}, pid {host.pid if host.pid is not None else 'unknown'})"
