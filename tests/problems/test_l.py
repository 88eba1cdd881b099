"""Devices that fall ill, are lost and come back. The numbers are those of docs/problems.md."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.view import MasterView
from gpurt.discovery.events import EventType
from gpurt.errors import BackendUnavailable, DeviceLost, ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.telemetry import GPUMonitoringService, backend_reader
from gpurt.testing.faults import Fault
from gpurt.types import DeviceState
from tests.cluster.support import Child, free_port, until
from tests.problems.rig import a_cluster, machine, plugged, rest


async def test_l42_a_driver_that_answers_999_after_a_resume_comes_back(tmp_path: Path) -> None:
    driver = machine("h100x2")
    async with a_cluster(tmp_path) as cluster:
        with plugged(driver):
            worker = await cluster.start("n1", backends=["accel", "cpu"], interval_s=30.0)
            subscription = worker.discovery.subscribe(1000)
            asleep = BackendUnavailable("cuInit: unknown error", reason=ReasonCode.ERROR, code=999)
            driver.inject(Fault("open", raises=asleep))
            for _ in range(2):
                await worker.discovery.discover_all_devices()
            await cluster.until(lambda: cluster.available("n1") == ["cpu:0"])
            before = set(cluster.node("n1").devices)
            driver.clear()
            await worker.discovery.discover_all_devices()
            await cluster.until(lambda: cluster.available("n1") == ["accel:0", "accel:1", "cpu:0"])
            assert set(cluster.node("n1").devices) == before
            told = [event for event in await rest(worker.discovery, subscription) if event.backend == "accel"]
    # Lost from use once and back once, however often nobody could look; never removed, never added.
    assert [event.type for event in told if event.type is not EventType.MEMORY] == [
        EventType.BACKEND_UNAVAILABLE,
        EventType.HEALTH,
        EventType.HEALTH,
        EventType.BACKEND_AVAILABLE,
        EventType.RECOVERED,
        EventType.RECOVERED,
    ]
    assert "unknown error" in (told[0].reason or "")


async def test_l43_a_lost_device_is_known_at_the_next_poll_and_fails_fast() -> None:
    driver = machine("h100x2")
    async with DriverBackend(driver) as backend:
        readers = {each.device_id: backend_reader(backend, each.device_id) for each in backend.devices}
        service = GPUMonitoringService(readers, patience_s=30)
        await service.collector.poll()
        handle = await backend.allocate("accel:1", 4096)
        driver.lose(1)  # from now on every call says so
        polls = 0
        while service.health.verdict("accel:1").state is not DeviceState.LOST:
            await service.collector.poll()
            polls += 1
            assert polls <= 2
        assert service.usable("accel:0")
        calls = len(driver.calls)
        for call in (
            lambda: backend.allocate("accel:1", 4096),
            lambda: backend.copy_to_device(b"x", handle),
            lambda: backend.synchronize("accel:1"),
        ):
            with pytest.raises(DeviceLost):
                await call()
        assert len(driver.calls) == calls  # nobody asked the driver again
        await backend.deallocate(handle)
        assert backend.live_handles == 0
        assert [each.state for each in backend.devices] == [DeviceState.HEALTHY, DeviceState.LOST]


async def test_l43_the_master_hears_of_it_between_two_look_ups(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        worker = await cluster.start("n1", simulate="h100x2", interval_s=1000.0, telemetry_s=0.02)
        backend = worker.backend
        assert isinstance(backend, DriverBackend)
        changes = cluster.view.changes()
        backend.driver.remove(1)  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            async for change in changes:
                if change.kind is ChangeKind.DEVICE_HEALTH:
                    break
        assert change.device is not None
        assert cluster.node("n1").devices[change.device].device.state is DeviceState.LOST
        assert cluster.available("n1") == ["simulated:0"]


async def test_l44_seven_of_eight_stay_allocatable(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        worker = await cluster.start("n1", simulate="h100x8")
        backend = worker.backend
        assert isinstance(backend, DriverBackend)
        backend.driver.remove(3)  # type: ignore[attr-defined]
        others = [f"simulated:{n}" for n in range(8) if n != 3]
        await cluster.until(lambda: cluster.available("n1") == others)
        (lost,) = (each for each in cluster.node("n1").gpu_devices if not each.usable)
        assert (lost.device_id, lost.state) == ("simulated:3", DeviceState.LOST)
        handles = await asyncio.gather(*(backend.allocate(each, 1 << 20) for each in others))
        await asyncio.gather(*(backend.copy_to_device(b"whole", each) for each in handles))
        assert [await backend.copy_from_device(each, 0, 5) for each in handles] == [b"whole"] * 7
        for handle in handles:
            await backend.deallocate(handle)
        with pytest.raises(DeviceLost):
            await backend.allocate("simulated:3", 1 << 20)


async def test_l45_a_device_that_vanishes_without_a_word_is_removed(tmp_path: Path) -> None:
    driver = machine("h100x3")
    async with a_cluster(tmp_path) as cluster:
        with plugged(driver):
            await cluster.start("n1", backends=["accel"])
            changes = cluster.view.changes()
            assert len(cluster.available("n1")) == 3
            # No Xid, no error: the next enumeration simply counts one less.
            driver.inner.remove("sim:0:h100:1")  # type: ignore[attr-defined]
            await cluster.until(lambda: len(cluster.node("n1").devices) == 2)
            changes.close()
            removed = [change.device async for change in changes if change.kind is ChangeKind.DEVICE_REMOVED]
            assert removed == ["sim:0:h100:1"]
            assert set(cluster.node("n1").devices) == {"sim:0:h100:0", "sim:0:h100:2"}
            assert len(cluster.available("n1")) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by POSIX signals")
async def test_l46_a_worker_that_aborts_is_out_of_the_placement_at_once(tmp_path: Path) -> None:
    """Two workers in processes of their own; the runtime of one of them calls abort()."""
    endpoint, view = f"tcp/127.0.0.1:{free_port()}", MasterView()
    listening = asyncio.Event()
    config = MasterConfig("test", endpoint)
    master = asyncio.create_task(run_master(config, view, on_ready=lambda _: listening.set()))
    await listening.wait()
    children = [Child("worker", endpoint, node, tmp_path / f"{node}.json", "h100x2") for node in ("n1", "n2")]
    try:
        for child in children:
            await child.ready()

        def nodes() -> set[str]:
            return {node for node, _ in view.snapshot().available_devices}

        await until(lambda: len(view.snapshot().available_devices) == 4)
        changes = view.changes()
        os.kill(children[0].process.pid, signal.SIGABRT)
        async for change in changes:
            if change.kind is ChangeKind.NODE_SUSPECT:
                break
        # Already with the first word of it, so before anything can be placed: nothing of the dead worker is chosen.
        assert nodes() == {"n2"}
        assert len(view.snapshot().available_devices) == 2
        await until(lambda: (record := view.node("n1")) is not None and record.state == "lost")
        assert nodes() == {"n2"}
    finally:
        for child in children:
            child.kill()
        master.cancel()
        await asyncio.wait({master})
