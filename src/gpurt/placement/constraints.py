"""What a plan has to keep, and what it should be good at."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.record import MOST_COUNT, MOST_SECONDS, PlacementRecord


class ObjectiveKind(StrEnum):
    LATENCY = "latency"
    """Least time per token of one pass through all stages and back."""
    THROUGHPUT = "throughput"
    """Least time of the slowest stage or link (a full pipeline gives one step per such time); ties by latency."""
    BALANCED = "balanced"
    """Least sum of both."""


class Workload(PlacementRecord):
    """What is run: it decides cache, activations and time."""

    context_tokens: int = Field(default=0, ge=0, le=MOST_COUNT)
    """Tokens of a sequence that the cache has to hold; 0: no cache is counted."""
    batch: int = Field(default=1, ge=1, le=MOST_COUNT)
    """Sequences at once."""
    prefill_tokens: int = Field(default=1, ge=1, le=MOST_COUNT)
    """Tokens of a sequence processed at once at most: sizes the workspace."""


class Pin(PlacementRecord):
    """Layers ``start`` to ``end`` (exclusive) lie on one of these devices or nodes."""

    start: int = Field(ge=0, le=MOST_COUNT)
    end: int = Field(ge=1, le=MOST_COUNT)
    devices: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()

    @model_validator(mode="after")
    def _sense(self) -> Self:
        if self.end <= self.start:
            raise InvalidPlacementInput("a pin has at least one layer", field="end")
        if not self.devices and not self.nodes:
            raise InvalidPlacementInput("a pin names a device or a node", field="devices")
        return self


class StageLayers(PlacementRecord):
    """A device that is used holds between ``minimum`` and ``maximum`` layers."""

    device: str
    minimum: int = Field(default=1, ge=1, le=MOST_COUNT)
    maximum: int | None = Field(default=None, ge=1, le=MOST_COUNT)


class DomainLimit(PlacementRecord):
    """At most ``stages`` stages in any failure domain of one kind (``node``, ``zone`` or a label)."""

    domain: str = Field(min_length=1)
    stages: int = Field(ge=1, le=MOST_COUNT)


class Constraints(PlacementRecord):
    """Everything here holds in every plan, or there is no plan."""

    workload: Workload = Workload()
    pins: tuple[Pin, ...] = ()
    exclude_devices: frozenset[str] = frozenset()
    exclude_nodes: frozenset[str] = frozenset()
    require_devices: frozenset[str] = frozenset()
    require_nodes: frozenset[str] = frozenset()
    """Each holds at least one stage."""
    stage_layers: tuple[StageLayers, ...] = ()
    """One entry a device at most."""
    min_stages: int = Field(default=1, ge=1, le=MOST_COUNT)
    max_stages: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    min_nodes: int = Field(default=1, ge=1, le=MOST_COUNT)
    max_nodes: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    domain_limits: tuple[DomainLimit, ...] = ()
    """Anti-affinity."""
    max_link_seconds: float | None = Field(default=None, gt=0)
    """No hand-over between stages takes longer than this: latency + bytes / bandwidth."""
    tensor_parallel_max: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    """1: no tensor parallelism."""
    same_backend: bool = False
    """All stages use one backend."""
    replicas: int = Field(default=1, ge=1, le=MOST_COUNT)
    """Whole pipelines on disjoint devices. Every rule holds in each of them; what is required is used by one of them.
    More than one: :func:`gpurt.placement.solve_replicas`."""
    replica_domain: str | None = Field(default=None, min_length=1)
    """No two replicas use the same failure domain of this kind (``node``, ``zone`` or a label)."""
    movement_seconds_per_byte: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Cost of every weight byte that is not on its device yet, in seconds of time per token: load time divided by the
    number of tokens over which it may be won back."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_stages is not None and self.max_stages < self.min_stages:
            raise InvalidPlacementInput("max_stages is below min_stages", field="max_stages")
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise InvalidPlacementInput("max_nodes is below min_nodes", field="max_nodes")
        return self
