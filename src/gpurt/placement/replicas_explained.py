"""Why replicas are as they are, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpurt.placement.arguments import check_kind
from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlan
from gpurt.placement.explanation import explain_left_out, explain_plan
from gpurt.placement.grouping import filter_devices
from gpurt.placement.inputs import check_types
from gpurt.placement.replicated import ReplicatedPlan, alone
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology
from gpurt.placement.words import listed, time_words


def explain_replicas(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    constraints: Constraints,
    replicated: ReplicatedPlan,
    *,
    left_out: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Sentences for people: left out, used by no replica, which replica limits all, and of each what
    :func:`~gpurt.placement.explain_plan` says of its own devices.

    Args:
        left_out: devices that are not among ``devices``, and why.

    Raises:
        InvalidPlacementInput: an argument is of another kind.
        InvalidPlan: a plan contradicts itself, is of a model with another number of layers, or uses a device that is
            not among ``devices``.
    """
    check_kind(replicated, ReplicatedPlan, "replicated")
    check_types(model, devices, Topology(), constraints)
    by_id = {device.id: device for device in devices}
    for name in sorted(set(replicated.devices) - set(by_id)):
        raise InvalidPlan("no such device", rule="device", where=name)
    lines = [*explain_left_out(model, devices, constraints, left_out or {})]
    lines += _idle(model, devices, constraints, replicated)
    lines += _slowest(replicated)
    rules = alone(constraints)
    for number, plan in enumerate(replicated.plans):
        own = [by_id[name] for name in plan.devices]
        lines += [f"replica {number + 1}: {text}" for text in explain_plan(model, own, rules, plan)]
    return tuple(lines)


def _idle(
    model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints, replicated: ReplicatedPlan
) -> Iterator[str]:
    kept, _ = filter_devices(model, devices, constraints)
    idle = [device.id for device in kept if device.id not in set(replicated.devices)]
    if idle:
        gap = replicated.gap
        certain = "none better were found with them"
        if gap is not None:
            certain = f"no replicas at all are better by more than {gap:.2%}"
        yield f"used by no replica, {listed(idle)}: {certain}"


def _slowest(replicated: ReplicatedPlan) -> Iterator[str]:
    values = [plan.value for plan in replicated.plans]
    slow, fast = max(range(len(values)), key=values.__getitem__), min(values)
    if values[slow] > fast * 1.01:
        yield (
            f"the slowest is replica {slow + 1}, {replicated.objective.value} {time_words(values[slow])}; that of the "
            f"fastest is {time_words(fast)}"
        )
