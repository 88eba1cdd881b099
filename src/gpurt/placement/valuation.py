"""What a path by numbers costs, and whether it keeps the rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gpurt.placement.instance import Instance
from gpurt.placement.relaxation import Step


def path_cost(instance: Instance, steps: Sequence[Step]) -> float:
    """The objective of a plan by numbers: stages, hand-overs and the way back."""
    layers = instance.layers
    total = sum(instance.cost.value(step.unit, step.start, step.end, layers) for step in steps)
    return total + sum(_ways(instance, steps))


def path_bottleneck(instance: Instance, steps: Sequence[Step]) -> float:
    """Seconds of the slowest stage or link."""
    layers = instance.layers
    slowest = max(instance.time.value(step.unit, step.start, step.end, layers) for step in steps)
    return max([slowest, *_ways(instance, steps)])


def _ways(instance: Instance, steps: Sequence[Step]) -> list[float]:
    ways = [float(instance.hop_at(after.start)[before.unit, after.unit]) for before, after in pairwise(steps)]
    if len(steps) > 1:
        ways.append(float(instance.back[steps[-1].unit, steps[0].unit]))
    return ways


def keeps_rules(instance: Instance, steps: Sequence[Step]) -> bool:
    """Devices used once, and every rule about the set of stages."""
    units = [step.unit for step in steps]
    if (instance.rows[units].sum(axis=0) > instance.limits).any():
        return False
    constraints = instance.constraints
    if constraints.max_nodes is not None or constraints.min_nodes > 1:
        nodes = len(set(instance.node[units].tolist()))
        if nodes < constraints.min_nodes or (constraints.max_nodes is not None and nodes > constraints.max_nodes):
            return False
    return True
