"""Delegates that fail late or want one thread, and choosing among adapters. Names carry the case."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpurt import plugins
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.types import Capabilities


def simulated() -> FaultyDriver:
    return FaultyDriver(SimulatedDriver(parse_simulation("h100")))


async def test_mob_1_what_opens_and_then_fails_is_not_used(tmp_path: Path) -> None:
    """The delegate constructs; its first allocation, or its first invocation, does not work."""
    driver = simulated()
    plugins.register("late", lambda: driver)
    try:
        for method in ("alloc", "read"):
            driver.inject(Fault(method, raises=RuntimeError("Can not find OpenCL library on this device")))  # type: ignore[arg-type]
            async with GPUDiscoveryService(tmp_path / f"{method}.json", backends=["late", "cpu"]) as service:
                result = await service.discover_all_devices()
            assert result.backend_name == "cpu"
            (device,) = (each for each in result.devices if each.backend == "simulated")
            assert not device.usable
            assert "Can not find OpenCL" in (device.state_reason or "")
    finally:
        plugins.unregister("late")


class OneThread(SimulatedDriver):
    """As a delegate that must run where it was made."""

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities.model_copy(update={"threading": "backend"})


async def test_mob_2_a_driver_of_one_thread_has_one() -> None:
    driver = FaultyDriver(OneThread(parse_simulation("h100x2")))
    async with DriverBackend(driver) as backend:

        async def use(device_id: str) -> None:
            handle = await backend.allocate(device_id, 1 << 16)
            await backend.copy_to_device(bytes(1 << 16), handle)
            await backend.copy_from_device(handle)
            await backend.get_device_temperature(device_id)
            await backend.synchronize(device_id)
            await backend.deallocate(handle)

        await asyncio.gather(*(use(device.device_id) for device in backend.devices for _ in range(4)))
    methods = {call.method for call in driver.calls}
    assert {"open", "alloc", "write", "read", "telemetry", "free", "close"} <= methods
    assert len({call.thread for call in driver.calls}) == 1


@pytest.mark.parametrize("reason", [ReasonCode.NO_LIBRARY])
def test_mob_1_the_reason_has_a_remedy(reason: ReasonCode) -> None:
    from gpurt.remedies import remedy

    assert remedy(reason, "tflite", "linux")
