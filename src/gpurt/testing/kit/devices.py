"""Devices, telemetry, and claims that must be true."""

from __future__ import annotations

from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import DeviceNotFound, OutOfMemory, OutOfRange
from gpurt.testing.kit.base import ConformanceBase, usage
from gpurt.types import Capabilities, GPUDevice

MIB = 1 << 20


class DeviceTests(ConformanceBase):
    async def test_devices_are_listed_alike(self, backend: GPUBackend) -> None:
        devices = await backend.list_devices()
        assert isinstance(devices, tuple)
        assert devices
        assert [d.device_id for d in backend.devices] == [d.device_id for d in devices]
        for device in devices:
            found = await backend.get_device(device.device_id)
            assert found is not None
            assert found.device_id == device.device_id
            assert found.stable_id == device.stable_id

    async def test_device_ids_and_identities_are_unique(self, backend: GPUBackend) -> None:
        devices = await backend.list_devices()
        assert len({d.device_id for d in devices}) == len(devices)
        assert len({d.stable_id for d in devices}) == len(devices)

    async def test_device_record_is_whole(self, backend: GPUBackend) -> None:
        for device in await backend.list_devices():
            assert isinstance(device, GPUDevice)
            assert device.backend
            assert device.name
            assert device.vendor
            assert device.memory_bytes is None or device.memory_bytes > 0
            if device.memory_bytes is not None and device.memory_available is not None:
                assert device.memory_available <= device.memory_bytes
            for measured in ("compute_units", "max_threads_per_block", "clock_rate_mhz", "bandwidth_gbps"):
                # 0 would be a lie: what is not known is None.
                value = getattr(device, measured)
                assert value is None or value > 0, measured
            assert GPUDevice.model_validate_json(device.model_dump_json()) == device

    async def test_unknown_device(self, backend: GPUBackend) -> None:
        for name in ("nope:0", "", "cpu", f"{backend.devices[0].device_id}9"):
            assert await backend.get_device(name) is None
            with pytest.raises(DeviceNotFound):
                await backend.allocate(name, 64)
            for call in (
                backend.synchronize,
                backend.get_device_memory_info,
                backend.get_device_temperature,
                backend.get_device_power_usage,
                backend.get_device_clock_rate,
            ):
                with pytest.raises(DeviceNotFound):
                    await call(name)

    async def test_memory_info(self, backend: GPUBackend) -> None:
        for device in backend.devices:
            info = await backend.get_device_memory_info(device.device_id)
            assert info.total_bytes > 0
            assert info.used_bytes + info.available_bytes + info.reserved_bytes <= info.total_bytes * 1.01 + MIB
            assert dict(info) == {key: info[key] for key in info.keys()}  # noqa: SIM118 - keys() is the point

    async def test_memory_info_follows_allocations(self, backend: GPUBackend, device_id: str) -> None:
        size = 32 * MIB
        # Other processes come and go meanwhile: half of it is enough, and once in a few times.
        for _ in range(5):
            before = await backend.get_device_memory_info(device_id)
            async with backend.allocation(device_id, size) as handle:
                await backend.copy_to_device(bytes(size), handle)
                during = await backend.get_device_memory_info(device_id)
            used = during.used_bytes - before.used_bytes
            if max(used, before.available_bytes - during.available_bytes) >= size // 2:
                return
        pytest.fail(f"an allocation of {size:,} bytes is not seen in the device's memory")

    async def test_temperature_power_and_clock_are_plausible_or_none(self, backend: GPUBackend) -> None:
        for device in backend.devices:
            temperature = await backend.get_device_temperature(device.device_id)
            power = await backend.get_device_power_usage(device.device_id)
            clock = await backend.get_device_clock_rate(device.device_id)
            assert temperature is None or -40 < temperature < 150
            assert power is None or 0 < power < 5000
            assert clock is None or 0 < clock < 20_000
            assert not isinstance(temperature, bool)
            assert clock is None or isinstance(clock, int)

    async def test_claim_telemetry(self, backend: GPUBackend, capabilities: Capabilities) -> None:
        getters: dict[str, Any] = {
            "temperature_c": backend.get_device_temperature,
            "power_w": backend.get_device_power_usage,
            "clock_mhz": backend.get_device_clock_rate,
        }
        for field, get in getters.items():
            for device in backend.devices:
                value = await get(device.device_id)
                if value is not None:
                    assert field in capabilities.telemetry, f"{field} is reported but not claimed"

    async def test_claim_largest_allocation(
        self, backend: GPUBackend, device_id: str, capabilities: Capabilities
    ) -> None:
        if capabilities.max_allocation_bytes is None:
            # Nothing but the memory itself is a limit.
            with pytest.raises(OutOfMemory):
                await backend.allocate(device_id, 1 << 60)
            return
        with pytest.raises(OutOfRange):
            await backend.allocate(device_id, capabilities.max_allocation_bytes + 1)

    async def test_available_memory_is_within_every_limit(self, backend: GPUBackend, device_id: str) -> None:
        info = await backend.get_device_memory_info(device_id)
        entry = usage(backend, device_id)
        limits = [info.total_bytes] if entry is None or entry.limit_bytes is None else [entry.limit_bytes]
        assert info.available_bytes <= min(limits)
