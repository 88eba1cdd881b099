"""C25, C26: one message per discovery, and a master's state that is folded of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from gpurt.discovery.events import diff
from gpurt.integrations.gathered import (
    DeviceGPUStateUpdated,
    GatheredState,
    NodeGatheredInfo,
    StaticNodeInformation,
    fold,
    gathered,
    without,
)
from gpurt.types import DeviceKind, DeviceState
from tests.discovery.records import UUIDS, cpu, device, result
from tests.discovery.test_service import Host

WORKER = """
import asyncio, sys
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.integrations.gathered import gathered
from gpurt.testing.simulated import create_simulated

async def main():
    async with create_simulated("h100x2", seed="n1") as backend:
        async with GPUDiscoveryService(backend, registry_path=sys.argv[1]) as service:
            async for event in gathered(service, "n1"):
                print(event.model_dump_json(), flush=True)
                return

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("devices", "backend", "primary"),
    [
        ([device(0), device(1), cpu()], "cuda", "cuda:0"),
        ([device(0, usable=False), device(1), cpu()], "cuda", "cuda:1"),
        ([cpu()], "cpu", "cpu:0"),
        ([device(0, backend="vulkan", kind=DeviceKind.SOFTWARE), cpu()], "cpu", "cpu:0"),
        ([device(0, usable=False)], None, None),
    ],
)
def test_c26_the_four_fields_and_never_an_unknown_backend(devices: list, backend: str, primary: str) -> None:
    found = result(*devices)
    info = StaticNodeInformation.of(found)
    assert (info.gpu_backend, info.primary_gpu_device_id) == (backend, primary)
    assert info.gpu_devices == tuple(devices)
    assert info.gpu_discovery_timestamp == found.timestamp
    state = fold(GatheredState(), NodeGatheredInfo(node_id="n1", info=info))
    assert state.nodes["n1"] == info
    assert GatheredState.model_validate_json(state.model_dump_json()) == state


async def test_c26_one_message_per_discovery_that_found_something_else(tmp_path: Path) -> None:
    seen = Host(device(0), device(1))
    async with seen.service(tmp_path / "registry.json") as service:
        events = gathered(service, "n1")
        async with asyncio.timeout(10):
            first = await anext(events)
            seen.shows["cuda"] = [device(0), device(1, state=DeviceState.LOST, usable=False)]
            second = await anext(events)
    assert (first.node_id, first.info.gpu_backend, len(first.info.gpu_devices)) == ("n1", "cuda", 3)
    assert [each.state for each in second.info.gpu_devices][:2] == [DeviceState.HEALTHY, DeviceState.LOST]
    assert second.when >= first.when


def test_c25_from_a_workers_process_into_the_masters_state(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "registry.json")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    state = fold(GatheredState(), NodeGatheredInfo.model_validate_json(said))
    assert {node for node, _ in state.devices} == {"n1"}
    assert len(state.devices) == len(json.loads(said)["info"]["gpu_devices"]) >= 2


def test_c25_devices_by_node_and_device_through_every_change() -> None:
    steps = [
        result(device(0), device(1)),
        result(device(0), device(1, state=DeviceState.LOST, usable=False)),
        result(device(0), device(2)),
        result(device(2)),
    ]
    state = GatheredState()
    for node in ("n1", "n2"):
        state = fold(state, NodeGatheredInfo(node_id=node, info=StaticNodeInformation.of(steps[0])))
    for before, after in pairwise(steps):
        for change in diff(before, after):
            event = DeviceGPUStateUpdated.of("n1", change)
            assert event is not None
            state = fold(state, event)
        assert {key for node, key in state.devices if node == "n1"} == {each.stable_id for each in after.devices}
        assert state.nodes["n1"].primary_gpu_device_id == next(each.device_id for each in after.devices if each.usable)
    assert {key for node, key in state.devices if node == "n2"} == {UUIDS[0], UUIDS[1]}
    assert set(without(state, "n1").nodes) == {"n2"}


def test_a_device_of_a_node_that_said_nothing_changes_nothing() -> None:
    state = GatheredState()
    assert fold(state, DeviceGPUStateUpdated(node_id="n1", device=device(0))) is state
    (snapshot,) = diff(None, result(device(0)))
    assert DeviceGPUStateUpdated.of("n1", snapshot) is None
