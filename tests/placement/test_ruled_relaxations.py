"""Many rules at once, small enough to try all plans: each verdict is right, and each change is the least that helps."""

from __future__ import annotations

import pytest

from gpurt.placement import (
    ConstraintSatisfactionPlacement,
    InfeasiblePlacement,
    InvalidPlacementInput,
    apply_relaxation,
    one_step_less,
)
from gpurt.placement.diagnosis import diagnose
from tests.placement.brute import Brute
from tests.placement.ruled_problems import Size, has_plan, ruled_problem

SOLVER = ConstraintSatisfactionPlacement()


def checked(seed: int) -> int | None:
    """Changes that were tried out; None where there is a plan, or rules that are refused before anything is solved."""
    case = ruled_problem(seed)
    truth = has_plan(case)
    try:
        SOLVER.solve_placement(*case, target_gap=0.9)
    except InfeasiblePlacement:
        assert not truth, f"seed {seed} has a plan"
    except InvalidPlacementInput:
        assert not truth, f"seed {seed} is no contradiction"
        return None
    else:
        assert truth, f"seed {seed} has none"
        return None
    report = diagnose(case, seconds=60)
    assert report.complete
    for change in report.relaxations:
        assert has_plan(apply_relaxation(change, *case)), f"seed {seed}: {change.change}"
        less = one_step_less(change)
        assert less is None or not has_plan(apply_relaxation(less, *case)), f"seed {seed}: less than {change.change}"
        assert change.minimal, f"seed {seed}: {change.change}"
    return len(report.relaxations)


def all_checked(seeds: range) -> tuple[int, int]:
    found = [number for seed in seeds if (number := checked(seed)) is not None]
    return len(found), sum(found)


@pytest.mark.wide
def test_some_verdicts_and_changes_against_trying_all_plans() -> None:
    refused, changes = all_checked(range(60))
    assert refused >= 25
    assert changes >= 30


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(1000, 5000, 500))
def test_very_many_verdicts_and_changes_against_trying_all_plans(begin: int) -> None:
    refused, changes = all_checked(range(begin, begin + 500))
    assert refused >= 250
    assert changes >= 350


@pytest.mark.wide
def test_trying_orders_finds_what_trying_all_plans_finds() -> None:
    for seed in range(40):
        case = ruled_problem(seed, most=Size(3, 4))
        assert has_plan(case) == (next(Brute(*case).plans(), None) is not None), f"seed {seed}"
