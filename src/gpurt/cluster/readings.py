"""A node's readings on the bus: telemetry of its devices, sent best effort.

They have a key of their own and nothing of the guarantees of events: the network may drop one, nobody repeats it, and
none is kept. A newer one makes an older one worthless, so what matters must never be told in this way alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from gpurt.cluster.envelope import check_size
from gpurt.cluster.errors import MalformedEvent
from gpurt.cluster.message_limits import MessageReader, Refusals
from gpurt.types import Telemetry

MAX_READINGS_BYTES: Final = 64 << 10
PER_MESSAGE: Final = 64
"""Devices in one message: 700 bytes each."""


class DeviceReadings(Telemetry):
    """What one device told last."""

    device: str
    """Key of the device within its node: the stable id."""
    age_s: float = Field(ge=0)
    """When it was sent, since the device was asked."""
    contact: str
    """How it answered: ``healthy suspect unresponsive lost``."""
    throttled: bool | None = None


class NodeReadings(BaseModel):
    """Readings of some devices of one node, taken at about the same time."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    epoch: str
    devices: tuple[DeviceReadings, ...]


def encode_readings(node: str, epoch: str, devices: Sequence[DeviceReadings]) -> list[bytes]:
    """Messages of at most ``MAX_READINGS_BYTES``.

    Raises:
        MalformedEvent: one device alone takes more.
    """
    messages: list[bytes] = []
    for start in range(0, len(devices), PER_MESSAGE):
        part = NodeReadings(node=node, epoch=epoch, devices=tuple(devices[start : start + PER_MESSAGE]))
        payload = json.dumps(part.model_dump(mode="json"), allow_nan=False, separators=(",", ":")).encode()
        check_size(payload, f"readings of node {node}", MAX_READINGS_BYTES)
        messages.append(payload)
    return messages


_READINGS: Final = MessageReader(NodeReadings, "readings")


def decode_readings(payload: bytes, *, node: str, refusals: Refusals | None = None) -> NodeReadings:
    """The readings in ``payload``, which came from the key of ``node``, without what is beyond all limits.

    Raises:
        MalformedEvent: too large, not JSON, not readings, or of another node.
    """
    what = f"readings of node {node}"
    check_size(payload, what, MAX_READINGS_BYTES)
    readings = _READINGS.read(payload, node, refusals)
    if readings.node != node:
        raise MalformedEvent(f"{what}: says that they are of node {readings.node[:64]!r}")
    return readings
