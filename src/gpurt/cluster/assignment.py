"""A node's part of a plan, as its master sends it and the node acknowledges it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpurt.cluster.errors import InvalidName
from gpurt.cluster.keys import check_name
from gpurt.cluster.message_limits import summary
from gpurt.cluster.shards import (
    MAX_BYTES,
    MAX_LAYERS,
    MAX_MESSAGE,
    MAX_PLAN_NODES,
    MAX_STAGES,
    Name,
    ResidentLayers,
    ShardState,
)
from gpurt.placement.errors import InvalidPlan
from gpurt.placement.plan import Plan
from gpurt.placement.version import MAX_NUMBER, PlanVersion

MAX_GROUP: Final = 1024
"""Devices of one tensor-parallel group."""

_Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES, strict=True)]


class AssignedDevice(BaseModel):
    """What one device has to hold."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    device: Name
    """Key within the node: the stable id."""
    weight_bytes: _Bytes
    """Layers, embedding and head; of a group, this device's share."""
    kv_bytes: _Bytes = 0
    activation_bytes: _Bytes = 0

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


class AssignedStage(BaseModel):
    """Layers ``start`` to ``end`` (exclusive) on a device, or on a tensor-parallel group of devices of the node."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    start: int = Field(ge=0, le=MAX_LAYERS, strict=True)
    end: int = Field(ge=1, le=MAX_LAYERS, strict=True)
    devices: Annotated[tuple[AssignedDevice, ...], Field(min_length=1, max_length=MAX_GROUP)]
    """In order of rank; the length is the size of the group."""

    @model_validator(mode="after")
    def _order(self) -> AssignedStage:
        if self.end <= self.start:
            raise ValueError("end does not lie behind start")
        return self


class Assignment(BaseModel):
    """Everything of one instance of a model that the node has to hold; without a stage: nothing any more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance: Name
    """Which copy of which model; a model that is placed once is its own instance."""
    model: Name
    layer_count: int = Field(ge=1, le=MAX_LAYERS, strict=True)
    """Of the whole model: who has the last layer has the head, too."""
    version: PlanVersion
    plan: Annotated[str, Field(max_length=64)] | None = None
    """Which plan this is a part of, the same at all its nodes: two plans of one version differ in it."""
    nodes: Annotated[tuple[Name, ...], Field(max_length=MAX_PLAN_NODES)] = ()
    """All nodes of the plan; empty: there are more than ``MAX_PLAN_NODES``."""
    stages: Annotated[tuple[AssignedStage, ...], Field(max_length=MAX_STAGES)] = ()

    @model_validator(mode="after")
    def _whole(self) -> Assignment:
        seen: set[str] = set()
        for stage in self.stages:
            if stage.end > self.layer_count:
                raise ValueError(f"layer {stage.end - 1} of a model of {self.layer_count} layers")
            for each in stage.devices:
                if each.device in seen:
                    raise ValueError(f"device {each.device} is in it twice")
                seen.add(each.device)
        return self

    @property
    def digest(self) -> str:
        """The same for equal assignments, across processes."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def devices(self) -> dict[str, AssignedDevice]:
        """By key."""
        return {each.device: each for stage in self.stages for each in stage.devices}

    def resident(self) -> tuple[ResidentLayers, ...]:
        """What lies on each device once it is loaded."""
        return tuple(
            ResidentLayers(device=each.device, start=stage.start, end=stage.end, bytes=each.total_bytes)
            for stage in self.stages
            for each in stage.devices
        )


class Refusal(StrEnum):
    """Why a node does not take its part."""

    STALE_TERM = "stale_term"
    STALE_VERSION = "stale_version"
    """It has agreed to a later plan of this instance, or to another one of this version."""
    UNKNOWN_DEVICE = "unknown_device"
    DEVICE_UNAVAILABLE = "device_unavailable"
    NOT_ENOUGH_MEMORY = "not_enough_memory"
    DRAINING = "draining"
    NO_LOADER = "no_loader"
    """Nobody loads models there, or not yet."""
    TOO_MANY = "too_many"
    """Instances on one node."""
    OTHER = "other"
    """A reason that this version does not know."""

    @classmethod
    def _missing_(cls, value: object) -> Refusal | None:
        return cls.OTHER if isinstance(value, str) else None


class Acknowledgement(BaseModel):
    """A node's answer to its assignment."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    accepted: bool
    term: int = Field(ge=0, le=MAX_NUMBER)
    """The latest that the node has heard of."""
    reason: Refusal | None = None
    """Of a refusal."""
    message: str = Field(default="", max_length=MAX_MESSAGE)
    device: str | None = None
    """Which one is the reason."""
    short_bytes: int | None = None
    """With ``not_enough_memory``: how many are missing on it."""
    state: ShardState | None = None
    """How far the node is with this very assignment; None before it is activated."""


