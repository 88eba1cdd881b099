"""Layers in proportion to memory: the rule that needs to know nothing else, as a plan to be no worse than."""

from __future__ import annotations

import numpy as np

from gpurt.placement.instance import Instance
from gpurt.placement.relaxation import Step
from gpurt.placement.valuation import keeps_rules, path_cost


def proportional(instance: Instance) -> tuple[Step, ...] | None:
    """Every device, in the order given, with a share of the layers by its memory, rounded by largest remainder; None
    where that breaks a rule or does not fit."""
    single = {unit.classes[0]: number for number, unit in enumerate(instance.units) if unit.size == 1}
    placed = sorted((index, kind) for kind, group in enumerate(instance.members) if kind in single for index in group)
    if not placed:
        return None
    memory = np.array([instance.devices[index].budget_bytes for index, _ in placed], dtype=np.float64)
    share = memory / memory.sum() * instance.layers
    number = share.astype(np.int64)
    short = instance.layers - int(number.sum())
    number[np.argsort(number - share, kind="stable")[:short]] += 1
    steps: list[Step] = []
    end = 0
    for (_, kind), layers in zip(placed, number.tolist(), strict=True):
        if layers:
            steps.append(Step(single[kind], end, end + layers))
            end += layers
    widest = instance.cost.inner.shape[2] - 1
    if len(steps) > 1 and max(step.end - step.start for step in steps) > widest:
        return None
    plan = tuple(steps)
    return plan if np.isfinite(path_cost(instance, plan)) and keeps_rules(instance, plan) else None
