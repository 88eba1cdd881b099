"""The small step with exo's own gatherer, on a checkout with the patch of memory. Run by ``test_exo.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from exo.shared.types.profiling import MemoryUsage
from exo.utils.channels import channel
from exo.utils.info_gatherer.info_gatherer import GatheredInfo, InfoGatherer

from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.wire import ProbeOutcome
from gpurt.types import DeviceIdentity, GPUDevice

GIB = 1 << 30
CARD: dict[str, Any] = {
    "device_id": "cuda:0",
    "name": "NVIDIA GeForce RTX 3060",
    "vendor": "nvidia",
    "backend": "cuda",
    "compute_capability": "8.6",
    "memory_bytes": 12 * GIB,
    "memory_available": 12 * GIB,
    "compute_units": 28,
    "tensor_core_count": 112,
    "max_threads_per_block": 1024,
    "clock_rate_mhz": 1777,
    "bandwidth_gbps": 360.0,
    "support_level": "full",
    "driver_version": "590.48.01",
    "backend_name": "cupy",
    "identity": DeviceIdentity(key="GPU-0", uuid="GPU-0"),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Host:
    """In place of probe processes."""

    async def probe(self, name: str, **_: Any) -> ProbeOutcome:
        await anyio.sleep(0)
        return ProbeOutcome(verified=(GPUDevice(**CARD),))


@pytest.fixture
def gatherer_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from gpurt.integrations.exo import sharing

    def make() -> GPUDiscoveryService:
        path = tmp_path / "registry.json"
        return GPUDiscoveryService(registry_path=path, backends=["cuda"], environ={}, prober=Host())

    monkeypatch.setattr(sharing, "GPUDiscoveryService", make)
    monkeypatch.setattr("gpurt.integrations.exo.states.shared", sharing.SharedDiscovery())

    async def first() -> MemoryUsage:
        sender, receiver = channel[GatheredInfo]()
        async with anyio.create_task_group() as group:
            group.start_soon(InfoGatherer(sender).run)
            with anyio.fail_after(10):
                while not isinstance(info := await receiver.receive(), MemoryUsage):
                    pass
            group.cancel_scope.cancel()
        return info

    return first


@pytest.mark.anyio
async def test_a_node_offers_its_cards_memory(gatherer_memory: Any) -> None:
    memory = await gatherer_memory()
    assert memory.ram_total.in_bytes == 12 * GIB
    assert memory.ram_available.in_bytes == 12 * GIB - (512 << 20)


@pytest.mark.anyio
async def test_what_the_user_says_is_believed(gatherer_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERRIDE_MEMORY_MB", "1024")
    assert (await gatherer_memory()).ram_available.in_bytes == GIB
