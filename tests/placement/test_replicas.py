"""Several pipelines at once: disjoint, each keeping the rules, and refused only where no division gives one to each."""

from __future__ import annotations

import asyncio
import time
from itertools import product

import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    InvalidPlacementInput,
    InvalidPlan,
    ModelSpec,
    Pin,
    PlacementDevice,
    ReplicatedPlan,
    Topology,
    solve_replicas,
    solve_replicas_async,
    validate_replicas,
)
from gpurt.placement.replicated import alone
from gpurt.placement.synthetic import model_for, synthetic_cluster
from tests.placement.brute import Brute
from tests.placement.instances import problem

pytestmark = pytest.mark.wide


def device(name: str, usable: int = 600, **fields: object) -> PlacementDevice:
    values: dict[str, object] = {"node": f"n-{name}", "memory_bandwidth": 1e6, "compute_flops": 1e9, **fields}
    return PlacementDevice.model_validate({"id": name, "usable_bytes": usable, **values})


MODEL = ModelSpec.uniform("m", layers=10, size_bytes=1000)
TWO = Constraints(replicas=2)


def test_replicas_share_no_device() -> None:
    devices = [device(name) for name in "abcd"]
    found = solve_replicas(MODEL, devices, Topology(), TWO)
    assert len(found.plans) == 2
    assert sorted(found.devices) == list("abcd")
    assert found.bound is not None
    assert found.value == pytest.approx(max(plan.value for plan in found.plans))
    assert ReplicatedPlan.model_validate_json(found.model_dump_json()) == found


def test_throughput_adds_the_rates() -> None:
    devices = [device(name, 1200) for name in "abcd"]
    found = solve_replicas(MODEL, devices, Topology(), TWO, objective="throughput")
    rate = sum(1 / plan.predicted.bottleneck_seconds for plan in found.plans)
    assert found.value == pytest.approx(1 / rate)


def test_replicas_in_domains_of_their_own() -> None:
    devices = [device(name, 1200, labels={"power": power}) for name, power in zip("abcd", "xxyy", strict=True)]
    rules = Constraints(replicas=2, replica_domain="power")
    found = solve_replicas(MODEL, devices, Topology(), rules)
    domains = [{name in "ab" for name in plan.devices} for plan in found.plans]
    assert sorted(map(sorted, domains)) == [[False], [True]]
    with pytest.raises(InfeasiblePlacement) as caught:
        solve_replicas(MODEL, devices, Topology(), Constraints(replicas=3, replica_domain="power"))
    assert caught.value.constraint == "replicas"


def test_shared_memory_is_not_shared_by_replicas() -> None:
    devices = [device(name, 1200, node="one", memory_pool_id="ram") for name in "ab"]
    with pytest.raises(InfeasiblePlacement):
        solve_replicas(MODEL, devices, Topology(), TWO)


def test_every_rule_holds_in_each_replica() -> None:
    devices = [device(name, 600, node=f"n{index // 2}") for index, name in enumerate("abcdef")]
    rules = Constraints(replicas=2, max_nodes=1, exclude_devices=frozenset("a"))
    found = solve_replicas(MODEL, devices, Topology(), rules)
    assert {frozenset(plan.devices) for plan in found.plans} == {frozenset("cd"), frozenset("ef")}
    one = Constraints(replicas=2, pins=(Pin(start=0, end=1, devices=frozenset("c")),))
    with pytest.raises(InfeasiblePlacement):
        solve_replicas(MODEL, devices, Topology(), one)
    both = Constraints(replicas=2, pins=(Pin(start=0, end=1, devices=frozenset("ce")),))
    first = {plan.stages[0].devices[0] for plan in solve_replicas(MODEL, devices, Topology(), both).plans}
    assert first == {"c", "e"}


def test_what_is_required_is_in_one_of_them() -> None:
    devices = [device("slow", 1200, memory_bandwidth=1e5), *(device(name, 1200) for name in "abc")]
    rules = Constraints(replicas=2, require_devices=frozenset({"slow"}))
    assert "slow" in solve_replicas(MODEL, devices, Topology(), rules).devices


def test_one_pipeline_is_asked_for_elsewhere() -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        ConstraintSatisfactionPlacement().solve_placement(MODEL, [device("a", 1200)], Topology(), TWO)
    assert caught.value.field == "constraints.replicas"


