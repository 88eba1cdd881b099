"""Inputs at the edge of what is allowed: each has a right answer, and no warning."""

from __future__ import annotations

from time import perf_counter, process_time
from typing import Any

import numpy as np
import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    InvalidPlacementInput,
    InvalidPlan,
    LayerSpec,
    ModelSpec,
    ObjectiveKind,
    Pin,
    PlacementCancelled,
    PlacementDevice,
    PlanStatus,
    RelaxationKind,
    Topology,
    Workload,
    apply_relaxation,
    choose_device,
    engine,
    repair_placement,
    solve_replicas,
    solver,
    validate_plan,
)
from gpurt.placement.building import build_instance
from gpurt.placement.instance import Instance
from gpurt.placement.synthetic import model_for, synthetic_cluster

SOLVER = ConstraintSatisfactionPlacement()
pytestmark = pytest.mark.filterwarnings("error")


def made(name: str, usable: int, **more: Any) -> PlacementDevice:
    return PlacementDevice(
        id=name, node=f"n-{name}", usable_bytes=usable, memory_bandwidth=100.0, compute_flops=100.0, **more
    )


def test_a_limit_of_a_domain_that_has_left_with_its_device_is_kept_by_all() -> None:
    model = ModelSpec.uniform("m", layers=4, size_bytes=400)
    devices = [made("a", 200, labels={"power": "one"}), made("b", 200), made("c", 200)]
    rules = Constraints(domain_limits=(DomainLimit(domain="power", stages=1),))
    plan = SOLVER.solve_placement(model, devices[:2], None, rules)
    repaired = repair_placement(plan, model, devices[1:], None, rules).plan
    assert set(repaired.devices) == {"b", "c"}


def test_layers_without_weights_are_repaired() -> None:
    model = ModelSpec(name="m", layers=(LayerSpec(weight_bytes=0, state_bytes=10, flops_per_token=1.0),) * 4)
    devices = [made("a", 1000), made("b", 1000)]
    plan = SOLVER.solve_placement(model, devices)
    left = [device for device in devices if device.id not in plan.devices]
    repaired = repair_placement(plan, model, left)
    assert repaired.bytes_moved == 0
    assert list(repaired.plan.devices) == [device.id for device in left]


def test_a_domain_without_a_name_is_one() -> None:
    model = ModelSpec.uniform("m", layers=4, size_bytes=400)
    devices = [made(name, 450, labels={"rack": ""}) for name in "abc"] + [made("e", 200, labels={"rack": "x"})]
    rules = Constraints(replicas=2, min_stages=2, domain_limits=(DomainLimit(domain="rack", stages=1),))
    with pytest.raises(InfeasiblePlacement):
        solve_replicas(model, devices, None, rules)


def test_the_only_layer_lies_with_the_embedding_and_the_head() -> None:
    model = ModelSpec(name="m", layers=(LayerSpec(weight_bytes=100),), embedding_bytes=80, head_bytes=100)
    devices = [made("a", 250), made("b", 130), made("c", 250)]
    rules = Constraints(pins=(Pin(start=0, end=1, devices=frozenset({"b"})),))
    with pytest.raises(InfeasiblePlacement) as caught:
        SOLVER.solve_placement(model, devices, None, rules)
    assert caught.value.report is not None
    relaxations = caught.value.report.relaxations
    assert RelaxationKind.BYTES_PER_DEVICE in {change.kind for change in relaxations}
    for change in relaxations:  # to drop the pin is none of them: nothing has room for all three
        applied = apply_relaxation(change, model, devices, None, rules)
        validate_plan(*applied, SOLVER.solve_placement(*applied))


def test_a_device_without_a_byte_takes_no_part_even_where_layers_have_none() -> None:
    model = ModelSpec(name="m", layers=(LayerSpec(weight_bytes=0, flops_per_token=1.0),) * 2)
    empty = [made("a", 0), made("b", 0)]
    with pytest.raises(InfeasiblePlacement) as caught:
        SOLVER.solve_placement(model, empty)
    assert caught.value.report is not None
    for change in caught.value.report.relaxations:
        applied = apply_relaxation(change, model, empty, None, Constraints())
        assert SOLVER.solve_placement(*applied).stages


def test_hops_past_single_precision_are_rounded_down_without_a_word() -> None:
    from gpurt.placement.paths import _below  # pyright: ignore[reportPrivateUsage]

    values = np.array([1e39, np.inf, 0.1, 0.0])
    assert (_below(values) <= values).all()


