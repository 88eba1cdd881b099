"""Memory of devices that nobody can reach: not told, and why. What is merely old stays, and is called so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpurt.discovery.audience import Audience
from gpurt.discovery.events import EventType, carry_over, diff, settled
from gpurt.discovery.health import DeviceHealth
from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.registry import RegistryDocument, RegistryFile
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.standing import Standing
from gpurt.errors import ReasonCode
from gpurt.health.monitor import Transition
from gpurt.health.policy import HealthPolicy
from gpurt.types import DeviceState, GPUDevice
from tests.discovery.records import GIB, UUIDS, absent, cpu, device, ok, result

THEN = "2026-11-20T10:00:00+00:00"
UNKNOWN = (None, None, f"unknown: last seen {THEN}")


def seen(n: int, **fields: object) -> GPUDevice:
    known = {"memory_usable_bytes": 78 * GIB, "memory_usable_source": "driver"}
    return device(n, **known | fields)  # type: ignore[arg-type]


def memory(record: GPUDevice | None) -> tuple[int | None, int | None, str | None]:
    assert record is not None
    assert record.memory_bytes == 80 * GIB
    return record.memory_available, record.memory_usable_bytes, record.memory_usable_source


OLD = result(seen(0), seen(1), cpu()).model_copy(update={"timestamp": THEN})
TOLD = (79 * GIB, 78 * GIB, "driver")


@pytest.mark.parametrize("reason", [ReasonCode.NO_DRIVER, ReasonCode.TIMEOUT, ReasonCode.CRASHED, ReasonCode.ERROR])
def test_a_device_of_a_backend_that_cannot_be_asked(reason: ReasonCode) -> None:
    new = carry_over(OLD, result(cpu(), reports=[absent("cuda", reason), ok("cpu")]))
    assert [memory(each) for each in new.devices[1:]] == [UNKNOWN, UNKNOWN]
    assert not any(each.usable for each in new.devices[1:])
    # The first time stands, however often nobody is there.
    again = carry_over(new, result(cpu(), reports=[absent("cuda", reason), ok("cpu")]))
    assert [memory(each) for each in again.devices[1:]] == [UNKNOWN, UNKNOWN]


def test_one_that_is_lost_and_one_that_is_gone() -> None:
    nameless = device(1, known="none", state=DeviceState.LOST, usable=False, memory_available=None)
    new = carry_over(OLD, result(seen(0), nameless, cpu()))
    assert [memory(each) for each in new.devices[:2]] == [TOLD, UNKNOWN]
    (event,) = diff(OLD, result(seen(0), cpu()))
    assert (event.type, memory(event.device)) == (EventType.REMOVED, UNKNOWN)


def test_it_is_told_with_the_state_and_not_once_more() -> None:
    away = result(cpu(), reports=[absent("cuda"), ok("cpu")])
    events = diff(OLD, away)
    assert [event.type for event in events] == [EventType.BACKEND_UNAVAILABLE, EventType.HEALTH, EventType.HEALTH]
    assert memory(events[1].device) == UNKNOWN
    for hold in (False, True):
        told = settled(OLD, carry_over(OLD, away), hold_memory=hold)
        assert memory(told.devices[1]) == UNKNOWN
        back = diff(told, OLD)
        recovered = [event for event in back if event.type is EventType.RECOVERED]
        assert [memory(event.device) for event in recovered] == [TOLD, TOLD]
        assert not [event for event in back if event.type is EventType.MEMORY]
        assert settled(told, OLD, hold_memory=hold).devices == OLD.devices


async def test_the_registrys_cards_on_a_machine_without_a_driver(tmp_path: Path) -> None:
    file = RegistryFile(tmp_path / "r.json")
    document = RegistryDocument(timestamp=THEN, backend_name="cuda", devices=(seen(0), seen(1)), reports=(ok("cuda"),))
    await asyncio.to_thread(file.save, document)
    async with GPUDiscoveryService(file.path, backends=["cuda", "cpu"], root=tmp_path) as service:
        stale = await service.cached()
        assert stale is not None
        assert (stale.discovery_status, [memory(each) for each in stale.devices]) == ("stale", [TOLD, TOLD])
        assert stale.age_s > 0
        found = await service.discover_all_devices()
    cards = [each for each in found.devices if each.vendor == "nvidia"]
    assert [memory(each) for each in cards] == [UNKNOWN, UNKNOWN]
    kept = await asyncio.to_thread(file.load)
    assert kept is not None
    assert [memory(each) for each in kept.devices if each.vendor == "nvidia"] == [UNKNOWN, UNKNOWN]
    # The next process reads the same.
    async with GPUDiscoveryService(file.path, backends=["cuda", "cpu"], root=tmp_path) as service:
        found = await service.discover_all_devices()
    assert [memory(each) for each in found.devices if each.vendor == "nvidia"] == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("state", "known"),
    [
        (DeviceState.LOST, False),
        (DeviceState.UNRESPONSIVE, False),
        (DeviceState.SUSPECT, False),
        (DeviceState.DEGRADED, True),
    ],
)
async def test_what_telemetry_finds_between_two_look_ups(tmp_path: Path, state: DeviceState, known: bool) -> None:
    health = DeviceHealth(HealthPolicy, lambda: 0.0)
    memory_of = DiscoveryMemory(RegistryFile(tmp_path / "r.json"), health=health)
    standing = Standing(memory_of, health, Audience(lambda: 0.0), lambda: 0.0)
    standing.found(OLD, ["cuda", "cpu"])
    health.monitor.restore({"devices": {UUIDS[0]: {"state": state, "xids": [], "reason": "xid"}}}, None)
    standing.took_health(Transition(UUIDS[0], DeviceState.HEALTHY, state, "xid", 0.0))
    last = standing.last()
    assert last is not None
    assert last.devices[0].state is state
    assert [memory(each) for each in last.devices[:2]] == [TOLD if known else UNKNOWN, TOLD]


def test_one_whose_driver_hangs_while_others_see_it_keeps_what_they_say_now() -> None:
    hanging = seen(0, state=DeviceState.UNRESPONSIVE, usable=False, state_reason="timeout: no answer")
    assert memory(carry_over(OLD, result(hanging, seen(1), cpu())).devices[0]) == TOLD
