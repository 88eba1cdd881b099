"""What a node says of the models that it holds layers of. Part of its state, told as a whole whenever it changes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpurt.placement.devices import ResidentRange
from gpurt.placement.version import MAX_NUMBER, PlanVersion

MAX_INSTANCES: Final = 64
"""Models, or copies of one, that a node holds parts of at once."""
MAX_STAGES: Final = 1024
"""Of one instance on one node."""
MAX_LAYERS: Final = 1 << 20
MAX_BYTES: Final = 1 << 63
MAX_MESSAGE: Final = 1024
MAX_PLAN_NODES: Final = 256
"""Nodes of one plan that are named to each of them; of a larger plan none is."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
"""Of a model, an instance, a device or a node."""


class ShardState(StrEnum):
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """A state that this version does not know."""

    @classmethod
    def _missing_(cls, value: object) -> ShardState | None:
        return cls.UNKNOWN if isinstance(value, str) else None


class ResidentLayers(BaseModel):
    """Layers ``start`` to ``end`` (exclusive) that lie on a device now and stay there under the present plan."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    device: Name
    """Key within the node."""
    start: int = Field(ge=0, le=MAX_LAYERS)
    end: int = Field(ge=0, le=MAX_LAYERS)
    bytes: int | None = Field(default=None, ge=0, le=MAX_BYTES)
    """What they take there, with cache and activations, as the plan says; None: not known, while some are exchanged."""

    @model_validator(mode="after")
    def _order(self) -> ResidentLayers:
        if self.end < self.start:
            raise ValueError("end lies before start")
        return self


class ShardReport(BaseModel):
    """One instance of a model, as far as it lies on the node."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance: Name
    """Which copy of which model; a model that is placed once is its own instance."""
    model: Name
    version: PlanVersion
    """Of the plan that the node follows."""
    state: ShardState
    plan: Annotated[str, Field(max_length=64)] | None = None
    """Which plan that is: two of one version differ in it. None: the master does not say."""
    master: Name | None = None
    """Who has sent it."""
    nodes: Annotated[tuple[Name, ...], Field(max_length=MAX_PLAN_NODES)] = ()
    """All nodes of the plan, so that whoever watches sees which of them do not follow it; empty: not said."""
    message: str | None = Field(default=None, max_length=MAX_MESSAGE)
    """Why it has failed."""
    resident: Annotated[tuple[ResidentLayers, ...], Field(max_length=MAX_STAGES)] = ()
    """While it loads: what was there before and stays. Empty after a failure, of which the node cannot tell what it
    has left."""


class NodePlacement(BaseModel):
    """Everything that a node holds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    term: int = Field(default=0, ge=0, le=MAX_NUMBER)
    """The latest that it has heard of a master; it follows none of an earlier one."""
    loader: bool | None = None
    """Somebody loads models on the node; None: it does not say."""
    shards: Annotated[tuple[ShardReport, ...], Field(max_length=MAX_INSTANCES)] = ()

    def shard(self, instance: str) -> ShardReport | None:
        return next((each for each in self.shards if each.instance == instance), None)

    def resident(self) -> dict[str, tuple[ResidentRange, ...]]:
        """By device key, as placement takes it."""
        found: dict[str, list[ResidentRange]] = {}
        for shard in self.shards:
            for layers in shard.resident:
                held = ResidentRange(model=shard.model, start=layers.start, end=layers.end)
                found.setdefault(layers.device, []).append(held)
        return {device: tuple(ranges) for device, ranges in found.items()}


def placement_changes(before: NodePlacement, after: NodePlacement) -> str | None:
    """What is another now, in words for people; None where nothing is."""
    said: list[str] = []
    if before.loader is not after.loader and (after.loader or before.loader):
        said.append("models can be loaded" if after.loader else "nobody loads models any more")
    for shard in after.shards:
        if shard != before.shard(shard.instance):
            why = f": {shard.message}" if shard.message else ""
            said.append(f"{shard.instance} {shard.state} under plan {shard.version}{why}")
    said += [f"{old.instance} let go" for old in before.shards if after.shard(old.instance) is None]
    if not said and after.term < before.term:
        said.append(f"it follows masters from term {after.term} on again, and had heard of {before.term}")
    return "; ".join(said) or None
