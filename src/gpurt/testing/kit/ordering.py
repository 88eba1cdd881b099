"""Order: per handle as submitted, other handles free to overlap, synchronize waits for what came before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gpurt.backend import GPUBackend
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, filled, keeps_freed, payload
from gpurt.testing.kit.probe import REQUEST_ID, DriverProbe, Gate
from gpurt.testing.loops import turns
from gpurt.types import Capabilities, MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend

MIB = 1 << 20


async def passes(rest: Coroutine[Any, Any, bool], gate: Gate, *, at_once: bool) -> None:
    """``rest`` ends beside the call that ``gate`` holds, or, where the driver takes one call at a time, after it.

    It returns whether that call had ended by then.
    """
    task = asyncio.create_task(rest)
    async with asyncio.timeout(10):
        if at_once:
            assert not await task
        else:
            await turns(20)
            assert not task.done()
        gate.release()
        await task


class OrderingTests(ConformanceBase):
    async def test_submission_is_the_call(self, backend: GPUBackend, device_id: str) -> None:
        async with backend.allocation(device_id, 256) as handle:
            first = asyncio.create_task(backend.copy_to_device(b"1" * 256, handle))
            second = asyncio.create_task(backend.copy_to_device(b"2" * 256, handle))
            third = asyncio.create_task(backend.copy_from_device(handle))
            # Awaited in the opposite order: order is that of the calls.
            assert await third == b"2" * 256
            await second
            await first
            assert await backend.copy_from_device(handle) == b"2" * 256

    async def test_writes_and_reads_of_all_sizes_keep_order(self, backend: GPUBackend, device_id: str) -> None:
        # Small and large copies take different lanes; on one handle they must not overtake each other.
        size = 3 * MIB
        rng = random.Random(3)
        model = bytearray(size)
        async with filled(backend, device_id, model) as handle:
            reads: list[tuple[asyncio.Task[bytes], bytes]] = []
            writes: list[asyncio.Task[None]] = []
            for step in range(40):
                count = rng.choice([1, 64, 4096, 2 * MIB])
                offset = rng.randrange(size - count)
                if step % 2:
                    content = bytes([step]) * count
                    model[offset : offset + count] = content
                    writes.append(asyncio.create_task(backend.copy_to_device(content, handle, offset)))
                else:
                    read = asyncio.create_task(backend.copy_from_device(handle, offset, count))
                    reads.append((read, bytes(model[offset : offset + count])))
                await asyncio.sleep(0)
            for read, expected in reads:
                same = await read == expected
                assert same
            await asyncio.gather(*writes)

    async def test_chain_of_device_copies(self, backend: GPUBackend, device_id: str) -> None:
        content = payload(1024)
        handles = [await backend.allocate(device_id, 1024) for _ in range(8)]
        tasks = [asyncio.create_task(backend.copy_to_device(content, handles[0]))]
        for src, dst in pairwise(handles):
            tasks.append(asyncio.create_task(backend.copy_device_to_device(src, dst, 1024)))
        last = asyncio.create_task(backend.copy_from_device(handles[-1]))
        frees = [asyncio.create_task(backend.deallocate(handle)) for handle in handles]
        assert await last == content
        await asyncio.gather(*tasks, *frees)

    async def test_crossing_device_copies_do_not_deadlock(
        self, backend: GPUBackend, device_id: str, second_device_id: str
    ) -> None:
        async with (
            filled(backend, device_id, b"a" * 512) as left,
            filled(backend, second_device_id, b"b" * 512) as right,
        ):
            copies = [
                backend.copy_device_to_device(left, right, 256)
                if step % 2
                else backend.copy_device_to_device(right, left, 256, src_offset_bytes=256, dst_offset_bytes=256)
                for step in range(200)
            ]
            async with asyncio.timeout(30):
                await asyncio.gather(*copies)
            assert await backend.copy_from_device(right, 0, 256) == b"a" * 256
            assert await backend.copy_from_device(left, 256, 256) == b"b" * 256

    async def test_free_waits_for_a_copy_under_way(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        handle = await backend.allocate(device_id, 64)
        gate = hold.hold("write")
        write = asyncio.create_task(backend.copy_to_device(bytes(64), handle))
        await gate.entered()
        free = asyncio.create_task(backend.deallocate(handle))
        await turns(10)
        assert hold.counts["free"] == 0
        # Nor is it another's: where freed blocks are kept, the next one to ask gets a new one.
        other = asyncio.create_task(backend.allocate(device_id, 64))
        await turns(10)
        gate.release()
        await asyncio.gather(write, free)
        await backend.deallocate(await other)
        assert hold.counts["alloc"] == 2
        if not keeps_freed(backend, device_id):
            assert hold.log.index(("write", "exit")) < hold.log.index(("free", "enter"))

    async def test_read_waits_for_a_write_under_way(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        async with backend.allocation(device_id, 64) as handle:
            gate = hold.hold("write")
            write = asyncio.create_task(backend.copy_to_device(b"n" * 64, handle))
            await gate.entered()
            read = asyncio.create_task(backend.copy_from_device(handle))
            await turns(10)
            assert hold.counts["read"] == 0
            gate.release()
            assert await read == b"n" * 64
            await write

    async def test_failed_copy_lets_the_next_one_go(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        async with backend.allocation(device_id, 64) as handle:
            hold.fail("write", OSError("boom"))
            results = await asyncio.gather(
                backend.copy_to_device(b"1" * 64, handle),
                backend.copy_to_device(b"2" * 64, handle),
                backend.copy_from_device(handle),
                return_exceptions=True,
            )
            assert isinstance(results[0], RuntimeError)
            assert results[1:] == [None, b"2" * 64]

    async def test_synchronize_waits_for_what_was_submitted(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        async with backend.allocation(device_id, 64) as handle:
            gate = hold.hold("write")
            write = asyncio.create_task(backend.copy_to_device(b"s" * 64, handle))
            await gate.entered()
            sync = asyncio.create_task(backend.synchronize(device_id))
            done, _ = await asyncio.wait({sync}, timeout=0.02)
            assert not done
            gate.release()
            await sync
            # The write is over when the synchronisation is, not merely about to be.
            assert ("write", "exit") in hold.log
            await write

    async def test_synchronize_includes_cancelled_work(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        async with backend.allocation(device_id, 64) as handle:
            gate = hold.hold("write")
            write = asyncio.create_task(backend.copy_to_device(b"s" * 64, handle))
            await gate.entered()
            write.cancel()
            await asyncio.wait({write})
            sync = asyncio.create_task(backend.synchronize(device_id))
            done, _ = await asyncio.wait({sync}, timeout=0.02)
            assert not done
            gate.release()
            await sync

    async def test_other_handles_overlap(
        self, backend: GPUBackend, device_id: str, capabilities: Capabilities, hold: DriverProbe
    ) -> None:
        """Where the driver takes one call at a time, everything is done in the order in which it was asked for."""
        at_once = capabilities.threading == "queue"
        async with (
            backend.allocation(device_id, 4 * MIB) as busy,
            backend.allocation(device_id, 4 * MIB) as free,
        ):
            gate = hold.hold("write")
            load = asyncio.create_task(backend.copy_to_device(bytes(4 * MIB), busy))
            await gate.entered()

            async def rest() -> bool:
                # A small write, both kinds of read, an allocation and a reading pass a large load.
                await backend.copy_to_device(b"small", free)
                assert await backend.copy_from_device(free, 0, 5) == b"small"
                assert len(await backend.copy_from_device(free)) == 4 * MIB
                async with backend.allocation(device_id, 64):
                    pass
                await backend.get_device_memory_info(device_id)
                return load.done()

            await passes(rest(), gate, at_once=at_once)
            await load

    async def test_other_devices_overlap(
        self,
        backend: GPUBackend,
        device_id: str,
        second_device_id: str,
        capabilities: Capabilities,
        hold: DriverProbe,
    ) -> None:
        # Of one device both copies are small, and those have one lane.
        at_once = capabilities.threading != "backend" and device_id != second_device_id
        async with (
            backend.allocation(device_id, 64) as busy,
            backend.allocation(second_device_id, 64) as free,
        ):
            gate = hold.hold("write")
            load = asyncio.create_task(backend.copy_to_device(bytes(64), busy))
            await gate.entered()

            async def rest() -> bool:
                await backend.copy_to_device(b"other", free)
                assert await backend.copy_from_device(free, 0, 5) == b"other"
                if device_id != second_device_id:
                    await backend.synchronize(second_device_id)
                return load.done()

            await passes(rest(), gate, at_once=at_once)
            await load

    async def test_context_variables_reach_the_driver(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        async with backend.allocation(device_id, 8) as handle:
            token = REQUEST_ID.set("request-7")
            await backend.copy_to_device(bytes(8), handle)
            REQUEST_ID.reset(token)
            assert hold.contexts["write"] == "request-7"
            await backend.copy_to_device(bytes(8), handle)
            assert hold.contexts["write"] is None

    async def test_back_pressure_waits_and_keeps_order(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        from gpurt.runtime.backend import DriverBackend

        await backend.shutdown()
        async with DriverBackend(shell.driver, max_pending=2) as bounded:
            handle = await bounded.allocate(device_id, 64)
            gate = hold.hold("write")
            writes = [asyncio.create_task(bounded.copy_to_device(bytes([n]) * 64, handle)) for n in range(20)]
            await gate.entered()
            last = asyncio.create_task(bounded.copy_from_device(handle))
            free = asyncio.create_task(bounded.deallocate(handle))
            await turns(5)
            assert not any(task.done() for task in writes)
            gate.release()
            await asyncio.gather(*writes, free)
            assert await last == bytes([19]) * 64
            await assert_nothing_live(bounded, hold)


class ConcurrencyTests(ConformanceBase):
    async def test_many_tasks(self, backend: GPUBackend, device_id: str) -> None:
        devices = [device.device_id for device in backend.devices if device.usable]

        async def work(seed: int) -> None:
            content = payload(1000 + seed, seed)
            for step in range(4):
                async with filled(backend, devices[(seed + step) % len(devices)], content) as handle:
                    target = bytearray(len(content))
                    await backend.copy_into(handle, target)
                    assert target == content

        async with asyncio.TaskGroup() as group:
            for seed in range(64):
                group.create_task(work(seed))
        await assert_nothing_live(backend)

    async def test_many_writers_of_one_handle(self, backend: GPUBackend, device_id: str) -> None:
        async with backend.allocation(device_id, 64 * 128) as handle:
            await asyncio.gather(
                *(backend.copy_to_device(bytes([n]) * 128, handle, n * 128) for n in range(64)),
            )
            expected = b"".join(bytes([n]) * 128 for n in range(64))
            assert await backend.copy_from_device(handle) == expected

    async def test_parallel_allocations_come_back_distinct(self, backend: GPUBackend, device_id: str) -> None:
        handles: list[MemoryHandle] = await asyncio.gather(*(backend.allocate(device_id, 128) for _ in range(64)))
        await asyncio.gather(*(backend.copy_to_device(bytes([n]) * 128, h) for n, h in enumerate(handles)))
        contents = await asyncio.gather(*(backend.copy_from_device(h) for h in handles))
        assert contents == [bytes([n]) * 128 for n in range(64)]
        await asyncio.gather(*(backend.deallocate(h) for h in handles))
