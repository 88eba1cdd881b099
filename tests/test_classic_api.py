"""The classic usage of a GPU abstraction layer, with ``await`` where a method is asynchronous, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.factory import GPUBackendFactory, detect_available_backends
from gpurt.types import GPUDevice


@pytest.fixture
async def backend():
    GPUBackendFactory.set_backend_override("cpu")
    backend = await GPUBackendFactory.create_backend()
    yield backend
    await backend.shutdown()
    GPUBackendFactory.clear_backend_override()


async def test_create_backend_automatically_and_by_name() -> None:
    backend = await GPUBackendFactory.create_backend()
    assert isinstance(backend, GPUBackend)
    await backend.shutdown()
    GPUBackendFactory.set_backend_override("cpu")
    try:
        backend = await GPUBackendFactory.create_backend()
        assert backend.name == "cpu"
        await backend.shutdown()
    finally:
        GPUBackendFactory.clear_backend_override()


async def test_list_devices(backend: GPUBackend, capsys: pytest.CaptureFixture[str]) -> None:
    devices = await backend.list_devices()
    for device in devices:
        print(f"{device.device_id}: {device.name}")
        print(f"  Memory: {device.memory_bytes / 1e9:.1f} GB")  # type: ignore[operator]
        print(f"  Compute: {device.compute_units} CUs")
    assert capsys.readouterr().out.startswith("cpu:0: ")
    assert devices == backend.devices


async def test_allocate_copy_synchronize_deallocate(backend: GPUBackend) -> None:
    devices = await backend.list_devices()
    device_id = devices[0].device_id
    before = await backend.get_device_memory_info(device_id)
    handle = await backend.allocate(device_id, size_bytes=1024 * 1024 * 1024)
    during = await backend.get_device_memory_info(device_id)
    assert during.used_bytes - before.used_bytes > 900 << 20

    host_data = b"tensor data"
    await backend.copy_to_device(host_data, handle)
    result = await backend.copy_from_device(handle, offset_bytes=0, size_bytes=len(host_data))
    assert result == host_data

    handle2 = await backend.allocate(devices[-1].device_id, size_bytes=1024 * 1024 * 1024)
    await backend.copy_device_to_device(handle, handle2, size_bytes=1024 * 1024)
    assert await backend.copy_from_device(handle2, 0, len(host_data)) == host_data
    await backend.synchronize(device_id)

    await backend.deallocate(handle)
    await backend.deallocate(handle2)
    after = await backend.get_device_memory_info(device_id)
    assert abs(after.used_bytes - before.used_bytes) < 100 << 20


async def test_discover_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = GPUDiscoveryService(registry_path=tmp_path / "registry.json")
    result = await service.discover_all_devices()
    print(f"Backend: {result['backend_name']}")
    print(f"Devices: {len(result['devices'])}")
    for device in result["devices"]:
        print(f"  {device.device_id}: {device.name}")
    await service.shutdown()
    await service.shutdown()
    assert "cpu:0: " in capsys.readouterr().out


async def test_failed_allocation_is_a_runtime_error(backend: GPUBackend) -> None:
    with pytest.raises(RuntimeError, match="cpu:0"):
        await backend.allocate("cpu:0", size_bytes=1 << 60)


async def test_available_backends() -> None:
    assert (await detect_available_backends())[-1] == "cpu"


async def test_monitoring(backend: GPUBackend) -> None:
    memory_info = await backend.get_device_memory_info("cpu:0")
    temp = await backend.get_device_temperature("cpu:0")
    power = await backend.get_device_power_usage("cpu:0")
    clock = await backend.get_device_clock_rate("cpu:0")
    assert set(memory_info.keys()) == {"total_bytes", "used_bytes", "available_bytes", "reserved_bytes"}
    assert all(isinstance(value, int) and value >= 0 for value in memory_info.values())
    # None where this machine has no such sensor, else something that a processor can be.
    assert temp is None or -40 < temp < 150
    assert power is None or 0 <= power < 2000
    assert clock is None or 100 < clock < 10_000


@dataclass
class NodeInfo:
    gpu_devices: tuple[GPUDevice, ...] = ()


@dataclass
class Worker:
    """As a worker embeds the layer: backend, discovery, one event to whoever listens."""

    node_id: str
    registry: Path
    sent: list[tuple[str, NodeInfo]] = field(default_factory=list)

    async def run(self) -> Any:
        self.gpu_backend = await GPUBackendFactory.create_backend("cpu")
        discovery = GPUDiscoveryService(self.gpu_backend, registry_path=self.registry)
        gpu_info = await discovery.discover_all_devices()
        node_info = NodeInfo(gpu_devices=gpu_info["devices"])
        self.sent.append((self.node_id, node_info))
        await discovery.shutdown()
        # The service was given the backend, so it did not close it.
        assert await self.gpu_backend.list_devices()
        await self.gpu_backend.shutdown()
        return gpu_info


async def test_worker_integration(tmp_path: Path) -> None:
    worker = Worker("node-1", tmp_path / "registry.json")
    gpu_info = await worker.run()
    assert gpu_info["backend_name"] == "cpu"
    [(node, info)] = worker.sent
    assert node == "node-1"
    assert [device.device_id for device in info.gpu_devices] == ["cpu:0"]
