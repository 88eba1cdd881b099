"""Inputs at the edge of what is allowed: each has a right answer, and no warning."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    LayerSpec,
    ModelSpec,
    Pin,
    PlacementDevice,
    RelaxationKind,
    apply_relaxation,
    repair_placement,
    solve_replicas,
    validate_plan,
)
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
