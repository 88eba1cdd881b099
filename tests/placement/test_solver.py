"""The entry: objectives, rules, determinism, time, cancellation, and what it says about bad input."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpurt.errors import GPUError
from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    InvalidPlacementInput,
    InvalidPlan,
    LayerSpec,
    Link,
    ModelSpec,
    Pin,
    PlacementCancelled,
    PlacementDevice,
    Plan,
    PlanStatus,
    ResidentRange,
    Topology,
    Workload,
    validate_plan,
)
from gpurt.placement.clock import Clock
from gpurt.placement.quiet_highs import quiet_highs
from gpurt.placement.synthetic import model_for, synthetic_cluster

SOLVER = ConstraintSatisfactionPlacement()


def device(name: str, usable: int = 1000, **fields: Any) -> PlacementDevice:
    values: dict[str, Any] = {"node": f"n-{name}", "memory_bandwidth": 1e6, "compute_flops": 1e9, **fields}
    return PlacementDevice(id=name, usable_bytes=usable, **values)


def model(layers: int = 10, size: int = 1000, **fields: Any) -> ModelSpec:
    return ModelSpec.uniform("m", layers=layers, size_bytes=size, **fields)


def pinned(*pins: tuple[int, int, str]) -> Constraints:
    return Constraints(pins=tuple(Pin(start=start, end=end, devices=frozenset({name})) for start, end, name in pins))


def test_every_layer_once_and_the_plan_survives_json() -> None:
    plan = SOLVER.solve_placement(model=model(), devices=[device("a", 600), device("b", 600)], topology=Topology())
    assert [index for stage in plan.stages for index in range(stage.start, stage.end)] == list(range(10))
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.status is PlanStatus.OPTIMAL
    assert plan.bound is not None
    assert plan.predicted.estimated, "links come from a table"


def test_the_faster_of_two_equal_devices_gets_more_layers() -> None:
    devices = [device("slow", 900, memory_bandwidth=178e3), device("fast", 900, memory_bandwidth=264e3)]
    plan = SOLVER.solve_placement(model(), devices, Topology())
    assert plan.layers_of("fast") == range(9) or len(plan.layers_of("fast")) == 9


def test_throughput_balances_what_latency_does_not() -> None:
    devices = [device("a", 1000), device("b", 1000)]
    links = Topology(links=(Link(source="a", target="b", latency_seconds=1e-5, bandwidth=1e9),
                            Link(source="b", target="a", latency_seconds=1e-5, bandwidth=1e9)))  # fmt: skip
    assert len(SOLVER.solve_placement(model(), devices, links).stages) == 1
    plan = SOLVER.solve_placement(model(), devices, links, objective="throughput")
    assert sorted(stage.layers for stage in plan.stages) == [5, 5]


def test_a_group_of_one_node_is_used_where_it_is_faster() -> None:
    devices = [device(name, 1000, node="one", memory_bandwidth=1e4) for name in "abcd"]
    plan = SOLVER.solve_placement(model(tensor_parallel=(1, 2, 4)), devices, Topology())
    assert plan.stages[0].tensor_parallel == 4
    assert plan.predicted.link_seconds > 0


def test_a_slow_link_is_not_crossed_by_large_activations() -> None:
    """1 GB over 1 Gb/s takes 8 s: never within 10 ms."""
    slow = Link(source="a", target="b", latency_seconds=1e-3, bandwidth=125e6)
    fast = Link(source="a", target="c", latency_seconds=1e-3, bandwidth=1e12)
    links = (
        slow,
        fast,
        *(link.model_copy(update={"source": link.target, "target": link.source}) for link in (slow, fast)),
    )
    devices = [device("a", 600), device("b", 600, memory_bandwidth=1e9), device("c", 600)]
    rules = Constraints(max_link_seconds=0.01)
    big = model(activation_bytes_per_token=10**9)
    plan = SOLVER.solve_placement(big, devices, Topology.unconnected(links), rules)
    assert set(plan.devices) == {"a", "c"}
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(big, devices[:2], Topology.unconnected(links[::2]), rules)


def test_data_types_and_operations_exclude_devices() -> None:
    half = model(dtype="bfloat16", operations=frozenset({"scan"}))
    integer = device("int8", dtypes=frozenset({"int8"}), memory_bandwidth=1e12)
    unable = device("directml", unsupported_operations=frozenset({"scan"}), memory_bandwidth=1e12)
    plan = SOLVER.solve_placement(half, [integer, unable, device("ok")], Topology())
    assert plan.devices == ("ok",)
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(half, [integer, unable], Topology())


def test_an_integer_device_does_not_follow_a_layer_of_another_type() -> None:
    layers = (LayerSpec(weight_bytes=100, dtype="bfloat16"), LayerSpec(weight_bytes=100, dtype="int8"))
    chain = ModelSpec(name="m", layers=layers)
    half, integer = (
        device("half", 150, dtypes=frozenset({"bfloat16", "int8"})),
        device("int", 150, dtypes=frozenset({"int8"})),
    )
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(chain, [half, integer], Topology())
    both = device("both", 150, dtypes=frozenset({"bfloat16", "int8"}))
    assert SOLVER.solve_placement(chain, [half, integer, both], Topology()).devices in (
        ("half", "both"),
        ("both", "half"),
    )


def test_backends_and_exclusions() -> None:
    devices = [device("cpu", 10**6, backend="cpu", memory_bandwidth=1e5), device("gpu", 1200, backend="cuda")]
    both = model(backends=frozenset({"cuda", "cpu"}))
    assert SOLVER.solve_placement(both, devices, Topology()).devices == ("gpu",)
    rules = Constraints(exclude_devices=frozenset({"gpu"}))
    assert SOLVER.solve_placement(both, devices, Topology(), rules).devices == ("cpu",)
    metal = model(backends=frozenset({"metal"}))
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(metal, devices, Topology())


def test_pins_limits_and_requirements_hold_together() -> None:
    devices = [device(f"d{index}", 500, node=f"n{index // 2}", labels={"power": "ab"[index % 2]}) for index in range(6)]
    rules = Constraints(
        pins=(Pin(start=2, end=4, devices=frozenset({"d3"})),),
        require_devices=frozenset({"d5"}),
        domain_limits=(DomainLimit(domain="power", stages=3),),
        max_nodes=2,
        max_stages=4,
    )
    plan = SOLVER.solve_placement(model(), devices, Topology(), rules)
    assert 2 in plan.layers_of("d3")
    assert "d5" in plan.devices
    assert len({stage.node for stage in plan.stages}) == 2


def test_devices_that_share_their_memory_are_used_once() -> None:
    devices = [device(name, 600, node="one", memory_pool_id="ram") for name in "ab"]
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(model(), devices, Topology())


def test_weights_stay_where_they_are_when_moving_costs() -> None:
    there = (ResidentRange(model="m", start=0, end=10),)
    devices = [device("old", resident=there, memory_bandwidth=0.9e6), device("new")]
    assert SOLVER.solve_placement(model(), devices, Topology()).devices == ("new",)
    plan = SOLVER.solve_placement(model(), devices, Topology(), Constraints(movement_seconds_per_byte=1.0))
    assert plan.devices == ("old",)
    assert plan.stages[0].held[0].moved == 0


def test_nine_large_places_for_ten_large_layers() -> None:
    """Two small devices do not help; the answer comes at once."""
    devices = [device(f"big{index}", 100) for index in range(9)] + [device(f"small{index}", 99) for index in range(2)]
    begin = time.perf_counter()
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(model(10, 1000), devices, Topology())
    assert time.perf_counter() - begin < 0.5


def test_the_same_inputs_give_the_same_plan_in_any_order() -> None:
    devices, topology = synthetic_cluster("home", 12, 3)
    big = model_for(devices, 32, 0.9, tensor_parallel=(1, 2))
    rules = Constraints(workload=Workload(context_tokens=8192))
    plans = [
        SOLVER.solve_placement(big, given, topology, rules, time_budget=30, seed=1)
        for given in (devices, devices, devices[::-1])
    ]
    assert len({plan.model_dump_json(exclude={"solve_seconds"}) for plan in plans}) == 1


def test_throughput_is_never_worse_than_layers_in_proportion_to_memory() -> None:
    for seed in range(6):
        devices, topology = synthetic_cluster("hetero", 8, seed)
        big = model_for(devices, 32, 0.6)
        plan = SOLVER.solve_placement(big, devices, topology, objective="throughput", time_budget=5)
        total = sum(each.budget_bytes for each in devices)
        share = [32 * each.budget_bytes / total for each in devices]
        number = [int(each) for each in share]
        for index in sorted(range(8), key=lambda index: number[index] - share[index])[: 32 - sum(number)]:
            number[index] += 1
        seconds = [
            count * (big.layers[0].weight_bytes / each.memory_bandwidth + each.launch_seconds)
            for count, each in zip(number, devices, strict=True)
        ]
        # Links left out and the head where it harms least: better than that plan can really be.
        head = min(
            max(*seconds, seconds[index] + big.head_bytes / each.memory_bandwidth) for index, each in enumerate(devices)
        )
        assert plan.value <= head * (1 + 1e-9)


def test_time_budget_is_kept() -> None:
    devices, topology = synthetic_cluster("home", 64, 1)
    big = model_for(devices, 126, 0.94, tensor_parallel=(1, 2, 4, 8))
    begin = time.perf_counter()
    plan = SOLVER.solve_placement(
        big, devices, topology, Constraints(workload=Workload(context_tokens=8192)), time_budget=1
    )
    assert time.perf_counter() - begin < 2
    assert plan.bound is not None


async def test_cancellation_returns_at_once_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    searching = threading.Event()
    slice_of = Clock.slice

    def slice_and_tell(clock: Clock, seconds: float) -> Callable[[], bool]:
        searching.set()
        return slice_of(clock, seconds)

    monkeypatch.setattr(Clock, "slice", slice_and_tell)
    devices, topology = synthetic_cluster("home", 64, 1)
    big = model_for(devices, 126, 0.94, tensor_parallel=(1, 2, 4, 8))
    task = asyncio.create_task(SOLVER.solve_placement_async(big, devices, topology, time_budget=60))
    assert await asyncio.to_thread(searching.wait, 10)
    begin = time.perf_counter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - begin < 0.1
    until = time.perf_counter() + 5
    while any(thread.name == "gpurt-placement" for thread in threading.enumerate()):
        assert time.perf_counter() < until, "the solver went on"
        await asyncio.sleep(0.05)


async def test_awaiting_gives_the_plan_and_the_errors() -> None:
    devices = [device("a"), device("b")]
    plan = await SOLVER.solve_placement_async(model(), devices, Topology())
    assert plan.devices == ("a",) or plan.devices == ("b",)
    with pytest.raises(InfeasiblePlacement):
        await SOLVER.solve_placement_async(model(size=10**9), devices, Topology())


def test_cancelled_before_there_is_a_plan() -> None:
    devices, topology = synthetic_cluster("home", 32, 1)
    with pytest.raises(PlacementCancelled):
        SOLVER.solve_placement(model_for(devices, 32, 0.94), devices, topology, cancelled=lambda: True)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: model(layers=0), "layers"),
        (lambda: LayerSpec(weight_bytes=-1), "weight_bytes"),
        (lambda: ModelSpec.model_validate({"name": "m", "layers": [{"weight_bytes": -1}]}), "layers.0.weight_bytes"),
        (lambda: device("a", usable=-1), "usable_bytes"),
        (lambda: device("a", memory_bandwidth=float("nan")), "memory_bandwidth"),
        (lambda: Link(source="a", target="b", latency_seconds=float("nan"), bandwidth=1), "latency_seconds"),
        (lambda: Link(source="a", target="b", latency_seconds=0, bandwidth=0), "bandwidth"),
        (lambda: Pin(start=3, end=3, devices=frozenset({"a"})), "end"),
        (lambda: Constraints(max_stages=1, min_stages=2), "max_stages"),
    ],
)  # fmt: skip
def test_bad_records_name_their_field(build: Any, field: str) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        build()
    assert caught.value.field == field
    assert isinstance(caught.value, GPUError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"devices": []}, "devices"),
        ({"devices": [device("a"), device("a")]}, "devices"),
        ({"constraints": Constraints(require_devices=frozenset({"x"}))}, "constraints.require_devices"),
        ({"constraints": pinned((0, 1, "x"))}, "constraints.pins.0.devices"),
        ({"constraints": pinned((0, 99, "a"))}, "constraints.pins.0.end"),
        ({"constraints": pinned((0, 2, "a"), (2, 4, "b"), (4, 6, "a"))}, "constraints.pins.2"),
        (
            {"topology": Topology(links=(Link(source="a", target="x", latency_seconds=0, bandwidth=1),))},
            "topology.links.0.target",
        ),
        ({"objective": "speed"}, "objective"),
        ({"time_budget": 0}, "time_budget"),
        ({"time_budget": float("nan")}, "time_budget"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(change: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"model": model(), "devices": [device("a"), device("b")], "topology": Topology()}
    with pytest.raises(InvalidPlacementInput) as caught:
        SOLVER.solve_placement(**{**given, **change})
    assert caught.value.field == field


def test_a_disconnected_topology_is_infeasible() -> None:
    with pytest.raises(InfeasiblePlacement):
        SOLVER.solve_placement(model(), [device("a", 600), device("b", 600)], Topology.unconnected())


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        ({"stages": 0}, "coverage"),
        ({"devices": ("a", "a")}, "device"),
        ({"end": 9}, "coverage"),
        ({"memory_seconds": 1.0}, "time"),
        ({"value": 1e-12}, "objective"),
        ({"weights": 1}, "memory"),
    ],
)
def test_the_validator_sees_damage(damage: dict[str, Any], rule: str) -> None:
    """Every kind of lie in a plan is found, and named."""
    devices = [device("a", 600), device("b", 600)]
    plan = SOLVER.solve_placement(model(), devices, Topology())
    stages = list(plan.stages)
    name, value = next(iter(damage.items()))
    if name == "stages":
        stages.pop()
    elif name == "devices":
        stages[1] = stages[1].model_copy(update={"devices": stages[0].devices, "node": stages[0].node})
    elif name in ("end", "memory_seconds"):
        stages[1] = stages[1].model_copy(update={name: value})
    elif name == "weights":
        held = stages[0].held[0].model_copy(update={"weights": value})
        stages[0] = stages[0].model_copy(update={"held": (held,)})
    broken = plan.model_copy(update={"stages": tuple(stages), **({"value": value} if name == "value" else {})})
    with pytest.raises(InvalidPlan) as caught:
        validate_plan(model(), devices, Topology(), None, broken)
    assert caught.value.rule == rule
    tight = [each.model_copy(update={"usable_bytes": 100}) for each in devices]
    with pytest.raises(InvalidPlan) as caught:
        validate_plan(model(), tight, Topology(), None, plan)
    assert caught.value.rule == "memory"


def test_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    """Not by a solver's library either: stdout belongs to the process that solves."""
    pytest.importorskip("highspy")
    quiet_highs().run()
    assert capfd.readouterr() == ("", "")
