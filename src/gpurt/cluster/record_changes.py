"""How the master's records come out of each other: one for every event. Pure.

They are made without checks, of values that have been checked: pydantic's own ways take three to five times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.envelope import Envelope
from gpurt.cluster.message_limits import MessageReader, Refusals
from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.records import DeviceRecord, NodeRecord, NodeState
from gpurt.cluster.shards import NodePlacement
from gpurt.cluster.state import DEVICES, NodeFields, NodeSnapshot
from gpurt.printable import printable
from gpurt.types import BackendReport, GPUDevice

M = TypeVar("M", bound=BaseModel)
_set = object.__setattr__


def record_of(
    snapshot: NodeSnapshot, devices: Iterable[tuple[str, GPUDevice]], *, state: NodeState, since: float
) -> NodeRecord:
    """What a snapshot says of its node, with these devices by their keys."""
    offered = state is NodeState.HEALTHY and not snapshot.draining
    return NodeRecord.model_construct(
        node=snapshot.node,
        state=state,
        state_since=since,
        epoch=snapshot.epoch,
        seq=snapshot.seq,
        host=snapshot.host,
        **{name: getattr(snapshot, name) for name in NodeFields.model_fields},
        devices={key: available(device, offered=offered) for key, device in devices},
        reports=snapshot.reports,
        placement=snapshot.placement,
        links=snapshot.links,
    )


def changed(record: NodeRecord, **fields: Any) -> NodeRecord:
    """As ``record.model_copy(update=fields)``."""
    return _made(NodeRecord, {**vars(record), **fields})


def offered_again(record: NodeRecord) -> NodeRecord:
    """With devices that are as available as the node's state says now."""
    devices = {key: available(r.device, offered=record.offers_devices) for key, r in record.devices.items()}
    return changed(record, devices=devices)


def available(device: GPUDevice, *, offered: bool) -> DeviceRecord:
    """``offered``: by its node."""
    return _made(DeviceRecord, {"device": device, "available": offered and device.usable})


def same_device(before: DeviceRecord | None, after: DeviceRecord) -> bool:
    # By their dictionaries: models that differ are compared twice by their own comparison.
    return before is not None and before.available == after.available and vars(before.device) == vars(after.device)


def device_change(before: DeviceRecord | None, after: DeviceRecord) -> ChangeKind:
    """What kind of news ``after`` is."""
    if before is None:
        return ChangeKind.DEVICE_ADDED
    health = (before.device.state, before.device.usable, before.available)
    same = health == (after.device.state, after.device.usable, after.available)
    return ChangeKind.DEVICE_UPDATED if same else ChangeKind.DEVICE_HEALTH


def position_of(event: Envelope) -> dict[str, Any]:
    """The fields of a record that every event moves."""
    return {"epoch": event.nodeepoch, "seq": int(event.nodeseq)}


# All but devices as a whole: what a node said before is still there, and half of what it holds now would read as if it
# had let go of the rest.
_FIELDS: Final = MessageReader(NodeFields, "fields", whole=True)
_REPORTS: Final = MessageReader(BackendReport, "report", whole=True)
_PLACEMENTS: Final = MessageReader(NodePlacement, "placement", whole=True)
_LINKS: Final = MessageReader(NodeLinks, "links", whole=True)


@dataclass(frozen=True, slots=True)
class EventData:
    """What an event says beside its envelope, by the records that it may have; within all limits.

    Every property raises MalformedEvent where what is there is none, and nothing of it can be kept.
    """

    node: str
    data: Mapping[str, Any]
    refusals: Refusals

    @property
    def fields(self) -> NodeFields | None:
        """None: it says nothing of them."""
        data = self.data
        return _FIELDS.parse(data["node"] or {}, self.node, self.refusals) if "node" in data else None

    @property
    def device(self) -> GPUDevice:
        return DEVICES.parse(self.data.get("device"), self.node, self.refusals)

    @property
    def report(self) -> BackendReport | None:
        """None: it has none."""
        return _REPORTS.parse(self.data["report"], self.node, self.refusals) if "report" in self.data else None

    @property
    def placement(self) -> NodePlacement:
        return _PLACEMENTS.parse(self.data.get("placement"), self.node, self.refusals)

    @property
    def links(self) -> NodeLinks:
        return _LINKS.parse(self.data.get("links"), self.node, self.refusals)


def text_of(value: object) -> str | None:
    """What a stranger calls a text, cut, without what would move a cursor."""
    return printable(value[:1024], 1024) if isinstance(value, str) else None


def _made(model: type[M], fields: dict[str, Any]) -> M:
    """As ``model.model_construct(**fields)``, of all its fields; ``fields`` is the record's own from then on."""
    record = model.__new__(model)
    _set(record, "__dict__", fields)
    _set(record, "__pydantic_fields_set__", set(fields))
    _set(record, "__pydantic_extra__", None)
    _set(record, "__pydantic_private__", None)
    return record
