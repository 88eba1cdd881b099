"""What is said of a problem without a plan is true: the cause, the figures, and the smallest changes that help."""

from __future__ import annotations

import pickle
from time import monotonic, perf_counter
from typing import Any

import pytest

from gpurt.placement import (
    ConstraintKind,
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    FilterReason,
    InfeasibilityReport,
    InfeasiblePlacement,
    Link,
    Locality,
    ModelSpec,
    Pin,
    PlacementDevice,
    Relaxation,
    RelaxationKind,
    StageLayers,
    Topology,
    Workload,
    apply_relaxation,
    one_step_less,
    validate_plan,
)
from gpurt.placement.diagnosis import diagnose
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.synthetic import ClusterKind, model_for, synthetic_cluster
from tests.placement.brute import Brute
from tests.placement.instances import problem

pytestmark = pytest.mark.wide

SOLVER = ConstraintSatisfactionPlacement()
MIB = 1 << 20


def device(name: str, mib: int = 1000, **fields: Any) -> PlacementDevice:
    values: dict[str, Any] = {"node": f"n-{name}", "memory_bandwidth": 1e12, "compute_flops": 1e15, **fields}
    return PlacementDevice(id=name, usable_bytes=mib * MIB, **values)


def model(layers: int = 10, mib: int = 1000, **fields: Any) -> ModelSpec:
    return ModelSpec.uniform("m", layers=layers, size_bytes=mib * MIB, **fields)


def refused(*case: Any, **options: Any) -> InfeasibilityReport:
    with pytest.raises(InfeasiblePlacement) as caught:
        SOLVER.solve_placement(*case, **options)
    error = caught.value
    assert error.report is not None
    assert error.constraint == error.report.constraint.value
    assert error.report.message in str(error)
    return error.report


def solvable(case: Problem, budget: float = 6) -> bool:
    try:
        plan = SOLVER.solve_placement(*case, time_budget=budget, target_gap=0.9)
    except InfeasiblePlacement:
        return False
    validate_plan(*case, plan)
    return True


def check_relaxations(case: Problem, report: InfeasibilityReport, *, minimal: bool = True) -> set[RelaxationKind]:
    """Each one, applied, is solved and validated; each, one step less, has no plan."""
    for change in report.relaxations:
        assert solvable(apply_relaxation(change, *case)), change
        assert change.minimal or not minimal, change
        less = one_step_less(change)
        if change.minimal and less is not None:
            assert not solvable(apply_relaxation(less, *case)), change
    return {change.kind for change in report.relaxations}


def found(report: InfeasibilityReport, kind: RelaxationKind) -> Relaxation:
    return next(change for change in report.relaxations if change.kind is kind)


def test_bytes_short_in_all() -> None:
    case = Problem(model(), (device("a", 400), device("b", 450)), Topology(), Constraints())
    report = refused(*case)
    assert report.constraint is ConstraintKind.MEMORY
    assert (report.need_bytes, report.usable_bytes, report.short_bytes) == (1000 * MIB, 850 * MIB, 150 * MIB)
    assert (report.placeable_layers, report.short_layers, report.stranded_bytes) == (8, 2, 50 * MIB)
    assert [(room.layers, room.stranded_bytes) for room in report.devices] == [(4, 0), (4, 50 * MIB)]
    more = found(report, RelaxationKind.BYTES_PER_DEVICE)
    assert more.amount == 100 * MIB, "one layer more on each of them"
    assert found(report, RelaxationKind.ADD_DEVICE_OF_SIZE).amount == 200 * MIB
    assert found(report, RelaxationKind.ADD_DEVICES).amount == 1
    assert check_relaxations(case, report) == {
        RelaxationKind.BYTES_PER_DEVICE,
        RelaxationKind.ADD_DEVICES,
        RelaxationKind.ADD_DEVICE_OF_SIZE,
    }


