"""Plans run on simulated devices that sleep by their own model: each token takes what was predicted.

The clock moves by sleeping alone, so that the host's own time is no part of it; ``benchmarks/prediction.py`` does the
same in real time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpurt.errors import CompileFailed, OutOfMemory
from gpurt.placement import Constraints, ConstraintSatisfactionPlacement, ModelSpec, Plan, Workload
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.modelled import ModelledDriver
from gpurt.testing.pipeline import Network, SimulatedCluster
from gpurt.testing.profiles import PROFILES, Profile
from tests.calibration.clocks import FakeClock

pytestmark = pytest.mark.wide

MIB = 1 << 20
WORKLOAD = Workload(context_tokens=2048, batch=2)
WITHIN = 0.10


def slow(key: str, mib: int, gbps: float, tflops: float, link_gbps: float = 1.0, latency_s: float = 0.0005) -> Profile:
    return replace(
        PROFILES["rtx-4090"], key=key, memory_bytes=mib * MIB, memory_bandwidth_gbps=gbps, fp16_tflops=tflops,
        host_link_gbps=link_gbps, latency_s=latency_s, peer_link_gbps=None,
    )  # fmt: skip


FAST, MIDDLE, SLOW = slow("fast", 72, 1.6, 0.05), slow("middle", 96, 0.8, 0.02, 0.4), slow("slow", 256, 0.4, 0.001, 0.2)
CLUSTERS = {
    "one device": ({"a": [slow("large", 1024, 2.0, 0.05)]}, Network(1.0, 0.001)),
    "one node": ({"a": [FAST, FAST]}, Network(1.0, 0.001)),
    "three nodes": ({"a": [FAST, FAST], "b": [MIDDLE], "c": [SLOW]}, Network(0.05, 0.002)),
    "slow network": ({"a": [FAST], "b": [MIDDLE], "c": [SLOW]}, Network(0.002, 0.03)),
}


def model(mib: int, **fields: Any) -> ModelSpec:
    """Arithmetic is what the slow device waits for, and memory what the others do."""
    each = mib * MIB // 16
    known: dict[str, Any] = {
        "kv_bytes_per_token": each // 10 // WORKLOAD.context_tokens, "flops_per_token": 4.0 * each,
        "activation_bytes_per_token": 16384, "embedding_bytes": each // 2, "head_bytes": each // 2,
        "head_flops_per_token": 2.0 * each,
    }  # fmt: skip
    return ModelSpec.uniform("m", layers=16, size_bytes=16 * each, **(known | fields))


def cluster_of(name: str) -> tuple[SimulatedCluster, FakeClock, int]:
    nodes, network = CLUSTERS[name]
    clock = FakeClock()

    async def pause(seconds: float) -> None:
        clock.sleep(seconds)

    total = sum(each.memory_bytes for profiles in nodes.values() for each in profiles) // MIB
    return SimulatedCluster(nodes, network, clock=clock, sleep=clock.sleep, pause=pause), clock, total


@pytest.mark.parametrize("name", CLUSTERS)
async def test_a_token_takes_what_was_predicted(name: str) -> None:
    cluster, _, total = cluster_of(name)
    spec = model(int(total * 0.7))
    async with cluster:
        devices = await cluster.measure_devices()
        topology = await cluster.measure_links(devices)
        plan = ConstraintSatisfactionPlacement().solve_placement(
            spec, devices, topology, Constraints(workload=WORKLOAD)
        )
        measured = await cluster.run(plan, spec, steps=2)
        again = await cluster.run(plan, spec, steps=3)
    assert len(plan.stages) >= (1 if name == "one device" else 2)
    assert not plan.predicted.estimated
    assert measured == pytest.approx(again, rel=1e-6)
    assert abs(plan.predicted.latency_seconds / measured - 1) <= WITHIN
    # Every part of the prediction is a part of the plan's time, and none is what hides another's error.
    assert plan.predicted.memory_seconds > 0
    if name == "slow network":
        assert plan.predicted.link_seconds > 0.05 * measured
    if any("slow" in device for device in plan.devices):
        assert plan.predicted.compute_seconds > 0


async def test_what_is_measured_is_what_the_devices_are() -> None:
    cluster, _, _ = cluster_of("three nodes")
    async with cluster:
        devices = {device.id: device for device in await cluster.measure_devices()}
        topology = await cluster.measure_links(tuple(devices.values()))
    told = {"a": FAST, "b": MIDDLE, "c": SLOW}
    for device in devices.values():
        profile = told[device.node]
        assert device.memory_bandwidth == pytest.approx(profile.memory_bandwidth_gbps * 1e9, rel=0.1)
        assert device.compute_flops == pytest.approx(profile.fp16_tflops * 1e12, rel=0.01)
        assert device.launch_seconds == pytest.approx(2 * profile.latency_s, rel=0.01)
        assert device.estimated == frozenset()
    for link in topology.links:
        near = link.source.split("/")[0] == link.target.split("/")[0]
        # Between nodes: out of the device, over the network, into the other one.
        assert link.latency_seconds >= (0.0005 if near else 0.002 + 2 * 0.0005) * 0.99
        assert link.bandwidth < (1.0e9 if near else 0.05e9)


async def test_a_plan_over_the_memory_fails_as_on_real_devices() -> None:
    cluster, _, total = cluster_of("one node")
    async with cluster:
        devices = await cluster.measure_devices()
        roomy = tuple(each.model_copy(update={"usable_bytes": 2 * each.usable_bytes}) for each in devices)
        spec = model(int(total * 1.5))
        plan: Plan = ConstraintSatisfactionPlacement().solve_placement(spec, roomy)
        with pytest.raises(OutOfMemory):
            await cluster.run(plan, spec, steps=1)


async def test_a_launch_lasts_as_its_longer_half() -> None:
    clock = FakeClock()
    driver = ModelledDriver([SLOW], clock=clock, sleep=clock.sleep)
    async with DriverBackend(driver) as backend:
        import numpy as np

        kernel = await backend.compile("modelled:0", "cost", "layer")
        for nbytes, flops, seconds in ((400_000_000, 0.0, 1.0), (0, 3e9, 3.0), (400_000_000, 3e9, 3.0), (0, 0.0, 0.0)):
            began = clock()
            await backend.launch(kernel, 1, 1, [np.uint64(nbytes), np.float64(flops)])
            assert clock() - began == pytest.approx(seconds + SLOW.latency_s)
        with pytest.raises(CompileFailed):
            await backend.compile("modelled:0", "void f() {}", "f")
