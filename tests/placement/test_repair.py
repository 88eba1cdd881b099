"""Plans after a loss: least movement, every rule, and never a failure where there is a plan."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    InvalidPlacementInput,
    Link,
    LinkTable,
    ModelSpec,
    Pin,
    PlacementDevice,
    Plan,
    RepairMethod,
    RepairPolicy,
    RepairResult,
    ResidentRange,
    Topology,
    Workload,
    repair_placement,
    validate_plan,
)
from gpurt.placement.holdings import Holdings
from gpurt.placement.synthetic import ClusterKind, model_for, synthetic_cluster
from tests.placement.brute import Brute
from tests.placement.instances import Problem, problem

pytestmark = pytest.mark.wide

SOLVER = ConstraintSatisfactionPlacement()
LAYER = 100


def device(name: str, layers: float, *, speed: float = 1e6, node: str | None = None) -> PlacementDevice:
    return PlacementDevice(
        id=name,
        node=node or f"node-{name}",
        usable_bytes=int(layers * LAYER),
        memory_bandwidth=speed,
        compute_flops=1e12,
        load_bandwidth=100.0,
    )


def model(layers: int, **fields: object) -> ModelSpec:
    return ModelSpec.uniform("m", layers=layers, size_bytes=layers * LAYER, **fields)


def solve(spec: ModelSpec, devices: list[PlacementDevice], **options: object) -> Plan:
    return SOLVER.solve_placement(spec, devices, **options)  # type: ignore[arg-type]


def without(devices: list[PlacementDevice], *names: str) -> list[PlacementDevice]:
    return [entry for entry in devices if entry.id not in names and entry.node not in names]


def ranges(plan: Plan) -> dict[tuple[str, ...], tuple[int, int]]:
    return {stage.devices: (stage.start, stage.end) for stage in plan.stages}


def losses(case: Problem, plan: Plan) -> list[tuple[PlacementDevice, ...]]:
    """What is left after the loss of each used device, and of each used node."""
    nodes = {entry.node for entry in case.devices if entry.id in plan.devices}
    left = [tuple(entry for entry in case.devices if entry.id != name) for name in plan.devices]
    left += [tuple(entry for entry in case.devices if entry.node != name) for name in sorted(nodes)]
    return [devices for devices in left if devices]


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_no_repair_fails_where_trying_all_finds_a_plan(objective: str, varied: bool, rules: bool) -> None:
    check_against_brute_force((305, 320, 329) if rules else (305,), objective, varied=varied, rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("objective", ["latency", "throughput", "balanced"])
def test_no_repair_of_many_fails_where_trying_all_finds_a_plan(objective: str, varied: bool, rules: bool) -> None:
    check_against_brute_force(range(1000, 1100), objective, varied=varied, rules=rules)


def check_against_brute_force(seeds: Iterable[int], objective: str, *, varied: bool, rules: bool) -> None:
    repaired = 0
    for seed in seeds:
        case = problem(seed, devices=4, layers=5, varied=varied, rules=rules)
        try:
            plan = SOLVER.solve_placement(*case, objective=objective, time_budget=5)
        except InfeasiblePlacement:
            continue
        for left in losses(case, plan):
            best = best_without(case, left, objective)
            try:
                result = repair_placement(plan, case.model, left, case.topology, case.constraints)
            except InfeasiblePlacement:
                assert best is None, f"seed {seed}, without {set(case.devices) - set(left)}"
                continue
            assert best is not None
            validate_plan(case.model, left, case.topology.within(left), case.constraints, result.plan)
            assert result.plan.value >= best * (1 - 1e-9)
            lost = {name for name in plan.devices if name not in {entry.id for entry in left}}
            least = sum(stage.layers for stage in plan.stages if lost.intersection(stage.devices))
            assert result.layers_lost >= least
            repaired += 1
    assert repaired


def best_without(case: Problem, left: tuple[PlacementDevice, ...], objective: str) -> float | None:
    """Least value that there is; a rule that asks for what has left cannot be kept."""
    return Brute(case.model, left, case.topology.within(left), case.constraints).best(objective)


@pytest.mark.parametrize("kind", ["home", "hetero", "datacentre"])
def test_losses_in_clusters_move_little_and_cost_little(kind: ClusterKind) -> None:
    rules = Constraints(workload=Workload(context_tokens=8192))
    devices, topology = synthetic_cluster(kind, 16, 3)
    spec = model_for(devices, 32, 0.4, tensor_parallel=(1, 2, 4, 8))
    plan = SOLVER.solve_placement(spec, devices, topology, rules, time_budget=1, target_gap=0.01)
    dice = random.Random(5)
    lost = moved = 0
    for name in dice.sample(plan.devices, min(2, len(plan.devices))):
        for gone in (name, name.split("/")[0]):
            left = without(list(devices), gone)
            try:
                best = SOLVER.solve_placement(spec, left, topology, rules, time_budget=1, target_gap=0.005)
            except InfeasiblePlacement:
                continue
            result = repair_placement(plan, spec, left, topology, rules)
            lost += result.layers_lost
            moved += result.layers_moved
            assert result.plan.predicted.latency_seconds <= 1.06 * best.predicted.latency_seconds
    assert lost
    assert moved <= 1.5 * lost


def test_what_survives_stays_and_a_spare_device_takes_the_rest() -> None:
    devices = [device(name, 4, speed=1e6) for name in "abc"] + [device("spare", 4, speed=0.9e6)]
    spec = model(12)
    plan = solve(spec, devices)
    gone = plan.stages[1].devices[0]
    result = repair_placement(plan, spec, without(devices, gone))
    assert result.method is RepairMethod.INCREMENTAL
    assert ranges(result.plan) == {**{k: v for k, v in ranges(plan).items() if k != (gone,)}, ("spare",): (4, 8)}
    assert (result.layers_lost, result.layers_moved, result.bytes_moved) == (4, 4, 400)
    assert result.load_seconds == pytest.approx(4.0)
    assert not result.load_estimated
    assert result.changed == (1,)
    assert [entry.moved for stage in result.plan.stages for entry in stage.held] == [0, 400, 0]


def test_without_spare_devices_the_neighbours_take_it() -> None:
    devices = [device(name, 6) for name in "abc"]
    spec = model(12)
    plan = solve(spec, devices, constraints=Constraints(min_stages=3))
    gone = plan.stages[1].devices[0]
    result = repair_placement(plan, spec, without(devices, gone))
    assert [stage.devices for stage in result.plan.stages] == [plan.stages[0].devices, plan.stages[2].devices]
    assert result.layers_moved == result.layers_lost == plan.stages[1].layers


def test_one_device_is_replaced_by_a_pair_where_nothing_else_fits() -> None:
    devices = [device(name, 6, speed=1e7) for name in "ab"] + [device(f"small{n}", 3) for n in range(2)]
    spec = model(12)
    plan = solve(spec, devices)
    gone = plan.stages[0].devices[0]
    result = repair_placement(plan, spec, without(devices, gone))
    assert set(result.plan.devices) == {*plan.devices, "small0", "small1"} - {gone}
    assert result.layers_moved == 6


def test_a_group_that_loses_a_member_is_formed_anew_and_its_shares_count() -> None:
    devices = [device(f"g{n}", 4, node="n") for n in range(4)] + [device("far", 4)]
    spec = model(8, tensor_parallel=(1, 2, 4))
    plan = solve(spec, devices, topology=Topology(links=()))
    assert [stage.tensor_parallel for stage in plan.stages] == [4]
    result = repair_placement(plan, spec, without(devices, plan.stages[0].devices[3]))
    assert result.layers_lost == 8
    assert result.plan.stages[0].tensor_parallel == 2
    # The first of four has a quarter of every layer, which is half of what the first of two needs.
    assert result.bytes_moved < 800
    validate_plan(spec, devices, Topology(), Constraints(), result.plan)


def test_shares_are_kept_apart_by_rank() -> None:
    devices = [device(f"g{n}", 8, node="n") for n in range(4)]
    spec = model(2, tensor_parallel=(1, 2, 4))
    plan = solve(spec, [entry.model_copy(update={"usable_bytes": 60}) for entry in devices])
    group = plan.stages[0].devices
    assert len(group) == 4
    holdings = Holdings(spec, plan, devices)
    assert holdings.missing(group).tolist() == [0.0, 0.0]
    assert holdings.missing(group[:2]).tolist() == pytest.approx([75.0, 75.0])  # has [0, 1/4), lacks [1/4, 1)
    assert holdings.missing((group[0], group[2])).tolist() == pytest.approx([50.0, 50.0])
    assert holdings.missing(group[:1]).tolist() == pytest.approx([75.0, 75.0])


def test_layers_that_lie_on_a_spare_device_are_not_moved() -> None:
    devices = [device(name, 4) for name in "abc"]
    spare = device("spare", 4).model_copy(update={"resident": (ResidentRange(model="m", start=0, end=12),)})
    spec = model(12)
    plan = solve(spec, devices)
    result = repair_placement(plan, spec, [*without(devices, plan.devices[1]), spare])
    assert (result.layers_lost, result.layers_moved, result.bytes_moved, result.load_seconds) == (4, 0, 0, 0.0)


def test_less_memory_moves_what_no_longer_fits_and_nothing_else() -> None:
    devices = [device(name, 6) for name in "abc"]
    spec = model(12)
    plan = solve(spec, devices, constraints=Constraints(min_stages=3))
    fullest = max(plan.stages, key=lambda stage: stage.layers)
    squeezed, room = fullest.devices[0], fullest.layers - 1
    now = [
        entry.model_copy(update={"usable_bytes": room * LAYER}) if entry.id == squeezed else entry for entry in devices
    ]
    result = repair_placement(plan, spec, now, constraints=Constraints(min_stages=3))
    assert (result.layers_lost, result.layers_moved) == (1, 1)
    assert [stage.devices for stage in result.plan.stages] == [stage.devices for stage in plan.stages]


def test_a_slower_device_is_left_only_where_that_pays() -> None:
    devices = [device(name, 6) for name in "abc"]
    spec = model(12)
    plan = solve(spec, devices)
    slow = [
        entry.model_copy(update={"memory_bandwidth": 1e4}) if entry.id == plan.devices[0] else entry
        for entry in devices
    ]
    moved = repair_placement(plan, spec, slow, policy=RepairPolicy(horizon_tokens=1e9))
    assert plan.devices[0] not in moved.plan.devices
    assert (moved.layers_lost, moved.layers_moved) == (0, 6)
    stays = repair_placement(plan, spec, slow, policy=RepairPolicy(horizon_tokens=10))
    assert stays.method is RepairMethod.UNCHANGED
    assert ranges(stays.plan) == ranges(plan)
    assert stays.plan.predicted.latency_seconds > plan.predicted.latency_seconds
    assert stays.changed == ()
    assert repair_placement(plan, spec, slow, policy=RepairPolicy(minimum_gain=0.999)).method is RepairMethod.UNCHANGED


def test_a_device_that_joins_is_used_only_where_that_pays() -> None:
    devices = [device(name, 6) for name in "ab"]
    spec = model(12)
    plan = solve(spec, devices)
    with_new = [*devices, device("new", 12, speed=1e8)]
    assert repair_placement(plan, spec, with_new, policy=RepairPolicy(horizon_tokens=1)).changed == ()
    gained = repair_placement(plan, spec, with_new, policy=RepairPolicy(horizon_tokens=1e9))
    assert gained.plan.devices == ("new",)
    assert gained.penalty < 0


def test_rules_are_kept_by_repairs() -> None:
    devices = [device(name, 4).model_copy(update={"labels": {"power": "x"}}) for name in "abc"]
    devices += [
        device("excluded", 12, speed=1e9),
        device("same", 12, speed=1e9).model_copy(update={"labels": {"power": "x"}}),
        device("other", 4, speed=1e3).model_copy(update={"labels": {"power": "y"}}),
    ]
    spec = model(12)
    rules = Constraints(
        exclude_devices=frozenset({"excluded"}),
        domain_limits=(DomainLimit(domain="power", stages=3),),
        pins=(Pin(start=0, end=2, devices=frozenset({"a"})),),
        require_devices=frozenset({"a"}),
        max_stages=3,
    )
    plan = solve(spec, without(devices, "same", "other"), constraints=rules)
    gone = next(name for name in plan.devices[1:] if name != "a")
    tight = rules.model_copy(update={"domain_limits": (DomainLimit(domain="power", stages=2),)})
    result = repair_placement(plan, spec, without(devices, gone), constraints=tight)
    validate_plan(spec, devices, Topology(), tight, result.plan)
    assert "excluded" not in result.plan.devices
    assert "a" in result.plan.stages[0].devices


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        (Constraints(pins=(Pin(start=0, end=1, devices=frozenset({"a"})),)), "pins"),
        (Constraints(require_devices=frozenset({"a"})), "require_devices"),
        (Constraints(require_nodes=frozenset({"node-a"})), "require_nodes"),
    ],
)
def test_what_a_rule_needs_and_has_left_is_said(rules: Constraints, kind: str) -> None:
    devices = [device(name, 6) for name in "abc"]
    spec = model(12)
    plan = solve(spec, devices, constraints=rules)
    with pytest.raises(InfeasiblePlacement) as caught:
        repair_placement(plan, spec, without(devices, "a"), constraints=rules)
    assert caught.value.constraint == kind


def test_rules_and_links_about_others_that_have_left_are_left_out() -> None:
    devices = [device(name, 6) for name in "abcd"]
    spec = model(12)
    rules = Constraints(
        exclude_devices=frozenset({"d"}), pins=(Pin(start=0, end=1, devices=frozenset({"a", "b", "c", "d"})),)
    )
    topology = Topology(links=(Link(source="a", target="d", latency_seconds=1.0, bandwidth=1.0),))
    plan = solve(spec, devices, topology=topology, constraints=rules)
    assert repair_placement(plan, spec, without(devices, "d"), topology, rules).changed == ()


def test_a_table_of_devices_still_holds_for_those_that_are_left() -> None:
    devices = [device(name, 6) for name in "abc"]
    table = LinkTable(names=("a", "b", "c"), latency_seconds=[[3.0] * 3] * 3, bandwidth=[[1e9] * 3] * 3)
    spec = model(12)
    plan = solve(spec, devices, topology=Topology(table=table))
    result = repair_placement(plan, spec, without(devices, plan.devices[0]), Topology(table=table))
    assert [hop.seconds for hop in result.plan.hops] == pytest.approx([3.0, 3.0])
    assert not any(hop.estimated for hop in result.plan.hops)


def test_a_repair_is_the_same_every_time_and_in_any_order() -> None:
    rules = Constraints(workload=Workload(context_tokens=8192))
    devices, topology = synthetic_cluster("home", 16, 2)
    spec = model_for(devices, 32, 0.5, tensor_parallel=(1, 2))
    plan = SOLVER.solve_placement(spec, devices, topology, rules, time_budget=1, target_gap=0.05)
    left = without(list(devices), plan.devices[0])

    def told(result: RepairResult) -> tuple[object, ...]:
        return result.method, ranges(result.plan), result.bytes_moved, result.penalty

    # So much is tolerated that no search is needed that ends by time.
    policy = RepairPolicy(tolerance=1.0)
    first = told(repair_placement(plan, spec, left, topology, rules, policy=policy))
    assert told(repair_placement(plan, spec, left[::-1], topology, rules, policy=policy)) == first
    assert first[0] is RepairMethod.INCREMENTAL


def test_nothing_left_that_could_hold_it_is_infeasible() -> None:
    devices = [device(name, 6) for name in "ab"]
    spec = model(12)
    plan = solve(spec, devices)
    with pytest.raises(InfeasiblePlacement):
        repair_placement(plan, spec, without(devices, "a"))


def test_a_plan_of_another_model_is_refused() -> None:
    devices = [device(name, 6) for name in "ab"]
    with pytest.raises(InvalidPlacementInput, match="plan"):
        repair_placement(solve(model(12), devices), model(11), devices)
