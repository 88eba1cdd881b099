"""Pools and their books. Names carry the case."""

from __future__ import annotations

import pytest

from gpurt.errors import OutOfMemory
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver

MIB, GIB = 1 << 20, 1 << 30
GPU = "simulated:0"


def backend(**options: object) -> DriverBackend:
    return DriverBackend(SimulatedDriver(parse_simulation("h100")), pool_bytes=GIB, **options)  # type: ignore[arg-type]


async def test_mem_1_cached_blocks_make_room_under_a_limit() -> None:
    async with backend(memory_limit=GIB) as gpu:
        await gpu.deallocate(await gpu.allocate(GPU, 512 * MIB))
        usage, kept = gpu.ledger.usage(GPU), gpu.pool_statistics(GPU).cached_bytes
        assert (usage.current_bytes, usage.limit_bytes, kept) == (0, GIB, 512 * MIB)
        handle = await gpu.allocate(GPU, 800 * MIB)
        assert handle.size_bytes == 800 * MIB
        with pytest.raises(OutOfMemory) as caught:
            await gpu.allocate(GPU, 300 * MIB)
        assert (caught.value.requested_bytes, caught.value.limit_bytes) == (300 * MIB, GIB)


async def test_mem_2_what_the_pool_keeps_is_not_used() -> None:
    async with backend() as gpu:
        before = await gpu.get_device_memory_info(GPU)
        handle = await gpu.allocate(GPU, 64 * MIB)
        used = await gpu.get_device_memory_info(GPU)
        await gpu.deallocate(handle)
        cached = await gpu.get_device_memory_info(GPU)
        assert used.used_bytes - before.used_bytes == 64 * MIB
        assert cached.used_bytes == before.used_bytes
        assert cached.reserved_bytes - before.reserved_bytes == 64 * MIB
        await gpu.trim(GPU)
        assert (await gpu.get_device_memory_info(GPU)).reserved_bytes == before.reserved_bytes


async def test_mem_3_live_allocations_of_one_size_share_nothing() -> None:
    async with backend() as gpu:
        await gpu.deallocate(await gpu.allocate(GPU, MIB))  # something to be handed out again
        x, y = await gpu.allocate(GPU, MIB), await gpu.allocate(GPU, MIB)
        await gpu.copy_to_device(bytes(MIB), y)
        await gpu.copy_to_device(b"\xff" * MIB, x)
        assert await gpu.copy_from_device(y) == bytes(MIB)
