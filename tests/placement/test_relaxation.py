"""Whatever the prices and whatever is remembered, the relaxation is never above the best plan."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gpurt.placement import ConstraintSatisfactionPlacement, PlanStatus
from gpurt.placement import engine as engine_module
from gpurt.placement import paths as paths_module
from gpurt.placement.beam import Beam
from gpurt.placement.bottleneck import least_bottleneck
from gpurt.placement.building import build_instance
from gpurt.placement.clock import Clock
from gpurt.placement.elimination import through_units, useful_arcs
from gpurt.placement.exact_highs import highs_available, linear_start
from gpurt.placement.instance import Instance
from gpurt.placement.paths import PathRelaxation
from gpurt.placement.proportional import proportional
from gpurt.placement.relaxation import Prices, Step, no_prices
from gpurt.placement.synthetic import ClusterKind, model_for, synthetic_cluster
from gpurt.placement.valuation import path_bottleneck
from gpurt.placement.visits import forgetful, remembering
from tests.placement.brute import Brute
from tests.placement.instances import problem

pytestmark = pytest.mark.wide
SEEDS = range(25)


def best_plan(instance: Instance) -> tuple[float, tuple[Step, ...]] | None:
    """By a beam that leaves nothing out."""
    relaxation = PathRelaxation(instance).solve(no_prices(instance))
    if not np.isfinite(relaxation.value):
        return None
    found = Beam(instance, relaxation, width=10**6).run(lambda: False)
    assert found.exhausted
    return found.plans[0] if found.plans else None


def some_prices(instance: Instance, seed: int, scale: float) -> Prices:
    random = np.random.default_rng(seed)
    use = random.exponential(scale, len(instance.limits)) * random.integers(0, 2, len(instance.limits))
    return Prices(use, random.normal(0, scale, instance.size))


@pytest.mark.parametrize("units", ["few", "many", "very many"])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("rules", [False, True])
def test_bounds_and_what_they_leave_out(varied: bool, rules: bool, units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if units != "few":
        # The table of hops is searched, as among many units.
        monkeypatch.setattr(paths_module, "_SMALL", 0)
    if units == "very many":
        # Hops rounded down.
        monkeypatch.setattr(paths_module, "_COARSE", 0)
    seen = 0
    for seed in SEEDS:
        case = problem(seed, devices=5, layers=5, varied=varied, rules=rules)
        if case.constraints.same_backend:
            continue
        instance = build_instance(*case)
        found = best_plan(instance)
        best = Brute(*case).best("latency")
        assert (found is None) == (best is None)
        if found is None:
            continue
        value, steps = found
        assert value == pytest.approx(best)
        seen += 1
        memories = [forgetful(instance.size), remembering(instance, np.zeros(instance.size))]
        memories.append(remembering(instance, np.arange(instance.size, dtype=np.float64), most=8))
        for visits in memories:
            paths = PathRelaxation(instance, visits)
            for prices in (no_prices(instance), some_prices(instance, seed, 0.2 * value)):
                free = paths.solve(prices)
                assert free.bound <= value * (1 + 1e-9)
                limit = value * 1.05
                held = paths.solve(prices, limit=limit)
                assert held.bound <= value * (1 + 1e-9)
                assert min(free.bound, limit) == pytest.approx(held.bound)
                for relaxation in (free, held):
                    through = through_units(relaxation)
                    arcs = useful_arcs(instance, relaxation, limit)
                    assert all(through[step.unit] <= value * (1 + 1e-9) for step in steps)
                    assert all(arcs[one.unit, other.unit] for one, other in pairwise(steps))
                    again = Beam(instance, relaxation, width=10**6, limit=limit, whole=True).run(lambda: False)
                    assert again.exhausted
                    assert again.plans[0][0] == pytest.approx(value)
    assert seen > 5


@pytest.mark.parametrize("narrow", [0, 1, 3])
@pytest.mark.parametrize("varied", [False, True])
def test_states_that_hold_more_than_most_are_extended_apart(
    varied: bool, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = build_instance(*problem(3, devices=5, layers=8, varied=varied))
    visits = remembering(instance, np.zeros(instance.size))
    prices = no_prices(instance)
    whole = PathRelaxation(instance, visits).solve(prices)

    def split(inner: np.ndarray) -> tuple[int, np.ndarray]:
        return narrow, np.arange(inner.shape[2])

    monkeypatch.setattr(paths_module, "_split", split)
    apart = PathRelaxation(instance, visits).solve(prices)
    for one, other in ((whole.forward, apart.forward), (whole.backward, apart.backward), (whole.onward, apart.onward)):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.skipif(not highs_available(), reason="needs highspy")
@pytest.mark.parametrize("seed", range(6))
def test_a_hurried_search_knows_the_units_that_are_left(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many units the linear relaxation leaves some out; what comes behind it speaks of the others."""
    monkeypatch.setattr(engine_module, "_HURRIED", np.inf)
    devices, topology = synthetic_cluster("hetero", 8, seed)
    model = model_for(devices, 32, 0.5, tensor_parallel=(1, 2, 4, 8))
    plan = ConstraintSatisfactionPlacement().solve_placement(model, devices, topology, time_budget=2)
    assert plan.status is PlanStatus.OPTIMAL