@pytest.mark.parametrize("more", [0, 4 << 40])
def test_pins_among_very_many_devices_are_placed_in_time(more: int) -> None:
    """Windows of layers that differ from place to place: where devices hold the whole model there are millions."""
    devices, topology = synthetic_cluster("home", 512, 3)
    model = model_for(devices, 126, 0.3)
    order = sorted(devices, key=lambda device: device.budget_bytes)
    pinned = frozenset(device.id for device in (order[:1] if more else order[-40:]))
    wider = [device.model_copy(update={"usable_bytes": device.usable_bytes + more}) for device in devices]
    rules = Constraints(pins=(Pin(start=10, end=40, devices=pinned),))
    begin = perf_counter()
    plan = SOLVER.solve_placement(model, wider, topology, rules, time_budget=5, target_gap=0.9)
    assert perf_counter() - begin < 20, "far past its time"
    inside = [stage for stage in plan.stages if stage.start < 40 and stage.end > 10]
    assert all(set(stage.devices) <= pinned for stage in inside)


def test_a_large_cluster_has_no_worse_plan_than_a_part_of_it() -> None:
    """Eight unlike devices a node make a hundred groups: of all nodes together more than there are tables for."""

    def node(number: int) -> list[PlacementDevice]:
        return [
            PlacementDevice(
                id=f"n{number}/{place}", node=f"n{number}", zone=f"z{number // 8}", backend="cuda",
                usable_bytes=(6 + (7 * (8 * number + place)) % 25) << 30, memory_bandwidth=1e12 + 1e11 * place,
                compute_flops=9e14,
            )
            for place in range(8)
        ]  # fmt: skip

    model = ModelSpec.uniform("m", layers=80, size_bytes=140 << 30, tensor_parallel=(1, 2, 4, 8))
    few = [device for number in range(8) for device in node(number)]
    many = [device for number in range(64) for device in node(number)]
    part = SOLVER.solve_placement(model, few, time_budget=5, target_gap=0.01)
    whole = SOLVER.solve_placement(model, many, time_budget=10, target_gap=0.01)
    assert whole.predicted.latency_seconds <= part.predicted.latency_seconds * 1.05


def test_a_repair_without_rules_counts_the_caches_of_the_plans_own_workload() -> None:
    model = ModelSpec(name="m", layers=(LayerSpec(weight_bytes=10, kv_bytes_per_token=1, flops_per_token=1.0),) * 4)
    work = Workload(context_tokens=40)
    devices = [made(name, 130) for name in "abc"]
    plan = SOLVER.solve_placement(model, devices, None, Constraints(workload=work))
    left = [device for device in devices if device.id != plan.devices[0]]
    repaired = repair_placement(plan, model, left).plan
    assert repaired.workload == work
    assert len(repaired.stages) == 2  # one device alone holds the weights, and not the caches


def test_one_name_is_no_set_of_names() -> None:
    with pytest.raises(InvalidPlacementInput, match="backends"):
        choose_device([made("a", 100)], backends="cuda")


def test_the_largest_device_is_told_also_where_it_is_too_small() -> None:
    model = ModelSpec.uniform("m", layers=2, size_bytes=4 << 30)
    with pytest.raises(InfeasiblePlacement, match=r"the largest device has 1\.0 GiB"):
        SOLVER.solve_placement(model, [made("a", 1 << 30)])


@pytest.mark.parametrize("rules", [{}, {"min_stages": 40}, {"domain_limits": (DomainLimit(domain="node", stages=1),)}])
@pytest.mark.parametrize(("count", "seconds"), [(48, 0.5), (512, 2.0)])
def test_a_moment_is_enough_for_a_plan_and_is_kept(count: int, seconds: float, rules: dict[str, Any]) -> None:
    """What is not looked at the clock for takes a few times as long on a busy machine: here processor time counts."""
    devices, topology = synthetic_cluster("home", count, 3)
    model = model_for(devices, 126, 0.5)
    begin = process_time()
    plan = SOLVER.solve_placement(model, devices, topology, Constraints(**rules), time_budget=0.05, target_gap=0)
    assert process_time() - begin < seconds
    assert len(plan.stages) > 1


