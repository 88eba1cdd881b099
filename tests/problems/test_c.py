"""Reported problems of membership in a cluster (57 to 63), each as it was reported."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.inprocess import InProcessEngine
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.records import NodeState
from gpurt.cluster.view import MasterView
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.wire import Failure
from gpurt.errors import BackendUnavailable, DeviceLost, ReasonCode
from gpurt.memory import transfer
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.weights import load_safetensors
from gpurt.weights.peer import copy_shard_from_peer
from tests.cluster.support import E1, E2, FakeClock, device, snapshot
from tests.discovery.records import device as card
from tests.problems.rig import Cluster, Host, a_cluster
from tests.weights.support import eventually, tensor, write


async def test_c57_nothing_can_be_placed_on_the_old_name_of_a_node_that_comes_back(tmp_path: Path) -> None:
    """Once with a goodbye and once without: the same machine and registry, another name every time."""
    registry = tmp_path / "machine.json"
    async with a_cluster(tmp_path) as cluster:
        for number in range(4):
            await cluster.start(f"run{number}", simulate="h100x2", registry_path=registry)
            if number % 2:
                await cluster.cut_off(f"run{number}")
                await cluster.until(lambda name=f"run{number}": cluster.node(name).state is NodeState.LOST)
            else:
                await cluster.stop(f"run{number}")
                await cluster.until(lambda name=f"run{number}": cluster.node(name).state is NodeState.LEFT)
        await cluster.start("run4", simulate="h100x2", registry_path=registry)
        assert {node for node, _ in cluster.view.snapshot().available_devices} == {"run4"}
        assert len(cluster.available("run4")) == 2


def test_c57_a_node_that_comes_back_with_other_devices_has_those_alone() -> None:
    view = MasterView()
    view.node_up("n1")
    view.apply_snapshot(snapshot(device("GPU-old"), device("GPU-kept", 1)), sole=True)
    view.node_down("n1")
    view.node_up("n1")
    view.apply_snapshot(snapshot(device("GPU-kept"), epoch=E2), sole=True)
    assert list(view.snapshot().devices) == [("n1", "GPU-kept")]


async def test_c58_an_idle_node_tells_nothing_however_often_it_looks(tmp_path: Path) -> None:
    """So there is nothing to replay: who joins late gets one snapshot of each node."""
    async with a_cluster(tmp_path) as cluster:
        worker = await cluster.start("n1", simulate="h100x2", interval_s=0.002, telemetry_s=None)
        told = worker.publisher.position
        for _ in range(50):
            await worker.discovery.discover_all_devices()
        assert worker.publisher.position == told
        late = await another_master(cluster)
        assert late.view.node("n1") is not None
        assert late.view.snapshot().available_devices == cluster.view.snapshot().available_devices
        assert cluster.node("n1").seq == told.seq <= 3
        await late.stop()


class Late:
    """A master that comes when everything has happened."""

    def __init__(self, cluster: Cluster) -> None:
        self.view = MasterView()
        self.ready = asyncio.Event()
        engine = InProcessEngine(cluster.bus)
        work = run_master(MasterConfig("test"), self.view, engine=engine, on_ready=lambda _: self.ready.set())
        self.task = asyncio.create_task(work)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


async def another_master(cluster: Cluster) -> Late:
    late = Late(cluster)
    await late.ready.wait()
    await cluster.until(lambda: (node := late.view.node("n1")) is not None and node.devices)
    return late


async def said(view: MasterView, *steps: object) -> list[ChangeKind]:
    changes = view.changes()
    for step in steps:
        assert callable(step)
        step()
    changes.close()
    return [change.kind async for change in changes]


async def test_c59_who_was_silent_and_is_back_was_never_removed() -> None:
    clock = FakeClock()
    view = MasterView(clock=clock, grace_s=2.0)
    view.node_up("n1")
    view.apply_snapshot(snapshot(device()), sole=True)

    def silent() -> None:
        view.node_down("n1")
        assert view.snapshot().available_devices == {}
        clock.now += 1.9
        view.tick()

    def back() -> None:
        view.node_up("n1")
        view.node_answered("n1", str(E1))
        clock.now += 60
        view.tick()

    kinds = await said(view, *[silent, back] * 3)
    assert kinds.count(ChangeKind.NODE_SUSPECT) == kinds.count(ChangeKind.NODE_BACK) == 3
    assert set(kinds) <= {ChangeKind.NODE_SUSPECT, ChangeKind.NODE_BACK, ChangeKind.DEVICE_HEALTH}
    assert list(view.snapshot().available_devices) == [("n1", "GPU-a")]


async def test_c60_a_node_that_is_gone_while_it_starts_up_is_lost_after_the_grace() -> None:
    """What it said last, that it was still looking, keeps nobody waiting for it."""
    clock = FakeClock()
    view = MasterView(clock=clock, grace_s=2.0)
    view.node_up("n1")
    view.apply_snapshot(snapshot(device(usable=False), discovery_status="preview"), sole=True)

    def gone() -> None:
        view.node_down("n1")
        clock.now += 2.1
        view.tick()

    assert ChangeKind.NODE_LOST in await said(view, gone)
    record = view.node("n1")
    assert record is not None
    assert (record.state, record.discovery_status) == (NodeState.LOST, "preview")


async def test_c60_a_driver_that_never_opens_is_given_up_at_its_deadline() -> None:
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100")))
    gate = threading.Event()
    driver.inject(Fault("open", gate=gate))
    backend = DriverBackend(driver, hang_after=0.1)
    try:
        async with asyncio.timeout(5):
            with pytest.raises(BackendUnavailable) as caught:
                await backend.initialize()
        assert caught.value.reason is ReasonCode.TIMEOUT
    finally:
        gate.set()
        await backend.shutdown()


async def test_c61_what_one_backend_does_costs_another_none_of_its_attempts(tmp_path: Path) -> None:
    crash, absent = Failure(ReasonCode.CRASHED, "signal 11"), Failure(ReasonCode.NO_DRIVER, "not loaded")
    host = Host(cuda=crash, opencl=absent)
    registry = tmp_path / "registry.json"
    async with host.service(registry) as service:
        await service.discover_all_devices()
        host.shows["opencl"] = [card(0, backend="opencl", vendor="amd")]
        for _ in range(4):
            await service.discover_all_devices()
        host.shows["opencl"] = absent
        await service.discover_all_devices()
    document = await asyncio.to_thread(RegistryFile(registry).load)
    assert document is not None
    assert document.attempts["cuda"].failures == 6
    assert document.attempts["opencl"].failures == 1


def test_c62_neither_way_of_evidence_alone_decides() -> None:
    """Who answers while its sign of life is gone is suspect; whose sign of life is back must answer, too."""
    clock = FakeClock()
    view = MasterView(clock=clock, grace_s=2.0)
    view.node_up("n1")
    view.apply_snapshot(snapshot(device()), sole=True)

    def state() -> NodeState:
        record = view.node("n1")
        assert record is not None
        return record.state

    view.node_down("n1")
    view.node_answered("n1", str(E1))
    assert state() is NodeState.SUSPECT
    clock.now += 1
    view.tick()
    assert state() is NodeState.SUSPECT
    view.node_up("n1")
    assert state() is NodeState.SUSPECT
    view.node_answered("n1", str(E1))
    assert state() is NodeState.HEALTHY
    clock.now += 60
    view.tick()
    assert state() is NodeState.HEALTHY


async def test_c63_a_peer_that_dies_in_the_middle_of_a_copy_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1 << 15)
    content = {f"layer{number}": tensor("F32", 256, 256, seed=number) for number in range(4)}
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100")))
    ours = SimulatedDriver(parse_simulation("h100"))
    async with DriverBackend(driver) as peer, DriverBackend(ours) as local:
        weights = await load_safetensors(write(tmp_path / "w.safetensors", content), peer, "simulated:0")
        driver.inject(Fault("read", nth=3, lose=True))
        with pytest.raises(DeviceLost):
            await copy_shard_from_peer(weights, peer, local, "simulated:0")
        # The survivor goes on, with nothing left of the attempt.
        await eventually(lambda: ours.live_allocations == local.live_handles == 0)
        handle = await local.allocate("simulated:0", 4096)
        await local.copy_to_device(b"alive", handle)
        assert await local.copy_from_device(handle, 0, 5) == b"alive"
        await local.deallocate(handle)
        await weights.close()
