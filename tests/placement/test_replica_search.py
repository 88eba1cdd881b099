"""Which divisions replicas come from, and what is told where there are not enough."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gpurt.placement import (
    Constraints,
    InfeasiblePlacement,
    ModelSpec,
    PlacementDevice,
    ReplicaReport,
    Topology,
    Workload,
    apply_relaxation,
    solve_replicas,
)
from gpurt.placement import replica_search as search
from gpurt.placement.infeasibility import InfeasibilityReport
from gpurt.placement.shares import blocks_of, moved
from gpurt.placement.solver import ConstraintSatisfactionPlacement

pytestmark = pytest.mark.wide


def device(name: str, usable: int = 600, **fields: object) -> PlacementDevice:
    values: dict[str, object] = {"node": f"n-{name}", "memory_bandwidth": 1e6, "compute_flops": 1e9, **fields}
    return PlacementDevice.model_validate({"id": name, "usable_bytes": usable, **values})


MODEL = ModelSpec.uniform("m", layers=10, size_bytes=1000, kv_bytes_per_token=1)
SPEEDS = [1e6, 8e5, 3e5, 1e6, 2e5, 5e5, 9e5, 4e5]
EIGHT = [device(f"d{index}", 900, memory_bandwidth=speed) for index, speed in enumerate(SPEEDS)]


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """The shares that were solved, in their order."""
    shares: list[frozenset[str]] = []
    solve = ConstraintSatisfactionPlacement.solve_placement

    def noting(self: object, model: object, devices: list[PlacementDevice], *rest: object, **options: object) -> object:
        shares.append(frozenset(each.id for each in devices))
        return solve(self, model, devices, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ConstraintSatisfactionPlacement, "solve_placement", noting)
    return shares


def plans(devices: list[PlacementDevice], count: int, seconds: float) -> list[list[tuple[tuple[str, ...], int, int]]]:
    found = solve_replicas(MODEL, devices, constraints=Constraints(replicas=count), time_budget=seconds)
    return [[(stage.devices, stage.start, stage.end) for stage in plan.stages] for plan in found.plans]


@pytest.mark.parametrize("count", [2, 3])
def test_neither_the_time_nor_the_order_of_devices_decides(count: int, solved: list[frozenset[str]]) -> None:
    first = plans(EIGHT, count, 60)
    looked = list(solved)
    shuffled = list(EIGHT)
    random.Random(7).shuffle(shuffled)
    for devices, seconds in ((EIGHT, 600.0), (shuffled, 60.0)):
        solved.clear()
        assert plans(devices, count, seconds) == first
        assert solved == looked, "the same divisions, one after the other"


def test_no_more_divisions_are_solved_than_are_said(solved: list[frozenset[str]]) -> None:
    solve_replicas(MODEL, EIGHT, constraints=Constraints(replicas=3), time_budget=600)
    # All devices once; each division, one replica after the other, and the best one more closely.
    assert len(solved) <= 1 + 3 * (search.TRIED + 2)


def test_the_best_of_few_divisions_is_proved() -> None:
    """Of four devices the slow ones have to be together, and the bound of one pipeline says nothing of that."""
    devices = [
        device(name, 600, memory_bandwidth=speed) for name, speed in zip("abcd", (1e6, 1e6, 1e5, 1e5), strict=True)
    ]
    found = solve_replicas(MODEL, devices, constraints=Constraints(replicas=2))
    assert found.gap is not None
    assert found.gap <= 1e-3
    assert sorted(name for plan in found.plans for name in plan.devices) == list("abcd")


def test_a_bad_division_is_mended_by_moves() -> None:
    """Equal memory on either side, but all the speed on one: seven blocks are too many to try all."""
    devices = [device(f"f{index}", 1200, memory_bandwidth=1e6, zone="a") for index in range(4)]
    devices += [device(f"s{index}", 1200, memory_bandwidth=1e4, zone="b") for index in range(4)]
    found = solve_replicas(MODEL, devices, constraints=Constraints(replicas=3))
    assert {name[0] for name in found.devices} == {"f"}


def test_moves_keep_every_block() -> None:
    blocks = blocks_of(EIGHT[:5], None)
    shares = [blocks[:3], blocks[3:]]
    seen = 0
    for changed in moved(shares, 1, [{"d0"}, {"d3", "d4"}]):
        seen += 1
        assert sorted(block[0].id for share in changed for block in share) == [each.id for each in EIGHT[:5]]
        assert all(changed)
    assert seen == 3 + 3 * 2
    first = next(moved(shares, 1, [{"d0"}, {"d3", "d4"}]))
    assert {block[0].id for block in first[1]} & {"d1", "d2"}, "what no plan uses moves first"


# Refusals


def refusal(devices: list[PlacementDevice], **rules: object) -> tuple[InfeasiblePlacement, Constraints]:
    constraints = Constraints.model_validate(rules)
    with pytest.raises(InfeasiblePlacement) as caught:
        solve_replicas(MODEL, devices, constraints=constraints)
    return caught.value, constraints


def powered(*names: str) -> list[PlacementDevice]:
    return [device(f"d{index}", 1200, labels={"power": name}) for index, name in enumerate(names)]


CASES: dict[str, tuple[Callable[[], list[PlacementDevice]], dict[str, object], int, str]] = {
    "too few devices": (lambda: [device(name, 1200) for name in "ab"], {"replicas": 3}, 2, "2 separate devices"),
    "one device": (lambda: [device("a", 1200)], {"replicas": 2}, 1, "there is 1 separate device to serve them"),
    "too few domains": (
        lambda: powered("x", "x", "y"), {"replicas": 3, "replica_domain": "power"}, 2, "2 parts of the devices that"
    ),
    "too little memory": (lambda: [device(name, 500) for name in "abcde"], {"replicas": 3}, 2, "no division of the"),
    "too long a context": (
        lambda: [device(name, 4000) for name in "ab"],
        {"replicas": 2, "workload": Workload(context_tokens=600)}, 1, "no division of the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_says_how_many_there_are_and_what_helps(case: str) -> None:
    build, rules, most, said = CASES[case]
    devices = build()
    error, constraints = refusal(devices, **rules)
    report = error.report
    assert isinstance(report, ReplicaReport)
    assert error.constraint == report.constraint == "replicas"
    assert said in report.message
    assert report.most_replicas == most
    assert report.short_bytes == max(0, report.need_bytes - report.usable_bytes)
    assert report.relaxations or report.without_domain
    for relaxation in report.relaxations:
        problem = apply_relaxation(relaxation, MODEL, devices, Topology(), constraints)
        assert len(solve_replicas(*problem).plans) == constraints.replicas, relaxation.change
    if most > 1:
        fewer = constraints.model_copy(update={"replicas": most})
        assert len(solve_replicas(MODEL, devices, constraints=fewer).plans) == most
    if report.without_domain:
        together = constraints.model_copy(update={"replica_domain": None})
        assert len(solve_replicas(MODEL, devices, constraints=together).plans) == constraints.replicas
    assert report.without_domain == (case == "too few domains")
    lines = report.explain().splitlines()
    assert lines[0] == f"No plan for m: {report.message}."
    assert ReplicaReport.model_validate_json(report.model_dump_json()) == report


def test_where_one_pipeline_has_no_plan_the_report_is_of_that() -> None:
    error, _ = refusal([device(name, 300) for name in "ab"], replicas=2)
    assert isinstance(error.report, InfeasibilityReport)
    assert error.constraint == "memory"
