"""In whatever order rules, devices and links are given: the same answer, and no plan that breaks one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    InvalidPlacementInput,
    Pin,
    Plan,
    PlanStatus,
    StageLayers,
    validate_plan,
)
from tests.placement.instances import Problem, problem

pytestmark = pytest.mark.wide

SOLVER = ConstraintSatisfactionPlacement()
DEVICES, LAYERS = 5, 6
BUDGET = 4.0
"""Seconds: problems of this size are proved in hundredths; what is left over goes to reports of why there is none."""
NAMES = [f"d{index}" for index in range(DEVICES)]

Rule = tuple[str, Any]
"""A field of :class:`Constraints`, and its value or one entry of it."""


def some(names: Sequence[str]) -> st.SearchStrategy[frozenset[str]]:
    return st.sets(st.sampled_from(names), min_size=1, max_size=3).map(frozenset)


def rule(field: str, value: st.SearchStrategy[Any]) -> st.SearchStrategy[Rule]:
    return value.map(lambda found: (field, found))


def a_pin(start: int, length: int, devices: frozenset[str]) -> Pin:
    return Pin(start=start, end=min(LAYERS, start + length), devices=devices)


def a_size(device: str, least: int, more: int) -> StageLayers:
    return StageLayers(device=device, minimum=least, maximum=least + more)


PINS = st.builds(a_pin, st.integers(0, LAYERS - 1), st.integers(1, 2), some(NAMES))
LIMITS = st.builds(DomainLimit, domain=st.sampled_from(["node", "zone", "power"]), stages=st.integers(1, 3))
SIZES = st.builds(a_size, st.sampled_from(NAMES), st.integers(1, 2), st.integers(0, 3))
RULES = st.lists(
    st.one_of(
        rule("pins", PINS),
        rule("domain_limits", LIMITS),
        rule("stage_layers", SIZES),
        rule("exclude_devices", st.sampled_from(NAMES)),
        rule("require_devices", st.sampled_from(NAMES)),
        rule("max_stages", st.integers(2, 5)),
        rule("min_stages", st.integers(1, 2)),
        rule("tensor_parallel_max", st.integers(1, 2)),
        rule("max_link_seconds", st.sampled_from([0.05, 0.5, 5.0])),
        rule("same_backend", st.booleans()),
    ),
    max_size=6,
)


def constraints(rules: Sequence[Rule], base: Constraints) -> Constraints:
    """One after the other, as a program would that collects them; of two values of one field the lower one holds."""
    fields: dict[str, Any] = {}
    for field, value in rules:
        if field in ("pins", "domain_limits", "stage_layers"):
            fields[field] = (*fields.get(field, ()), value)
        elif field in ("exclude_devices", "require_devices"):
            fields[field] = fields.get(field, frozenset[str]()) | {value}
        else:
            fields[field] = min(value, fields.get(field, value))
    return Constraints(workload=base.workload, **fields)


def answer(given: Problem) -> Plan | type[Exception]:
    """A plan that keeps every rule, or which error there is."""
    try:
        plan = SOLVER.solve_placement(*given, time_budget=BUDGET)
    except (InfeasiblePlacement, InvalidPlacementInput) as error:
        return type(error)
    validate_plan(*given, plan)
    held = {each.device: each for stage in plan.stages for each in stage.held}
    for device in given.devices:
        assert device.id not in held or held[device.id].total <= device.usable_bytes
    return plan


def same_in_any_order(seed: int, rules: list[Rule], data: st.DataObject) -> None:
    made = problem(seed, devices=DEVICES, layers=LAYERS, varied=True)
    first = made._replace(constraints=constraints(rules, made.constraints))
    shuffled = Problem(
        made.model,
        tuple(data.draw(st.permutations(made.devices), label="devices")),
        made.topology.model_copy(update={"links": tuple(data.draw(st.permutations(made.topology.links)))}),
        constraints(data.draw(st.permutations(rules), label="rules"), made.constraints),
    )
    one, other = answer(first), answer(shuffled)
    if not isinstance(one, Plan) or not isinstance(other, Plan):
        assert one is other
        return
    # A plan for one order is a plan for the other: the rules are the same ones.
    validate_plan(*shuffled, one)
    validate_plan(*first, other)
    assert one.status is other.status is PlanStatus.OPTIMAL
    assert one.value == pytest.approx(other.value, rel=2e-4)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), RULES, st.data())
def test_no_order_breaks_a_rule(seed: int, rules: list[Rule], data: st.DataObject) -> None:
    same_in_any_order(seed, rules, data)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), RULES, st.data())
def test_no_order_of_many_breaks_a_rule(seed: int, rules: list[Rule], data: st.DataObject) -> None:
    same_in_any_order(seed, rules, data)
