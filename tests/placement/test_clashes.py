"""Rules that contradict each other are told at once, also among very many devices, and both by their names."""

from __future__ import annotations

from time import monotonic, process_time
from typing import Any

import pytest

from gpurt.placement import (
    ConstraintKind,
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    ModelSpec,
    Pin,
    PlacementDevice,
    RelaxationKind,
    StageLayers,
    Topology,
    apply_relaxation,
    one_step_less,
)
from gpurt.placement.feasibility import Feasibility, Problem

pytestmark = pytest.mark.wide

SOLVER = ConstraintSatisfactionPlacement()
GIB = 1 << 30
Kind = RelaxationKind


def device(place: int) -> PlacementDevice:
    """Two on each node; nodes take turns with backends, and thirty-two of them make a zone."""
    node = place // 2
    return PlacementDevice(
        id=f"d{place}", node=f"n{node}", zone=f"z{node // 32}", backend=("cuda", "rocm")[node % 2],
        usable_bytes=8 * GIB, memory_bandwidth=1e12, compute_flops=1e15,
        memory_pool_id="shared" if place in (4, 5) else None,
    )  # fmt: skip


DEVICES = tuple(device(place) for place in range(1024))
MODEL = ModelSpec.uniform("m", layers=64, size_bytes=64 * GIB)


def pin(start: int, end: int, *names: str) -> Pin:
    devices = frozenset(name for name in names if name.startswith("d"))
    return Pin(start=start, end=end, devices=devices, nodes=frozenset(names) - devices)


def names(*given: str) -> frozenset[str]:
    return frozenset(given)


def asked(rules: dict[str, Any]) -> tuple[InfeasiblePlacement, Problem]:
    case = Problem(MODEL, DEVICES, Topology(), Constraints(**rules))
    begin = process_time()
    with pytest.raises(InfeasiblePlacement) as caught:
        SOLVER.solve_placement(*case)
    assert process_time() - begin < 0.5, "a tenth of a second, and much of it is what a busy machine takes"
    return caught.value, case


