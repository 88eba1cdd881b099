"""Host buffers: pooled, page-locked where the driver can."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from gpurt.errors import GPUError, OutOfMemory, OutOfRange, TransferFailed, Unsupported
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver
from gpurt.testing.kit.probe import DriverProbe
from tests.support.reference_driver import ReferenceDriver

DEVICE = "reference:0"


class Pinning(ReferenceDriver):
    """A driver with page-locked memory; here it only counts."""

    def __init__(self, most: int = 1 << 30) -> None:
        super().__init__(chunk_bytes=1 << 14)
        self.capabilities = self.capabilities.model_copy(update={"pins_memory": True})
        self.most = most
        self.made = 0
        self.live: list[bytearray] = []

    def host_alloc(self, nbytes: int) -> bytearray:
        if nbytes + sum(map(len, self.live)) > self.most:
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


# Whoever forgets one, and whoever keeps an array of one


def limited(pinned: bool, **options: Any) -> DriverBackend:
    return DriverBackend(Pinning() if pinned else ReferenceDriver(), host_buffer_limit=1 << 16, **options)


@pytest.mark.parametrize("pinned", [True, False])
async def test_a_dropped_buffer_is_told_of_and_its_block_comes_back(pinned: bool) -> None:
    async with limited(pinned) as backend:
        buffer = await backend.host_buffer(DEVICE, 1 << 16)
        address = np.frombuffer(buffer.memory, np.uint8).ctypes.data
        with pytest.warns(ResourceWarning, match="65,536 bytes was never closed"):
            del buffer
        with await backend.host_buffer(DEVICE, 1 << 16) as again:
            assert np.frombuffer(again.memory, np.uint8).ctypes.data == address
        assert await backend.trim() == 1 << 16


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("make", [lambda b: b.numpy("int32"), lambda b: b.memory, lambda b: memoryview(b.memory)[8:16]])
async def test_a_block_is_not_reused_while_something_looks_into_it(pinned: bool, make: Any, close: bool) -> None:
    async with limited(pinned) as backend:
        buffer = await backend.host_buffer(DEVICE, 40_000)
        array = make(buffer)
        array[0] = 7
        if close and array is buffer.memory:
            array = array[:]  # for it ends with the buffer
        if close:
            buffer.close()
        else:
            with pytest.warns(ResourceWarning):
                del buffer
        # The whole limit is used, and not by what can be closed.
        with pytest.raises(OutOfMemory, match="delete arrays"):
            await backend.host_buffer(DEVICE, 40_000)
        with await backend.host_buffer(DEVICE, 10_000) as other:
            other.numpy()[:] = 1
        assert array[0] == 7
        derived = array[:1]
        del array
        with pytest.raises(OutOfMemory):
            await backend.host_buffer(DEVICE, 40_000)
        del derived
        with await backend.host_buffer(DEVICE, 40_000):
            pass


async def test_the_view_ends_with_the_buffer_and_keeps_nothing() -> None:
    async with limited(True) as backend:
        with await backend.host_buffer(DEVICE, 40_000) as buffer:
            view = buffer.memory
            assert view is buffer.memory
        with pytest.raises(ValueError, match="released"):
            view[0] = 1
        with await backend.host_buffer(DEVICE, 40_000) as buffer:  # the whole limit
            buffer.memory.release()
            buffer.memory[0] = 1


async def test_arrays_of_a_closed_buffer_never_alias_the_next() -> None:
    async with DriverBackend(Pinning()) as backend:
        with await backend.host_buffer(DEVICE, 5000) as buffer:
            array = buffer.numpy()
        array[:] = 3
        with await backend.host_buffer(DEVICE, 5000) as other:
            other.numpy()[:] = 4
            assert set(array) == {3}
        with pytest.raises(GPUError, match="closed"):
            buffer.numpy()


async def test_a_buffer_may_end_in_the_middle_of_anything() -> None:
    """A garbage collection can come while the pool's lock is held; it must not wait for that lock."""
    async with limited(True) as backend:
        ring: list[Any] = [await backend.host_buffer(DEVICE, 40_000)]
        ring.append(ring)
        del ring
        with backend._opening.host_pool._lock, pytest.warns(ResourceWarning):
            gc.collect()
        with await backend.host_buffer(DEVICE, 40_000):
            pass


