"""What exo's nodes get of gpurt: devices, memory, backends and environments, told when they change."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from gpurt.discovery.registry import RegistryDocument, RegistryFile
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import DeviceNotFound, ReasonCode
from gpurt.integrations.exo import (
    backends,
    device_states,
    env_for,
    forward_backends,
    forward_devices,
    forward_memory,
    placement_memory,
)
from gpurt.integrations.exo import sharing as sharing_module
from gpurt.integrations.exo.figures import DeviceFigures, changed
from gpurt.integrations.exo.sharing import SharedDiscovery
from gpurt.types import BackendReport, DeviceKind, DeviceState, GPUDevice
from tests.discovery.records import GIB, UUIDS, cpu, device
from tests.discovery.test_service import TIMED_OUT, Host
from tests.integrations.exo_stand_in import MemoryUsage, exo

__all__ = ["exo"]

CARD = {"memory_bytes": 12 * GIB, "memory_usable_bytes": 11 * GIB}
NEEDS_CUPY = {"usable": False, "state_reason": f"{ReasonCode.NO_LIBRARY}: CuPy is not installed"}


def of(*devices: GPUDevice) -> list[DeviceFigures]:
    return [DeviceFigures.of(each) for each in devices]


def host() -> MemoryUsage:
    return MemoryUsage.from_psutil(override_memory=None)


def test_gpurt_and_the_adapter_need_no_exo() -> None:
    code = (
        "import sys, gpurt.integrations.exo as adapter;"
        "adapter.forward_devices, adapter.placement_memory, adapter.env_for, adapter.backends;"
        "assert not any(name.split('.')[0] == 'exo' for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with pytest.raises(ImportError, match="exo"):
        from gpurt.integrations.exo import NodeDevices  # noqa: F401


class TestFigures:
    def test_all_are_plain_json_and_small(self) -> None:
        (figures,) = of(device(0, **CARD, state_reason="x" * 5000, state=DeviceState.DEGRADED))
        text = json.dumps({name: getattr(figures, name) for name in DeviceFigures.__slots__})
        assert len(text) < 1024

    @pytest.mark.parametrize(
        ("fields", "healthy"),
        [
            ({}, True),
            (NEEDS_CUPY, True),
            ({"usable": False, "state_reason": "no_permission: /dev/nvidia0"}, False),
            ({"state": DeviceState.LOST, "usable": False}, False),
            ({"state": DeviceState.DEGRADED}, False),
            ({**NEEDS_CUPY, "state": DeviceState.DEGRADED}, False),
            ({"simulated": True}, False),
            ({"kind": DeviceKind.SOFTWARE}, False),
        ],
    )
    def test_what_exos_engines_can_compute_on(self, fields: dict[str, Any], healthy: bool) -> None:
        (figures,) = of(device(0, **fields))
        assert figures.healthy is healthy
        assert (figures.reason is None) is healthy

    def test_small_changes_of_memory_are_no_news(self) -> None:
        before = of(device(0, memory_usable_bytes=40 * GIB))
        assert changed(before, None)
        assert not changed(before, before)
        assert not changed([replace(before[0], memory_usable_bytes=40 * GIB - (500 << 20))], before)
        assert changed([replace(before[0], memory_usable_bytes=39 * GIB)], before)
        assert changed([replace(before[0], memory_usable_bytes=None)], before)
        assert changed([replace(before[0], healthy=False)], before)
        assert changed([], before)
        assert changed([*before, *of(device(1))], before)


class TestMemory:
    def test_a_cards_memory_replaces_the_hosts(self) -> None:
        memory = placement_memory(host(), of(cpu(), device(0, **CARD)))
        assert (memory.ram_total.in_bytes, memory.ram_available.in_bytes) == (12 * GIB, 11 * GIB)

    @pytest.mark.parametrize(
        "fields",
        [
            {"unified_memory": True},
            {"state": DeviceState.LOST, "usable": False},
            {"memory_usable_bytes": None},
            {"backend": "rocm"},
        ],
    )
    def test_else_the_hosts_stays(self, fields: dict[str, Any]) -> None:
        assert placement_memory(host(), of(cpu(), device(0, **{**CARD, **fields}))) == host()

    def test_of_two_cards_the_one_that_a_runner_computes_on(self) -> None:
        cards = of(device(0, **CARD), device(1, memory_bytes=24 * GIB, memory_usable_bytes=20 * GIB))
        assert placement_memory(host(), cards).ram_available.in_bytes == 20 * GIB

    def test_other_backends_where_there_is_an_engine_for_them(self) -> None:
        card = of(device(0, **CARD, backend="rocm"))
        memory = placement_memory(host(), card, backends=frozenset({"cuda", "rocm"}))
        assert memory.ram_available.in_bytes == 11 * GIB


class TestBackends:
    @pytest.mark.parametrize(
        ("devices", "names"),
        [
            ([], {"MlxCpu"}),
            ([cpu()], {"MlxCpu"}),
            ([cpu(), device(0)], {"MlxCpu", "MlxCuda", "Vllm"}),
            ([device(0, **NEEDS_CUPY)], {"MlxCpu", "MlxCuda", "Vllm"}),
            ([device(0, backend="vulkan", backends=("vulkan", "cuda"))], {"MlxCpu", "MlxCuda", "Vllm"}),
            ([device(0, backend="metal", vendor="apple")], {"MlxCpu", "MlxMetal"}),
            ([device(0, backend="rocm")], {"MlxCpu"}),
            ([device(0, state=DeviceState.LOST, usable=False)], {"MlxCpu"}),
        ],
    )
    def test_by_what_is_well(self, devices: list[GPUDevice], names: set[str]) -> None:
        assert backends(devices) == names


class TestEnvironment:
    def test_only_what_changes(self) -> None:
        cards = [device(0), device(1)]
        assert env_for(["cuda:1"], cards, environ={"HOME": "/"}) == {"CUDA_VISIBLE_DEVICES": UUIDS[1]}
        assert env_for([], cards, environ={}) == {"CUDA_VISIBLE_DEVICES": "-1"}

    def test_devices_of_the_registry(self, tmp_path: Path) -> None:
        registry = tmp_path / "registry.json"
        with pytest.raises(DeviceNotFound, match="knows no devices"):
            env_for(["cuda:0"], environ={}, registry_path=registry)
        report = BackendReport(name="cuda", status="ok")
        RegistryFile(registry).save(RegistryDocument(devices=(device(0), device(1)), reports=(report,)))
        after = env_for([UUIDS[0]], environ={}, registry_path=registry)
        assert after == {"CUDA_VISIBLE_DEVICES": UUIDS[0]}


class Sent:
    """A sender that keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._more = asyncio.Event()

    async def send(self, item: Any) -> None:
        self.items.append(item)
        self._more.set()

    async def until(self, count: int) -> list[Any]:
        async with asyncio.timeout(5):
            while len(self.items) < count:
                self._more.clear()
                await self._more.wait()
        return self.items


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def looked(seen: Host, times: int = 2) -> None:
    """So many look-ups have begun from now on."""
    before = len(seen.probes)
    await until(lambda: len(seen.probes) >= before + 2 * times)