@pytest.mark.parametrize(
    ("rules", "constraint", "said", "helping"),
    [
        ({"pins": (pin(3, 4, "d0"),), "exclude_devices": names("d0")}, "pins",
         "the pin of layer 3 to d0 cannot be kept: d0 is excluded", {Kind.DROP_PIN, Kind.INCLUDE}),
        ({"pins": (pin(3, 6, "n0"),), "exclude_nodes": names("n0")}, "pins",
         "the pin of layers 3 to 5 to n0 cannot be kept: n0 is excluded", {Kind.DROP_PIN, Kind.INCLUDE}),
        ({"require_devices": names("d0"), "exclude_nodes": names("n0")}, "require_devices",
         "requiring d0 cannot be kept: n0 is excluded", {Kind.REQUIRE, Kind.INCLUDE}),
        ({"require_nodes": names("n0"), "exclude_devices": names("d0", "d1")}, "require_nodes",
         "requiring n0 cannot be kept: d0, d1 are excluded", {Kind.REQUIRE, Kind.INCLUDE}),
        ({"require_devices": names(*(f"d{2 * at}" for at in range(9))), "max_stages": 8}, "require_devices",
         "requiring d0, d10, d12, d14, d16, d2, d4, d6 and d8 takes 9 stages, and max_stages allows 8",
         {Kind.MAX_STAGES, Kind.REQUIRE}),
        ({"require_nodes": names("n0", "n1", "n2", "n3", "n4"), "max_nodes": 4}, "require_nodes",
         "takes 5 nodes, and max_nodes allows 4", {Kind.MAX_NODES, Kind.REQUIRE}),
        ({"require_devices": names("d4", "d5")}, "require_devices",
         "requiring d4 and d5 cannot be kept: they share their memory", {Kind.REQUIRE}),
        ({"pins": (pin(3, 6, "d0"), pin(5, 8, "d2"))}, "pins",
         "the pin of layers 3 to 5 to d0 and the pin of layers 5 to 7 to d2 contradict each other", {Kind.DROP_PIN}),
        ({"pins": (pin(3, 6, "d0"), pin(6, 9, "d2"), pin(9, 12, "d0", "d4")), "exclude_devices": names("d4")}, "pins",
         "the pin of layers 6 to 8 to d2 contradict each other: d0 has one range", {Kind.DROP_PIN, Kind.INCLUDE}),
        ({"pins": (pin(3, 9, "d0"),), "stage_layers": (StageLayers(device="d0", maximum=4),)}, "pins",
         "the pin of layers 3 to 8 to d0 and stage_layers contradict each other: d0 may have 4 layers at most",
         {Kind.DROP_PIN, Kind.STAGE_LAYERS}),
        ({"pins": (pin(0, 1, "d0"), pin(1, 2, "d2")), "stage_layers": (StageLayers(device="d0", minimum=3),)}, "pins",
         "the minimum of 3 layers on d0 contradicts the pins: they leave it 1 layer",
         {Kind.DROP_PIN, Kind.STAGE_LAYERS}),
        ({"require_devices": names("d0", "d2"), "domain_limits": (DomainLimit(domain="zone", stages=1),)},
         "require_devices", "requiring d0 and d2 takes 2 stages, and there may be at most 1 stage per zone",
         {Kind.REQUIRE, Kind.DOMAIN_LIMIT}),
        ({"require_devices": names("d0", "d2"), "same_backend": True}, "require_devices",
         "requiring d0 and d2 takes cuda and rocm, and same_backend allows one backend",
         {Kind.REQUIRE, Kind.SAME_BACKEND}),
        ({"pins": (pin(3, 4, "d0"), pin(8, 9, "d2")), "same_backend": True}, "pins",
         "the pin of layer 3 to d0 and the pin of layer 8 to d2 take cuda and rocm",
         {Kind.DROP_PIN, Kind.SAME_BACKEND}),
        ({"min_nodes": 12, "max_stages": 10}, "min_nodes",
         "min_nodes 12 takes as many stages, and max_stages allows 10", {Kind.MIN_NODES, Kind.MAX_STAGES}),
        ({"min_stages": 65}, "min_stages", "min_stages is 65, and the model has only 64 layers", {Kind.MIN_STAGES}),
        ({"min_nodes": 65}, "min_nodes", "min_nodes is 65, and the model has only 64 layers", {Kind.MIN_NODES}),
        ({"min_stages": 20, "max_nodes": 9}, "max_nodes", "min_stages is 20, and max_nodes 9 leaves 18 devices",
         {Kind.MIN_STAGES, Kind.MAX_NODES}),
        ({"min_stages": 20, "domain_limits": (DomainLimit(domain="zone", stages=1),)}, "domain_limits",
         "min_stages is 20, and at most 1 stage per zone leaves 16 stages", {Kind.MIN_STAGES, Kind.DOMAIN_LIMIT}),
        ({"min_stages": 64, "require_devices": names("d0"), "stage_layers": (StageLayers(device="d0", minimum=2),)},
         "min_stages", "leaves fewer layers than min_stages 64 needs", {Kind.MIN_STAGES, Kind.REQUIRE}),
    ],
)  # fmt: skip
def test_both_rules_are_named_and_either_may_go(
    rules: dict[str, Any], constraint: str, said: str, helping: set[RelaxationKind]
) -> None:
    error, case = asked(rules)
    assert error.constraint == constraint
    assert said in str(error)
    assert error.report is not None
    found = {change.kind for change in error.report.relaxations}
    assert found & helping, "a busy machine does not try them all"
    counting = Feasibility(monotonic() + 60, search=0)
    for change in error.report.relaxations:
        assert counting.ask(apply_relaxation(change, *case)) is True, change.change
        less = one_step_less(change)
        assert not change.minimal or less is None or counting.ask(apply_relaxation(less, *case)) is False, change.change


def test_pins_and_a_limit_of_stages_that_are_both_too_little() -> None:
    error, _ = asked({"pins": (pin(3, 4, "d0"), pin(8, 9, "d2")), "require_devices": names("d6"), "max_stages": 2})
    assert error.constraint == ConstraintKind.MAX_STAGES
    assert "requiring d6, the pin of layer 3 to d0 and the pin of layer 8 to d2 take 3 stages" in str(error)


def test_rules_that_fit_each_other_are_no_contradiction() -> None:
    rules = Constraints(
        pins=(pin(0, 2, "d0"), pin(2, 4, "d2"), pin(1, 3, "d0", "d2")),
        require_devices=names("d0", "d1"), require_nodes=names("n0", "n1"), exclude_devices=names("d3"),
        min_stages=9, max_stages=9, max_nodes=6, min_nodes=3, domain_limits=(DomainLimit(domain="node", stages=2),),
        stage_layers=(StageLayers(device="d0", minimum=2, maximum=2),),
    )  # fmt: skip
    plan = SOLVER.solve_placement(MODEL, DEVICES[:16], Topology(), rules, target_gap=0.9)
    assert len(plan.stages) == 9


@pytest.mark.parametrize("rules", [{"min_stages": 64}, {"min_nodes": 64}, {"min_stages": 20, "max_nodes": 10}])
def test_as_many_stages_as_there_can_be_have_a_plan_among_very_many_devices(rules: dict[str, Any]) -> None:
    plan = SOLVER.solve_placement(MODEL, DEVICES, Topology(), Constraints(**rules), time_budget=2, target_gap=0.9)
    assert len(plan.stages) >= 20
