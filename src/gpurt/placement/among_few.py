"""A plan where a search among all devices has found none, and there may be one: rules leave room for few plans.

It is looked for among the devices that counting would take, and then where layers fit when they are laid down one stage
after the other. Neither says anything of the best plan among all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gpurt.placement.building import build_instance
from gpurt.placement.clock import Clock
from gpurt.placement.constraints import ObjectiveKind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.incumbent import Found
from gpurt.placement.instance import Instance
from gpurt.placement.relaxation import Step
from gpurt.placement.valuation import keeps_rules, path_bottleneck, path_cost

Solve = Callable[[Instance, Clock], Found]


def among_few(problem: Problem, kind: ObjectiveKind, clock: Clock, solve: Solve) -> tuple[Instance, Found] | None:
    """``solve`` looks for a plan on an instance. None: there is none here either."""
    ask = Feasibility(clock.deadline, cancelled=clock.cancelled, search=0)
    few = None if clock.over() else ask.devices_that_do(problem)
    if few is not None:
        share = Clock(max(0.01, clock.left * 0.5), clock.cancelled)
        instance = build_instance(problem.model, few, problem.topology, problem.constraints)
        found = solve(instance, share)
        if found.steps is not None:
            return instance, found
    layout = ask.laid(problem)
    if layout is None:
        return None
    devices = sorted((device for group, _ in layout for device in group), key=lambda device: device.id)
    instance = build_instance(problem.model, devices, problem.topology, problem.constraints)
    steps = _steps(instance, layout)
    if steps is None or not keeps_rules(instance, steps):
        return None
    value = 0.0 if kind is ObjectiveKind.THROUGHPUT else path_cost(instance, steps)
    value += 0.0 if kind is ObjectiveKind.LATENCY else path_bottleneck(instance, steps)
    if not np.isfinite(value):
        return None
    laid = Found(value, steps, bound=0.0, engines=("laying",), proof=None)
    if clock.over():
        return instance, laid
    # What was laid is a plan, whatever a search among its devices still finds in the time that is left.
    found = solve(instance, Clock(max(0.01, clock.left), clock.cancelled))
    if found.steps is None or found.value > value:
        found = replace(laid, bound=min(found.bound, value))
    return instance, found


def _steps(instance: Instance, layout: list[tuple[tuple[PlacementDevice, ...], int]]) -> tuple[Step, ...] | None:
    """A layout by the numbers of an instance; None where it has a group that is not among the units."""
    kind_of = {instance.devices[at].id: kind for kind, group in enumerate(instance.members) for at in group}
    number = {unit.classes: at for at, unit in enumerate(instance.units)}
    steps: list[Step] = []
    for group, end in layout:
        unit = number.get(tuple(sorted(kind_of.get(device.id, -1) for device in group)))
        if unit is None:
            return None
        steps.append(Step(unit, steps[-1].end if steps else 0, end))
    return tuple(steps)