def assignments_of(plan: Plan, version: PlanVersion, *, instance: str | None = None) -> dict[str, Assignment]:
    """The part of every node that a plan uses.

    Args:
        instance: which copy of the model; None: the model is placed once.

    Raises:
        InvalidPlan: a device is not named ``node/key`` of its stage's node, has no bytes in the plan or is in it twice,
            or a name, a number or the count of stages is beyond what a node takes.
    """
    stages: dict[str, list[AssignedStage]] = {}
    for position, stage in enumerate(plan.stages):
        try:
            check_name(stage.node, "node")
        except InvalidName as exc:
            raise InvalidPlan(f"stage {position}: {exc.message}", rule="device", where=f"stages.{position}") from None
        held = {each.device: each for each in stage.held}
        devices: list[AssignedDevice] = []
        for name in stage.devices:
            if not name.startswith(f"{stage.node}/"):
                raise InvalidPlan(f"{name!r} is not a device of node {stage.node!r}", rule="device", where=name)
            if name not in held:
                raise InvalidPlan(f"stage {position} does not say what {name!r} holds", rule="memory", where=name)
            share = held[name]
            with _of_plan("device", f"stages.{position}"):
                devices.append(
                    AssignedDevice(
                        device=name.removeprefix(f"{stage.node}/"),
                        weight_bytes=share.weights,
                        kv_bytes=share.kv,
                        activation_bytes=share.activations,
                    )
                )
        with _of_plan("stage", f"stages.{position}"):
            part = AssignedStage(start=stage.start, end=stage.end, devices=tuple(devices))
        stages.setdefault(stage.node, []).append(part)
    return {node: _assignment(plan, version, instance, tuple(parts), node) for node, parts in stages.items()}


def release_of(plan: Plan, version: PlanVersion, *, instance: str | None = None) -> Assignment:
    """For a node that a plan does not use: let go of what an earlier plan has put there.

    Raises:
        InvalidPlan: as of ``assignments_of``.
    """
    return _assignment(plan, version, instance, ())


def kept_of(resident: tuple[ResidentLayers, ...], assigned: tuple[ResidentLayers, ...]) -> tuple[ResidentLayers, ...]:
    """What lies on a device already and is assigned to it as well."""
    wanted: Mapping[str, ResidentLayers] = {each.device: each for each in assigned}
    kept: list[ResidentLayers] = []
    for old in resident:
        new = wanted.get(old.device)
        start, end = (0, 0) if new is None else (max(old.start, new.start), min(old.end, new.end))
        if start < end:
            whole = (start, end) == (old.start, old.end)
            kept.append(ResidentLayers(device=old.device, start=start, end=end, bytes=old.bytes if whole else None))
    return tuple(kept)


def _assignment(
    plan: Plan, version: PlanVersion, instance: str | None, stages: tuple[AssignedStage, ...], where: str = "plan"
) -> Assignment:
    nodes = tuple(dict.fromkeys(stage.node for stage in plan.stages))
    with _of_plan("assignment", where):
        return Assignment(
            instance=instance or plan.model,
            model=plan.model,
            layer_count=plan.layer_count,
            version=version,
            plan=_plan_id(plan),
            nodes=nodes if len(nodes) <= MAX_PLAN_NODES else (),
            stages=stages,
        )


def _plan_id(plan: Plan) -> str:
    """The same for plans that have all nodes hold the same, across processes."""
    what = [
        (
            stage.start,
            stage.end,
            stage.node,
            stage.devices,
            [(h.device, h.weights, h.kv, h.activations) for h in stage.held],
        )
        for stage in plan.stages
    ]
    return hashlib.sha256(json.dumps((plan.model, plan.layer_count, what)).encode()).hexdigest()[:16]


@contextmanager
def _of_plan(rule: str, where: str) -> Generator[None]:
    try:
        yield
    except ValidationError as exc:
        message = f"no node takes {where} of the plan: {summary(exc)}"
        raise InvalidPlan(message, rule=rule, where=where) from None
