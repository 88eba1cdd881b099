"""A repair as it is told: the plan with its figures, and what it takes to come to it from the former one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from time import monotonic

from pydantic import Field

from gpurt.placement.assembly import assemble, objective_value
from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.holdings import Holdings, Movement
from gpurt.placement.hysteresis import RepairPolicy
from gpurt.placement.incumbent import PROVEN_GAP
from gpurt.placement.instance import Instance
from gpurt.placement.paths import Step
from gpurt.placement.plan import Plan, Stage
from gpurt.placement.record import PlacementRecord
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology
from gpurt.placement.validation import validate_plan


class RepairMethod(StrEnum):
    UNCHANGED = "unchanged"
    """Every layer stays where it is."""
    INCREMENTAL = "incremental"
    """Around what survives."""
    WIDER = "wider"
    """By the solver on the neighbourhood."""
    FULL = "full"
    """By the solver on all devices."""


class RepairResult(PlacementRecord):
    """A plan, and what it takes to come to it from the former one."""

    plan: Plan
    method: RepairMethod
    layers_lost: int = Field(ge=0)
    """Layers whose stage lost a device, and those that no longer fit where they are."""
    layers_moved: int = Field(ge=0)
    """Layers of which some device has to load at least a part, the lost ones among them."""
    bytes_moved: int = Field(ge=0)
    """Weights of layers to load, on all devices together; embedding and head are not counted."""
    load_seconds: float = Field(ge=0)
    """Until the last device has loaded; all load at once."""
    load_estimated: bool
    """The policy's bandwidth stands in for that of a device which does not say."""
    penalty: float
    """Objective against that of the former plan as it was promised, as a share: 0.04 is 4 % slower. Where devices were
    only lost and the former plan was the best, the best plan that there is now is no nearer than that."""
    changed: tuple[int, ...]
    """Places in ``plan.stages`` of those whose devices or layers differ from the former plan's."""
    seconds: float = Field(ge=0)
    """What finding it took."""

    @property
    def value(self) -> float:
        """Of the plan's objective, in seconds, without movement."""
        return objective_value(self.plan.objective, self.plan.predicted)


class Teller:
    """Makes results of one repair. ``devices`` are all that there are now; ``lost``: layers that have to move."""

    def __init__(
        self,
        before: Plan,
        model: ModelSpec,
        devices: Sequence[PlacementDevice],
        topology: Topology,
        constraints: Constraints,
        policy: RepairPolicy,
        holdings: Holdings,
        *,
        seed: int,
    ) -> None:
        self.begin = monotonic()
        self.before = before
        self.model = model
        self.devices = devices
        self.by_id = {device.id: device for device in devices}
        self.topology = topology
        self.constraints = constraints
        self.policy = policy
        self.holdings = holdings
        self.seed = seed
        self.lost = 0
        self.promised = objective_value(before.objective, before.predicted)

    def of_steps(self, instance: Instance, steps: Sequence[Step], method: RepairMethod) -> RepairResult:
        """``instance`` may know its devices with more on them than they say: what is told is what they say."""
        plan = assemble(
            replace(
                instance,
                constraints=self.constraints,
                devices=tuple(self.by_id[device.id] for device in instance.devices),
            ),
            steps,
            objective=self.before.objective,
            bound=None,
            target_gap=PROVEN_GAP,
            proven_gap=PROVEN_GAP,
            solver="repair",
            solve_seconds=monotonic() - self.begin,
            seed=self.seed,
        )
        return self.of_plan(plan, method)

    def of_plan(self, plan: Plan, method: RepairMethod) -> RepairResult:
        """Raises: InvalidPlan where the plan breaks a rule."""
        former = {frozenset(stage.devices): stage for stage in self.before.stages}
        stages = [_in_old_order(stage, former.get(frozenset(stage.devices))) for stage in plan.stages]
        movement = self.holdings.movement(stages)
        plan = plan.model_copy(update={"stages": tuple(_with_moved(stage, movement) for stage in stages)})
        validate_plan(self.model, self.devices, self.topology, self.constraints, plan)
        places = {(stage.devices, stage.start, stage.end) for stage in self.before.stages}
        return RepairResult(
            plan=plan,
            method=method,
            layers_lost=self.lost,
            layers_moved=len(movement.layers),
            bytes_moved=movement.total_bytes,
            load_seconds=movement.seconds(self.by_id, self.policy.load_bandwidth),
            load_estimated=any(self.by_id[name].load_bandwidth is None for name in movement.bytes),
            penalty=objective_value(plan.objective, plan.predicted) / self.promised - 1 if self.promised > 0 else 0.0,
            changed=tuple(
                place
                for place, stage in enumerate(plan.stages)
                if (stage.devices, stage.start, stage.end) not in places
            ),
            seconds=monotonic() - self.begin,
        )


def _in_old_order(stage: Stage, former: Stage | None) -> Stage:
    """A group that stays together keeps its ranks: each member has the share that it had."""
    if former is None or former.devices == stage.devices:
        return stage
    held = {entry.device: entry for entry in stage.held}
    return stage.model_copy(
        update={"devices": former.devices, "held": tuple(held[device] for device in former.devices)}
    )


def _with_moved(stage: Stage, movement: Movement) -> Stage:
    """Bytes to load as the shares are, which the solver does not know."""
    held = tuple(entry.model_copy(update={"moved": movement.bytes.get(entry.device, 0)}) for entry in stage.held)
    return stage.model_copy(update={"held": held})