def test_bytes_would_do_but_whole_layers_do_not_fit() -> None:
    """Ten layers of 100 MiB, four devices of 299: 1,196 MiB are usable, 99 stranded on each."""
    case = Problem(model(), tuple(device(name, 299) for name in "abcd"), Topology(), Constraints())
    report = refused(*case)
    assert report.constraint is ConstraintKind.LAYERS
    assert (report.short_bytes, report.short_layers, report.stranded_bytes) == (0, 2, 4 * 99 * MIB)
    assert found(report, RelaxationKind.BYTES_PER_DEVICE).amount == MIB
    assert one_step_less(found(report, RelaxationKind.BYTES_PER_DEVICE)) is None, "one step less is what there is now"
    check_relaxations(case, report)


def test_ends_that_do_not_fit_beside_the_layers() -> None:
    spec = model(embedding_bytes=60 * MIB, head_bytes=60 * MIB)
    case = Problem(spec, (device("a", 550), device("b", 575)), Topology(), Constraints())
    report = refused(*case)
    assert report.constraint is ConstraintKind.ENDS
    check_relaxations(case, report)


def test_the_largest_layer_fits_nowhere() -> None:
    case = Problem(model(), (device("a", 99), device("b", 50)), Topology(), Constraints())
    report = refused(*case)
    assert report.constraint is ConstraintKind.LAYER
    assert (report.largest_layer_bytes, report.largest_device_bytes) == (100 * MIB, 99 * MIB)
    assert {each.reason for each in report.filtered} == {FilterReason.TOO_SMALL}
    check_relaxations(case, report)


def test_context_batch_and_number_format() -> None:
    """Per token and sequence 10 KiB of cache in each of ten layers; 400 MiB are left for it on two devices."""
    spec = model(kv_bytes_per_token=10 << 10, dtype="float16", workspace_bytes_per_token=1024)
    work = Workload(context_tokens=3000, batch=2, prefill_tokens=1024)
    case = Problem(spec, (device("a", 700), device("b", 700)), Topology(), Constraints(workload=work))
    report = refused(*case)
    context, batch = found(report, RelaxationKind.CONTEXT_TOKENS), found(report, RelaxationKind.BATCH)
    # Five layers on each, with 40 MiB for the cache of one less a fifth of the scratch: 2,037 tokens of both sequences.
    assert context.amount == 1792
    assert batch.amount == 1
    assert found(report, RelaxationKind.QUANTISATION).names == ("Q8_0",)
    check_relaxations(case, report)


@pytest.mark.parametrize(
    ("rules", "kind", "amount", "constraint"),
    [
        ({"max_stages": 2}, RelaxationKind.MAX_STAGES, 4, ConstraintKind.MAX_STAGES),
        ({"max_nodes": 1}, RelaxationKind.MAX_NODES, 4, ConstraintKind.MAX_NODES),
        ({"min_stages": 6}, RelaxationKind.MIN_STAGES, 5, ConstraintKind.MIN_STAGES),
        ({"min_nodes": 7}, RelaxationKind.MIN_NODES, 5, ConstraintKind.MIN_NODES),
        (
            {"domain_limits": (DomainLimit(domain="power", stages=1),)},
            RelaxationKind.DOMAIN_LIMIT, 2, ConstraintKind.DOMAIN_LIMITS,
        ),
        (
            {"pins": (Pin(start=0, end=5, devices=frozenset({"a"})),)},
            RelaxationKind.WIDEN_PIN, 1, ConstraintKind.PINS,
        ),
        ({"same_backend": True}, RelaxationKind.SAME_BACKEND, None, ConstraintKind.SAME_BACKEND),
        ({"exclude_devices": frozenset("ab")}, RelaxationKind.INCLUDE, 1, ConstraintKind.MEMORY),
        ({"exclude_nodes": frozenset({"n-a", "n-b"})}, RelaxationKind.INCLUDE, 1, ConstraintKind.MEMORY),
        (
            {"stage_layers": (StageLayers(device="a", minimum=9),), "require_devices": frozenset("a")},
            RelaxationKind.STAGE_LAYERS, None, ConstraintKind.REQUIRE_DEVICES,
        ),
        (
            {
                "max_stages": 4, "require_devices": frozenset({"tiny"}),
                "stage_layers": (StageLayers(device="a", maximum=2), StageLayers(device="b", maximum=2)),
            },
            RelaxationKind.REQUIRE, None, ConstraintKind.REQUIRE_DEVICES,
        ),
    ],
)  # fmt: skip
def test_constraints_that_cannot_be_kept(
    rules: dict[str, Any], kind: RelaxationKind, amount: int | None, constraint: ConstraintKind
) -> None:
    """Ten layers on four devices with three each, and one with one half."""
    devices = (
        device("a", 300, labels={"power": "1"}), device("b", 300, labels={"power": "1"}),
        device("c", 300, labels={"power": "2"}, backend="cuda"),
        device("d", 300, labels={"power": "2"}, backend="cuda"),
        device("tiny", 150, labels={"power": "3"}),
    )  # fmt: skip
    case = Problem(model(), devices, Topology(), Constraints(**rules))
    report = refused(*case)
    assert report.constraint is constraint
    change = found(report, kind)
    assert change.amount == amount
    assert change.minimal
    check_relaxations(case, report)


