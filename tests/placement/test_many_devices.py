"""Thousands of devices of one node: what is alike is found, what is unlike is bounded, by counts and not by time."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.placement import Constraints, ConstraintSatisfactionPlacement, ModelSpec, PlacementDevice, Topology
from gpurt.placement.building import build_instance
from gpurt.placement.constraints import Pin
from gpurt.placement.devices import devices_from_view
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.grouping import UNIT_LIMIT, classes_of
from gpurt.placement.inventory import inventory_of
from gpurt.placement.topology import LinkMatrix
from tests.cluster.support import device as gpu

GIB = 1 << 30


def device(index: int, size: int = 80, *, node: str = "w1", bandwidth: float = 2e12) -> PlacementDevice:
    return PlacementDevice(
        id=f"{node}/GPU-{index:04}", node=node, usable_bytes=size * GIB, memory_bandwidth=bandwidth, compute_flops=1e15
    )


def model(layers: int = 40, *, tensor_parallel: tuple[int, ...] = (1, 2, 4)) -> ModelSpec:
    return ModelSpec.uniform(
        "m",
        layers=layers,
        size_bytes=layers * GIB,
        flops_per_token=1e9,
        activation_bytes_per_token=8192,
        tensor_parallel=tensor_parallel,
    )


def alike(links: LinkMatrix, a: int, b: int) -> bool:
    """Nothing tells a from b: each has the same links to every other device, and the two the same to each other."""
    others = [each for each in range(len(links.latency)) if each not in (a, b)]
    return all(
        table[a, b] == table[b, a]
        and all(table[a, each] == table[b, each] and table[each, a] == table[each, b] for each in others)
        for table in (links.latency, links.bandwidth)
    )


@settings(deadline=None)
@given(st.data())
def test_classes_are_the_devices_that_no_link_tells_apart(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    # Few values, powers of two among them: equal links, and links whose bits add up alike, are to come up often.
    value = st.sampled_from([1.0, 2.0, 4.0, 0.5, 3.0])
    tables = [np.array([[data.draw(value) for _ in range(count)] for _ in range(count)]) for _ in range(2)]
    if data.draw(st.booleans()):
        tables = [np.triu(table) + np.triu(table, 1).T for table in tables]
    for a in range(count):
        if data.draw(st.booleans()) and a:
            for table in tables:  # one more device like the one before
                order = [*range(a), a - 1, *range(a + 1, count)]
                table[:] = table[np.ix_(order, order)]
    np.fill_diagonal(tables[0], 0.0)
    np.fill_diagonal(tables[1], np.inf)
    links = LinkMatrix(*tables, np.zeros((count, count), dtype=np.bool_))
    classes = classes_of([device(index) for index in range(count)], links, Constraints())
    assert sorted(each for found in classes for each in found) == list(range(count))
    of = {each: number for number, found in enumerate(classes) for each in found}
    for a, b in permutations(range(count), 2):
        assert (of[a] == of[b]) is alike(links, a, b)


def test_equal_devices_are_one_class_however_many() -> None:
    devices = [device(index) for index in range(1500)]
    assert classes_of(devices, Topology().dense(devices), Constraints()) == (tuple(range(1500)),)


@pytest.mark.parametrize("tensor_parallel", [pytest.param((1,), marks=pytest.mark.wide), (1, 2, 4, 8)])
def test_unlike_devices_make_a_bounded_number_of_units(tensor_parallel: tuple[int, ...]) -> None:
    devices = [device(index, 8 + index % 90, bandwidth=1e12 + 1e8 * index) for index in range(2500)]
    wanted = model(tensor_parallel=tensor_parallel)
    named = Constraints(pins=(Pin(start=0, end=1, devices=frozenset({"w1/GPU-0000"})),))
    instance = build_instance(wanted, devices, Topology(), named)
    assert instance.size <= UNIT_LIMIT
    assert not instance.complete
    kept = {each.id for each in instance.devices}
    assert "w1/GPU-0000" in kept  # a rule names it
    assert {max(devices, key=lambda each: each.memory_bandwidth).id, "w1/GPU-0089"} <= kept


def test_of_many_unlike_devices_there_is_a_plan() -> None:
    # More of them than an array has dimensions, and than 64 bits count the ways to use them up.
    devices = [device(index, 8 + index % 90, bandwidth=1e12 + 1e8 * index) for index in range(200)]
    plan = ConstraintSatisfactionPlacement().solve_placement(model(), devices, time_budget=2.0)
    assert plan.stages[-1].end == 40


@pytest.mark.parametrize("size", [-5, 2**62, 10**400])
def test_a_size_that_no_device_has_is_named_and_left_out(size: int) -> None:
    good, evil = gpu("GPU-g"), gpu("GPU-e", memory_bytes=max(size, 0), memory_usable_bytes=size)
    found = inventory_of({("n1", "GPU-g"): good, ("n2", "GPU-e"): evil})
    assert [each.id for each in found.devices] == ["n1/GPU-g"]
    assert "it says that it has" in found.left_out["n2/GPU-e"]
    with pytest.raises(InvalidPlacementInput, match="n2/GPU-e says that it has"):
        devices_from_view({("n2", "GPU-e"): evil})


def test_sizes_that_cannot_be_counted_together_cost_the_largest() -> None:
    view = {("good", "GPU-g"): gpu("GPU-g")}
    view |= {("evil", f"GPU-{index}"): gpu(f"GPU-{index}", memory_usable_bytes=1 << 53) for index in range(200)}
    found = inventory_of(view)
    assert "good/GPU-g" in {each.id for each in found.devices}
    assert found.left_out.keys() <= {f"evil/GPU-{index}" for index in range(200)}
    assert found.left_out
    assert ConstraintSatisfactionPlacement().solve_placement(model(), found.devices, time_budget=0.5).stages
    with pytest.raises(InvalidPlacementInput, match="evil/GPU-0 alone has"):
        ConstraintSatisfactionPlacement().solve_placement(model(), devices_from_view(view), time_budget=0.5)