async def cancelled_within(task: asyncio.Task[Any], seconds: float) -> None:
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


@pytest.mark.usefixtures("exo")
class TestForwarding:
    async def test_devices_when_they_change_and_not_else(self, path: Path) -> None:
        seen, sent = Host(device(0), device(1)), Sent()
        async with seen.service(path) as service:
            task = asyncio.create_task(forward_devices(sent, service=service))
            await sent.until(1)
            await looked(seen)
            assert len(sent.items) == 1
            seen.shows["cuda"] = [device(0), device(1, state=DeviceState.LOST, usable=False)]
            await sent.until(2)
            seen.shows["cuda"] = [device(0)]
            await sent.until(3)
            await cancelled_within(task, 0.5)
        told = [[(each.device_id, each.healthy) for each in item.devices] for item in sent.items]
        assert told[0] == [("cuda:0", True), ("cuda:1", True), ("toy:0", True)]
        assert told[1] == [("cuda:0", True), ("cuda:1", False), ("toy:0", True)]
        assert told[2] == [("cuda:0", True), ("toy:0", True)]

    async def test_devices_survive_exos_json_and_newer_versions(self, path: Path) -> None:
        from gpurt.integrations.exo import NodeDevice, NodeDevices

        said = NodeDevices(devices=[NodeDevice.of(device(0, **CARD))])
        assert NodeDevices.model_validate_json(said.model_dump_json(by_alias=True)) == said
        newer = json.loads(said.model_dump_json(by_alias=True))
        newer["from"] = newer["devices"][0]["colour"] = "the future"
        newer["devices"][0]["kind"] = "qpu"
        (read,) = NodeDevices.model_validate_json(json.dumps(newer)).devices
        assert (read.kind, read.memory_usable_bytes) == ("qpu", 11 * GIB)
        assert len(said.model_dump_json(by_alias=True)) < 1024

    async def test_what_the_registry_remembers_is_not_told(self, path: Path) -> None:
        async with Host(device(0), device(1)).service(path) as service:
            await service.discover_all_devices()
        seen, sent = Host(device(0)), Sent()
        seen.gate = asyncio.Event()
        async with seen.service(path) as service:
            task = asyncio.create_task(forward_devices(sent, service=service))
            await until(lambda: seen.running > 0)
            assert sent.items == []
            seen.gate.set()
            await sent.until(1)
            assert [each.device_id for each in sent.items[0].devices] == ["cuda:0", "toy:0"]
            await cancelled_within(task, 0.5)

    async def test_memory_of_the_card_with_a_sign_of_life(self, path: Path) -> None:
        seen, sent = Host(device(0, memory_bytes=12 * GIB, memory_available=12 * GIB)), Sent()
        async with seen.service(path) as service:
            task = asyncio.create_task(forward_memory(sent, service=service, keep_alive=0.1))
            first, second = (await sent.until(2))[:2]
            assert first == second
            assert first.ram_total.in_bytes == 12 * GIB
            assert first.ram_available.in_bytes == 12 * GIB - (512 << 20)
            seen.shows["cuda"] = TIMED_OUT
            await until(lambda: sent.items[-1] == host())
            await cancelled_within(task, 0.5)

    async def test_memory_that_the_user_says_is_believed(self, path: Path) -> None:
        sent = Sent()
        async with Host(device(0, **CARD)).service(path) as service:
            task = asyncio.create_task(forward_memory(sent, service=service, override_bytes=GIB))
            (first, *_) = await sent.until(1)
            assert first.ram_available.in_bytes == GIB
            await cancelled_within(task, 0.5)

    async def test_backends_follow_the_devices(self, path: Path) -> None:
        seen, sent = Host(), Sent()
        async with seen.service(path) as service:
            task = asyncio.create_task(forward_backends(sent, service=service))
            await sent.until(1)
            seen.shows["cuda"] = [device(0)]
            service.look_soon()
            await sent.until(2)
            await cancelled_within(task, 0.5)
        told = [sorted(name.value for name in item.backends) for item in sent.items]
        assert told == [["MlxCpu"], ["MlxCpu", "MlxCuda", "Vllm"]]

    async def test_a_wrong_variable_ends_nobody(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        service = Host(device(0)).service(path, environ={"GPURT_MEMORY_LIMIT": "much"})
        async with service:
            task = asyncio.create_task(forward_devices(Sent(), service=service))
            await until(lambda: "GPURT_MEMORY_LIMIT" in caplog.text)
            assert not task.done()
            await cancelled_within(task, 0.5)

    async def test_cancelled_by_a_scope_of_anyio_while_a_driver_hangs(self, path: Path) -> None:
        seen = Host(device(0))
        seen.gate = asyncio.Event()
        async with seen.service(path) as service:
            began = 0.0
            async with anyio.create_task_group() as group:
                group.start_soon(forward_devices, Sent(), name=None)
                group.cancel_scope.cancel()
            async with anyio.create_task_group() as group:

                async def forward() -> None:
                    await forward_devices(Sent(), service=service)

                group.start_soon(forward)
                await until(lambda: seen.running > 0)
                began = time.monotonic()
                group.cancel_scope.cancel()
            assert time.monotonic() - began < 0.5


class TestSharing:
    @pytest.fixture
    def made(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SharedDiscovery, Host, list[Any]]:
        seen = Host(device(0))
        services: list[GPUDiscoveryService] = []

        def make() -> GPUDiscoveryService:
            services.append(seen.service(path, interval=10.0))
            return services[-1]

        monkeypatch.setattr(sharing_module, "GPUDiscoveryService", make)
        shared = SharedDiscovery()
        monkeypatch.setattr("gpurt.integrations.exo.states.shared", shared)
        return shared, seen, services

    async def test_entered_and_left_many_times(self, made: tuple[SharedDiscovery, Host, list[Any]]) -> None:
        """An election makes exo's worker anew: what was found is there at once, and nothing is left behind."""
        _, seen, services = made
        told: list[tuple[GPUDevice, ...]] = []
        for _ in range(8):
            states = device_states()
            told.append(await anext(states))
            await states.aclose()
        assert [device.device_id for device in told[0]] == ["cuda:0", "toy:0"]
        assert told == told[:1] * 8
        assert len(seen.probes) == 2
        assert len(services) == 1
        await asyncio.sleep(0.05)
        assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    async def test_the_last_one_shuts_it_down(self, made: tuple[SharedDiscovery, Host, list[Any]]) -> None:
        shared, _, _ = made
        one, other = await shared.acquire(), await shared.acquire()
        assert one is other
        shared.release(other)
        assert await one.discover_all_devices()
        subscription = one.subscribe()
        shared.release(one)
        async with asyncio.timeout(5):
            assert [event async for event in subscription]

    def test_one_loop_after_another(self, made: tuple[SharedDiscovery, Host, list[Any]]) -> None:
        async def once() -> tuple[GPUDevice, ...]:
            states = device_states()
            try:
                return await anext(states)
            finally:
                await states.aclose()

        assert asyncio.run(once()) == asyncio.run(once())
        assert len(made[2]) == 1

    async def test_two_loops_at_once(self, made: tuple[SharedDiscovery, Host, list[Any]]) -> None:
        shared, _, services = made

        async def other() -> None:
            service = await shared.acquire()
            assert service is not services[0]
            shared.release(service)

        service = await shared.acquire()
        await asyncio.to_thread(asyncio.run, other())
        assert len(services) == 2
        shared.release(service)
