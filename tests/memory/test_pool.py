"""The pool: by itself against a model, and under a backend whose driver can be held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.errors import OutOfMemory
from gpurt.runtime.allocator import Block, Pool, size_class
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.kit.probe import DriverProbe
from tests.support.reference_driver import ReferenceDriver

DEVICE = "reference:0"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "block"),
    [(1, 512), (512, 512), (513, 1024), (4097, 4608), (MIB - 1, MIB), (MIB, MIB), (MIB + 1, MIB + MIB // 8)],
)
def test_classes(nbytes: int, block: int) -> None:
    assert size_class(nbytes) == block


@given(st.integers(1, 1 << 44))
def test_a_class_wastes_an_eighth_at_most(nbytes: int) -> None:
    block = size_class(nbytes)
    assert nbytes <= block < nbytes + max(512, nbytes / 8 + 1)
    assert size_class(block) == block


def test_a_block_that_could_never_be_kept_is_not_rounded_up() -> None:
    assert Pool(MIB, 1).block_bytes(5 * MIB + 1) == 5 * MIB + 1
    assert Pool(0, 1).block_bytes(1) == 1
    assert Pool(0, 256).block_bytes(1) == 256
    assert Pool(MIB, 768).block_bytes(100) == 768


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["take", "give", "evict"]), st.integers(1, 6)), max_size=80),
    limit=st.integers(0, 12),
)
def test_a_block_is_in_one_place_and_the_books_are_right(steps: list[tuple[str, int]], limit: int) -> None:
    pool = Pool(limit * 512, 512)
    inside: set[Block] = set()
    outside: list[Block] = []
    for step, size in steps:
        size *= 512
        if step == "take":
            block = pool.take(size)
            if block is None:
                assert size not in {each.nbytes for each in inside}
                outside.append(Block(0, size, None))
            else:
                assert block.nbytes == size
                inside.remove(block)
                outside.append(block)
        elif step == "give" and outside:
            block = outside.pop()
            fits = sum(each.nbytes for each in inside) + block.nbytes <= limit * 512
            assert pool.give(block) == fits
            if fits:
                inside.add(block)
        elif step == "evict":
            blocks = pool.evict(size)
            inside -= set(blocks)
            assert sum(block.nbytes for block in blocks) >= size or not inside
        statistics = pool.statistics()
        assert statistics.cached_bytes == sum(each.nbytes for each in inside) <= limit * 512
        assert statistics.cached_count == len(inside)


@pytest.fixture
async def hold():
    return DriverProbe(ReferenceDriver(chunk_bytes=1 << 14))


@pytest.fixture
async def backend(hold: DriverProbe):
    backend = DriverBackend(hold.driver, pool_bytes=8 * MIB)
    await backend.initialize()
    yield backend
    hold.release()
    await backend.shutdown()
    assert hold.live == 0


async def test_a_freed_block_serves_the_next_allocation_without_the_driver(
    backend: DriverBackend, hold: DriverProbe
) -> None:
    first = await backend.allocate(DEVICE, 1000)
    await backend.deallocate(first)
    calls = hold.counts["alloc"]
    second = await backend.allocate(DEVICE, 900)  # same class
    assert hold.counts["alloc"] == calls
    assert second.handle_id != first.handle_id
    assert second.size_bytes == 900
    statistics = backend.pool_statistics(DEVICE)
    assert (statistics.hits, statistics.misses, statistics.cached_bytes) == (1, 1, 0)
    await backend.deallocate(second)


async def test_a_hit_never_leaves_the_loops_thread(backend: DriverBackend) -> None:
    await backend.deallocate(await backend.allocate(DEVICE, 4096))
    # A coroutine that ends at its first step has not waited for anything.
    with pytest.raises(StopIteration) as ended:
        backend.allocate(DEVICE, 4096).send(None)
    with pytest.raises(StopIteration):
        backend.deallocate(ended.value.value).send(None)


async def test_a_block_with_work_outstanding_is_not_reused(backend: DriverBackend, hold: DriverProbe) -> None:
    handle = await backend.allocate(DEVICE, 4096)
    gate = hold.hold("write")
    write = asyncio.create_task(backend.copy_to_device(b"old" * 1365, handle))
    await gate.entered()
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    free = asyncio.create_task(backend.deallocate(handle))
    await asyncio.sleep(0)
    fresh = await backend.allocate(DEVICE, 4096)
    assert hold.live == 2
    gate.release()
    await free
    await backend.copy_to_device(b"n" * 4096, fresh)
    assert await backend.copy_from_device(fresh) == b"n" * 4096
    assert backend.pool_statistics(DEVICE).cached_count == 1
    await backend.deallocate(fresh)


async def test_live_allocations_of_one_size_never_share_memory(backend: DriverBackend) -> None:
    handles = [await backend.allocate(DEVICE, 512) for _ in range(50)]
    for handle in handles[::2]:
        await backend.deallocate(handle)
    kept = handles[1::2] + [await backend.allocate(DEVICE, 512) for _ in range(25)]
    for number, handle in enumerate(kept):
        await backend.copy_to_device(bytes([number]) * 512, handle)
    for number, handle in enumerate(kept):
        assert await backend.copy_from_device(handle) == bytes([number]) * 512
        await backend.deallocate(handle)


async def test_a_full_pool_frees(backend: DriverBackend, hold: DriverProbe) -> None:
    handles = [await backend.allocate(DEVICE, 2 * MIB) for _ in range(6)]
    for handle in handles:
        await backend.deallocate(handle)
    assert hold.live == 4
    assert backend.pool_statistics(DEVICE).cached_bytes == 8 * MIB


async def test_trim_gives_everything_back(backend: DriverBackend, hold: DriverProbe) -> None:
    await backend.deallocate(await backend.allocate(DEVICE, 2 * MIB))
    info = await backend.get_device_memory_info(DEVICE)
    assert info.reserved_bytes >= 2 * MIB
    assert info.total_bytes == info.used_bytes + info.available_bytes + info.reserved_bytes
    assert await backend.trim() >= 2 * MIB
    assert hold.live == 0
    assert backend.pool_statistics(DEVICE).cached_bytes == 0


async def test_cached_blocks_make_room_under_a_limit(hold: DriverProbe) -> None:
    async with DriverBackend(hold.driver, pool_bytes=64 * MIB, memory_limit=10 * MIB) as backend:
        await backend.deallocate(await backend.allocate(DEVICE, 6 * MIB))
        large = await backend.allocate(DEVICE, 8 * MIB)
        assert hold.live == 1
        with pytest.raises(OutOfMemory) as caught:
            await backend.allocate(DEVICE, 4 * MIB)
        assert caught.value.limit_bytes == 10 * MIB
        await backend.deallocate(large)


async def test_cached_blocks_make_room_in_the_library(backend: DriverBackend, hold: DriverProbe) -> None:
    await backend.deallocate(await backend.allocate(DEVICE, 2 * MIB))
    hold.fail("alloc", MemoryError("full"))  # the next call only
    handle = await backend.allocate(DEVICE, 4 * MIB)
    assert hold.live == 1
    assert backend.pool_statistics(DEVICE).cached_count == 0
    await backend.deallocate(handle)


async def test_a_block_is_rounded_up_only_where_there_is_room(hold: DriverProbe) -> None:
    async with DriverBackend(hold.driver, pool_bytes=8 * MIB) as backend:
        hold.fail("alloc", MemoryError("full"))
        handle = await backend.allocate(DEVICE, MIB + 1)
        await backend.deallocate(handle)
        assert backend.pool_statistics(DEVICE).cached_bytes == MIB + 1


async def test_a_cancelled_allocation_that_appears_late_is_kept(backend: DriverBackend, hold: DriverProbe) -> None:
    gate = hold.hold("alloc")
    task = asyncio.create_task(backend.allocate(DEVICE, 4096))
    await gate.entered()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.release()
    await backend.synchronize(DEVICE)
    assert backend.pool_statistics(DEVICE).cached_count == 1
    usage = backend.ledger.usage(DEVICE)
    assert (usage.committed_bytes, usage.current_count) == (0, 0)


@pytest.mark.parametrize("pool_bytes", [-1])
def test_bad_pool(pool_bytes: Any) -> None:
    with pytest.raises(ValueError, match="pool_bytes"):
        DriverBackend(ReferenceDriver(), pool_bytes=pool_bytes)
