"""Lifecycle, event loops, and what is left when a backend goes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import BackendClosed, InvalidHandle, WrongLoop
from gpurt.testing.kit.base import ConformanceBase, payload, shutdown_quietly, usage
from gpurt.testing.kit.probe import DriverProbe
from gpurt.testing.loops import until
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend


def _new_threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("gpurt:")]


class LifecycleTests(ConformanceBase):
    async def test_initialize_again_changes_nothing(self, backend: GPUBackend, device_id: str) -> None:
        devices = backend.devices
        async with backend.allocation(device_id, 64) as handle:
            await backend.copy_to_device(b"k" * 64, handle)
            await backend.initialize()
            assert await backend.copy_from_device(handle) == b"k" * 64
        assert [d.device_id for d in backend.devices] == [d.device_id for d in devices]

    async def test_concurrent_initialize(self, backend: GPUBackend) -> None:
        await backend.shutdown()
        await asyncio.gather(*(backend.initialize() for _ in range(4)))
        assert backend.devices

    async def test_shutdown_is_idempotent(self, backend: GPUBackend) -> None:
        await backend.shutdown()
        await backend.shutdown()
        await asyncio.gather(backend.shutdown(), backend.shutdown(timeout=1))

    async def test_shutdown_without_timeout(self, backend: GPUBackend) -> None:
        await backend.shutdown(timeout=None)
        with pytest.raises(BackendClosed):
            await backend.list_devices()

    async def test_use_after_shutdown(self, backend: GPUBackend, device_id: str) -> None:
        handle = await backend.allocate(device_id, 64)
        await shutdown_quietly(backend)
        for call in (
            lambda: backend.list_devices(),
            lambda: backend.get_device(device_id),
            lambda: backend.allocate(device_id, 64),
            lambda: backend.deallocate(handle),
            lambda: backend.copy_to_device(b"x", handle),
            lambda: backend.copy_from_device(handle),
            lambda: backend.copy_into(handle, bytearray(4)),
            lambda: backend.copy_device_to_device(handle, handle, 1, dst_offset_bytes=8),
            lambda: backend.synchronize(device_id),
            lambda: backend.get_device_memory_info(device_id),
            lambda: backend.get_device_temperature(device_id),
            lambda: backend.get_device_power_usage(device_id),
            lambda: backend.get_device_clock_rate(device_id),
        ):
            with pytest.raises(BackendClosed):
                await call()

    async def test_handle_of_an_earlier_life(self, backend: GPUBackend, device_id: str) -> None:
        handle = await backend.allocate(device_id, 64)
        await shutdown_quietly(backend)
        await backend.initialize()
        with pytest.raises(InvalidHandle):
            await backend.copy_from_device(handle)

    async def test_context_manager(self, backend: GPUBackend) -> None:
        await backend.shutdown()
        async with backend as entered:
            assert entered is backend
            assert await backend.list_devices()
        with pytest.raises(BackendClosed):
            await backend.list_devices()

    async def test_another_loop_is_refused(self, backend: GPUBackend, device_id: str) -> None:
        handle = await backend.allocate(device_id, 64)

        def elsewhere() -> None:
            async def use() -> None:
                for call in (
                    lambda: backend.initialize(),
                    lambda: backend.allocate(device_id, 64),
                    lambda: backend.copy_from_device(handle),
                    lambda: backend.deallocate(handle),
                    lambda: backend.synchronize(device_id),
                ):
                    with pytest.raises(WrongLoop):
                        await call()

            asyncio.run(use())

        await asyncio.to_thread(elsewhere)
        await backend.deallocate(handle)

    async def test_moves_to_another_loop_after_shutdown(self, backend: GPUBackend, device_id: str) -> None:
        await backend.shutdown()

        def elsewhere() -> bytes:
            async def use() -> bytes:
                async with backend, backend.allocation(device_id, 8) as handle:
                    await backend.copy_to_device(b"elsewher", handle)
                    return await backend.copy_from_device(handle)

            return asyncio.run(use())

        assert await asyncio.to_thread(elsewhere) == b"elsewher"
        await backend.initialize()
        async with backend.allocation(device_id, 8) as handle:
            await backend.copy_to_device(b"and back", handle)
            assert await backend.copy_from_device(handle) == b"and back"

    async def test_many_lives_leave_no_thread(self, backend: GPUBackend, device_id: str) -> None:
        await backend.shutdown()
        before = set(threading.enumerate())
        for _ in range(5):
            async with backend, backend.allocation(device_id, 16) as handle:
                await backend.copy_to_device(payload(16), handle)
        await until(lambda: not _new_threads(before), f"threads left behind: {_new_threads(before)}")

    async def test_shutdown_reports_live_handles(self, backend: GPUBackend, device_id: str) -> None:
        leaked: list[MemoryHandle] = [await backend.allocate(device_id, 1000) for _ in range(3)]
        with pytest.warns(ResourceWarning, match="3"):
            await backend.shutdown()
        assert len(leaked) == 3

    async def test_shutdown_without_leaks_is_silent(
        self, backend: GPUBackend, device_id: str, recwarn: pytest.WarningsRecorder
    ) -> None:
        async with backend.allocation(device_id, 1000):
            pass
        await backend.shutdown()
        assert [w for w in recwarn if issubclass(w.category, ResourceWarning)] == []

    async def test_shutdown_frees_everything(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        for size in (1, 100, 4096):
            await backend.allocate(device_id, size)
        assert hold.live == 3
        await shutdown_quietly(backend)
        assert hold.live == 0
        assert hold.counts["close"] == 1

    async def test_shutdown_finishes_submitted_work(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        handle = await backend.allocate(device_id, 64)
        gate = hold.hold("write")
        write = asyncio.create_task(backend.copy_to_device(b"w" * 64, handle))
        await gate.entered()
        closing = asyncio.create_task(shutdown_quietly(backend))
        await asyncio.sleep(0.01)
        assert not closing.done()
        assert hold.counts["close"] == 0
        gate.release()
        await write
        await closing
        assert hold.log.index(("write", "exit")) < hold.log.index(("close", "enter"))

    async def test_cancelled_shutdown_goes_on(self, backend: GPUBackend, device_id: str, hold: DriverProbe) -> None:
        handle = await backend.allocate(device_id, 64)
        gate = hold.hold("write")
        write = asyncio.create_task(backend.copy_to_device(b"w" * 64, handle))
        await gate.entered()
        closing = asyncio.create_task(shutdown_quietly(backend))
        await asyncio.sleep(0.01)
        closing.cancel()
        gate.release()
        await asyncio.wait({closing, write})
        await shutdown_quietly(backend)
        assert hold.counts["close"] == 1
        assert hold.live == 0

    async def test_driver_sees_its_threads_as_promised(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        await backend.shutdown()
        hold.threads.clear()  # the earlier life had threads of its own
        await backend.initialize()
        size = 4096

        async def one(seed: int) -> None:
            async with backend.allocation(device_id, size) as handle:
                await backend.copy_to_device(payload(size, seed), handle)
                assert await backend.copy_from_device(handle) == payload(size, seed)
                await backend.synchronize(device_id)

        await asyncio.gather(*(one(seed) for seed in range(16)))
        data = ("alloc", "free", "write", "read", "copy", "sync")
        every = {thread for threads in hold.threads.values() for thread in threads}
        of_data = {thread for (name, _), threads in hold.threads.items() if name in data for thread in threads}
        match shell.driver.capabilities.threading:
            case "backend":
                assert len(every) == 1
            case "device":
                assert len(of_data) == 1
            case _:
                pass
        assert threading.get_ident() not in every

    async def test_ledger_starts_empty_in_every_life(self, backend: GPUBackend, device_id: str) -> None:
        if usage(backend, device_id) is None:
            pytest.skip("the backend has no ledger")
        await backend.allocate(device_id, 512)
        await shutdown_quietly(backend)
        await backend.initialize()
        assert usage(backend, device_id).current_count == 0
