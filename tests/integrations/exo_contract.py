"""The adapter with exo's own types, on a checkout with the patch of all devices. Run by ``test_exo.py`` in exo's
interpreter; not collected by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from exo.routing.topics import LOCAL_EVENTS
from exo.shared.apply import apply
from exo.shared.types.common import NodeId, SessionId, SystemId
from exo.shared.types.events import IndexedEvent, LocalForwarderEvent, NodeGatheredInfo, NodeTimedOut
from exo.shared.types.profiling import MemoryUsage
from exo.shared.types.state import State
from exo.utils.channels import channel
from exo.utils.disk_event_log import DiskEventLog
from exo.utils.info_gatherer.info_gatherer import (
    GatheredInfo,
    InfoGatherer,
    MiscData,
    NodeBackends,
)

from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.wire import ProbeOutcome
from gpurt.integrations.exo import (
    NodeDevice,
    NodeDevices,
    forward_backends,
    forward_devices,
    forward_memory,
    placement_memory,
)
from gpurt.types import DeviceIdentity, GPUDevice

pytestmark = pytest.mark.anyio
GIB = 1 << 30
NODE = NodeId("node")
HOST = MemoryUsage.from_bytes(ram_total=64 * GIB, ram_available=50 * GIB, swap_total=0, swap_available=0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def card(index: int = 0, **fields: Any) -> GPUDevice:
    values: dict[str, Any] = {
        "device_id": f"cuda:{index}",
        "name": "NVIDIA GeForce RTX 3060",
        "vendor": "nvidia",
        "backend": "cuda",
        "compute_capability": "8.6",
        "memory_bytes": 12 * GIB,
        "memory_available": 11 * GIB + (512 << 20),
        "memory_usable_bytes": 11 * GIB,
        "compute_units": 28,
        "tensor_core_count": 112,
        "max_threads_per_block": 1024,
        "clock_rate_mhz": 1777,
        "bandwidth_gbps": 360.0,
        "support_level": "full",
        "driver_version": "590.48.01",
        "backend_name": "cupy",
        "identity": DeviceIdentity(key=f"GPU-{index}", uuid=f"GPU-{index}"),
    }
    return GPUDevice(**{**values, **fields})


SAID = NodeDevices(devices=[NodeDevice.of(card())])


def told(*infos: Any) -> State:
    state = State()
    for index, info in enumerate(infos):
        event = info if isinstance(info, NodeTimedOut) else NodeGatheredInfo(node_id=NODE, when="2026-01-01", info=info)
        state = apply(state, IndexedEvent(idx=index, event=event))
    return state


def test_the_event_survives_the_wire() -> None:
    event = NodeGatheredInfo(node_id=NODE, when="2026-01-01", info=SAID)
    session = SessionId(master_node_id=NODE, election_clock=0)
    sent = LocalForwarderEvent(origin_idx=0, origin=SystemId(), session=session, event=event)
    raw = LOCAL_EVENTS.serialize(sent)
    assert LOCAL_EVENTS.deserialize(raw) == sent
    assert len(SAID.model_dump_json()) < 1024


def test_the_event_survives_the_log(tmp_path: Path) -> None:
    event = NodeGatheredInfo(node_id=NODE, when="2026-01-01", info=SAID)
    log = DiskEventLog(tmp_path)
    log.append(event)
    assert list(log.read_all()) == [event]
    log.close()


def test_the_state_survives_json() -> None:
    state = told(HOST, SAID)
    again = State.model_validate_json(state.model_dump_json())
    assert again.model_dump_json() == state.model_dump_json()
    assert again.node_devices[NODE][0].memory_usable_bytes == 11 * GIB


def test_fields_of_a_newer_gpurt_are_ignored() -> None:
    text = SAID.model_dump_json().replace('"deviceId"', '"colour":"green","deviceId"')
    assert NodeDevices.model_validate_json(text) == SAID


def test_the_cards_memory_is_what_a_shard_gets() -> None:
    state = told(HOST, SAID)
    assert state.placement_memory[NODE].ram_available.in_bytes == 11 * GIB
    assert state.node_memory[NODE] == HOST
    lost = NodeDevices(devices=[NodeDevice.of(card(state="lost", usable=False))])
    assert told(HOST, lost).placement_memory[NODE] == HOST
    assert placement_memory(HOST, ()) == HOST


def test_d10_nothing_of_a_node_that_is_gone_stays() -> None:
    """Also C57: a node that comes back under a new id brings no ghost of the old one."""
    state = told(HOST, SAID, NodeBackends(backends=[]), MiscData(friendly_name="it"), NodeTimedOut(node_id=NODE))
    for name in State.model_fields:
        if name.startswith("node_"):
            assert NODE not in getattr(state, name), name


class Host:
    """In place of probe processes."""

    def __init__(self) -> None:
        self.shows: tuple[GPUDevice, ...] = (card(0), card(1))

    async def probe(self, name: str, **_: Any) -> ProbeOutcome:
        await anyio.sleep(0)
        return ProbeOutcome(verified=self.shows)

    def service(self, path: Path) -> GPUDiscoveryService:
        return GPUDiscoveryService(
            registry_path=path / "registry.json", backends=["cuda"], environ={}, interval=0.02, prober=self
        )


async def test_forwarded_through_exos_channel(tmp_path: Path) -> None:
    host = Host()
    sender, receiver = channel[GatheredInfo]()
    async with host.service(tmp_path) as service, anyio.create_task_group() as group:
        with anyio.fail_after(10):
            for start in (forward_devices, forward_backends, forward_memory):

                async def forward(start: Any = start) -> None:
                    await start(sender, service=service)

                group.start_soon(forward)
            first = [await receiver.receive() for _ in range(3)]
            kinds = {type(each) for each in first}
            assert kinds == {NodeDevices, NodeBackends, MemoryUsage}
            await anyio.sleep(0.2)
            assert receiver.collect() == []
            host.shows = (card(0),)
            while not isinstance(info := await receiver.receive(), NodeDevices):
                pass
            assert [each.device_id for each in info.devices] == ["cuda:0"]
        began = time.monotonic()
        group.cancel_scope.cancel()
    assert time.monotonic() - began < 0.5


async def test_a_gatherer_made_anew_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exo's own, as at every election: it tells the same devices each time, from one service."""
    from gpurt.integrations.exo import sharing

    host = Host()
    made: list[GPUDiscoveryService] = []

    def make() -> GPUDiscoveryService:
        made.append(host.service(tmp_path))
        return made[-1]

    monkeypatch.setattr(sharing, "GPUDiscoveryService", make)
    monkeypatch.setattr("gpurt.integrations.exo.states.shared", sharing.SharedDiscovery())
    for _ in range(5):
        sender, receiver = channel[GatheredInfo]()
        gatherer = InfoGatherer(sender)
        async with anyio.create_task_group() as group:
            group.start_soon(gatherer.run)
            with anyio.fail_after(10):
                while not isinstance(info := await receiver.receive(), NodeDevices):
                    pass
            group.cancel_scope.cancel()
        assert [each.device_id for each in info.devices] == ["cuda:0", "cuda:1"]
    assert len(made) == 1
