"""Grids of devices: distinct, close where it counts, and who carries what between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.placement import (
    InvalidPlacementInput,
    Link,
    PlacementDevice,
    Topology,
    create_cross_vendor_mesh,
    create_device_mesh,
)
from gpurt.placement.meshes import communication_of
from gpurt.placement.synthetic import synthetic_cluster
from gpurt.types import DeviceKind
from tests.placement.rack import A100, CPU, GB, MI250, RACK, T4, device

pytestmark = pytest.mark.wide

METAL = device("m2", vendor="apple", backend="metal")


@pytest.mark.parametrize(
    ("devices", "library"),
    [
        ([A100], "nccl"),
        ([A100, T4], "nccl"),
        ([MI250, MI250], "rccl"),
        ([A100, MI250], "mixed"),
        ([A100, CPU], "mixed"),
        ([A100, MI250, CPU, METAL], "mixed"),
        ([CPU], "gloo"),
        ([CPU, CPU], "gloo"),
        ([METAL], "gloo"),
        ([METAL, CPU], "gloo"),
    ],
)
def test_who_carries_collective_operations(devices: list[PlacementDevice], library: str) -> None:
    assert communication_of(devices) == library


def test_a_mesh_of_processors_meets_in_host_memory() -> None:
    processors = [device(f"cpu{index}", kind=DeviceKind.CPU, backend="cpu", node=f"n{index}") for index in range(4)]
    mesh = create_device_mesh(processors, data=2, pipeline=2)
    assert mesh.communication == "gloo"
    assert mesh.ranks.shape == (2, 2, 1)
    assert mesh.groups == ((0, 1, 2, 3),)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 2]),
    st.sampled_from(["home", "hetero"]),
    st.integers(0, 9),
)
def test_distinct_devices_and_symmetric_ways(data: int, pipeline: int, tensor: int, kind: str, seed: int) -> None:
    devices, topology = synthetic_cluster(kind, 16, seed)  # type: ignore[arg-type]
    try:
        mesh = create_device_mesh(devices, topology, data=data, pipeline=pipeline, tensor=tensor)
    except InvalidPlacementInput:
        groups = Counter((each.node, each.backend) for each in devices)
        assert sum(size // tensor for size in groups.values()) < data * pipeline
        return
    assert mesh.shape == (data, pipeline, tensor)
    assert len({each.id for each in mesh.devices}) == len(mesh.devices) == data * pipeline * tensor
    for table, diagonal in ((mesh.latency_seconds, 0.0), (mesh.bandwidth, np.inf)):
        assert (table == table.T).all()
        assert (np.diag(table) == diagonal).all()
    links = topology.dense(mesh.devices)
    assert (mesh.latency_seconds >= links.latency).all()
    assert (mesh.bandwidth <= links.bandwidth).all()
    for rank in range(len(mesh.devices)):
        group = [mesh.devices[other] for other in mesh.along("tensor", rank)]
        assert len({(each.node, each.backend) for each in group}) == 1
    assert create_device_mesh(devices[::-1], topology, data=data, pipeline=pipeline, tensor=tensor).devices == (
        mesh.devices
    )


def test_tensor_groups_follow_the_fast_links() -> None:
    """Two pairs with a bridge each in a node of four."""
    cards = [device(f"d{index}", backend="cuda") for index in range(4)]
    bridged = [("d0", "d2"), ("d2", "d0"), ("d1", "d3"), ("d3", "d1")]
    links = tuple(Link(source=one, target=other, latency_seconds=1e-6, bandwidth=3e11) for one, other in bridged)
    mesh = create_device_mesh(cards, Topology(links=links), pipeline=2, tensor=2)
    assert {frozenset(mesh.devices[other].id for other in mesh.along("tensor", rank)) for rank in range(4)} == {
        frozenset({"d0", "d2"}),
        frozenset({"d1", "d3"}),
    }
    assert mesh.along("pipeline", 1) == (1, 3)


def test_stages_of_a_pipeline_are_neighbours() -> None:
    cards = [device(f"d{index}", node=f"n{index}") for index in range(4)]
    near = [("d0", "d3"), ("d3", "d1"), ("d1", "d2")]
    links = tuple(
        Link(source=one, target=other, latency_seconds=1e-6, bandwidth=1e10)
        for pair in near
        for one, other in (pair, pair[::-1])
    )
    mesh = create_device_mesh(cards, Topology(links=links), pipeline=4)
    assert [each.id for each in mesh.devices] == ["d0", "d3", "d1", "d2"]


def test_memory_that_two_devices_share_is_one_device() -> None:
    shared = [
        device("gpu", memory_pool_id="host"),
        device("cpu", 90 * GB, memory_pool_id="host", kind=DeviceKind.CPU),
    ]
    assert [each.id for each in create_cross_vendor_mesh(shared).devices] == ["gpu"]


def test_a_mesh_across_vendors_has_groups_and_shares() -> None:
    mesh = create_cross_vendor_mesh(RACK)
    assert [each.id for each in mesh.devices] == ["mi250", "cpu", "a100", "t4"]
    assert mesh.groups == ((0,), (1,), (2, 3))
    assert mesh.communication == "mixed"
    assert mesh.shares(560) == (181, 2, 312, 65)
    assert mesh.shares(0) == (0, 0, 0, 0)
    assert sum(mesh.shares(7)) == 7
    assert mesh.explain().splitlines()[:2] == [
        "4 device: 4 devices, mixed between them",
        "rank 0 (device 0): mi250, rocm, 59.6 GiB",
    ]


def test_without_a_way_there_is_no_pipeline() -> None:
    cards = [device(f"d{index}", node=f"n{index}") for index in range(2)]
    apart = Topology.unconnected()
    with pytest.raises(InvalidPlacementInput) as caught:
        create_device_mesh(cards, apart, pipeline=2)
    assert caught.value.field == "topology"
    mesh = create_device_mesh(cards, apart, data=2)
    assert mesh.latency_seconds[0, 1] == np.inf
    assert mesh.bandwidth[0, 1] == 0


def test_wrong_grids_name_their_field() -> None:
    mesh = create_cross_vendor_mesh(RACK)
    for call, field in (
        (lambda: create_device_mesh(RACK, tensor=0), "tensor"),
        (lambda: create_device_mesh(RACK, data=-1), "data"),
        (lambda: mesh.along("rows", 0), "axis"),
        (lambda: mesh.along("device", 9), "rank"),
        (lambda: mesh.shares(-1), "total"),
        (lambda: create_cross_vendor_mesh([]), "devices"),
        (lambda: create_device_mesh([A100, A100]), "devices.1.id"),
        (lambda: create_cross_vendor_mesh([A100, T4, A100]), "devices.2.id"),
        (lambda: create_device_mesh([]), "devices"),
        (lambda: create_device_mesh(RACK, Topology(cut=frozenset({("a100", "nobody")}))), "topology.cut"),
        (lambda: create_cross_vendor_mesh(RACK, both_ways(("a100", "nobody"))), "topology.links.0.target"),
        (lambda: mesh.along("device", -1), "rank"),
        (lambda: communication_of([]), "devices"),
    ):
        with pytest.raises(InvalidPlacementInput) as caught:
            call()
        assert caught.value.field == field
    with pytest.raises(InvalidPlacementInput, match=r"pipeline 2 x tensor 2 takes 2 groups of 2 .*, and there is 1$"):
        create_device_mesh(RACK, pipeline=2, tensor=2)
    with pytest.raises(
        InvalidPlacementInput, match=rf"pipeline 3 x tensor 4 takes 24 devices, and there are {len(RACK)}$"
    ):
        create_device_mesh(RACK, data=2, pipeline=3, tensor=4)
    shared = [device(f"d{index}", memory_pool_id="ram") for index in range(2)]
    with pytest.raises(
        InvalidPlacementInput, match=r"2 devices, and there is 1, those that share their memory counted"
    ):
        create_device_mesh(shared, data=2)
    with pytest.raises(InvalidPlacementInput, match="the mesh has no axis 'rows', only device"):
        mesh.along("rows", 0)


def both_ways(*pairs: tuple[str, str]) -> Topology:
    ways = [way for pair in pairs for way in (pair, pair[::-1])]
    return Topology.unconnected(
        tuple(Link(source=one, target=other, latency_seconds=0.1, bandwidth=10.0) for one, other in ways)
    )


def test_devices_cut_from_each_other_are_no_tensor_group() -> None:
    cards = [device(f"d{index}") for index in range(2)]
    apart = Topology(cut=frozenset({("d0", "d1"), ("d1", "d0")}))
    with pytest.raises(InvalidPlacementInput, match=r"reach each other, and there are 0$") as caught:
        create_device_mesh(cards, apart, tensor=2)
    assert caught.value.field == "devices"
    three = create_device_mesh([*cards, device("d2")], apart, tensor=2)
    assert np.isfinite(three.latency_seconds).all()


def test_a_chain_that_exists_is_found_wherever_it_begins() -> None:
    cards = [device("d0", node="a"), device("d1", node="b", compute_flops=1e15), device("d2", node="c")]
    mesh = create_device_mesh(cards, both_ways(("d0", "d1"), ("d1", "d2")), pipeline=3)
    assert [each.id for each in mesh.devices] == ["d0", "d1", "d2"]
    # The fastest device reaches nobody: the others do.
    assert {each.id for each in create_device_mesh(cards, both_ways(("d0", "d2")), pipeline=2).devices} == {"d0", "d2"}


@pytest.mark.parametrize("total", [10, 2**53 + 1, 10**18 + 7, 10**400])
@pytest.mark.parametrize("rate", [1e13, 1.7e308])
def test_shares_add_up_however_large(total: int, rate: float) -> None:
    mesh = create_cross_vendor_mesh([device(f"d{index}", compute_flops=rate) for index in range(3)])
    shares = mesh.shares(total)
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("total", [10.5, float("nan"), True, "3", None])
def test_shares_are_of_whole_pieces(total: Any) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        create_cross_vendor_mesh(RACK).shares(total)
    assert caught.value.field == "total"
    with pytest.raises(InvalidPlacementInput) as caught:
        create_device_mesh(RACK, pipeline=total)
    assert caught.value.field == "pipeline"