def test_devices_left_out_each_have_their_reason() -> None:
    spec = model(
        dtype="bfloat16", operations=frozenset({"scan"}), largest_tensor_bytes=50 * MIB, backends=frozenset({"cuda"})
    )
    given = {"backend": "cuda"}
    devices = (
        device("kept", 500, **given),
        device("out", 500, **given),
        device("metal", 500, backend="metal"),
        device("int8", 500, dtypes=frozenset({"int8"}), **given),
        device("scanless", 500, unsupported_operations=frozenset({"scan"}), **given),
        device("narrow", 500, max_allocation_bytes=MIB, **given),
        device("reserved", 500, reserve_bytes=600 * MIB, **given),
        device("small", 99, **given),
        device("twin", 400, node="n-kept", memory_pool_id="p", **given),
        device("far", 300, **given),
    )
    devices = (devices[0].model_copy(update={"memory_pool_id": "p"}), *devices[1:])
    topology = Topology(cut=frozenset(("far", each.id) for each in devices if each.id != "far"))
    rules = Constraints(exclude_devices=frozenset({"out"}))
    report = refused(spec, devices, topology, rules)
    assert {each.device: each.reason for each in report.filtered} == {
        "out": FilterReason.EXCLUDED,
        "metal": FilterReason.BACKEND,
        "int8": FilterReason.DTYPE,
        "scanless": FilterReason.OPERATION,
        "narrow": FilterReason.ALLOCATION,
        "reserved": FilterReason.NO_MEMORY,
        "small": FilterReason.TOO_SMALL,
        "twin": FilterReason.MEMORY_POOL,
        "far": FilterReason.NOT_CONNECTED,
    }
    assert all(each.detail for each in report.filtered)
    assert [each.device for each in report.devices] == ["kept"]
    check_relaxations(Problem(spec, devices, topology, rules), report)


def test_no_device_at_all_may_take_part() -> None:
    report = refused(model(backends=frozenset({"cuda"})), [device("a", backend="metal")], Topology())
    assert report.constraint is ConstraintKind.DEVICES
    assert not report.devices


def test_islands_are_connected() -> None:
    devices = tuple(device(name, 400) for name in "abcd")
    pairs = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")]
    links = [Link(source=one, target=other, latency_seconds=1e-4, bandwidth=1e9) for one, other in pairs]
    case = Problem(model(), devices, Topology.unconnected(links), Constraints())
    report = refused(*case)
    assert report.constraint is ConstraintKind.LINKS
    assert report.placeable_layers == 10, "with every link there is room"
    assert found(report, RelaxationKind.CONNECT).amount == 2
    check_relaxations(case, report)


