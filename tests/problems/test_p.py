"""Where layers go. The numbers are those of docs/problems.md."""

from __future__ import annotations

from typing import Any

import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    InfeasiblePlacement,
    Link,
    ModelSpec,
    Pin,
    PlacementDevice,
    ResidentRange,
    StageLayers,
    Topology,
    Workload,
    devices_from_view,
    validate_plan,
)
from gpurt.types import DeviceKind
from tests.cluster.support import device as gpu

pytestmark = pytest.mark.wide

GB = 10**9
GIB = 1 << 30
SOLVER = ConstraintSatisfactionPlacement()


def device(name: str, usable: int, bandwidth: float, **fields: Any) -> PlacementDevice:
    values: dict[str, Any] = {"node": f"n-{name}", "compute_flops": 1e14, **fields}
    return PlacementDevice(id=name, usable_bytes=usable, memory_bandwidth=bandwidth, **values)


def model(layers: int, size: int, **fields: Any) -> ModelSpec:
    return ModelSpec.uniform("m", layers=layers, size_bytes=size, flops_per_token=float(size // layers), **fields)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_p50_of_equal_memory_the_faster_device_has_more_layers(objective: str) -> None:
    devices = [device("slow", 24 * GB, 178e9), device("fast", 24 * GB, 264e9)]
    plan = SOLVER.solve_placement(model(40, 40 * GB), devices, objective=objective)
    fast, slow = len(plan.layers_of("fast")), len(plan.layers_of("slow"))
    assert fast + slow == 40
    assert fast > slow
    if objective == "latency":
        assert fast == 24, "as many as it holds"


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_p51_much_memory_on_a_weak_node_draws_no_layers(objective: str) -> None:
    """A node with 256 GB and a processor beside one with a GPU of 24 GB."""
    devices = [device("weak", 256 * GB, 20e9, kind=DeviceKind.CPU, backend="cpu"), device("gpu", 24 * GB, 900e9)]
    plan = SOLVER.solve_placement(model(32, 30 * GB), devices, objective=objective)
    assert len(plan.layers_of("gpu")) == 25, "as many as it holds"
    assert len(plan.layers_of("weak")) == 7


def test_p52_layers_that_somebody_pins_are_there() -> None:
    devices = [device("x", 24 * GB, 100e9), device("y", 48 * GB, 900e9)]
    rules = Constraints(
        pins=(Pin(start=0, end=8, nodes=frozenset({"n-x"})),), stage_layers=(StageLayers(device="x", maximum=8),)
    )
    plan = SOLVER.solve_placement(model(32, 32 * GB), devices, constraints=rules)
    assert plan.layers_of("x") == range(8)


def test_p52_a_pin_that_cannot_be_kept_is_explained() -> None:
    devices = [device("x", 4 * GB, 100e9), device("y", 48 * GB, 900e9)]
    rules = Constraints(pins=(Pin(start=0, end=8, nodes=frozenset({"n-x"})),))
    with pytest.raises(InfeasiblePlacement) as caught:
        SOLVER.solve_placement(model(32, 32 * GB), devices, constraints=rules)
    assert caught.value.constraint == "pins"
    report = caught.value.report
    assert report is not None
    assert "pin" in report.explain()
    assert report.relaxations


def test_p53_an_impossible_model_has_need_and_have_and_each_device() -> None:
    devices = [device("a", 24 * GB, 900e9), device("b", 12 * GB, 400e9, reserve_bytes=2 * GB)]
    with pytest.raises(InfeasiblePlacement) as caught:
        SOLVER.solve_placement(model(80, 140 * GB), devices)
    report = caught.value.report
    assert report is not None
    assert caught.value.constraint == "memory"
    assert (report.need_bytes, report.usable_bytes, report.short_bytes) == (140 * GB, 34 * GB, 106 * GB)
    assert {each.device: each.usable_bytes for each in report.devices} == {"a": 24 * GB, "b": 10 * GB}
    # 1.75 GB a layer: 13 on the one, 5 on the other.
    assert (report.layers, report.placeable_layers) == (80, 18)


def test_p54_no_device_has_more_than_its_budget() -> None:
    """70 billion parameters in four bits on 24, 12 and 12 GB, cache and workspace counted."""
    devices = [
        device(name, size * GIB, speed, node="host", backend="cuda", reserve_bytes=GIB // 2)
        for name, size, speed in (("a", 24, 936e9), ("b", 12, 360e9), ("c", 12, 360e9))
    ]
    layers = {"kv_bytes_per_token": 4096, "workspace_bytes_per_token": 60_000, "activation_bytes_per_token": 16384}
    llama = model(80, 38 * GB, embedding_bytes=GB // 2, head_bytes=GB // 2, **layers)
    for objective in ("latency", "throughput", "balanced"):
        for context in (0, 2048, 8192, 16384):
            rules = Constraints(workload=Workload(context_tokens=context, prefill_tokens=512))
            plan = SOLVER.solve_placement(llama, devices, constraints=rules, objective=objective, time_budget=0.3)
            validate_plan(llama, devices, Topology(), rules, plan)
            for stage in plan.stages:
                for held in stage.held:
                    assert held.weights + held.kv + held.activations + held.reserve <= held.usable
    rules = Constraints(workload=Workload(context_tokens=131072, prefill_tokens=512))
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(llama, devices, constraints=rules)


def test_p55_what_is_kept_free_is_kept_free_on_every_device() -> None:
    """A card here, and one with unified memory on another node: the margin of each is its own."""
    card = gpu("GPU-a", memory_usable_bytes=20 * GIB)
    unified = gpu("GPU-b", memory_usable_bytes=100 * GIB, unified_memory=True, memory_pool_id="host")
    processor = gpu(
        "cpu",
        memory_usable_bytes=100 * GIB,
        backend="cpu",
        kind=DeviceKind.CPU,
        memory_pool_id="host",
        device_id="cpu:0",
    )
    view = {("here", "GPU-a"): card, ("remote", "GPU-b"): unified, ("remote", "cpu"): processor}
    devices = devices_from_view(view, reserve=0.15)
    plan = SOLVER.solve_placement(model(102, 102 * GIB), devices)
    held = {each.device: each for stage in plan.stages for each in stage.held}
    assert held.keys() <= {"here/GPU-a", "remote/GPU-b"}, "shared memory is used once, by the faster"
    assert (held["here/GPU-a"].reserve, held["remote/GPU-b"].reserve) == (3 * GIB, 15 * GIB)
    for each in held.values():
        assert each.weights <= each.usable - each.reserve
    assert (held["here/GPU-a"].weights, held["remote/GPU-b"].weights) == (17 * GIB, 85 * GIB)
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(model(103, 103 * GIB), devices)


def test_p56_of_two_equal_placements_the_present_one_stays() -> None:
    there = (ResidentRange(model="m", start=0, end=10),)
    links = tuple(
        Link(source=one, target=other, latency_seconds=1e-4, bandwidth=1e9)
        for one, other in (("old", "new"), ("new", "old"))
    )

    def placed(gain: float) -> tuple[str, ...]:
        """With a new device that is so much faster; moving a byte costs as long as reading it a tenth of a time."""
        devices = [device("old", 20 * GB, 1e11, resident=there), device("new", 20 * GB, 1e11 * (1 + gain))]
        rules = Constraints(movement_seconds_per_byte=1e-12)
        return SOLVER.solve_placement(model(10, 10 * GB), devices, Topology(links=links), rules).devices

    assert placed(0.0) == ("old",)
    assert placed(0.05) == ("old",)
    assert placed(0.2) == ("new",)
