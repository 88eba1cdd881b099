"""Calls that end a process in which MLX makes them: ours answer with a typed error. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.metal_backends import cpu_driver

from gpurt.errors import BackendUnavailable

ROOT = Path(__file__).parents[2]

ADDRESS_SPACE = """
import asyncio, resource
from gpurt.backends.metal_backend import MetalBackend
from gpurt.errors import OutOfMemory

GIB = 1 << 30

async def main():
    async with MetalBackend(device="cpu") as backend:
        async with backend.allocation("metal:0", 64):
            pages = int(open("/proc/self/statm").read().split()[0])
            limit = pages * resource.getpagesize() + GIB // 4
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            for size in (GIB, GIB // 2, 4 * GIB):
                try:
                    await backend.allocate("metal:0", size)
                except OutOfMemory as exc:
                    assert exc.requested_bytes == size
                    print("refused", size // (GIB // 2))
        async with backend.allocation("metal:0", 1 << 20) as handle:
            await backend.copy_to_device(b"x" * (1 << 20), handle)
            assert await backend.copy_from_device(handle) == b"x" * (1 << 20)
    print("alive")

asyncio.run(main())
"""

VIEW_BEYOND_SHUTDOWN = """
import asyncio, warnings
import numpy as np
from gpurt.backends.metal_backend import MetalBackend

warnings.simplefilter("ignore")

async def main():
    async with MetalBackend(device="cpu") as backend:
        handle = await backend.allocate("metal:0", 64 << 20)
        array = (await backend.view(handle)).numpy()
        array[:] = 5
    array[0] += 1
    async with MetalBackend(device="cpu") as again:
        async with again.allocation("metal:0", 64 << 20) as handle:
            await again.copy_to_device(bytes(64 << 20), handle)
    return array

array = asyncio.run(main())
assert array[0] == 6 and (array[1:] == 5).all()
print("alive")
"""


@pytest.fixture(autouse=True)
def _mlx() -> None:
    try:
        cpu_driver()
    except BackendUnavailable as exc:
        pytest.skip(f"[{exc.reason}] {exc}")


def run(program: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="sets the limit of the address space as Linux has it")
def test_no_address_space_left() -> None:
    """What MLX does about a malloc that returns nothing is to write there."""
    assert run(ADDRESS_SPACE) == ["refused 2", "refused 1", "refused 8", "alive"]


def test_an_array_outlives_its_backend() -> None:
    assert run(VIEW_BEYOND_SHUTDOWN) == ["alive"]