def test_a_limit_of_hand_overs_is_raised_to_the_next_link_that_helps() -> None:
    devices = tuple(device(name, 600) for name in "abc")
    seconds = {("a", "b"): 0.3, ("b", "a"): 0.5, ("a", "c"): 0.2, ("c", "a"): 0.9, ("b", "c"): 0.7, ("c", "b"): 0.8}
    links = [
        Link(source=one, target=other, latency_seconds=time, bandwidth=1e12) for (one, other), time in seconds.items()
    ]
    case = Problem(model(), devices, Topology(links=tuple(links)), Constraints(max_link_seconds=0.1))
    report = refused(*case)
    assert report.constraint is ConstraintKind.MAX_LINK_SECONDS
    assert found(report, RelaxationKind.MAX_LINK_SECONDS).amount == pytest.approx(0.2)
    check_relaxations(case, report)


def test_the_report_is_json_and_the_error_says_it() -> None:
    with pytest.raises(InfeasiblePlacement) as caught:
        SOLVER.solve_placement(model(), [device("a", 400), device("b", 450)], Topology())
    error = caught.value
    assert error.report is not None
    assert InfeasibilityReport.model_validate_json(error.report.model_dump_json()) == error.report
    again = pickle.loads(pickle.dumps(error))
    assert again.report == error.report
    assert "1000.0 MiB are needed and 850.0 MiB usable, 150.0 MiB short" in str(error)
    assert str(error).endswith("; to make it possible, add 1 device like b (450.0 MiB usable)"), "the easiest change"
    lines = error.report.explain().splitlines()
    assert lines[0].startswith("No plan for m: ")
    assert lines[-3:] == [
        "  - add 1 device like b (450.0 MiB usable)",
        "  - add 1 device with 200.0 MiB usable (200 MiB)",
        "  - give every device 100.0 MiB more (100 MiB)",
    ]


