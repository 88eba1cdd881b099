"""What Xids do to a device, over the life of a service and of its registry. Names carry the case."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.health import Evidence
from gpurt.types import DeviceState, GPUDevice
from tests.cases.rig import Said, uuid, working


async def look(service: GPUDiscoveryService) -> GPUDevice:
    return next(d for d in (await service.discover_all_devices()).devices if d.stable_id == uuid(1))


async def test_nvi_10_xids_condemn_by_their_kind_and_are_remembered_and_revised(tmp_path: Path) -> None:
    now = 1000.0
    said = Said(cuda=await asyncio.to_thread(working, tmp_path, 0, 1))
    path = tmp_path / "r.json"

    def service() -> GPUDiscoveryService:
        return said.service(path, clock=lambda: now, root=tmp_path)

    async with service() as first:
        subscription = first.subscribe(1000)
        assert (await look(first)).usable
        first.health.changed(first.health.monitor.xid(uuid(1), 31))  # an application's mistake
        assert (await look(first)).usable
        transition = first.health.monitor.xid(uuid(1), 79)
        assert transition is not None
        first.take_health(transition)
        bad = await look(first)
        assert (bad.state, bad.usable) == (DeviceState.LOST, False)
        assert "xid_79" in (bad.state_reason or "")
        await first.shutdown()
        events: list[DeviceEvent] = [event async for event in subscription]
        kinds = [event.type for event in events if event.type not in (EventType.SNAPSHOT, EventType.MEMORY)]
        assert kinds == [EventType.LOST]
    async with service() as second:
        assert (await look(second)).state is DeviceState.LOST  # a new process makes no card better
        for _ in range(20):
            now += 600.0
            second.health.changed(second.health.monitor.observe(uuid(1), Evidence()))
        assert (await look(second)).usable  # and clean samples for long enough do
    async with service() as third:
        assert (await look(third)).usable


async def test_nvi_10_what_condemns_is_configuration(tmp_path: Path) -> None:
    said = Said(cuda=await asyncio.to_thread(working, tmp_path, 0, 1))
    environ = {"GPURT_HEALTH_XIDS": "79=application,31=lost"}
    async with said.service(tmp_path / "r.json", environ, root=tmp_path) as service:
        await look(service)
        assert service.health.monitor.xid(uuid(1), 79) is None
        transition = service.health.monitor.xid(uuid(1), 31)
        assert transition is not None
        service.take_health(transition)
        assert (await look(service)).state is DeviceState.LOST
