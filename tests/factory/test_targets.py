"""How long opening and discovery may take (C32). Aims with room: the real figures are in ``benchmarks/RESULTS.md``."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpurt.backend import GPUBackend
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.factory import GPUBackendFactory

ATTEMPTS = 5
"""The best of so many counts: a machine that is busy with something else says nothing about gpurt."""


async def best_seconds(call: Callable[[], Awaitable[object]], limit: float) -> float:
    """Seconds of the fastest attempt. On a machine whose processors others take, which is measured, processor time of
    this process and its children stands in for them."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        wall, worked = time.perf_counter(), processor_seconds()
        await call()
        wall, worked = time.perf_counter() - wall, processor_seconds() - worked
        best = min(best, wall)
        if best >= limit and machine_is_busy():
            best = worked
        if best < limit:
            break
    return best


def processor_seconds() -> float:
    return sum(os.times()[:4])


def machine_is_busy() -> bool:
    """A loop that only computes got less than four fifths of a processor."""
    wall, worked = time.perf_counter(), time.thread_time()
    while time.thread_time() - worked < 0.1:
        pass
    return time.perf_counter() - wall > 0.125


async def test_a_backend_opens_within_three_seconds() -> None:
    async def open_one() -> None:
        backends.append(await GPUBackendFactory.create_backend("cpu"))

    backends: list[GPUBackend] = []
    assert await best_seconds(open_one, 3) < 3
    for backend in backends:
        await backend.shutdown()


async def test_discovery_takes_less_than_twice_its_second(tmp_path: Path) -> None:
    """A second is wanted with every library there is, of which making a software Vulkan device takes most."""

    async def discover() -> None:
        async with GPUDiscoveryService(registry_path=tmp_path / "registry.json") as service:
            result = await service.discover_all_devices()
            assert "cpu:0" in {device.device_id for device in result.devices}

    assert await best_seconds(discover, 2) < 2
