"""Host buffers: pooled, page-locked where the driver can."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from gpurt.errors import GPUError, OutOfMemory, OutOfRange
from gpurt.shell import DriverBackend
from gpurt.testing.kit.probe import DriverProbe
from tests.support.reference_driver import ReferenceDriver

DEVICE = "reference:0"


class Pinning(ReferenceDriver):
    """A driver with page-locked memory; here it only counts."""

    def __init__(self) -> None:
        super().__init__(chunk_bytes=1 << 14)
        self.capabilities = self.capabilities.model_copy(update={"pins_memory": True})
        self.made = 0
        self.live: list[bytearray] = []

    def host_alloc(self, nbytes: int) -> bytearray:
        if nbytes > 1 << 30:
            raise MemoryError("cannot lock that much")
        self.made += 1
        self.live.append(bytearray(nbytes))
        return self.live[-1]

    def host_memory(self, block: Any) -> memoryview:
        return memoryview(block)

    def host_free(self, block: Any) -> None:
        self.live = [other for other in self.live if other is not block]


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
async def backend(request: pytest.FixtureRequest):
    driver = Pinning() if request.param else ReferenceDriver(chunk_bytes=1 << 14)
    async with DriverBackend(driver) as backend:
        yield backend
    if request.param:
        assert driver.live == []


async def test_copies_both_ways(backend: DriverBackend) -> None:
    async with backend.allocation(DEVICE, 5000) as handle:
        with await backend.host_buffer(DEVICE, 5000) as buffer:
            assert buffer.pinned == isinstance(backend.driver, Pinning)
            assert len(buffer) == buffer.nbytes == buffer.memory.nbytes == 5000
            buffer.numpy()[:] = 7
            await backend.copy_to_device(buffer.memory, handle)
            buffer.numpy()[:] = 0
            assert await backend.copy_into(handle, buffer.memory) == 5000
            assert bytes(buffer.memory) == b"\7" * 5000
            assert buffer.numpy("float32").size == 1250
            if sys.version_info >= (3, 12):
                await backend.copy_to_device(buffer, handle)
        with pytest.raises(GPUError, match="closed"):
            _ = buffer.memory
        buffer.close()


async def test_a_closed_block_serves_the_next_buffer() -> None:
    driver = Pinning()
    async with DriverBackend(driver) as backend:
        (await backend.host_buffer(DEVICE, 5000)).close()
        await backend.synchronize(DEVICE)
        (await backend.host_buffer(DEVICE, 4990)).close()
        assert driver.made == 1
        await backend.synchronize(DEVICE)
        assert await backend.trim(DEVICE) >= 5000
        assert driver.live == []


async def test_live_buffers_never_share_memory(backend: DriverBackend) -> None:
    buffers = [await backend.host_buffer(DEVICE, 100) for _ in range(8)]
    for number, buffer in enumerate(buffers):
        buffer.numpy()[:] = number
    assert [set(buffer.memory) for buffer in buffers] == [{number} for number in range(8)]
    for buffer in buffers:
        buffer.close()


async def test_a_block_is_not_reused_while_a_cancelled_copy_reads_it() -> None:
    driver = Pinning()
    hold = DriverProbe(driver)
    async with DriverBackend(driver) as backend, backend.allocation(DEVICE, 5000) as handle:
        buffer = await backend.host_buffer(DEVICE, 5000)
        gate = hold.hold("write")
        copy = asyncio.create_task(backend.copy_to_device(buffer.memory, handle))
        await gate.entered()
        copy.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copy
        buffer.close()
        other = await backend.host_buffer(DEVICE, 5000)
        assert driver.made == 2
        gate.release()
        other.close()


@pytest.mark.parametrize("pinned", [True, False])
async def test_limit(pinned: bool) -> None:
    driver = Pinning() if pinned else ReferenceDriver()
    async with DriverBackend(driver, host_buffer_limit=1 << 16) as backend:
        first = await backend.host_buffer(DEVICE, 40_000)
        with pytest.raises(OutOfMemory) as caught:
            await backend.host_buffer(DEVICE, 40_000)
        assert caught.value.limit_bytes == 1 << 16
        first.close()
        await backend.synchronize(DEVICE)
        with await backend.host_buffer(DEVICE, 60_000):  # the kept block makes room
            pass


async def test_what_the_library_refuses_is_out_of_memory() -> None:
    async with DriverBackend(Pinning()) as backend:
        with pytest.raises(OutOfMemory, match="lock") as caught:
            await backend.host_buffer(DEVICE, 2 << 30)
        assert caught.value.requested_bytes == 2 << 30
        with await backend.host_buffer(DEVICE, 10):
            pass


@pytest.mark.parametrize("size", [0, -1, 1 << 70, 1.5, True, "8"])
async def test_bad_sizes(backend: DriverBackend, size: Any) -> None:
    with pytest.raises(OutOfRange):
        await backend.host_buffer(DEVICE, size)


async def test_a_cancelled_request_keeps_its_block() -> None:
    driver = Pinning()
    hold = DriverProbe(driver)
    async with DriverBackend(driver, host_buffer_limit=1 << 16) as backend:
        gate = hold.hold("sync")
        busy = asyncio.create_task(backend.synchronize(DEVICE))
        await gate.entered()
        request = asyncio.create_task(backend.host_buffer(DEVICE, 50_000))
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        gate.release()
        await busy
        await backend.synchronize(DEVICE)
        with await backend.host_buffer(DEVICE, 50_000):
            pass


async def test_closing_after_shutdown_is_harmless() -> None:
    backend = DriverBackend(Pinning())
    await backend.initialize()
    buffer = await backend.host_buffer(DEVICE, 100)
    await backend.shutdown()
    buffer.close()
