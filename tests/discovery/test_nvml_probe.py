"""Whole probes: the real child, the real nvidia-ml-py, a stand-in for NVIDIA's library."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpurt.discovery.events import EventType
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import ReasonCode
from gpurt.types import DeviceState, GPUDevice
from tests.support.nvml_stub import H100_TOTAL, PCI_A, UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]


@pytest.fixture
def services(nvml_stub: NvmlStub, tmp_path: Path) -> Callable[..., GPUDiscoveryService]:
    def make(scenario: str = "ok2", *, file: Path | None = None, **variables: str) -> GPUDiscoveryService:
        environ = nvml_stub.env(scenario, file=file) | variables
        return GPUDiscoveryService(
            registry_path=tmp_path / "registry.json",
            backends=["cuda", "cpu"],
            probe_timeout=10.0 if "hang" not in scenario else 1.0,
            interval=0.05,
            environ=environ,
        )

    return make


async def test_cards_are_told_while_their_driver_is_still_loading(services: Callable[..., GPUDiscoveryService]) -> None:
    """As on the first discovery of a host: the library's import and the first contexts take seconds."""
    order: list[str] = []
    service = services()

    def take(preview: DiscoveryResult) -> None:
        order.append(preview.discovery_status)
        first, second = cards(preview)
        assert [first.stable_id, second.stable_id] == [UUID_A, UUID_B]
        assert first.identity is not None
        assert first.identity.pci_address == PCI_A
        assert first.memory_bytes == H100_TOTAL
        assert not first.usable

    await service.discover_all_devices(on_preview=take)
    order.append("answer")
    assert order == ["preview", "answer"]


def probes_alive() -> list[int]:
    def runs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process.pid for process in psutil.Process().children(recursive=True) if runs(process)]


def cards(result: DiscoveryResult) -> list[GPUDevice]:
    return [device for device in result.devices if device.backend == "cuda"]


async def test_cards_are_listed_with_identity_and_memory_although_cupy_is_missing(
    services: Callable[..., GPUDiscoveryService],
) -> None:
    result = await services().discover_all_devices()
    first, second = cards(result)
    assert [first.stable_id, second.stable_id] == [UUID_A, UUID_B]
    assert first.identity is not None
    assert first.identity.pci_address == PCI_A
    assert first.memory_bytes == H100_TOTAL
    assert first.compute_capability == "9.0"
    if result.reports[0].status != "ok":
        assert not first.usable
        assert result.reports[0].reason is ReasonCode.NO_LIBRARY
        assert "cupy-cuda12x" in (result.reports[0].hint or "")
        assert result.backend_name == "cpu"


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("init12", ReasonCode.NO_DRIVER),
        ("init9", ReasonCode.NO_DRIVER),
        ("init18", ReasonCode.DRIVER_MISMATCH),
        ("init4", ReasonCode.NO_PERMISSION),
        ("init999", ReasonCode.ERROR),
        ("segv", ReasonCode.CRASHED),
        ("abort", ReasonCode.CRASHED),
        ("exit3", ReasonCode.CRASHED),
        ("garbage", ReasonCode.CRASHED),
        ("forkchild", ReasonCode.CRASHED),
        ("hang", ReasonCode.TIMEOUT),
    ],
)
async def test_every_failure_has_its_reason_and_harms_nobody(
    services: Callable[..., GPUDiscoveryService], scenario: str, reason: ReasonCode
) -> None:
    started, before = time.monotonic(), probes_alive()  # servers of other tests may be children, too
    result = await services(scenario).discover_all_devices()
    assert time.monotonic() - started < 5.0
    report = result.reports[0]
    assert report.reason is reason
    assert report.hint
    assert report.message
    assert [device.device_id for device in result.devices] == ["cpu:0"]
    assert result.devices[0].usable
    assert set(probes_alive()) <= set(before)


async def test_what_a_library_prints_is_not_an_answer(services: Callable[..., GPUDiscoveryService]) -> None:
    assert len(cards(await services("noise").discover_all_devices())) == 2


async def test_the_mask_hides_cards(services: Callable[..., GPUDiscoveryService]) -> None:
    result = await services(CUDA_VISIBLE_DEVICES="").discover_all_devices()
    assert result.reports[0].reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert not any(device.usable for device in cards(result))
    assert result.backend_name == "cpu"


async def test_a_lost_card_keeps_its_name(services: Callable[..., GPUDiscoveryService]) -> None:
    await services().discover_all_devices()
    result = await services("lost1").discover_all_devices()
    first, second = cards(result)
    assert first.stable_id == UUID_A
    assert first.state is DeviceState.HEALTHY
    assert (second.stable_id, second.state) == (UUID_B, DeviceState.LOST)


async def test_a_swap_after_a_reboot_changes_no_identity(services: Callable[..., GPUDiscoveryService]) -> None:
    before = await services().discover_all_devices()
    after = await services("swapped").discover_all_devices()
    assert {d.stable_id for d in cards(before)} == {d.stable_id for d in cards(after)} == {UUID_A, UUID_B}
    names = {d.stable_id: d.device_id for d in cards(before)}
    assert all(names[d.stable_id] != d.device_id for d in cards(after))


async def test_a_driver_that_goes_and_comes_back_removes_nothing(
    services: Callable[..., GPUDiscoveryService], tmp_path: Path
) -> None:
    scenario = tmp_path / "scenario"

    def become(text: str) -> None:
        temporary = tmp_path / "next"
        temporary.write_text(text)
        os.replace(temporary, scenario)

    become("ok2")
    service = services(file=scenario)
    subscription = service.subscribe(1000)
    await service.discover_all_devices()
    become("init999")
    await service.discover_all_devices()
    become("ok2")
    await service.discover_all_devices()
    become("ok1")
    await service.discover_all_devices()
    await service.shutdown()
    events = [event async for event in subscription]
    types = [event.type for event in events if event.type is not EventType.MEMORY]
    assert types[0] is EventType.SNAPSHOT
    assert types.count(EventType.REMOVED) == 1
    assert types.count(EventType.ADDED) == 0
    assert [e.stable_id for e in events if e.type is EventType.REMOVED] == [UUID_B]
