"""Whole workloads on devices: never more than fits, everything where everything can, the same answer every time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.placement import InvalidPlacementInput, PlacementDevice, WorkloadRequest, optimize_workload_placement
from tests.placement.rack import CPU, GB, RACK, device

pytestmark = pytest.mark.wide


def work(name: str, memory: int, **fields: Any) -> WorkloadRequest:
    return WorkloadRequest(name=name, memory_bytes=memory, **fields)


def possible(workloads: list[WorkloadRequest], devices: list[PlacementDevice]) -> bool:
    """By trying all assignments."""
    for chosen in itertools.product(range(len(devices)), repeat=len(workloads)):
        room = [each.budget_bytes for each in devices]
        for request, index in zip(workloads, chosen, strict=True):
            room[index] -= request.memory_bytes
            if request.backends is not None and devices[index].backend not in request.backends:
                room[index] = -1
        if min(room, default=0) >= 0:
            return True
    return False


BACKENDS = st.sampled_from([None, frozenset({"cuda"}), frozenset({"cpu", "rocm"})])
WORKLOADS = st.lists(st.tuples(st.integers(0, 10), st.sampled_from([0.0, 1e12, 5e12]), BACKENDS), max_size=5).map(
    lambda rows: [work(f"w{i}", size, flops=flops, backends=on) for i, (size, flops, on) in enumerate(rows)]
)
DEVICES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["cuda", "rocm", "cpu"])), max_size=3).map(
    lambda rows: [device(f"d{i}", size, backend=on) for i, (size, on) in enumerate(rows)]
)


@given(WORKLOADS, DEVICES)
def test_everything_is_placed_where_that_is_possible(
    workloads: list[WorkloadRequest], devices: list[PlacementDevice]
) -> None:
    found = optimize_workload_placement(workloads, devices)
    assert found.certain
    assert (not found.unplaced) == possible(workloads, devices)
    by_id = {each.id: each for each in devices}
    held = dict.fromkeys(by_id, 0)
    for request in workloads:
        assert (request.name in found.devices) != (request.name in found.unplaced)
        if request.name in found.devices:
            place = by_id[found.devices[request.name]]
            assert request.backends is None or place.backend in request.backends
            held[place.id] += request.memory_bytes
    assert held == found.held_bytes
    assert all(held[name] <= by_id[name].budget_bytes for name in held)
    assert optimize_workload_placement(workloads, devices[::-1]).devices == found.devices


def test_nine_large_places_for_ten_large_workloads() -> None:
    """The small places do not help, and nothing is put where it does not fit."""
    devices = [device(f"big{index}", 100) for index in range(9)] + [device(f"small{index}", 99) for index in range(2)]
    found = optimize_workload_placement([work(f"w{index}", 100) for index in range(10)], devices)
    assert found.certain
    assert list(found.unplaced) == ["w9"]
    assert max(found.held_bytes.values()) == 100
    assert found.explain().splitlines()[-1] == "no assignment places all 10 workloads"


def test_steps_are_balanced_by_the_rates_of_devices() -> None:
    fast, slow = device("fast", 100, compute_flops=3e12), device("slow", 100, compute_flops=1e12)
    found = optimize_workload_placement([work(f"w{index}", 1, flops=1e12) for index in range(8)], [slow, fast])
    assert found.busy_seconds == {"fast": pytest.approx(2.0), "slow": pytest.approx(2.0)}


def test_what_fits_only_in_one_way_is_found() -> None:
    """Balance alone would put the two long ones apart, and leave no room for the large one."""
    devices = [device("a", 10, compute_flops=1e12), device("b", 8, compute_flops=1e12)]
    workloads = [work("x", 4, flops=1e12), work("y", 4, flops=1e12), work("z", 10)]
    found = optimize_workload_placement(workloads, devices)
    assert found.devices == {"x": "b", "y": "b", "z": "a"}


def test_reasons() -> None:
    workloads = [
        work("huge", 999 * GB),
        work("odd", 1, backends=frozenset({"npu"})),
        work("int8", 1, dtype="int8"),
        work("fits", GB, dtype="bf16", flops=1e12),
    ]
    found = optimize_workload_placement(workloads, RACK)
    assert found.certain
    assert list(found.devices) == ["fits"]
    text = found.explain()
    assert "huge is not placed: it holds 930.4 GiB, and no device has more than 238.4 GiB" in text
    assert "odd is not placed: no device is of npu" in text
    assert "int8 is not placed: no device computes in int8" in text
    assert text.splitlines()[0].startswith("a100: fits; 953.7 MiB, 3.21 ms a step")
    nowhere = optimize_workload_placement([work("w", 1)], [])
    assert nowhere.unplaced == {"w": "there is no device"}
    assert nowhere.certain
    assert optimize_workload_placement([], []).explain() == ""
    both = optimize_workload_placement([work("w", 1, backends=frozenset({"b", "a"}), dtype="int8")], RACK)
    assert both.unplaced == {"w": "no device is of a or b and computes in int8"}


def test_a_search_that_is_given_up_is_no_proof() -> None:
    """Two fit on each of twelve devices, whatever their sizes; to see that by trying takes too long."""
    devices = [device(f"d{index}", 1000 + index) for index in range(12)]
    sizes = [450 + index for index in range(25)]
    found = optimize_workload_placement([work(f"w{i}", size) for i, size in enumerate(sizes)], devices)
    assert found.unplaced
    assert not found.certain
    assert "no assignment was found that places" in found.explain()


def test_wrong_requests_name_their_field() -> None:
    for call, field in (
        (lambda: work("", 1), "name"),
        (lambda: work("w", -1), "memory_bytes"),
        (lambda: work("w", 1, flops=float("nan")), "flops"),
        (lambda: work("w", 1, dtype="float9"), "dtype"),
        (lambda: optimize_workload_placement([work("w", 1), work("w", 2)], [CPU]), "workloads.1.name"),
        (lambda: optimize_workload_placement([], [CPU, CPU]), "devices.1.id"),
        (lambda: work("w", float("nan")), "memory_bytes"),
        (lambda: work("w", 1, colour="red"), "colour"),
    ):
        with pytest.raises(InvalidPlacementInput) as caught:
            call()
        assert caught.value.field == field
