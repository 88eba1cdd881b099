"""What a node tells about itself: the snapshot that its events change."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from gpurt.cluster.bus import MAX_STATE_BYTES
from gpurt.cluster.envelope import check_size
from gpurt.cluster.epoch import MAX_SEQ, Epoch, Position
from gpurt.cluster.errors import InvalidName, MalformedEvent
from gpurt.cluster.message_limits import MessageReader, Refusals
from gpurt.cluster.node_fields import NodeFields
from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.shards import NodePlacement
from gpurt.types import BackendReport, DeviceKind, GPUDevice

SNAPSHOT_SCHEMA: Final = 1


DEVICES: Final = MessageReader(GPUDevice, "device")


class HostInfo(BaseModel):
    """Which machine a node runs on."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hostname: str
    fingerprint: str
    """The same for one machine across reboots, different for two machines with one image."""
    boot_id: str | None = None
    pid: int | None = None
    system: str | None = None
    python: str | None = None


def this_host() -> HostInfo:
    """The machine and process of this moment. Reads files: not for the event loop."""
    from gpurt.sources.host import boot_id, host_fingerprint

    return HostInfo(
        hostname=platform.node() or "unknown",
        fingerprint=host_fingerprint(),
        boot_id=boot_id(),
        pid=os.getpid(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


class NodeSnapshot(NodeFields):
    """All that a node says, as of one position in its events."""

    schema_version: int = Field(default=SNAPSHOT_SCHEMA, alias="schema")
    node: str
    epoch: str
    seq: int = Field(ge=0, le=MAX_SEQ)
    host: HostInfo
    gpu_devices: tuple[GPUDevice, ...] = ()
    reports: tuple[BackendReport, ...] = ()
    placement: NodePlacement = NodePlacement()
    links: NodeLinks = NodeLinks()

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    @property
    def position(self) -> Position:
        return Position(Epoch.parse(self.epoch), self.seq)

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)


def encode_snapshot(snapshot: NodeSnapshot) -> bytes:
    """
    Raises:
        MalformedEvent: over ``MAX_STATE_BYTES``.
    """
    payload = json.dumps(snapshot.document(), allow_nan=False, separators=(",", ":")).encode()
    check_size(payload, f"snapshot of node {snapshot.node}", MAX_STATE_BYTES)
    return payload


def _check_shards(placement: Any) -> None:
    """Half of what a node holds would read as if it had let go of the rest.

    Raises:
        ValueError: something of what it says to hold cannot be.
    """
    NodePlacement.model_validate({**placement, "term": 0} if isinstance(placement, dict) else placement)


_SNAPSHOTS: Final = MessageReader(
    NodeSnapshot, "snapshot", essential={"placement": _check_shards}, pieces={"gpu_devices": DEVICES}
)


def decode_snapshot(payload: bytes, *, node: str, refusals: Refusals | None = None) -> NodeSnapshot:
    """The snapshot in ``payload``, which came from the key of ``node``, without what is beyond all limits.

    Raises:
        MalformedEvent: too large, not JSON, not a snapshot, or of another node.
    """
    check_size(payload, f"snapshot of node {node}", MAX_STATE_BYTES)
    return _of_node(_SNAPSHOTS.read(payload, node, refusals), node)


def parse_snapshot(document: Any, *, node: str, refusals: Refusals | None = None) -> NodeSnapshot:
    """
    Raises:
        MalformedEvent: not a snapshot, or of another node.
    """
    return _of_node(_SNAPSHOTS.parse(document, node, refusals), node)


def _of_node(snapshot: NodeSnapshot, node: str) -> NodeSnapshot:
    what = f"snapshot of node {node}"
    try:
        Epoch.parse(snapshot.epoch)
    except InvalidName as exc:
        raise MalformedEvent(f"{what}: {exc.message}") from exc
    if snapshot.node != node:
        raise MalformedEvent(f"{what}: says that it is of node {snapshot.node[:64]!r}")
    return snapshot


def device_keys(devices: Iterable[GPUDevice]) -> dict[str, GPUDevice]:
    """The devices of one node by key: the stable id; where two devices claim one, all but the first get today's
    name appended, so that none disappears."""
    keyed: dict[str, GPUDevice] = {}
    for device in devices:
        key = device.stable_id
        keyed[key if key not in keyed else f"{key}@{device.device_id}"] = device
    return keyed


def summarize_devices(devices: Iterable[GPUDevice], *, timestamp: str | None, status: str | None) -> NodeFields:
    """The node's summary of ``devices``, which come in order of preference."""
    primary = next((d for d in devices if d.usable and d.kind is not DeviceKind.SOFTWARE), None)
    return NodeFields(
        gpu_backend=primary and primary.backend,
        gpu_discovery_timestamp=timestamp,
        primary_gpu_device_id=primary and primary.device_id,
        discovery_status=status,
    )