def test_a_part_of_the_time_is_within_the_whole() -> None:
    whole = Clock(10)
    part = whole.part(2)
    assert 1.5 < part.left <= 2 - 0.03
    assert whole.part(100).deadline <= whole.deadline
    # A short one keeps enough back for who has just looked.
    assert Clock(0.1).part(0.1).left <= 0.07


def test_memory_only_raises_the_bound() -> None:
    devices, topology = synthetic_cluster("home", 24, 1)
    instance = build_instance(
        model_for(devices, 32, 0.5), devices, topology, problem(1, devices=2, layers=2).constraints
    )
    prices = no_prices(instance)
    plain = PathRelaxation(instance).solve(prices).bound
    longer = PathRelaxation(instance, remembering(instance, np.zeros(instance.size))).solve(prices).bound
    assert plain < longer


@pytest.mark.skipif(not highs_available(), reason="needs highspy")
def test_the_linear_start_is_below_every_plan() -> None:
    for seed in SEEDS:
        case = problem(seed, devices=5, layers=5)
        instance = build_instance(*case)
        found = best_plan(instance)
        start = linear_start(instance, deadline=1e12, stop=lambda: False)
        if found is None or start is None or len(found[1]) == 1:
            continue
        assert start.bound <= found[0] * (1 + 1e-9)
        assert all(start.through[step.unit] <= found[0] * (1 + 1e-9) for step in found[1])


@pytest.mark.parametrize("seed", range(3))
def test_throughput_is_no_worse_than_by_memory_where_there_is_no_time(seed: int) -> None:
    devices, topology = synthetic_cluster("hetero", 48, seed)
    instance = build_instance(
        model_for(devices, 80, 0.3), devices, topology, problem(1, devices=2, layers=2).constraints
    )
    by_memory = proportional(instance)
    assert by_memory is not None
    found = least_bottleneck(instance, Clock(0.05), seed=0, target_gap=1e-4)
    assert found.steps is not None
    assert path_bottleneck(instance, found.steps) <= path_bottleneck(instance, by_memory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["home", "hetero", "datacentre"])
@pytest.mark.parametrize("fill", [0.5, 0.94])
def test_throughput_of_sixteen_devices_is_certified_within_two_percent(kind: ClusterKind, fill: float) -> None:
    devices, topology = synthetic_cluster(kind, 16, 1)
    model = model_for(devices, 80, fill, tensor_parallel=(1, 2, 4, 8))
    plan = ConstraintSatisfactionPlacement().solve_placement(
        model, devices, topology, objective="throughput", time_budget=30, target_gap=0.02
    )
    assert plan.gap is not None
    assert plan.gap <= 0.02
