"""Failures of the library: typed, with their cause, and without consequences for what follows."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import (
    BackendUnavailable,
    DeviceLost,
    DeviceNotFound,
    DeviceUnresponsive,
    GPUError,
    OutOfMemory,
    OutOfRange,
    TransferFailed,
)
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, filled, keeps_freed, usage
from gpurt.testing.kit.probe import DriverProbe
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend

Run = Callable[[GPUBackend, MemoryHandle, MemoryHandle], Awaitable[Any]]
FAILING: dict[str, tuple[str, type[GPUError], Run]] = {
    "copy_to_device": ("write", TransferFailed, lambda b, h, _: b.copy_to_device(b"x" * 32, h)),
    "copy_from_device": ("read", TransferFailed, lambda b, h, _: b.copy_from_device(h)),
    "copy_into": ("read", TransferFailed, lambda b, h, _: b.copy_into(h, bytearray(32))),
    "copy_device_to_device": ("copy", TransferFailed, lambda b, h, g: b.copy_device_to_device(h, g, 32)),
    "synchronize": ("sync", TransferFailed, lambda b, h, _: b.synchronize(h.device_id)),
    "allocate": ("alloc", GPUError, lambda b, h, _: b.allocate(h.device_id, 32)),
    "memory_info": ("telemetry", GPUError, lambda b, h, _: b.get_device_memory_info(h.device_id)),
    "temperature": ("telemetry", GPUError, lambda b, h, _: b.get_device_temperature(h.device_id)),
}
failing = pytest.mark.parametrize("operation", list(FAILING))


Classify = Callable[[Exception], type[GPUError] | None]


class LibraryError(Exception):
    """What a vendor library might raise."""


class DeviceGone(Exception):
    """Classified as ``DeviceLost`` by :func:`_classify_gone`."""


def _classify_gone(original: Classify) -> Classify:
    def classify(exc: Exception) -> type[GPUError] | None:
        return DeviceLost if isinstance(exc, DeviceGone) else original(exc)

    return classify


class ErrorTests(ConformanceBase):
    @failing
    async def test_library_failure_is_typed_and_passes(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe, operation: str
    ) -> None:
        method, kind, run = FAILING[operation]
        async with filled(backend, device_id, b"a" * 32) as handle, backend.allocation(device_id, 32) as other:
            boom = LibraryError("status 700: illegal address")
            hold.fail(method, boom)
            with pytest.raises(kind) as caught:
                await run(backend, handle, other)
            error = caught.value
            assert isinstance(error, RuntimeError)
            assert error.__cause__ is boom
            assert error.backend == backend.name
            assert error.device_id == device_id
            assert error.operation
            assert "700" in str(error)
            assert device_id in str(error)
            # It was that call's failure, not the device's: the next one works.
            result = await run(backend, handle, other)
            if operation == "allocate":
                await backend.deallocate(result)
        await assert_nothing_live(backend, hold)

    @pytest.mark.parametrize(
        "exception", [StopIteration("spent"), StopAsyncIteration(), OSError(5, "I/O error"), ValueError(), KeyError(1)]
    )
    async def test_any_exception_of_a_library(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe, exception: Exception
    ) -> None:
        async with backend.allocation(device_id, 32) as handle:
            hold.fail("write", exception)
            with pytest.raises(GPUError) as caught:
                async with asyncio.timeout(10):
                    await backend.copy_to_device(bytes(32), handle)
            # A StopIteration that leaves a coroutine becomes the cause of a RuntimeError first.
            assert exception in (caught.value.__cause__, caught.value.__cause__ and caught.value.__cause__.__cause__)
            await backend.copy_to_device(bytes(32), handle)

    async def test_typed_error_of_a_driver_goes_through(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        async with backend.allocation(device_id, 32) as handle:
            hold.fail("write", TransferFailed("ECC error", code=214))
            with pytest.raises(TransferFailed) as caught:
                await backend.copy_to_device(bytes(32), handle)
            assert caught.value.code == 214
            assert caught.value.device_id == device_id
            # An error that is its own cause would send loggers round in a circle.
            assert caught.value.__cause__ is not caught.value

    async def test_out_of_memory_of_a_library(self, backend: GPUBackend, device_id: str, hold: DriverProbe) -> None:
        hold.fail("alloc", *(MemoryError("cudaErrorMemoryAllocation") for _ in range(8)))
        with pytest.raises(OutOfMemory) as caught:
            await backend.allocate(device_id, 1000)
        assert caught.value.requested_bytes == 1000
        assert isinstance(caught.value.__cause__, MemoryError)
        assert caught.value.device_id == device_id

    async def test_failed_free_is_reported_and_final(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        handle = await backend.allocate(device_id, 32)
        hold.fail("free", LibraryError("cannot free"))
        if keeps_freed(backend, device_id):
            await backend.deallocate(handle)
        with pytest.raises(GPUError) as caught:
            # What is kept is given back to the library by `trim`.
            await (backend.trim() if keeps_freed(backend, device_id) else backend.deallocate(handle))
        assert isinstance(caught.value.__cause__, LibraryError)
        with pytest.raises(GPUError):
            await backend.deallocate(handle)
        entry = usage(backend, device_id)
        assert entry is None or entry.current_count == 0

    async def test_failed_copy_lets_go_of_its_buffer(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        source, target = bytearray(32), bytearray(32)
        async with backend.allocation(device_id, 32) as handle:
            hold.fail("write", LibraryError())
            hold.fail("read", LibraryError())
            with pytest.raises(TransferFailed) as kept:
                await backend.copy_to_device(source, handle)
            with pytest.raises(TransferFailed) as kept_too:
                await backend.copy_into(handle, target)
        # Also while somebody keeps the errors, whose tracebacks name the driver's own slices.
        source.append(0)
        target.append(0)
        assert kept.value is not kept_too.value

    async def test_failed_open_is_unavailable_and_may_be_tried_again(
        self, backend: GPUBackend, hold: DriverProbe
    ) -> None:
        await backend.shutdown()
        for exception in (LibraryError("no such symbol"), ImportError("no module"), BackendUnavailable("no device")):
            hold.fail("open", exception)
            with pytest.raises(BackendUnavailable) as caught:
                await backend.initialize()
            assert caught.value.backend == backend.name
            assert str(exception) in str(caught.value)
        await backend.initialize()
        assert backend.devices

    async def test_lost_device_is_sticky_and_alone(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        driver = shell.driver
        driver.classify = _classify_gone(driver.classify)  # pyright: ignore[reportAttributeAccessIssue]
        handle, spare = await backend.allocate(device_id, 32), await backend.allocate(device_id, 32)
        others = [device.device_id for device in backend.devices if device.device_id != device_id]
        gone = DeviceGone("fell off the bus")
        hold.fail("write", gone)
        with pytest.raises(DeviceLost) as caught:
            await backend.copy_to_device(bytes(32), handle)
        assert caught.value.__cause__ is gone
        assert not isinstance(caught.value, DeviceUnresponsive)
        calls = dict(hold.counts)
        for call in (
            lambda: backend.copy_to_device(bytes(32), spare),
            lambda: backend.copy_from_device(spare),
            lambda: backend.allocate(device_id, 32),
            lambda: backend.synchronize(device_id),
        ):
            with pytest.raises(DeviceLost):
                await call()
        device = await backend.get_device(device_id)
        assert device is not None
        assert device.state == "lost"
        # The memory went with the device: only the books are left.
        await backend.deallocate(handle)
        await backend.deallocate(spare)
        assert dict(hold.counts) == calls
        assert usage(backend, device_id).current_count == 0
        for other in others:
            async with filled(backend, other, b"alive") as alive:
                assert await backend.copy_from_device(alive) == b"alive"
        # A new life may find it again.
        await backend.shutdown()
        del driver.classify
        await backend.initialize()
        async with backend.allocation(device_id, 8):
            pass

    async def test_errors_survive_pickling(self, backend: GPUBackend, device_id: str) -> None:
        caught: list[GPUError] = []
        async with backend.allocation(device_id, 8) as handle:
            for call in (
                lambda: backend.allocate("nope:0", 8),
                lambda: backend.allocate(device_id, 0),
                lambda: backend.allocate(device_id, 1 << 62),
                lambda: backend.copy_from_device(handle, 9),
            ):
                with pytest.raises(GPUError) as info:
                    await call()
                caught.append(info.value)
        kinds = (DeviceNotFound, OutOfRange, (OutOfMemory, OutOfRange), OutOfRange)
        for error, kind in zip(caught, kinds, strict=True):
            assert isinstance(error, kind)
            twin = pickle.loads(pickle.dumps(error))
            assert type(twin) is type(error)
            assert str(twin) == str(error)
            assert twin.fields() == error.fields()
