"""The answer: which layers lie where, what that takes and what it gives."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from gpurt.placement.constraints import ObjectiveKind, Workload
from gpurt.placement.record import MOST_COUNT, MOST_TOGETHER, PlacementRecord


class PlanStatus(StrEnum):
    OPTIMAL = "optimal"
    """Proved: no plan is better by more than 1e-4 of the objective."""
    CERTIFIED = "certified"
    """``gap`` says how far from the optimum it is at most, within the gap that was asked for."""
    FEASIBLE = "feasible"
    """Valid; the gap is wider than was asked for, or no bound is known."""


class DeviceBytes(PlacementRecord):
    """What one device holds under a plan."""

    device: str
    weights: int = Field(ge=0, le=MOST_TOGETHER)
    """Layers, embedding and head."""
    kv: int = Field(ge=0, le=MOST_TOGETHER)
    activations: int = Field(ge=0, le=MOST_TOGETHER)
    reserve: int = Field(ge=0, le=MOST_TOGETHER)
    """Left free, and the runtime's own."""
    usable: int = Field(ge=0, le=MOST_TOGETHER)
    moved: int = Field(default=0, ge=0, le=MOST_TOGETHER)
    """Of ``weights``, what has to be loaded because it is not there yet."""

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.reserve


class Stage(PlacementRecord):
    """One step of the pipeline: layers ``start`` to ``end`` (exclusive) on a device, or split over a group."""

    devices: tuple[str, ...] = Field(min_length=1)
    """More than one: a tensor-parallel group, each with an equal share of every layer."""
    node: str
    backend: str
    start: int = Field(ge=0, le=MOST_COUNT)
    end: int = Field(ge=1, le=MOST_COUNT)
    memory_seconds: float = Field(ge=0)
    """Per token: reading weights and cache, where that is what it waits for."""
    compute_seconds: float = Field(ge=0)
    """Per token: arithmetic, where that is what it waits for."""
    overhead_seconds: float = Field(ge=0)
    """Per token: fixed cost per layer."""
    link_seconds: float = Field(ge=0)
    """Per token: sums within the tensor-parallel group."""
    link_estimated: bool = False
    """Some link within the tensor-parallel group was not measured; false for a device alone."""
    held: tuple[DeviceBytes, ...]

    @property
    def seconds(self) -> float:
        return self.memory_seconds + self.compute_seconds + self.overhead_seconds + self.link_seconds

    @property
    def layers(self) -> int:
        return self.end - self.start

    @property
    def tensor_parallel(self) -> int:
        return len(self.devices)


class Hop(PlacementRecord):
    """The way from one stage to the next; the last one is back to the first stage."""

    source: int = Field(ge=0, le=MOST_COUNT)
    target: int = Field(ge=0, le=MOST_COUNT)
    """Positions in ``stages``."""
    payload_bytes: int = Field(ge=0, le=MOST_TOGETHER)
    seconds: float = Field(ge=0)
    estimated: bool


class Prediction(PlacementRecord):
    """Seconds per step, in which each sequence of the batch gets one token."""

    latency_seconds: float = Field(ge=0)
    memory_seconds: float = Field(ge=0)
    compute_seconds: float = Field(ge=0)
    link_seconds: float = Field(ge=0)
    overhead_seconds: float = Field(ge=0)
    bottleneck_seconds: float = Field(ge=0)
    """Slowest stage or hop."""
    estimated: bool
    """Some speed or link behind it comes from a table."""


class Plan(PlacementRecord):
    """A whole placement. ``model_dump_json`` and ``model_validate_json`` are its JSON."""

    model: str
    layer_count: int = Field(ge=1, le=MOST_COUNT)
    workload: Workload
    stages: tuple[Stage, ...] = Field(min_length=1)
    hops: tuple[Hop, ...]
    predicted: Prediction
    objective: ObjectiveKind
    value: float = Field(ge=0)
    """Of the objective, in seconds, movement included."""
    bound: float | None = Field(default=None, ge=0)
    """No plan has a lower value; None: not known."""
    status: PlanStatus
    solver: str
    """Which engine found it, and which one proved it."""
    solve_seconds: float = Field(ge=0)
    seed: int

    @property
    def gap(self) -> float | None:
        """(value - bound) / value: how far from the optimum at most."""
        if self.bound is None:
            return None
        return max(0.0, (self.value - self.bound) / self.value) if self.value > 0 else 0.0

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for stage in self.stages for device in stage.devices)

    def layers_of(self, device: str) -> range:
        """The layers on a device, empty where it has none."""
        for stage in self.stages:
            if device in stage.devices:
                return range(stage.start, stage.end)
        return range(0)

    def resident(self) -> dict[str, range]:
        """Every used device with its layers."""
        return {device: range(stage.start, stage.end) for stage in self.stages for device in stage.devices}
