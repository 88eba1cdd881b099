"""Allocation, handles, exhaustion, accounting."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import InvalidHandle, OutOfMemory, OutOfRange
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, payload, usage
from gpurt.testing.kit.probe import DriverProbe
from gpurt.types import Capabilities, MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend

USES: dict[str, Callable[[GPUBackend, Any, Any], Awaitable[Any]]] = {
    "deallocate": lambda backend, handle, _: backend.deallocate(handle),
    "copy_to_device": lambda backend, handle, _: backend.copy_to_device(b"x" * 16, handle),
    "copy_from_device": lambda backend, handle, _: backend.copy_from_device(handle),
    "copy_into": lambda backend, handle, _: backend.copy_into(handle, bytearray(16)),
    "copy_device_to_device_src": lambda backend, handle, good: backend.copy_device_to_device(handle, good, 16),
    "copy_device_to_device_dst": lambda backend, handle, good: backend.copy_device_to_device(good, handle, 16),
}
"""Every way to use a handle; the last argument is another, valid one."""


class MemoryTests(ConformanceBase):
    @pytest.mark.parametrize("size", [1, 2, 255, 256, 4095, 4097, (1 << 20) + 1])
    async def test_allocation_has_its_size(self, backend: GPUBackend, device_id: str, size: int) -> None:
        handle = await backend.allocate(device_id, size)
        assert handle.size_bytes == size
        assert handle.device_id == device_id
        assert len(await backend.copy_from_device(handle)) == size
        await backend.deallocate(handle)

    @pytest.mark.parametrize(
        "size", [0, -1, -(1 << 70), True, False, "64", 64.0, None, b"64"], ids=lambda size: repr(size)[:12]
    )
    async def test_size_that_is_not_a_size(self, backend: GPUBackend, device_id: str, size: Any) -> None:
        with pytest.raises(OutOfRange):
            await backend.allocate(device_id, size)

    async def test_exhaustion_says_how_much(self, backend: GPUBackend, device_id: str) -> None:
        info = await backend.get_device_memory_info(device_id)
        for requested in (info.total_bytes * 4, 1 << 62):
            with pytest.raises((OutOfMemory, OutOfRange)) as caught:
                await backend.allocate(device_id, requested)
            if isinstance(caught.value, OutOfMemory):
                error = caught.value
                assert isinstance(error, MemoryError)
                assert error.requested_bytes == requested
                assert error.device_id == device_id
                known = (error.free_bytes, error.total_bytes, error.limit_bytes)
                assert any(value is not None for value in known)
                assert all(value is None or 0 <= value < requested for value in known)
        async with backend.allocation(device_id, 64) as handle:
            await backend.copy_to_device(b"still ok" * 8, handle)

    async def test_a_size_beyond_any_integer_of_c(self, backend: GPUBackend, device_id: str) -> None:
        with pytest.raises((OutOfMemory, OutOfRange)):
            await backend.allocate(device_id, 1 << 70)

    async def test_handles_are_unique_and_frozen(self, backend: GPUBackend, device_id: str) -> None:
        handles = await asyncio.gather(*(backend.allocate(device_id, 1) for _ in range(200)))
        assert len({handle.handle_id for handle in handles}) == 200
        with pytest.raises(dataclasses.FrozenInstanceError):
            handles[0].size_bytes = 2  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.gather(*(backend.deallocate(handle) for handle in handles))

    async def test_handle_survives_pickling_within_the_process(self, backend: GPUBackend, device_id: str) -> None:
        handle = await backend.allocate(device_id, 8)
        twin: MemoryHandle = pickle.loads(pickle.dumps(handle))
        await backend.copy_to_device(b"pickled!", twin)
        assert await backend.copy_from_device(handle) == b"pickled!"
        await backend.deallocate(twin)
        with pytest.raises(InvalidHandle):
            await backend.deallocate(handle)

    @pytest.mark.parametrize("use", list(USES))
    async def test_freed_handle(self, backend: GPUBackend, device_id: str, use: str) -> None:
        async with backend.allocation(device_id, 64) as good:
            handle = await backend.allocate(device_id, 64)
            await backend.deallocate(handle)
            with pytest.raises(InvalidHandle):
                await USES[use](backend, handle, good)

    @pytest.mark.parametrize("use", list(USES))
    async def test_bad_handle(self, backend: GPUBackend, device_id: str, use: str) -> None:
        async with backend.allocation(device_id, 64) as good:
            bad: list[Any] = [
                dataclasses.replace(good, generation=good.generation ^ 1),
                dataclasses.replace(good, handle_id=good.handle_id + 1_000_000),
                dataclasses.replace(good, size_bytes=good.size_bytes * 2),
                dataclasses.replace(good, device_id=good.device_id + "1"),
                None,
                "handle",
                good.handle_id,
            ]
            for handle in bad:
                with pytest.raises(InvalidHandle):
                    await USES[use](backend, handle, good)
            assert len(await backend.copy_from_device(good)) == 64

    @pytest.mark.parametrize("use", list(USES))
    async def test_bad_handle_reaches_no_driver(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe, use: str
    ) -> None:
        good = await backend.allocate(device_id, 64)
        calls = dict(hold.counts)
        stale = dataclasses.replace(good, generation=good.generation ^ 1)
        with pytest.raises(InvalidHandle):
            await USES[use](backend, stale, good)
        assert dict(hold.counts) == calls
        await backend.deallocate(good)

    async def test_concurrent_double_free(self, backend: GPUBackend, device_id: str) -> None:
        handle = await backend.allocate(device_id, 64)
        results = await asyncio.gather(*(backend.deallocate(handle) for _ in range(8)), return_exceptions=True)
        assert results.count(None) == 1
        assert sum(isinstance(result, InvalidHandle) for result in results) == 7

    async def test_handle_is_dead_as_of_the_call(self, backend: GPUBackend, device_id: str) -> None:
        handle = await backend.allocate(device_id, 64)
        freeing = asyncio.create_task(backend.deallocate(handle))
        await asyncio.sleep(0)
        with pytest.raises(InvalidHandle):
            await backend.copy_from_device(handle)
        await freeing

    async def test_allocation_is_freed_on_error(self, backend: GPUBackend, device_id: str) -> None:
        seen: list[MemoryHandle] = []

        async def fail() -> None:
            async with backend.allocation(device_id, 64) as handle:
                seen.append(handle)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        with pytest.raises(InvalidHandle):
            await backend.deallocate(seen[0])

    async def test_live_allocations_never_alias(self, backend: GPUBackend, device_id: str) -> None:
        size = 512
        held: dict[int, MemoryHandle] = {}
        for round_ in range(60):
            held[round_] = await backend.allocate(device_id, size)
            await backend.copy_to_device(payload(size, round_), held[round_])
            if round_ % 3 == 2:
                await backend.deallocate(held.pop(round_ - 1))
        for round_, handle in held.items():
            assert await backend.copy_from_device(handle) == payload(size, round_)
            await backend.deallocate(handle)


class AccountingTests(ConformanceBase):
    async def test_ledger_follows_every_allocation(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, capabilities: Capabilities
    ) -> None:
        alignment = capabilities.alignment_bytes
        sizes = [alignment * factor for factor in (1, 7, 100)]
        before = shell.ledger.usage(device_id)
        handles = [await backend.allocate(device_id, size) for size in sizes]
        during = shell.ledger.usage(device_id)
        assert during.current_bytes - before.current_bytes == sum(sizes)
        assert during.current_count - before.current_count == 3
        assert during.peak_bytes >= during.current_bytes
        await backend.deallocate(handles.pop())
        assert shell.ledger.usage(device_id).current_bytes - before.current_bytes == sum(sizes[:2])
        for handle in handles:
            await backend.deallocate(handle)
        after = shell.ledger.usage(device_id)
        assert after.current_bytes == before.current_bytes
        assert after.current_count == before.current_count
        assert after.total_bytes - before.total_bytes == sum(sizes)
        assert after.total_count - before.total_count == 3
        assert after.peak_bytes == during.peak_bytes

    async def test_failed_allocations_leave_no_trace(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        before = shell.ledger.usage(device_id)
        # More than any ladder of retries, so that the failure is final.
        hold.fail("alloc", *(MemoryError("no more") for _ in range(8)))
        with pytest.raises(OutOfMemory):
            await backend.allocate(device_id, 4096)
        assert shell.ledger.usage(device_id).current_bytes == before.current_bytes
        assert shell.ledger.usage(device_id).total_bytes == before.total_bytes
        assert shell.ledger.usage(device_id).reserved_bytes == 0
        assert hold.live == 0

    async def test_ledger_equals_the_driver(self, backend: GPUBackend, shell: DriverBackend, hold: DriverProbe) -> None:
        devices = [device.device_id for device in backend.devices]
        handles = [await backend.allocate(devices[n % len(devices)], 64 * (n + 1)) for n in range(20)]
        assert sum(usage(backend, name).current_count for name in devices) == hold.live == 20
        for handle in handles[::2]:
            await backend.deallocate(handle)
        assert sum(usage(backend, name).current_count for name in devices) == 10
        for handle in handles[1::2]:
            await backend.deallocate(handle)
        await assert_nothing_live(backend, hold)

    async def test_concurrent_allocations_cannot_overshoot_a_limit(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str
    ) -> None:
        from gpurt.runtime.backend import DriverBackend

        await backend.shutdown()
        limited = DriverBackend(shell.driver, memory_limit=1 << 20)
        async with limited:
            results = await asyncio.gather(
                *(limited.allocate(device_id, 600_000) for _ in range(10)), return_exceptions=True
            )
            granted = [result for result in results if isinstance(result, MemoryHandle)]
            refused = [result for result in results if isinstance(result, OutOfMemory)]
            assert len(granted) == 1
            assert len(refused) == 9
            assert all(error.limit_bytes == 1 << 20 and error.requested_bytes == 600_000 for error in refused)
            await limited.deallocate(granted[0])
            async with limited.allocation(device_id, 600_000):
                assert limited.ledger.usage(device_id).peak_bytes <= 1 << 20