@pytest.mark.parametrize(
    ("change", "rules", "said"),
    [
        ({"model": "x"}, {}, "model: the plan is for x with 2 layers, not for m with 2"),
        ({"workload": Workload(batch=2)}, {}, "workload: the plan was made for context_tokens=0 batch=2 "),
        ({}, {"min_stages": 3}, "stages: 2 stages, and 3 at least are allowed"),
        ({}, {"max_nodes": 1}, "stages: 2 nodes, and 1 to 1 are allowed"),
        ({}, {"exclude_devices": frozenset("a")}, "a: it is excluded"),
        ({}, {"pins": (Pin(start=0, end=1, devices=frozenset("b")),)}, "pins.0: a holds some of layer 0"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_with_the_place(
    change: dict[str, Any], rules: dict[str, Any], said: str
) -> None:
    model = ModelSpec.uniform("m", layers=2, size_bytes=40)
    devices = [made("a", 20), made("b", 20)]
    plan = SOLVER.solve_placement(
        model, devices, constraints=Constraints(pins=(Pin(start=0, end=1, devices=frozenset("a")),))
    )
    with pytest.raises(InvalidPlan, match=f"^{said}"):
        validate_plan(model, devices, Topology(), Constraints(**rules), plan.model_copy(update=change))


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are() -> None:
    model = ModelSpec.uniform("m", layers=2, size_bytes=40)
    with pytest.raises(InvalidPlacementInput, match=r"unknown name 'c' \(there are a, b\)"):
        SOLVER.solve_placement(
            model, [made("a", 20), made("b", 20)], constraints=Constraints(exclude_devices=frozenset("c"))
        )


def test_a_pin_to_what_has_left_is_named_as_it_was_given() -> None:
    model = ModelSpec.uniform("m", layers=2, size_bytes=40)
    rules = Constraints(pins=(Pin(start=0, end=1, devices=frozenset("a")),))
    plan = SOLVER.solve_placement(model, [made("a", 20), made("b", 20)], constraints=rules)
    with pytest.raises(InfeasiblePlacement, match="the pin of layer 0 to a cannot be kept: nothing that it names is"):
        repair_placement(plan, model, [made("b", 50)], constraints=rules)


@pytest.mark.parametrize("objective", list(ObjectiveKind))
@pytest.mark.parametrize("layers", [1, 3])
def test_what_takes_no_time_at_all_has_a_plan(objective: ObjectiveKind, layers: int) -> None:
    model = ModelSpec(name="m", layers=(LayerSpec(weight_bytes=0, workspace_bytes_per_token=10),) * layers)
    plan = SOLVER.solve_placement(model, [made("a", 30)], objective=objective)
    assert (plan.value, plan.devices) == (0, ("a",))


@pytest.mark.parametrize("seconds", [float("inf"), 1e300])
def test_as_long_as_it_takes_is_a_time(seconds: float) -> None:
    model = ModelSpec.uniform("m", layers=4, size_bytes=40)
    devices = [made(name, 30) for name in "abcd"]
    plan = SOLVER.solve_placement(model, devices, time_budget=seconds)
    assert (plan.status, plan.value) == (PlanStatus.OPTIMAL, SOLVER.solve_placement(model, devices).value)
    rules = Constraints(replicas=2)
    replicas = solve_replicas(model, devices, constraints=rules, time_budget=seconds)
    assert replicas.value == solve_replicas(model, devices, constraints=rules).value


def test_without_time_nothing_is_set_up_that_would_have_to_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, topology = synthetic_cluster("home", 256, 3)
    begun: list[int] = []

    def begin(instance: Instance, **more: Any) -> None:
        begun.append(instance.size)

    monkeypatch.setattr(engine, "linear_start", begin)
    monkeypatch.setattr(engine, "highs_available", lambda: True)
    plan = SOLVER.solve_placement(model_for(devices, 126, 0.5), devices, topology, time_budget=1e-6)
    assert plan.stages
    assert begun == []


@pytest.mark.parametrize("objective", list(ObjectiveKind))
def test_what_is_cancelled_while_it_is_set_up_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, objective: ObjectiveKind
) -> None:
    devices, topology = synthetic_cluster("home", 256, 3)
    built: list[Instance] = []

    def build(*inputs: Any) -> Instance:
        built.append(build_instance(*inputs))
        return built[-1]

    monkeypatch.setattr(solver, "build_instance", build)
    with pytest.raises(PlacementCancelled):
        SOLVER.solve_placement(
            model_for(devices, 126, 0.5), devices, topology, objective=objective, cancelled=lambda: bool(built)
        )
