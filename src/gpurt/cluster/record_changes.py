"""How the master's records come out of each other: one for every event. Pure.

They are made without checks, of values that have been checked: pydantic's own ways take three to five times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.envelope import Envelope
from gpurt.cluster.records import DeviceRecord, NodeRecord, NodeState
from gpurt.cluster.state import NodeFields, NodeSnapshot
from gpurt.types import GPUDevice

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


def fields_of(data: Mapping[str, Any]) -> NodeFields | None:
    """
    Raises:
        ValidationError: they are there and are none.
    """
    return NodeFields.model_validate(data["node"] or {}) if "node" in data else None


def text_of(value: object) -> str | None:
    """What a stranger calls a text, cut."""
    return value[:1024] if isinstance(value, str) else None


def _made(model: type[M], fields: dict[str, Any]) -> M:
    """As ``model.model_construct(**fields)``, of all its fields; ``fields`` is the record's own from then on."""
    record = model.__new__(model)
    _set(record, "__dict__", fields)
    _set(record, "__pydantic_fields_set__", set(fields))
    _set(record, "__pydantic_extra__", None)
    _set(record, "__pydantic_private__", None)
    return record