@pytest.mark.parametrize("seed", range(12))
def test_two_replicas_of_five_devices_as_by_trying_all(seed: int) -> None:
    """Refused exactly where no division of the devices gives a plan to both."""
    model, devices, topology, rules = problem(seed, devices=5, layers=4, rules=seed % 2 == 1)
    model = model.model_copy(update={"embedding_bytes": 0, "head_bytes": 0, "tied_bytes": 0})
    rules = rules.model_copy(update={"require_nodes": frozenset(), "require_devices": frozenset(), "replicas": 2})
    best = None
    for owner in product(range(2), repeat=len(devices)):
        shares = [tuple(each for each, mine in zip(devices, owner, strict=True) if mine == side) for side in range(2)]
        if not all(shares) or _pools(shares[0]) & _pools(shares[1]):
            continue
        values = [
            Brute(model, share, topology.within(share), _within(rules, share)).best("latency") for share in shares
        ]
        if None not in values:
            worst = max(value for value in values if value is not None)
            best = worst if best is None else min(best, worst)
    try:
        found = solve_replicas(model, devices, topology, rules, time_budget=30)
    except InfeasiblePlacement:
        assert best is None
        return
    validate_replicas(model, devices, topology, rules, found)
    assert best is not None
    assert found.value >= best * (1 - 1e-9)
    assert found.bound is None or found.bound <= best * (1 + 1e-9)


def _pools(share: tuple[PlacementDevice, ...]) -> set[tuple[str, str]]:
    return {(each.node, each.memory_pool_id) for each in share if each.memory_pool_id is not None}


def _within(rules: Constraints, share: tuple[PlacementDevice, ...]) -> Constraints:
    ids = {each.id for each in share}
    return alone(rules).model_copy(
        update={
            "stage_layers": tuple(entry for entry in rules.stage_layers if entry.device in ids),
            "exclude_devices": rules.exclude_devices & ids,
        }
    )


def test_the_validator_sees_replicas_that_meet() -> None:
    devices = [device(name, 1200) for name in "ab"]
    found = solve_replicas(MODEL, devices, Topology(), TWO)
    twice = found.model_copy(update={"plans": (found.plans[0], found.plans[0])})
    with pytest.raises(InvalidPlan) as caught:
        validate_replicas(MODEL, devices, Topology(), TWO, twice)
    assert caught.value.rule == "replicas"
    with pytest.raises(InvalidPlan):
        validate_replicas(MODEL, devices, Topology(), Constraints(replicas=3), found)


def test_a_large_cluster_in_three_replicas() -> None:
    devices, topology = synthetic_cluster("hetero", 48, 3)
    model = model_for(devices, 32, 0.25)
    found = solve_replicas(model, devices, topology, Constraints(replicas=3, replica_domain="node"), time_budget=6)
    nodes = [{stage.node for stage in plan.stages} for plan in found.plans]
    assert len(nodes[0] | nodes[1] | nodes[2]) == sum(map(len, nodes))


async def test_a_cancelled_search_for_replicas_returns_at_once() -> None:
    devices, topology = synthetic_cluster("home", 32, 1)
    model = model_for(devices, 80, 0.45)
    task = asyncio.create_task(solve_replicas_async(model, devices, topology, TWO, time_budget=60))
    await asyncio.sleep(0.2)
    begin = time.perf_counter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - begin < 0.1


def test_a_rule_that_a_share_knows_nothing_of_is_none_there() -> None:
    devices = [device("a", 1200, labels={"power": "x"}), device("b", 1200)]
    rules = Constraints(replicas=2, domain_limits=(DomainLimit(domain="power", stages=1),))
    assert sorted(solve_replicas(MODEL, devices, Topology(), rules).devices) == ["a", "b"]


def test_pins_that_contradict_each_other_on_one_share_alone() -> None:
    """On a and b, or c and d, one device would come before and after the other."""
    names = (frozenset("ac"), frozenset("bd"), frozenset("af"))
    pins = tuple(Pin(start=place, end=place + 1, devices=each) for place, each in enumerate(names))
    rules = Constraints(replicas=2, pins=pins)
    with pytest.raises(InfeasiblePlacement) as caught:
        solve_replicas(MODEL, [device(name, 1200) for name in "abcdef"], Topology(), rules)
    assert caught.value.constraint == "replicas"


def test_a_domain_that_nobody_has_names_its_field() -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        solve_replicas(MODEL, [device("a"), device("b")], Topology(), Constraints(replicas=2, replica_domain="powr"))
    assert caught.value.field == "constraints.replica_domain"