async def test_shutdown_tells_of_open_buffers() -> None:
    backend = limited(True)
    await backend.initialize()
    left = [await backend.host_buffer(DEVICE, 100) for _ in range(2)]
    with pytest.warns(ResourceWarning, match="reference: 2 host buffers of 200 bytes were never closed"):
        await backend.shutdown()
    for buffer in left:
        buffer.numpy()[:] = 1  # still there
        buffer.close()


async def test_shutdown_says_nothing_of_closed_ones() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        async with limited(True) as backend:
            with await backend.host_buffer(DEVICE, 100) as buffer:
                array = buffer.numpy()
        array[:] = 1


@pytest.mark.parametrize("call", ["write", "read"])
async def test_a_failed_copy_does_not_keep_the_block(call: str) -> None:
    driver = FaultyDriver(ReferenceDriver())
    driver.inject(Fault(call, raises=OSError))  # type: ignore[arg-type]

    async def fail() -> None:
        with await backend.host_buffer(DEVICE, 40_000) as buffer:
            if call == "write":
                await backend.copy_to_device(buffer.memory, handle)
            else:
                await backend.copy_into(handle, buffer.memory)

    async with (
        DriverBackend(driver, host_buffer_limit=1 << 16) as backend,
        backend.allocation(DEVICE, 40_000) as handle,
    ):
        with pytest.raises(TransferFailed):
            await fail()
        gc.collect()
        with await backend.host_buffer(DEVICE, 40_000):
            pass


# Not enough of it


async def test_more_than_the_host_has() -> None:
    async with DriverBackend(ReferenceDriver()) as backend:
        with pytest.raises(MemoryError, match="host memory ran out") as caught:
            await backend.host_buffer(DEVICE, sys.maxsize >> 1)
        assert isinstance(caught.value, OutOfMemory)
        assert caught.value.requested_bytes >= sys.maxsize >> 1
        assert (caught.value.free_bytes, caught.value.total_bytes) == (None, None)  # nothing of the device's
        assert (caught.value.device_id, caught.value.backend) == (DEVICE, "reference")
        assert caught.value.hint
        with await backend.host_buffer(DEVICE, 10):
            pass


async def test_kept_blocks_make_room_for_what_can_be_locked() -> None:
    driver = Pinning(most=100_000)
    async with DriverBackend(driver) as backend:
        (await backend.host_buffer(DEVICE, 60_000)).close()
        with await backend.host_buffer(DEVICE, 90_000):
            assert len(driver.live) == 1
        with pytest.raises(OutOfMemory, match="lock"):
            await backend.host_buffer(DEVICE, 200_000)


@pytest.mark.parametrize("dtype", ["V0", "S", "U", "O", object, "no-such", None, "(2,3)f4", []])
async def test_no_element(backend: DriverBackend, dtype: Any) -> None:
    with await backend.host_buffer(DEVICE, 100) as buffer, pytest.raises(OutOfRange):
        buffer.numpy(dtype)


async def test_elements_in_any_spelling(backend: DriverBackend) -> None:
    with await backend.host_buffer(DEVICE, 102) as buffer:
        for dtype in ("float32", "f4", np.float32, np.dtype("float32"), "single"):
            assert (buffer.numpy(dtype).dtype, buffer.numpy(dtype).size) == (np.float32, 25)
        assert buffer.numpy("S3").size == 34
        if "ml_dtypes" not in sys.modules:
            with pytest.raises(Unsupported, match="ml_dtypes"):
                buffer.numpy("bfloat16")
