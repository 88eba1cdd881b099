"""Memory managers (A07, A13, A14): one for each device, exact statistics, a cache that can be cleared, and arrays
that are not copied where device and host share their memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from gpurt.backend import GPUBackend
from gpurt.backends.cpu_backend import CPUDriver
from gpurt.errors import (
    BackendClosed,
    DeviceNotFound,
    HandleInUse,
    OutOfMemory,
    OutOfRange,
    Unsupported,
    WrongLoop,
)
from gpurt.memory.manager import MemoryManager
from gpurt.runtime.backend import DriverBackend
from gpurt.tensors import get_memory_manager, to_device
from gpurt.testing import FaultyDriver, SimulatedDriver, parse_simulation
from gpurt.testing.sparse import SparseMemory
from tests.factory.toy import ToyBackend
from tests.support.reference_driver import ReferenceDriver

DEVICE = "reference:0"
MIB = 1 << 20


@pytest.fixture
async def backend() -> AsyncIterator[DriverBackend]:
    async with DriverBackend(ReferenceDriver(), pool_bytes=8 * MIB) as backend:
        yield backend
        assert backend.live_handles == 0


@pytest.fixture
async def manager(backend: DriverBackend) -> MemoryManager:
    return await get_memory_manager(DEVICE, backend=backend)


# Which manager


async def test_the_same_object_for_each_device(backend: DriverBackend, manager: MemoryManager) -> None:
    assert await get_memory_manager(DEVICE, backend=backend) is manager
    assert await get_memory_manager(backend.devices[0], backend=backend) is manager
    assert await get_memory_manager(None, backend=backend) is manager
    assert await get_memory_manager(manager) is manager
    assert (manager.device_id, manager.backend) == (DEVICE, backend)
    assert DEVICE in repr(manager)
    other = await get_memory_manager("reference:1", backend=backend)
    assert other is not manager
    assert other is await get_memory_manager("reference:1", backend=backend)


async def test_another_instance_has_managers_of_its_own(manager: MemoryManager) -> None:
    async with DriverBackend(ReferenceDriver(), pool_bytes=MIB) as second:
        other = await get_memory_manager(DEVICE, backend=second)
        assert other is not manager
        await (await other.allocate(100)).free()
        assert (other.pool.misses, manager.pool.misses) == (1, 0)


async def test_no_manager_keeps_a_backend_alive_and_no_backend_a_manager() -> None:
    backend = DriverBackend(ReferenceDriver())
    await backend.initialize()
    manager = await get_memory_manager(DEVICE, backend=backend)
    backend_gone, manager_gone = weakref.ref(backend), weakref.ref(manager)
    del manager
    gc.collect()
    assert manager_gone() is None
    manager = await get_memory_manager(DEVICE, backend=backend)
    await backend.shutdown()
    del backend
    assert backend_gone() is not None  # the manager needs it
    del manager
    async with asyncio.timeout(5):
        while backend_gone() is not None:  # its threads are still ending
            await asyncio.sleep(0.002)
            gc.collect()


def test_not_shared_across_loops() -> None:
    backend = DriverBackend(ReferenceDriver())

    async def open_and_get() -> MemoryManager:
        await backend.initialize()
        return await get_memory_manager(DEVICE, backend=backend)

    async def use(manager: MemoryManager) -> None:
        with pytest.raises(WrongLoop):
            await manager.allocate(1)
        with pytest.raises(WrongLoop):
            _ = manager.pool
        with pytest.raises(WrongLoop):
            await get_memory_manager(DEVICE, backend=backend)

    first_loop = asyncio.new_event_loop()
    first = first_loop.run_until_complete(open_and_get())
    asyncio.run(use(first))
    first_loop.run_until_complete(backend.shutdown())
    second_loop = asyncio.new_event_loop()
    second = second_loop.run_until_complete(open_and_get())
    assert second is not first
    second_loop.run_until_complete(backend.shutdown())
    first_loop.close()
    second_loop.close()


async def test_no_such_device(backend: DriverBackend) -> None:
    with pytest.raises(DeviceNotFound, match="reference:1"):
        await get_memory_manager("reference:2", backend=backend)


async def test_a_closed_backend() -> None:
    backend = DriverBackend(ReferenceDriver())
    with pytest.raises(BackendClosed):
        await get_memory_manager(DEVICE, backend=backend)
    async with backend:
        manager = await get_memory_manager(DEVICE, backend=backend)
    with pytest.raises(BackendClosed):
        _ = manager.pool
    with pytest.raises(BackendClosed):
        await manager.allocate(1)


# The pool


async def test_a_freed_block_serves_the_next_array_of_its_key(manager: MemoryManager) -> None:
    first = await manager.allocate((1000, 10), dtype="float32")
    await first.free()
    second = await manager.allocate((1000, 10), dtype="float32")
    assert (manager.pool.hits, manager.pool.misses) == (1, 1)
    assert second.handle != first.handle
    await second.free()


async def test_live_arrays_of_one_key_share_nothing(manager: MemoryManager) -> None:
    x = await manager.allocate((100, 10), dtype="float32")
    y = await manager.allocate((100, 10), dtype="float32")
    (await x.numpy(copy=False))[:] = 1
    (await y.numpy(copy=False))[:] = 2
    assert (await x.numpy()).max() == 1
    assert manager.pool.hits == 0
    gc.collect()
    await x.free()
    await y.free()


async def test_statistics_are_exact(manager: MemoryManager) -> None:
    pool = manager.pool
    assert (pool.hits, pool.misses, pool.cached_bytes, pool.peak_cached_bytes, pool.live_bytes) == (0, 0, 0, 0, 0)
    assert (pool.limit_bytes, pool.fragmentation) == (8 * MIB, 0.0)
    arrays = [await manager.allocate(MIB) for _ in range(4)]
    pool = manager.pool
    assert (pool.live_bytes, pool.live_count, pool.misses, pool.fragmentation) == (4 * MIB, 4, 4, 0.0)
    for array in arrays[:3]:
        await array.free()
    pool = manager.pool
    assert (pool.cached_bytes, pool.cached_count, pool.live_bytes, pool.live_count) == (3 * MIB, 3, MIB, 1)
    assert pool.fragmentation == 0.75
    again = await manager.allocate(MIB)
    pool = manager.pool
    assert (pool.hits, pool.misses, pool.cached_bytes, pool.fragmentation) == (1, 4, 2 * MIB, 0.5)
    assert (pool.peak_cached_bytes, pool.peak_live_bytes) == (3 * MIB, 4 * MIB)
    assert await manager.clear_cache() == 2 * MIB
    pool = manager.pool
    assert (pool.cached_bytes, pool.cached_count, pool.evicted_bytes) == (0, 0, 2 * MIB)
    assert (pool.live_bytes, pool.fragmentation) == (2 * MIB, 0.0)
    await arrays[3].free()
    await again.free()


async def test_what_others_allocate_counts_too(backend: DriverBackend, manager: MemoryManager) -> None:
    async with backend.allocation(DEVICE, 1000):
        assert manager.pool.live_bytes == 1000
    async with await to_device(bytes(1000), manager):
        assert (manager.pool.hits, manager.pool.live_bytes) == (1, 1000)


async def test_a_full_pool_gives_back(manager: MemoryManager) -> None:
    arrays = [await manager.allocate(3 * MIB) for _ in range(4)]
    for array in arrays:
        await array.free()
    assert manager.pool.cached_bytes == 6 * MIB  # of 8 allowed


async def test_clearing_the_cache_gives_the_memory_back_to_the_device() -> None:
    driver = ReferenceDriver()
    async with DriverBackend(driver, pool_bytes=8 * MIB) as backend:
        manager = await get_memory_manager(DEVICE, backend=backend)
        kept = await manager.allocate(MIB)
        await (await manager.allocate(2 * MIB)).free()
        assert driver.used[0] == 3 * MIB
        assert (await manager.memory_info()).reserved_bytes == 2 * MIB
        assert await manager.clear_cache() == 2 * MIB
        assert driver.used[0] == MIB
        assert (await manager.memory_info()).reserved_bytes == 0
        await kept.free()


async def test_limits_and_bad_arrays() -> None:
    async with DriverBackend(ReferenceDriver(), memory_limit=1000) as backend:
        manager = await get_memory_manager(DEVICE, backend=backend)
        with pytest.raises(OutOfMemory):
            await manager.allocate(1001)
        for shape, dtype in [((0, 3), "float32"), (-1, "uint8"), (3, "no-such-type")]:
            with pytest.raises(OutOfRange) as caught:
                await manager.allocate(shape, dtype)  # type: ignore[arg-type]
            assert caught.value.operation == "MemoryManager.allocate"
        assert backend.live_handles == 0


async def test_a_cancelled_allocation(backend: DriverBackend, manager: MemoryManager) -> None:
    task = asyncio.create_task(manager.allocate(MIB))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.synchronize(DEVICE)
    assert manager.pool.live_count == 0


async def test_a_backend_without_a_pool() -> None:
    backend: GPUBackend = ToyBackend()
    await backend.initialize()
    manager = await get_memory_manager(backend=backend)
    with pytest.raises(Unsupported, match="no pool"):
        _ = manager.pool


# Unified memory


class UnifiedDriver(SimulatedDriver):
    """Simulated unified memory that the host can really address: allocations of one page are contiguous."""

    capabilities = SimulatedDriver.capabilities.model_copy(update={"host_visible": True, "unified_memory": True})

    def host_view(self, index: int, mem: SparseMemory) -> memoryview:
        return memoryview(mem._page(0))


@pytest.mark.parametrize(
    "make", [CPUDriver, lambda: UnifiedDriver(parse_simulation("m2-ultra"))], ids=["cpu", "m2-ultra"]
)
async def test_unified_memory_is_used_without_copying_a_byte(make: Any) -> None:
    driver = FaultyDriver(make())
    async with DriverBackend(driver) as backend:
        manager = await get_memory_manager(backend=backend)
        array = await manager.allocate((64, 64), "float32")
        ours = await array.numpy(copy=False)
        ours[:] = np.arange(64 * 64, dtype="float32").reshape(64, 64)  # straight into the device's memory
        theirs = await array.numpy(copy=None)
        assert theirs.ctypes.data == ours.ctypes.data
        with await array.view() as view:
            assert view.numpy().ctypes.data == ours.ctypes.data
        assert not {call.method for call in driver.calls} & {"read", "write", "copy", "load"}
        # What the device sees is what was written.
        assert await array.tobytes() == ours.tobytes()
        with pytest.raises(HandleInUse):
            await array.free()
        del ours, theirs
        gc.collect()
        await array.free()


async def test_the_simulated_m2_ultra_says_so() -> None:
    async with DriverBackend(SimulatedDriver(parse_simulation("m2-ultra"))) as backend:
        assert backend.devices[0].unified_memory
        async with await to_device(b"data", backend=backend) as array:
            assert (await array.numpy(copy=None)).tobytes() == b"data"
