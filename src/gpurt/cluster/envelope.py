"""The event envelope: CloudEvents 1.0, JSON, structured mode.

Attributes and types that this version does not know are tolerated. ``nodeseq`` is a decimal string because a
CloudEvents Integer has 32 bits only.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator

from gpurt.cluster.device_data import DeviceData
from gpurt.cluster.epoch import MAX_SEQ, Epoch, Position
from gpurt.cluster.errors import InvalidName, MalformedEvent
from gpurt.cluster.message_limits import MessageReader, Refusals

MAX_EVENT_BYTES: Final = 256 << 10
"""Larger news goes as a notice; the receiver then asks for the node's snapshot."""

CONTENT_TYPE: Final = "application/cloudevents+json"
DATA_SCHEMA: Final = "gpurt:device-event:1"

_MAX_DIGITS: Final = len(str(MAX_SEQ))
_Text = Annotated[str, Field(min_length=1, max_length=1024)]


class EventKind(StrEnum):
    """The types that this version sends. Receivers ignore others, but count their sequence numbers."""

    DEVICE_ADDED = "gpurt.device.added.v1"
    DEVICE_UPDATED = "gpurt.device.updated.v1"
    DEVICE_REMOVED = "gpurt.device.removed.v1"
    DEVICE_HEALTH = "gpurt.device.health.v1"
    NODE_SNAPSHOT = "gpurt.node.snapshot.v1"
    """``data`` replaces all that is known of the node; without ``data``: ask the node for its snapshot."""
    NODE_LEAVING = "gpurt.node.leaving.v1"
    BACKEND_SELECTED = "gpurt.backend.selected.v1"
    BACKEND_FAILED = "gpurt.backend.failed.v1"
    NODE_PLACEMENT = "gpurt.node.placement.v1"
    """What the node holds of models, and whether it is draining."""
    NODE_LINKS = "gpurt.node.links.v1"
    """What the node has measured of its ways to others."""


class Envelope(BaseModel):
    """One event of one node."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    specversion: Literal["1.0"] = "1.0"
    id: _Text
    source: _Text
    type: _Text
    time: AwareDatetime | None = None
    subject: _Text | None = None
    """Key of the device that it is about."""
    datacontenttype: str | None = "application/json"
    dataschema: str | None = DATA_SCHEMA
    data: Annotated[DeviceData | dict[str, Any] | None, Field(union_mode="left_to_right")] = None
    """Of a received event; one that is made has what it was given."""

    nodeid: _Text
    nodeepoch: _Text
    nodeseq: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,19}$")]
    causationid: str | None = None
    traceparent: str | None = None

    @field_validator("nodeepoch")
    @classmethod
    def _epoch_form(cls, value: str) -> str:
        try:
            Epoch.parse(value)
        except InvalidName as exc:
            raise ValueError(exc.message) from exc
        return value

    @field_validator("nodeseq")
    @classmethod
    def _seq_range(cls, value: str) -> str:
        if len(value) == _MAX_DIGITS and int(value) > MAX_SEQ:
            raise ValueError("must fit 64 bits")
        return value

    @property
    def position(self) -> Position:
        return Position(Epoch.parse(self.nodeepoch), int(self.nodeseq))

    def document(self) -> dict[str, Any]:
        """``data`` as plain JSON values; empty where there is none."""
        if isinstance(self.data, DeviceData):
            return self.data.model_dump(mode="json", exclude_unset=True)
        return self.data or {}


def make_event(
    kind: str,
    *,
    cluster: str,
    node: str,
    position: Position,
    subject: str | None = None,
    data: dict[str, Any] | None = None,
) -> Envelope:
    """An event of ``node``, stamped with the wall clock of this moment."""
    epoch, seq = position
    event = Envelope(
        id=f"{node}:{epoch}:{seq}",
        source=f"gpurt://{cluster}/{node}",
        type=kind,
        time=datetime.now(UTC),
        subject=subject,
        datacontenttype="application/json" if data is not None else None,
        dataschema=DATA_SCHEMA if data is not None else None,
        nodeid=node,
        nodeepoch=str(epoch),
        nodeseq=str(seq),
    )
    return event.model_copy(update={"data": data})


def encode(event: Envelope) -> bytes:
    """The event as UTF-8 JSON.

    Raises:
        MalformedEvent: NaN, infinity or a value JSON does not know in ``data``; over ``MAX_EVENT_BYTES``.
    """
    document = event.model_dump(mode="json", exclude_none=True, exclude={"data"})
    if event.data is not None:
        # As given: a None inside data is a value ("unknown"), not an absent attribute.
        document["data"] = event.document()
    try:
        payload = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as exc:
        raise MalformedEvent(f"event {event.id}: data is not JSON: {exc}") from exc
    check_size(payload, f"event {event.id}")
    return payload


_EVENTS: Final = MessageReader(Envelope, "event", whole=True)


def decode(payload: bytes, *, node: str | None = None, refusals: Refusals | None = None) -> Envelope:
    """The event in ``payload``; with ``node``, only if it says that it is of that node. What it is about is within all
    limits where it is a device; of other types, and of a device that is not, whoever knows the type looks at it.

    Raises:
        MalformedEvent: too large, not JSON, not a CloudEvent of a node, or of another node.
    """
    if len(payload) > MAX_EVENT_BYTES:
        check_size(payload, _sender(node))
    event = _EVENTS.read(payload, node, refusals)
    if node is not None and event.nodeid != node:
        raise MalformedEvent(f"{_sender(node)}: says that it is of node {event.nodeid[:64]!r}")
    return event


def _sender(node: str | None) -> str:
    return f"event of node {node}" if node else "event"


def check_size(payload: bytes, what: str, limit: int = MAX_EVENT_BYTES) -> None:
    """
    Raises:
        MalformedEvent: ``payload`` is larger than ``limit`` bytes.
    """
    if len(payload) > limit:
        raise MalformedEvent(f"{what}: {len(payload)} bytes, over the limit of {limit} bytes")
