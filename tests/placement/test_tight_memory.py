"""No feasible problem is refused, however little room there is; nothing is ever over a device's memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    InfeasiblePlacement,
    ModelSpec,
    PlacementDevice,
    Plan,
    Topology,
    Workload,
    validate_plan,
)

SOLVER = ConstraintSatisfactionPlacement()


def device(name: str, usable: int, *, node: str | None = None, speed: float = 1e9) -> PlacementDevice:
    return PlacementDevice(
        id=name, node=node or f"node-{name}", usable_bytes=usable, memory_bandwidth=speed, compute_flops=1e12
    )


def place_tightly(seed: int) -> None:
    """Between two and five devices, 90 to 98 % of their memory: places it exactly where whole layers fit."""
    dice = random.Random(seed)
    sizes = [dice.randint(10_000, 2_000_000) for _ in range(dice.randint(2, 5))]
    layers = dice.choice([8, 16, 32, 80])
    size = int(sum(sizes) * dice.uniform(0.90, 0.98))
    devices = [device(f"d{index}", usable) for index, usable in enumerate(sizes)]
    model = ModelSpec.uniform("m", layers=layers, size_bytes=size)
    feasible = sum(min(layers, usable * layers // size) for usable in sizes) >= layers
    try:
        plan = SOLVER.solve_placement(model, devices, Topology())
    except InfeasiblePlacement:
        assert not feasible, f"seed {seed}: {sizes}, {layers} layers, {size} bytes"
        return
    assert feasible or validated(model, devices, plan)


def validated(model: ModelSpec, devices: list[PlacementDevice], plan: Plan) -> bool:
    validate_plan(model, devices, Topology(), None, plan)
    return True


@pytest.mark.parametrize("block", range(2))
def test_no_feasible_tight_problem_is_refused(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        place_tightly(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(30))
def test_none_of_fifteen_thousand_tight_problems_is_refused(block: int) -> None:
    for seed in range(10_000 + block * 500, 10_000 + block * 500 + 500):
        place_tightly(seed)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=7),
    same_node=st.booleans(),
    layers=st.integers(1, 12),
    weight=st.integers(0, 600),
    kv=st.integers(0, 30),
    ends=st.integers(0, 500),
    objective=st.sampled_from(["latency", "throughput", "balanced"]),
)
def test_memory_is_never_exceeded(
    sizes: list[int], same_node: bool, layers: int, weight: int, kv: int, ends: int, objective: str
) -> None:
    devices = [
        device(f"d{index}", usable, node="one" if same_node else None, speed=1e9 * (1 + index % 2))
        for index, usable in enumerate(sizes)
    ]
    model = ModelSpec.uniform(
        "m",
        layers=layers,
        size_bytes=weight * layers,
        kv_bytes_per_token=kv,
        embedding_bytes=ends,
        head_bytes=ends,
        tied_bytes=ends,
        tensor_parallel=(1, 2, 4),
    )
    rules = Constraints(workload=Workload(context_tokens=4, batch=2))
    try:
        plan = SOLVER.solve_placement(model, devices, Topology(), rules, objective=objective)
    except InfeasiblePlacement:
        return
    for stage in plan.stages:
        for held in stage.held:
            assert held.total <= held.usable
            assert held.weights + held.kv >= (weight + kv * 8) * stage.layers // stage.tensor_parallel
    assert sorted(index for stage in plan.stages for index in range(stage.start, stage.end)) == list(range(layers))


def test_an_exact_fit_is_taken() -> None:
    """Three equal parts of 1,500 bytes in twelve layers: none may be rounded up."""
    model = ModelSpec.uniform("m", layers=12, size_bytes=1500)
    plan = SOLVER.solve_placement(model, [device(name, 500) for name in "abc"], Topology())
    assert sorted(stage.layers for stage in plan.stages) == [4, 4, 4]


def test_a_device_too_small_for_a_share_takes_one_layer() -> None:
    """8 and 128 GiB for 129.89 GiB in 32 layers: a share by memory would put two layers on the small one."""
    gib = 1 << 30
    model = ModelSpec.uniform("m", layers=32, size_bytes=int(129.89 * gib))
    plan = SOLVER.solve_placement(model, [device("a", 8 * gib), device("b", 128 * gib)], Topology())
    assert {stage.devices[0]: stage.layers for stage in plan.stages} == {"a": 1, "b": 31}


def test_one_byte_too_much_is_refused() -> None:
    model = ModelSpec.uniform("m", layers=10, size_bytes=1001)
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(model, [device("a", 1000)], Topology())
