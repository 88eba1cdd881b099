"""Input that no placement can have is a typed error that names the field; what is merely impossible is another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
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
    LinkClass,
    LinkTable,
    ModelSpec,
    Pin,
    PlacementDevice,
    Plan,
    ResidentRange,
    StageLayers,
    Topology,
    Workload,
    WorkloadRequest,
    choose_device,
    explain_plan,
    get_performance_estimate,
    predict_load,
    repair_placement,
    solve_replicas,
    validate_plan,
)
from gpurt.placement.building import build_instance
from gpurt.placement.search import LocalSearch
from gpurt.types import GPUDevice

pytestmark = pytest.mark.wide

NAN, INF = float("nan"), float("inf")


def device(name: str, usable: int = 1000, **fields: Any) -> PlacementDevice:
    values: dict[str, Any] = {"node": f"n-{name}", "memory_bandwidth": 1e6, "compute_flops": 1e9, **fields}
    return PlacementDevice(id=name, usable_bytes=usable, **values)


def model(layers: int = 10, **fields: Any) -> ModelSpec:
    return ModelSpec.uniform("m", layers=layers, size_bytes=1000, **fields)


def table(latency: Any, bandwidth: Any = ((1, 1), (1, 1)), names: tuple[str, ...] = ("a", "b")) -> LinkTable:
    return LinkTable(names=names, latency_seconds=np.array(latency), bandwidth=np.array(bandwidth))


def pins(*given: tuple[int, int, str]) -> Constraints:
    """Of each: first layer, end, and names of devices or, beginning with ``n-``, of a node."""
    return Constraints(
        pins=tuple(
            Pin(start=start, end=end, nodes=frozenset({names}))
            if names.startswith("n-")
            else Pin(start=start, end=end, devices=frozenset(names))
            for start, end, names in given
        )
    )


def solve(**change: Any) -> Any:
    given: dict[str, Any] = {"model": model(), "devices": [device(name) for name in "abc"], **change}
    return ConstraintSatisfactionPlacement().solve_placement(**given)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: model(0), "layers"),
        (lambda: ModelSpec(name="", layers=model().layers), "name"),
        (lambda: LayerSpec(weight_bytes=-1), "weight_bytes"),
        (lambda: LayerSpec(weight_bytes=1, flops_per_token=NAN), "flops_per_token"),
        (lambda: LayerSpec(weight_bytes=1, kv_bytes_per_token=-1), "kv_bytes_per_token"),
        (lambda: model(embedding_bytes=-1), "embedding_bytes"),
        (lambda: model(tied_bytes=1), "tied_bytes"),
        (lambda: model(tensor_parallel=(0,)), "tensor_parallel"),
        (lambda: model(colour="red"), "colour"),
        (lambda: device("a", -1), "usable_bytes"),
        (lambda: device("a", reserve_bytes=-1), "reserve_bytes"),
        (lambda: device("a", memory_bandwidth=0), "memory_bandwidth"),
        (lambda: device("a", compute_flops=INF), "compute_flops"),
        (lambda: device("a", resident=[{"model": "m", "start": 4, "end": 2}]), "resident.0.end"),
        (lambda: ResidentRange(model="m", start=-1, end=2), "start"),
        (lambda: Link(source="a", target="b", latency_seconds=NAN, bandwidth=1), "latency_seconds"),
        (lambda: Link(source="a", target="b", latency_seconds=-1, bandwidth=1), "latency_seconds"),
        (lambda: Link(source="a", target="b", latency_seconds=0, bandwidth=NAN), "bandwidth"),
        (lambda: Link(source="", target="b", latency_seconds=0, bandwidth=1), "source"),
        (lambda: LinkClass(latency_seconds=NAN, bandwidth=1), "latency_seconds"),
        (lambda: table([[0, -1], [1, 0]]), "latency_seconds"),
        (lambda: table([[0, 1], [1, 0]], [[1, 0], [1, 1]]), "bandwidth"),
        (lambda: table([[0, 1]]), "names"),
        (lambda: table([[0, 1], [1, 0]], names=("a", "a")), "names"),
        (lambda: table([["x", 1], [1, 0]]), "latency_seconds"),
        (lambda: Topology.model_validate({"links": [{"source": "a"}]}), "links.0.target"),
        (lambda: Pin(start=3, end=3, devices=frozenset({"a"})), "end"),
        (lambda: Pin(start=3, end=4), "devices"),
        (lambda: StageLayers(device="a", minimum=0), "minimum"),
        (lambda: DomainLimit(domain="node", stages=0), "stages"),
        (lambda: Workload(batch=0), "batch"),
        (lambda: Workload(context_tokens=-1), "context_tokens"),
        (lambda: Constraints(max_stages=1, min_stages=2), "max_stages"),
        (lambda: Constraints(max_nodes=1, min_nodes=2), "max_nodes"),
        (lambda: Constraints(max_link_seconds=NAN), "max_link_seconds"),
        (lambda: Constraints(movement_seconds_per_byte=-1), "movement_seconds_per_byte"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_names_its_field(build: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        build()
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert isinstance(caught.value, GPUError)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"devices": []}, "devices"),
        ({"devices": [device("a"), device("a")]}, "devices"),
        ({"devices": [device("a"), device("b", node="a")]}, "devices"),
        ({"constraints": Constraints(exclude_devices=frozenset({"x"}))}, "constraints.exclude_devices"),
        ({"constraints": Constraints(exclude_nodes=frozenset({"x"}))}, "constraints.exclude_nodes"),
        ({"constraints": Constraints(require_nodes=frozenset({"x"}))}, "constraints.require_nodes"),
        ({"constraints": Constraints(stage_layers=(StageLayers(device="x"),))}, "constraints.stage_layers"),
        ({"constraints": Constraints(stage_layers=(StageLayers(device="a"), StageLayers(device="a", maximum=2)))},
         "constraints.stage_layers"),
        ({"constraints": Constraints(domain_limits=(DomainLimit(domain="node", stages=1),
                                                    DomainLimit(domain="rack", stages=1)))},
         "constraints.domain_limits.1.domain"),
        ({"constraints": Constraints(require_devices=frozenset("a"), exclude_devices=frozenset("a"))},
         "constraints.require_devices"),
        ({"constraints": pins((0, 1, "a"), (0, 1, "x"))}, "constraints.pins.1.devices"),
        ({"constraints": pins((0, 1, "n-x"))}, "constraints.pins.0.nodes"),
        ({"constraints": pins((8, 11, "a"))}, "constraints.pins.0.end"),
        ({"topology": Topology(cut=frozenset({("a", "x")}))}, "topology.cut"),
        ({"topology": Topology(table=table([[0, 1], [1, 0]], names=("x", "y")))}, "topology.table.names"),
    ],
)  # fmt: skip
def test_names_that_nobody_has_and_rules_that_contradict(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        solve(**change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([(0, 2, "a"), (2, 4, "b"), (4, 6, "a")], 2),
        ([(4, 6, "a"), (0, 2, "a"), (1, 5, "b")], 0),
        ([(0, 2, "a"), (2, 4, "bc"), (4, 6, "a")], 2),
        ([(0, 2, "ab"), (2, 4, "c"), (4, 6, "ab"), (6, 7, "c")], 3),
        ([(0, 2, "n-a"), (2, 4, "b"), (4, 6, "n-a")], 2),  # a node of one device
        ([(0, 2, "a"), (2, 4, "n-b"), (4, 6, "n-a")], 2),
    ],
)
def test_cyclic_pins_name_the_pin(given: list[tuple[int, int, str]], field: int) -> None:
    with pytest.raises(InvalidPlacementInput, match="cyclic") as caught:
        solve(constraints=pins(*given))
    assert caught.value.field == f"constraints.pins.{field}"


def test_pins_that_go_round_a_group_are_no_cycle() -> None:
    assert solve(constraints=pins((0, 2, "ab"), (2, 4, "c"), (4, 6, "ab"))).layers_of("c") == range(2, 4)
    there = solve(constraints=pins((0, 2, "a"), (2, 4, "n-a"), (4, 6, "a"))).layers_of("a")
    assert set(range(6)) <= set(there)


@pytest.mark.parametrize(
    "change",
    [
        {"devices": [device("a", 600), device("b", 600)], "topology": Topology.unconnected()},
        {"devices": [device("a", 600), device("b", 600)],
         "topology": Topology(cut=frozenset({("a", "b"), ("b", "a")}))},
        {"constraints": pins((0, 3, "a"), (2, 5, "b"))},
        {"constraints": Constraints(exclude_devices=frozenset("abc"))},
        {"constraints": Constraints(min_stages=4)},
    ],
)  # fmt: skip
def test_what_is_impossible_is_another_error(change: dict[str, Any]) -> None:
    with pytest.raises(InfeasiblePlacement) as caught:
        solve(**change)
    assert caught.value.constraint


def test_a_table_of_devices_counts_also_where_some_of_them_take_no_part() -> None:
    apart = table(np.full((4, 4), 0.5), np.full((4, 4), 1e3), names=("a", "b", "c", "gone"))
    plan = solve(
        model=model(activation_bytes_per_token=100),
        devices=[device("a", 600), device("b", 600), device("c", 0), device("d", 10)],
        topology=Topology(table=apart),
    )
    assert [hop.seconds for hop in plan.hops] == [pytest.approx(0.6), pytest.approx(0.504)]
    assert not any(hop.estimated for hop in plan.hops)


GPU = GPUDevice(
    device_id="cuda:0", name="H100", vendor="nvidia", backend="cuda", compute_capability="9.0", memory_bytes=1 << 36,
    memory_available=1 << 36, compute_units=132, tensor_core_count=528, max_threads_per_block=1024,
    clock_rate_mhz=1980, bandwidth_gbps=3350.0, support_level="full", driver_version=None, backend_name="cupy",
)  # fmt: skip
"""A record of discovery, which is not a device of placement."""


@pytest.mark.parametrize("solve", [ConstraintSatisfactionPlacement().solve_placement, solve_replicas])
@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"devices": [GPU]}, "devices.0", "devices_from_view, or each with device_from_gpu"),
        ({"devices": [device("a"), GPU]}, "devices.1", "not GPUDevice"),
        ({"devices": GPU}, "devices", "device_from_gpu"),
        ({"devices": "cuda:0"}, "devices", "not str"),
        ({"devices": []}, "devices", "there is no device"),
        ({"model": "llama"}, "model", "ModelSpec.from_config"),
        ({"model": None}, "model", "not NoneType"),
        ({"topology": {"a": 1}}, "topology", "a Topology, not dict"),
        ({"constraints": {"max_stages": 1}}, "constraints", "a Constraints, not dict"),
        ({"seed": -1}, "seed", "from 0"),
        ({"seed": "7"}, "seed", "from 0, and is '7'"),
        ({"seed": 1.5}, "seed", "from 0"),
        ({"target_gap": NAN}, "target_gap", "0 or more, and is nan"),
        ({"target_gap": -0.1}, "target_gap", "0 or more"),
        ({"target_gap": "0.1"}, "target_gap", "0 or more"),
        ({"time_budget": NAN}, "time_budget", "positive"),
        ({"time_budget": "10"}, "time_budget", "positive"),
        ({"time_budget": 10**400}, "time_budget", "positive"),
        ({"target_gap": 10**400}, "target_gap", "0 or more"),
        ({"cancelled": 5}, "cancelled", "a function that says whether to stop, not int"),
    ],
)
def test_arguments_of_another_kind(
    solve: Callable[..., object], changes: dict[str, Any], field: str, said: str
) -> None:
    model = ModelSpec.uniform("m", layers=2, size_bytes=100)
    with pytest.raises(InvalidPlacementInput, match=re.escape(said)) as caught:
        solve(**{"model": model, "devices": [device("a")], **changes})
    assert caught.value.field == field


def test_numbers_of_numpy_are_numbers() -> None:
    model = ModelSpec.uniform("m", layers=2, size_bytes=100)
    plan = ConstraintSatisfactionPlacement().solve_placement(
        model, [device("a")], seed=np.int64(3), target_gap=np.float64(0.01), time_budget=np.float32(5)
    )
    assert plan.seed == 3


@pytest.mark.parametrize("size", [1 << 54, 1 << 63, 10**400], ids=["2^54", "2^63", "10^400"])
@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda size: device("a", size), "usable_bytes"),
        (lambda size: device("a", max_allocation_bytes=size), "max_allocation_bytes"),
        (lambda size: LayerSpec(weight_bytes=size), "weight_bytes"),
        (lambda size: LayerSpec(weight_bytes=1, workspace_bytes_per_token=size), "workspace_bytes_per_token"),
        (lambda size: model(embedding_bytes=size), "embedding_bytes"),
        (lambda size: model(tensor_parallel=(1, size)), "tensor_parallel"),
        (lambda size: Workload(context_tokens=size), "context_tokens"),
        (lambda size: Workload(batch=size), "batch"),
        (lambda size: Constraints(max_stages=size), "max_stages"),
        (lambda size: Constraints(replicas=size), "replicas"),
        (lambda size: DomainLimit(domain="node", stages=size), "stages"),
        (lambda size: StageLayers(device="a", minimum=size), "minimum"),
        (lambda size: WorkloadRequest(name="w", memory_bytes=size), "memory_bytes"),
        (lambda size: get_performance_estimate(device("a"), m=size, n=1, k=1), "m"),
    ],
)  # fmt: skip
def test_numbers_that_nothing_has_name_their_field(build: Callable[[int], object], size: int, field: str) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        build(size)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"devices": [device(f"d{index}", 1 << 53) for index in range(129)]}, "devices"),
        ({"model": ModelSpec(name="m", layers=(LayerSpec(weight_bytes=1 << 53),) * 200)}, "model.layers"),
        ({"model": model(kv_bytes_per_token=1 << 40),
          "constraints": Constraints(workload=Workload(context_tokens=1 << 30))},
         "constraints.workload.context_tokens"),
        ({"model": model(workspace_bytes_per_token=1 << 40),
          "constraints": Constraints(workload=Workload(prefill_tokens=1 << 30))},
         "constraints.workload.prefill_tokens"),
        ({"model": model(activation_bytes_per_token=1 << 40),
          "constraints": Constraints(workload=Workload(batch=1 << 30))}, "constraints.workload.batch"),
    ],
)  # fmt: skip
def test_more_together_than_can_be_counted(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPlacementInput, match="are counted") as caught:
        solve(**change)
    assert caught.value.field == field


def test_layers_that_no_model_has_cost_nothing() -> None:
    claims = device("a", resident=(ResidentRange(model="m", start=2, end=1 << 70),))
    plan = solve(devices=[claims], constraints=Constraints(movement_seconds_per_byte=1e-3))
    assert plan.stages[0].held[0].moved == 200


@pytest.mark.parametrize("amount", [10**400, NAN, -1, "1", None, True])
def test_a_requirement_is_an_amount(amount: Any) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        choose_device([device("a")], amount)
    assert caught.value.field == "memory_requirement_gb"


def test_a_device_with_nothing_left_takes_no_part_even_for_layers_that_take_nothing() -> None:
    nothing = ModelSpec.uniform("m", layers=2, size_bytes=0)
    with pytest.raises(InfeasiblePlacement):
        solve(model=nothing, devices=[device("a", 100, reserve_bytes=100)])
    devices = [device("a", 100), device("b", 100)]
    plan = solve(model=nothing, devices=devices)
    full = [each.model_copy(update={"reserve_bytes": 100}) for each in devices]
    with pytest.raises(InvalidPlan, match="takes no part") as caught:
        validate_plan(nothing, full, Topology(), None, plan)
    assert caught.value.rule == "memory"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_search_among_links_that_do_not_exist_is_silent() -> None:
    devices = [device(name, 400) for name in "abcd"]
    apart = Topology(cut=frozenset({("n-a", "n-b"), ("n-b", "n-c"), ("n-c", "n-a"), ("n-d", "n-a")}))
    instance = build_instance(model(), devices, apart, Constraints())
    for order in ((0, 1, 2), (1, 2, 3), (3, 0, 1), (2, 0, 3)):
        search = LocalSearch(instance, 0, lambda: False)
        search.run(order, search.value(order), rounds=3)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "end beyond the model": lambda plan: plan["stages"][-1].update(end=1000),
    "start beyond the model": lambda plan: plan["stages"][0].update(start=500, end=600),
    "a stage is missing": lambda plan: plan["stages"].pop(0),
    "a device twice": lambda plan: plan["stages"][1].update(
        devices=plan["stages"][0]["devices"], held=plan["stages"][0]["held"]
    ),
    "no hops": lambda plan: plan.update(hops=[]),
    "a hop elsewhere": lambda plan: plan["hops"][0].update(target=7),
    "bytes of others": lambda plan: plan["stages"][0].update(held=plan["stages"][1]["held"]),
    "it ends before it starts": lambda plan: plan["stages"][0].update(start=5, end=1),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_plan_that_contradicts_itself_is_used_by_nobody(lie: str) -> None:
    devices = [device(name, 600) for name in "abc"]
    document = solve(devices=devices).model_dump(mode="json")
    LIES[lie](document)
    plan = Plan.model_validate(document)
    for use in (
        lambda: predict_load(plan, model(), devices),
        lambda: explain_plan(model(), devices, Constraints(), plan),
        lambda: repair_placement(plan, model(), devices),
        lambda: repair_placement(plan, model(), devices[1:]),
        lambda: validate_plan(model(), devices, Topology(), None, plan),
    ):
        with pytest.raises(InvalidPlan):
            use()


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: device("a", memory_bandwidth=5e-324), "memory_bandwidth"),
        (lambda: device("a", compute_flops=1e-300), "compute_flops"),
        (lambda: device("a", load_bandwidth=1e-30), "load_bandwidth"),
        (lambda: device("a", node_load_bandwidth=1e-30), "node_load_bandwidth"),
        (lambda: device("a", launch_seconds=1e307), "launch_seconds"),
        (lambda: Link(source="a", target="b", latency_seconds=0.0, bandwidth=5e-324), "bandwidth"),
        (lambda: Link(source="a", target="b", latency_seconds=1e307, bandwidth=1.0), "latency_seconds"),
        (lambda: LinkClass(latency_seconds=0.0, bandwidth=5e-324), "bandwidth"),
        (lambda: LinkClass(latency_seconds=1e307, bandwidth=1.0), "latency_seconds"),
        (lambda: table(np.full((2, 2), 0.5), np.full((2, 2), 5e-324), names=("a", "b")), "bandwidth"),
        (lambda: table(np.full((2, 2), 1e307), np.full((2, 2), 1.0), names=("a", "b")), "latency_seconds"),
        (lambda: LayerSpec(weight_bytes=1, flops_per_token=1e307), "flops_per_token"),
        (lambda: model(head_flops_per_token=1e307), "head_flops_per_token"),
        (lambda: Constraints(movement_seconds_per_byte=1e307), "movement_seconds_per_byte"),
    ],
)  # fmt: skip
def test_rates_and_times_of_nothing_there_is_name_their_field(build: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        build()
    assert caught.value.field == field


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("objective", ["latency", "throughput", "balanced"])
def test_the_slowest_and_dearest_there_may_be_have_a_plan_without_a_warning(objective: str) -> None:
    slow = {"memory_bandwidth": 1e-3, "compute_flops": 1e-3, "load_bandwidth": 1e-3, "launch_seconds": 1e9}
    spec = ModelSpec.uniform(
        "m", layers=4, size_bytes=1 << 53, flops_per_token=1e30, head_flops_per_token=1e30,
        activation_bytes_per_token=1 << 40, tensor_parallel=(1, 2),
    )  # fmt: skip
    devices = [device(name, 3 << 51, node="n", **slow) for name in "ab"]
    links = [
        Link(source=one, target=other, latency_seconds=1e9, bandwidth=1e-3) for one, other in (("a", "b"), ("b", "a"))
    ]
    rules = Constraints(movement_seconds_per_byte=1e9)
    plan = ConstraintSatisfactionPlacement().solve_placement(
        spec, devices, Topology(links=tuple(links)), rules, objective=objective, time_budget=2
    )
    assert set(plan.devices) == {"a", "b"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("field", ["memory_bandwidth", "compute_flops", "load_bandwidth"])
def test_a_rate_past_all_others_is_a_rate(field: str) -> None:
    plan = solve(devices=[device("a", 400, **{field: 1.7e308}), device("b", 1000)])
    assert plan.devices