def shrunk(seed: int, **size: Any) -> Problem:
    """A small problem, its bytes as MiB and its memory reduced, so that about half of them have no plan."""
    case = problem(seed, **size)
    layers = tuple(
        layer.model_copy(
            update={
                "weight_bytes": layer.weight_bytes * MIB,
                "kv_bytes_per_token": layer.kv_bytes_per_token * MIB // 64,
                "workspace_bytes_per_token": layer.workspace_bytes_per_token * MIB,
            }
        )
        for layer in case.model.layers
    )
    ends = {name: getattr(case.model, name) * MIB for name in ("embedding_bytes", "head_bytes", "tied_bytes")}
    spec = case.model.model_copy(update={"layers": layers, **ends})
    devices = tuple(
        each.model_copy(update={"usable_bytes": each.usable_bytes * (3 + seed % 8) // 8 * MIB}) for each in case.devices
    )
    work = case.constraints.workload
    if work.context_tokens:
        work = work.model_copy(update={"context_tokens": 1024})
    return Problem(spec, devices, case.topology, case.constraints.model_copy(update={"workload": work}))


def against_brute(seeds: range, **size: Any) -> int:
    """Every suggestion is feasible by trying all plans, and one step less is not."""
    checked = 0
    for seed in seeds:
        case = shrunk(seed, **size)
        truth = next(Brute(*case).plans(), None) is not None
        counted = Feasibility(monotonic() + 60, search=0).ask(case)
        assert counted in (None, truth), f"seed {seed}"
        if truth:
            continue
        report = diagnose(case, seconds=30)
        assert report.complete
        for change in report.relaxations:
            assert next(Brute(*apply_relaxation(change, *case)).plans(), None) is not None, (seed, change)
            less = one_step_less(change)
            if change.minimal and less is not None:
                assert next(Brute(*apply_relaxation(less, *case)).plans(), None) is None, (seed, change)
            checked += change.minimal
            assert change.minimal or change.kind is RelaxationKind.CONNECT, (seed, change)
    return checked


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("varied", [False, True])
def test_small_problems_against_trying_all_plans(rules: bool, varied: bool) -> None:
    assert against_brute(range(6), devices=3, layers=5, rules=rules, varied=varied) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_more_small_problems_against_trying_all_plans(devices: int, rules: bool, varied: bool) -> None:
    assert against_brute(range(100, 160), devices=devices, layers=6, rules=rules, varied=varied) >= 20


def at_size(kind: ClusterKind, count: int, cause: str, *, parallel: tuple[int, ...] = (1,)) -> Problem:
    """A cluster and a model that has no plan there, for one cause."""
    devices, topology = synthetic_cluster(kind, count, 3)
    work = Workload(context_tokens=8192, batch=2)
    fill = 1.3 if cause == "bytes" else 0.4
    spec = model_for(devices, 126, fill, tensor_parallel=parallel).model_copy(update={"dtype": "float16"})
    rules: dict[str, Any] = {}
    if cause == "max_stages":
        rules["max_stages"] = 4
    elif cause == "max_nodes":
        rules["max_nodes"] = 2
    elif cause == "anti-affinity":
        rules["domain_limits"] = (DomainLimit(domain="power", stages=1),)
    elif cause == "pins":
        smallest = min(devices, key=lambda each: each.budget_bytes)
        rules["pins"] = (Pin(start=10, end=110, devices=frozenset({smallest.id})),)
    elif cause == "connectivity":
        topology = Topology(classes={**topology.classes, Locality.WIDE: None, Locality.ZONE: None})
    return Problem(spec, devices, topology, Constraints(workload=work, **rules))


CAUSES = ["bytes", "max_stages", "max_nodes", "anti-affinity", "pins", "connectivity"]


@pytest.mark.parametrize(
    "cause", [cause if cause == "bytes" else pytest.param(cause, marks=pytest.mark.slow) for cause in CAUSES]
)
def test_changes_at_a_size_that_cannot_be_tried_out(cause: str) -> None:
    """Each change is solved and validated; what is called the least is, by counting and by the solver."""
    case = at_size("hetero", 48, cause)
    report = diagnose(case, seconds=20)
    assert check_relaxations(case, report, minimal=False)
    assert any(change.minimal for change in report.relaxations)


@pytest.mark.parametrize("cause", CAUSES)
def test_answers_are_quick_at_1024_devices(cause: str) -> None:
    """Far below what a busy machine takes; the figures are in benchmarks/infeasibility.py."""
    case = at_size("home", 1024, cause)
    begin = perf_counter()
    report = refused(*case)
    assert perf_counter() - begin < 10
    first = report.relaxations[0]
    assert Feasibility(monotonic() + 60, search=0).ask(Problem(*apply_relaxation(first, *case))) is True
    if (less := one_step_less(first)) is not None and first.minimal:
        assert Feasibility(monotonic() + 60, search=0).ask(Problem(*apply_relaxation(less, *case))) is False


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [(1,), (1, 2, 4, 8)])
@pytest.mark.parametrize("kind", ["home", "hetero", "datacentre"])
@pytest.mark.parametrize("cause", CAUSES)
def test_every_change_at_1024_devices(kind: ClusterKind, cause: str, parallel: tuple[int, ...]) -> None:
    case = at_size(kind, 1024, cause, parallel=parallel)
    report = diagnose(case, seconds=60)
    assert report.relaxations
    counting = Feasibility(monotonic() + 600, search=0)
    for change in report.relaxations:
        applied = apply_relaxation(change, *case)
        validate_plan(*applied, SOLVER.solve_placement(*applied, time_budget=30, target_gap=0.9))
        less = one_step_less(change)
        if change.minimal and less is not None:
            assert counting.ask(apply_relaxation(less, *case)) is False, change
