"""Of equal devices each stage gets those that have most of it already."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from gpurt.placement import ConstraintSatisfactionPlacement, ModelSpec, PlacementDevice, Plan, Stage
from gpurt.placement.equal_devices import at_home
from gpurt.placement.holdings import Holdings
from gpurt.placement.synthetic import synthetic_model

pytestmark = pytest.mark.wide
GB = 10**9


def device(name: str, node: str) -> PlacementDevice:
    return PlacementDevice(
        id=name, node=node, backend="cuda", usable_bytes=4 * GB, memory_bandwidth=1e12, compute_flops=1e14
    )


def planned(parallel: tuple[int, ...], layers: int) -> tuple[ModelSpec, tuple[PlacementDevice, ...], Plan]:
    """Two nodes of three or four equal devices, hardly large enough."""
    each = 4 if max(parallel) > 1 else 3
    devices = tuple(device(f"{node}{number}", node) for node in "ab" for number in range(each))
    model = synthetic_model(layers, int(len(devices) * 4 * GB * 0.8), tensor_parallel=parallel)
    return model, devices, ConstraintSatisfactionPlacement().solve_placement(model, devices, time_budget=2)


def renamed(stages: tuple[Stage, ...] | list[Stage], names: dict[str, str]) -> list[Stage]:
    return [
        stage.model_copy(update={"devices": tuple(names.get(name, name) for name in stage.devices)}) for stage in stages
    ]


def kept(model: ModelSpec, stages: list[Stage], holdings: Holdings) -> float:
    """Bytes of each stage that each of its devices has, of whole layers."""
    total = 0.0
    for stage in stages:
        for name in stage.devices:
            lacks = holdings.missing([name])[stage.start : stage.end].sum()
            total += sum(layer.weight_bytes for layer in model.layers[stage.start : stage.end]) - lacks
    return total


@pytest.mark.parametrize("parallel", [(1,), (2,)])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_stages_go_back_to_where_they_lie(parallel: tuple[int, ...], seed: int) -> None:
    model, devices, plan = planned(parallel, 24)
    holdings = Holdings(model, plan, devices)
    sets = [[each.id for each in devices if each.node == node] for node in "ab"]
    dice = random.Random(seed)
    names = {name: other for group in sets for name, other in zip(group, dice.sample(group, len(group)), strict=True)}
    back = at_home(renamed(plan.stages, names), sets, holdings)
    assert [(set(stage.devices), stage.start) for stage in back] == [
        (set(stage.devices), stage.start) for stage in plan.stages
    ]


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_where_stages_have_shifted_no_exchange_would_keep_more(shift: int) -> None:
    model, devices, plan = planned((1,), 24)
    holdings = Holdings(model, plan, devices)
    sets = [[each.id for each in devices if each.node == node] for node in "ab"]
    last = len(plan.stages) - 1
    moved = [
        stage.model_copy(
            update={
                "start": stage.start + shift * (place > 0),
                "end": stage.end + shift * (place < last),
            }
        )
        for place, stage in enumerate(plan.stages)
    ]
    turned = renamed(moved, {"a0": "a1", "a1": "a2", "a2": "a0"})
    best = max(
        kept(model, renamed(moved, dict(zip(sets[0], order, strict=True))), holdings) for order in permutations(sets[0])
    )
    assert kept(model, at_home(turned, sets, holdings), holdings) == best


def test_devices_that_are_unlike_all_others_stay() -> None:
    model, devices, plan = planned((1,), 24)
    sets = [[each.id] for each in devices]
    assert at_home(plan.stages, sets, Holdings(model, None, devices)) == list(plan.stages)
