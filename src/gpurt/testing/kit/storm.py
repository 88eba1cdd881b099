"""Random storms: thousands of operations, most of them cancelled at random moments, and nothing may be left."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import InvalidHandle
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, filled, payload
from gpurt.testing.kit.probe import DriverProbe
from gpurt.testing.loops import CANCELLERS, PATIENCE, Canceller, turns, until
from gpurt.types import MemoryHandle

SIZE = 2048
WAVE = 25


class Storm:
    """One storm over one backend, reproducible from its seed as far as threads allow."""

    def __init__(self, backend: GPUBackend, seed: int) -> None:
        self.backend = backend
        self.rng = random.Random(seed)
        self.devices = [device.device_id for device in backend.devices if device.usable]
        self.handles: list[MemoryHandle] = []
        self.not_freed: set[MemoryHandle] = set()
        """To be deallocated by a task that has not run yet; one cancelled before its first step never will."""
        self.outcomes: Counter[str] = Counter()

    async def run(self, operations: int) -> None:
        done = 0
        while done < operations:
            cancellers: list[Canceller] = []
            for _ in range(min(WAVE, operations - done)):
                cancellers.append(self._launch())
                await self._disturb(self.rng.choice(cancellers[-3:]))
            for canceller in cancellers:
                await self._collect(canceller)
            done += len(cancellers)

    def _launch(self) -> Canceller:
        canceller = self.rng.choice(list(CANCELLERS.values()))()
        canceller.start(self._operation())
        return canceller

    async def _disturb(self, canceller: Canceller) -> None:
        match self.rng.randrange(5):
            case 0:
                return  # let it finish
            case 1:
                pass  # at once: perhaps before its first step
            case 2 | 3:
                await turns(self.rng.randrange(1, 20))
            case _:
                await asyncio.sleep(self.rng.random() * 0.0003)
        canceller.cancel()

    async def _collect(self, canceller: Canceller) -> None:
        assert await canceller.ended_within(PATIENCE)
        if canceller.completed and isinstance(canceller.value, MemoryHandle):
            self.handles.append(canceller.value)
        if canceller.error is not None and not isinstance(canceller.error, InvalidHandle):
            # InvalidHandle is the storm's own doing: another task freed the handle first.
            raise canceller.error
        self.outcomes["completed" if canceller.completed else "cancelled" if canceller.cancelled else "other"] += 1

    def _operation(self) -> Callable[[], Awaitable[Any]]:
        backend, rng = self.backend, self.rng
        device_id = rng.choice(self.devices)
        if len(self.handles) < 4 or rng.random() < 0.25:
            return lambda: backend.allocate(device_id, rng.randrange(1, SIZE + 1))
        if len(self.handles) > 40 or rng.random() < 0.2:
            handle = self.handles.pop(rng.randrange(len(self.handles)))
            self.not_freed.add(handle)
            return lambda: self._free(handle)
        src, dst = rng.choice(self.handles), rng.choice(self.handles)
        size = rng.randrange(1, min(src.size_bytes, dst.size_bytes) + 1)
        match rng.randrange(6):
            case 0:
                return lambda: backend.copy_to_device(bytearray(size), dst)
            case 1:
                return lambda: backend.copy_from_device(src, 0, size)
            case 2:
                return lambda: backend.copy_into(src, bytearray(size))
            case 3 if src is not dst:
                return lambda: backend.copy_device_to_device(src, dst, size)
            case 4:
                return lambda: backend.get_device_memory_info(device_id)
            case _:
                return lambda: backend.synchronize(device_id)

    async def _free(self, handle: MemoryHandle) -> None:
        self.not_freed.remove(handle)
        await self.backend.deallocate(handle)

    async def end(self) -> None:
        for handle in (*self.handles, *self.not_freed):
            await self.backend.deallocate(handle)


class StormTests(ConformanceBase):
    async def test_storm(self, backend: GPUBackend, device_id: str, hold: DriverProbe) -> None:
        await self._storm(backend, device_id, hold, 1_500)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(3))
    async def test_great_storm(self, backend: GPUBackend, device_id: str, hold: DriverProbe, seed: int) -> None:
        await self._storm(backend, device_id, hold, 10_000, seed)

    async def _storm(
        self, backend: GPUBackend, device_id: str, probe: DriverProbe, operations: int, seed: int = 0
    ) -> None:
        loop = asyncio.get_running_loop()
        complaints: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        tasks = asyncio.all_tasks()
        try:
            async with filled(backend, device_id, payload(SIZE)) as witness:
                storm = Storm(backend, seed)
                await storm.run(operations)
                await storm.end()
                assert await backend.copy_from_device(witness) == payload(SIZE)
            await assert_nothing_live(backend, probe)
            # A storm in which everything or nothing was cancelled shows little; how much is depends on the machine.
            assert storm.outcomes["completed"] > operations // 50
            assert storm.outcomes["cancelled"] > operations // 50
            await until(lambda: asyncio.all_tasks() <= tasks, "tasks left behind")
            gc.collect()
            await asyncio.sleep(0)
            assert complaints == []
        finally:
            loop.set_exception_handler(None)

    @pytest.mark.slow
    async def test_soak(self, backend: GPUBackend, device_id: str, hold: DriverProbe) -> None:
        """10,000 rounds of allocate, copy, free grow the process by less than 10 MiB."""
        import psutil

        process = psutil.Process()

        async def rounds(count: int) -> None:
            content = payload(4096)
            for _ in range(count):
                async with filled(backend, device_id, content) as handle:
                    assert len(await backend.copy_from_device(handle)) == 4096

        await rounds(500)
        hold.log.clear()
        gc.collect()
        before = process.memory_info().rss
        for _ in range(20):
            await rounds(500)
            hold.log.clear()
        gc.collect()
        assert process.memory_info().rss - before < 10 << 20
        await assert_nothing_live(backend, hold)
