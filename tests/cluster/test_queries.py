"""What schedulers ask: which devices fit, how much memory there is, how well everything is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpurt.cluster.queries import (
    cluster_devices,
    devices_by_health,
    find_devices,
    health_of,
    memory_pools,
    nodes_by_state,
    usable_memory,
)
from gpurt.cluster.records import ClusterSnapshot, NodeState
from gpurt.cluster.view import MasterView
from gpurt.types import DeviceIdentity, DeviceKind, DeviceState, GPUDevice
from tests.cluster.support import HOST_A, HOST_B, FakeClock, device, snapshot

GIB = 1 << 30


def gpu(uuid: str, room: int | None = 10 * GIB, **fields: Any) -> GPUDevice:
    return device(uuid, memory_usable_bytes=room, **fields)


def cluster(nodes: dict[str, list[GPUDevice]], hosts: dict[str, Any] | None = None) -> tuple[MasterView, FakeClock]:
    clock = FakeClock()
    view = MasterView(clock=clock)
    for name, devices in nodes.items():
        view.node_up(name)
        view.apply_snapshot(snapshot(*devices, node=name, host=(hosts or {}).get(name, HOST_A)))
    return view, clock


def keys(found: Any) -> list[tuple[str, str]]:
    return [(each.node, each.key) for each in found]


def test_the_largest_come_first_and_unknown_ones_last_whatever_the_order_of_arrival() -> None:
    devices = {
        "n2": [gpu("GPU-c", 40 * GIB), gpu("GPU-d", None)],
        "n1": [gpu("GPU-b", 40 * GIB), gpu("GPU-a", 80 * GIB), gpu("GPU-e", 0)],
    }
    expected = [("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-c"), ("n1", "GPU-e"), ("n2", "GPU-d")]
    names = list(devices)
    for seed in range(10):
        random.Random(seed).shuffle(names)
        view, _ = cluster({name: devices[name] for name in names})
        assert keys(find_devices(view.snapshot())) == expected


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["a", "b", "c", "d", "e"]),
        ({"vendor": "nvidia"}, ["a", "b"]),
        ({"vendor": "amd"}, ["c"]),
        ({"backend": "opencl"}, ["b"]),
        ({"backend": "cuda"}, ["a", "b"]),
        ({"kinds": ["igpu"]}, ["d"]),
        ({"kinds": "igpu"}, ["d"]),
        ({"kinds": [DeviceKind.INTEGRATED_GPU, "cpu"]}, ["d", "e"]),
        ({"capability": "gfx942"}, ["c"]),
        ({"capability": "gfx942:xnack-"}, ["c"]),
        ({"capability": "9.0"}, ["a"]),
        ({"min_capability": "8.9"}, ["a", "b"]),
        ({"min_capability": "9.0"}, ["a"]),
        ({"min_capability": "10.0"}, []),
        ({"min_usable_bytes": 20 * GIB}, ["a", "c"]),
        ({"min_usable_bytes": 0}, ["a", "b", "c", "d"]),
        ({"simulated": True}, ["b"]),
        ({"simulated": False}, ["a", "c", "d", "e"]),
        ({"nodes": "n2"}, []),
        ({"nodes": ["n1", "n9"]}, ["a", "b", "c", "d", "e"]),
        ({"health": DeviceState.HEALTHY}, ["a", "b", "c", "d", "e"]),
        ({"where": lambda found: found.device.unified_memory}, ["d"]),
        ({"vendor": "nvidia", "simulated": False, "min_capability": "8.0"}, ["a"]),
    ],
)
def test_conditions(conditions: dict[str, Any], expected: list[str]) -> None:
    view, _ = cluster(
        {
            "n1": [
                gpu("a", 80 * GIB, compute_capability="9.0"),
                gpu("b", 10 * GIB, compute_capability="8.9", backends=("cuda", "opencl"), simulated=True),
                gpu("c", 40 * GIB, vendor="amd", backend="rocm", compute_capability="gfx942:sramecc+:xnack-"),
                gpu("d", 5 * GIB, vendor="apple", backend="metal", kind=DeviceKind.INTEGRATED_GPU, unified_memory=True,
                    compute_capability=None),
                gpu("e", None, vendor="intel", backend="cpu", kind=DeviceKind.CPU, compute_capability="avx512"),
            ]
        }
    )  # fmt: skip
    assert sorted(key for _, key in keys(find_devices(view.snapshot(), **conditions))) == expected


def test_conditions_that_cannot_be_meant_are_refused() -> None:
    empty = ClusterSnapshot(nodes={})
    for bad in ("gfx942", "9", "", "9.0.1", "-1.0", "9.x"):
        with pytest.raises(ValueError, match=r"MAJOR\.MINOR"):
            find_devices(empty, min_capability=bad)
    with pytest.raises(ValueError, match="negative"):
        find_devices(empty, min_usable_bytes=-1)
    assert find_devices(empty) == ()
    assert usable_memory(()).usable_bytes == 0


def test_shared_memory_counts_once_and_no_pool_of_another_host_is_the_same() -> None:
    shared = {"memory_pool_id": "host:x", "unified_memory": True}
    view, _ = cluster(
        {
            "n1": [gpu("igpu", 12 * GIB, **shared), gpu("cpu", 20 * GIB, kind=DeviceKind.CPU, **shared), gpu("GPU-a")],
            "n2": [gpu("igpu", 12 * GIB, **shared)],
        },
        {"n2": HOST_B},
    )
    found = find_devices(view.snapshot())
    assert len(found) == 4
    assert usable_memory(found).usable_bytes == (20 + 10 + 12) * GIB
    pools = memory_pools(found)
    assert [pool.usable_bytes for pool in pools] == [20 * GIB, 12 * GIB, 10 * GIB]
    assert keys(pools[0].devices) == [("n1", "cpu"), ("n1", "igpu")]


def test_two_nodes_of_one_machine_share_its_cards_and_pools() -> None:
    shared = {"memory_pool_id": "host:x"}
    devices = [gpu("GPU-a", 70 * GIB), gpu("cpu", 16 * GIB, **shared)]
    view, _ = cluster({"n1": devices, "n2": [gpu("GPU-a", 60 * GIB), gpu("cpu", 15 * GIB, **shared)]})
    found = cluster_devices(view.snapshot())
    assert len(found) == 4
    assert usable_memory(found).usable_bytes == (70 + 16) * GIB
    other, _ = cluster({"n1": devices, "n2": devices}, {"n2": HOST_B})
    assert usable_memory(cluster_devices(other.snapshot())).usable_bytes == 2 * (70 + 16) * GIB


def test_a_name_is_no_identity() -> None:
    unstable = DeviceIdentity(key="Radeon", stable=False)
    view, _ = cluster({name: [gpu("x", identity=unstable)] for name in ("n1", "n2")})
    assert usable_memory(cluster_devices(view.snapshot())).usable_bytes == 20 * GIB


def test_unknown_memory_is_told_and_not_taken_for_none() -> None:
    view, _ = cluster({"n1": [gpu("a", None), gpu("b", None, memory_pool_id="p"), gpu("c", 1, memory_pool_id="p")]})
    memory = usable_memory(cluster_devices(view.snapshot()))
    assert (memory.usable_bytes, memory.unknown) == (1, 1)


def test_health_is_no_better_than_that_of_the_node() -> None:
    broken = gpu("GPU-b", state=DeviceState.DEGRADED, usable=False)
    view, clock = cluster({name: [gpu("GPU-a"), broken] for name in ("n1", "n2", "n3", "n4")})

    def health(node: str) -> list[str]:
        return [found.health for found in cluster_devices(view.snapshot()) if found.node == node]

    view.node_down("n4", left=True)
    view.node_down("n3")
    clock.now += 5
    view.tick()
    view.node_down("n2")
    assert health("n1") == ["healthy", "degraded"]
    assert health("n2") == ["suspect", "degraded"]
    assert health("n3") == ["lost", "lost"]
    assert health("n4") == ["removed", "removed"]
    picture = view.snapshot()
    assert nodes_by_state(picture) == dict.fromkeys(NodeState, 1) | {NodeState.UNKNOWN: 0}
    counts = devices_by_health(cluster_devices(picture))
    assert {state: count for state, count in counts.items() if count} == {
        "healthy": 1, "suspect": 1, "degraded": 2, "lost": 2, "removed": 2,
    }  # fmt: skip
    assert set(counts) == set(DeviceState)
    assert keys(find_devices(picture)) == [("n1", "GPU-a")]
    assert len(find_devices(picture, available=False)) == 7
    assert len(find_devices(picture, available=None)) == 8
    assert keys(find_devices(picture, available=None, health=["suspect"])) == [("n2", "GPU-a")]


def test_a_state_of_a_later_version_stays_unknown_until_the_node_is_away() -> None:
    strange = gpu("GPU-a", state="levitating")
    view, _ = cluster({"n1": [strange]})
    node = view.node("n1")
    assert node is not None
    assert health_of(node, strange) is DeviceState.UNKNOWN
    view.node_down("n1")
    node = view.node("n1")
    assert node is not None
    assert health_of(node, strange) is DeviceState.SUSPECT


def test_an_answer_does_not_change_with_the_view() -> None:
    view, _ = cluster({"n1": [gpu("GPU-a")]})
    picture = view.snapshot()
    view.node_down("n1")
    assert len(find_devices(picture)) == 1
    assert find_devices(view.snapshot()) == ()
