"""Read-back verification, through drivers and through backends."""

from __future__ import annotations

import pytest

from gpurt.discovery.verify import verification_key, verify_backend, verify_driver
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.types import DeviceState
from tests.discovery.records import UUIDS, device


def faulty(*faults: Fault, spec: str = "h100x2") -> FaultyDriver:
    return FaultyDriver(SimulatedDriver(parse_simulation(spec)), faults)


def test_a_driver_that_gives_bytes_back_passes() -> None:
    driver = faulty()
    devices = driver.open()
    said: list[str] = []
    assert verify_driver(driver, devices, doing=said.append) == tuple(devices)
    assert said == ["verifying simulated:0", "verifying simulated:1"]
    methods = [call.method for call in driver.calls if call.index == 0]
    assert methods.index("attach") < methods.index("alloc") < methods.index("free") < methods.index("detach")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("read", index=1, corrupt=17),
        Fault("write", index=1, raises=OSError("link down")),
        Fault("alloc", index=1, raises=RuntimeError("no kernel image")),
        Fault("attach", index=1, raises=RuntimeError("no context")),
    ],
)
def test_a_device_that_fails_costs_only_itself(fault: Fault) -> None:
    driver = faulty(fault)
    good, bad = verify_driver(driver, driver.open())
    assert good.usable
    assert not bad.usable
    assert bad.state is DeviceState.DEGRADED
    assert (bad.state_reason or "").startswith("failed verification")


def test_a_device_that_is_lost_is_called_lost() -> None:
    driver = faulty(Fault("write", index=0, lose=True))
    bad, good = verify_driver(driver, driver.open())
    assert bad.state is DeviceState.LOST
    assert good.usable


def test_a_full_device_is_not_a_broken_one() -> None:
    driver = faulty(Fault("alloc", index=0, raises=MemoryError()))
    full, _ = verify_driver(driver, driver.open())
    assert full.usable
    assert full.state_reason == "not verified: no free memory"


def test_what_has_passed_before_is_left_alone() -> None:
    driver = faulty(Fault("read", corrupt=0))
    real = tuple(d.model_copy(update={"simulated": False}) for d in driver.open())
    key = verification_key(real[0])
    assert key is not None
    first, second = verify_driver(driver, real, already={key})
    assert first.usable
    assert not second.usable


def test_what_is_remembered_depends_on_the_driver_and_never_on_a_simulation() -> None:
    key = verification_key(device(0))
    assert key is not None
    assert key.startswith(UUIDS[0])
    assert verification_key(device(0, driver_version="591")) != key
    assert verification_key(device(0, simulated=True)) is None
    assert verification_key(device(0, known="none")) is None


async def test_a_backend_is_verified_through_its_public_methods() -> None:
    driver = faulty(Fault("read", index=1, corrupt=3))
    async with DriverBackend(driver) as backend:
        good, bad = await verify_backend(backend, await backend.list_devices())
        assert good.usable
        assert not bad.usable
        assert "came back different" in (bad.state_reason or "")
        assert backend.ledger.usage("simulated:0").current_count == 0
