"""Several pipelines of one model at once, and whether they keep the rules together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import isclose

from pydantic import Field

from gpurt.placement.arguments import check_kind
from gpurt.placement.constraints import Constraints, ObjectiveKind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlan
from gpurt.placement.inputs import check_types
from gpurt.placement.neighbourhood import limits_there
from gpurt.placement.plan import Plan
from gpurt.placement.record import PlacementRecord
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology
from gpurt.placement.validation import validate_plan


class ReplicatedPlan(PlacementRecord):
    """A plan for each replica. A request goes to any one of them."""

    plans: tuple[Plan, ...] = Field(min_length=1)
    objective: ObjectiveKind
    value: float = Field(ge=0)
    """Seconds. Latency: the slowest replica's value. Throughput: time per step of all replicas together, the inverse of
    the sum of their rates. Balanced: the slowest replica's value."""
    bound: float | None = Field(default=None, ge=0)
    """No set of replicas has a lower value; None: not known."""

    @property
    def gap(self) -> float | None:
        if self.bound is None:
            return None
        return max(0.0, (self.value - self.bound) / self.value) if self.value > 0 else 0.0

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for plan in self.plans for device in plan.devices)


def replicated_value(objective: ObjectiveKind, plans: Sequence[Plan]) -> float:
    """What :attr:`ReplicatedPlan.value` says of these plans."""
    if objective is ObjectiveKind.THROUGHPUT:
        if any(plan.value == 0 for plan in plans):
            return 0.0
        return 1 / sum(1 / plan.value for plan in plans)
    return max(plan.value for plan in plans)


def alone(constraints: Constraints) -> Constraints:
    """The rules of one replica: those of all together are left out."""
    return constraints.model_copy(
        update={
            "replicas": 1, "replica_domain": None, "require_devices": frozenset(), "require_nodes": frozenset(),
        }
    )  # fmt: skip


def rules_of_share(
    constraints: Constraints, share: Sequence[PlacementDevice], nodes: Mapping[str, Set[str]]
) -> Constraints | None:
    """The rules of one replica as far as they speak of these devices; None where a pin names none of them.

    ``nodes``: all devices of each node, those of other shares as well.
    """
    ids, there = {device.id for device in share}, {device.node for device in share}
    pins = [
        pin.model_copy(update={"devices": pin.devices & ids, "nodes": pin.nodes & there}) for pin in constraints.pins
    ]
    if any(not pin.devices and not pin.nodes for pin in pins):
        return None
    return alone(constraints).model_copy(
        update={
            "pins": tuple(pins),
            "exclude_devices": constraints.exclude_devices & ids,
            "exclude_nodes": constraints.exclude_nodes & there,
            "require_devices": constraints.require_devices & ids,
            # A node that is divided may be used by another share.
            "require_nodes": frozenset(name for name in constraints.require_nodes & there if nodes[name] <= ids),
            "stage_layers": tuple(entry for entry in constraints.stage_layers if entry.device in ids),
            "domain_limits": limits_there(constraints, share),
        }
    )


def validate_replicas(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    topology: Topology,
    constraints: Constraints,
    replicated: ReplicatedPlan,
) -> None:
    """Raise :class:`InvalidPlan` unless every plan is valid and they keep the rules together; InvalidPlacementInput
    where an argument is of another kind."""
    check_kind(replicated, ReplicatedPlan, "replicated")
    check_types(model, devices, topology, constraints)
    if len(replicated.plans) != constraints.replicas:
        count = len(replicated.plans)
        raise InvalidPlan(f"{count} plans for {constraints.replicas} replicas", rule="replicas", where="plans")
    by_id = {device.id: device for device in devices}
    taken: dict[tuple[str, ...], int] = {}
    for number, plan in enumerate(replicated.plans):
        validate_plan(model, devices, topology, alone(constraints), plan)
        for name in plan.devices:
            device = by_id[name]
            keys: list[tuple[str, ...]] = [("device", name)]
            if device.memory_pool_id is not None:
                keys.append(("memory pool", device.node, device.memory_pool_id))
            domain = device.domain(constraints.replica_domain) if constraints.replica_domain else None
            if domain is not None:
                keys.append((str(constraints.replica_domain), domain))
            for key in keys:
                other = taken.setdefault(key, number)
                if other != number:
                    raise InvalidPlan(
                        f"replicas {other} and {number} share {' '.join(key)}", rule="replicas", where=name
                    )
    used = set(replicated.devices)
    nodes = {by_id[name].node for name in used}
    for name in sorted((constraints.require_devices - used) | (constraints.require_nodes - nodes)):
        raise InvalidPlan("it is required and not used", rule="require", where=name)
    value = replicated_value(replicated.objective, replicated.plans)
    if any(plan.objective is not replicated.objective for plan in replicated.plans):
        raise InvalidPlan("plans of another objective", rule="objective", where="plans")
    if not isclose(replicated.value, value, rel_tol=1e-6, abs_tol=1e-15):
        raise InvalidPlan(f"it is {value}, not {replicated.value}", rule="objective", where="value")
    if replicated.bound is not None and replicated.bound > value * (1 + 1e-6):
        raise InvalidPlan(f"{replicated.bound} is above the value {value}", rule="objective", where="bound")
