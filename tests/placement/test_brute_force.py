"""Equal to trying every plan, and never a plan that the independent validator refuses."""

from __future__ import annotations

import pytest

from gpurt.placement import ConstraintSatisfactionPlacement, InfeasiblePlacement, PlanStatus, validate_plan
from tests.placement.brute import Brute
from tests.placement.instances import Problem, problem

SOLVER = ConstraintSatisfactionPlacement()


def check(case: Problem, objective: str) -> str:
    best = Brute(*case).best(objective)
    try:
        plan = SOLVER.solve_placement(*case, objective=objective, time_budget=20)
    except InfeasiblePlacement:
        assert best is None
        return "infeasible"
    validate_plan(*case, plan)
    assert best is not None
    assert plan.value == pytest.approx(best, rel=1.01e-4)
    assert plan.value >= best * (1 - 1e-9)
    if plan.bound is not None:
        assert plan.bound <= best * (1 + 1e-9)
    assert plan.status is PlanStatus.OPTIMAL
    return "placed"


def sweep(seeds: range, objectives: tuple[str, ...], **size: int | bool) -> None:
    for objective in objectives:
        seen = {check(problem(seed, **size), objective) for seed in seeds}  # type: ignore[arg-type]
        assert "placed" in seen


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("objective", ["latency", "throughput", "balanced"])
def test_small_problems_are_solved_as_by_trying_all(objective: str, varied: bool, rules: bool) -> None:
    seeds = range(6 if objective == "balanced" and rules else 12)
    sweep(seeds, (objective,), devices=4, layers=6, varied=varied, rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("devices", [2, 3, 4, 5])
def test_problems_up_to_five_devices_and_eight_layers(devices: int, varied: bool, rules: bool) -> None:
    sweep(range(1000, 1150), ("latency", "throughput"), devices=devices, layers=8, varied=varied, rules=rules)
