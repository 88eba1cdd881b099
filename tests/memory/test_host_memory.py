"""When the memory of the host runs out, the error says so, and how much was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from gpurt.errors import OutOfMemory
from gpurt.memory import transfer
from gpurt.runtime.backend import DriverBackend
from gpurt.runtime.host_memory import read_bytes
from gpurt.tensors import get_memory_manager, to_device
from gpurt.testing import SimulatedDriver, parse_simulation
from tests.support.reference_driver import ReferenceDriver

MORE_THAN_ANY_HOST = 1 << 60


@pytest.fixture
async def backend() -> AsyncIterator[DriverBackend]:
    (profile,) = parse_simulation("h100")
    huge = replace(profile, memory_bytes=MORE_THAN_ANY_HOST + (1 << 40))
    async with DriverBackend(SimulatedDriver([huge])) as backend:
        yield backend
        assert backend.live_handles == 0


def check(error: OutOfMemory, nbytes: int) -> None:
    assert "host memory ran out" in str(error)
    assert f"{nbytes:,} bytes" in str(error)
    assert error.requested_bytes == nbytes
    assert (error.free_bytes, error.total_bytes, error.pooled_bytes) == (None, None, None)  # nothing of the device's
    assert error.hint


async def test_copy_from_device(backend: DriverBackend) -> None:
    async with backend.allocation("simulated:0", MORE_THAN_ANY_HOST) as handle:
        with pytest.raises(MemoryError) as caught:
            await backend.copy_from_device(handle)
    assert isinstance(caught.value, OutOfMemory)
    check(caught.value, MORE_THAN_ANY_HOST)
    assert (caught.value.device_id, caught.value.backend) == ("simulated:0", "simulated")
    assert caught.value.operation
    assert isinstance(caught.value.__cause__, MemoryError)


async def test_array_to_numpy(backend: DriverBackend) -> None:
    manager = await get_memory_manager("simulated:0", backend=backend)
    async with await manager.allocate(MORE_THAN_ANY_HOST // 4, "float32") as array:
        with pytest.raises(OutOfMemory) as caught:
            await array.numpy()
    check(caught.value, MORE_THAN_ANY_HOST)


async def test_a_tensor_that_must_be_put_in_order() -> None:
    # A small array in the strides of a huge one.
    huge = np.broadcast_to(np.float32(1), (MORE_THAN_ANY_HOST // 4,))
    async with DriverBackend(ReferenceDriver()) as backend:
        with pytest.raises(OutOfMemory) as caught:
            await to_device(huge, "reference:0", backend=backend)
    check(caught.value, MORE_THAN_ANY_HOST)
    assert caught.value.operation == "to_device"


async def test_between_backends_without_host_buffers(monkeypatch: pytest.MonkeyPatch, backend: DriverBackend) -> None:
    from gpurt.backend import GPUBackend

    monkeypatch.setattr(transfer, "STAGING_BYTES", MORE_THAN_ANY_HOST)
    async with backend.allocation("simulated:0", MORE_THAN_ANY_HOST) as handle:
        place = transfer.Place(backend, handle)
        async with DriverBackend(ReferenceDriver()) as other, other.allocation("reference:0", 1) as small:
            monkeypatch.setattr(other, "host_buffer", GPUBackend.host_buffer.__get__(other))
            with pytest.raises(OutOfMemory) as caught:
                await transfer.transfer(place, transfer.Place(other, small), MORE_THAN_ANY_HOST)
    check(caught.value, MORE_THAN_ANY_HOST)


def test_a_driver_that_runs_out_is_left_to_tell() -> None:
    def fill(view: memoryview) -> None:
        raise MemoryError("staging")

    for nbytes in (10, 1 << 20):
        with pytest.raises(MemoryError, match="staging") as caught:
            read_bytes(nbytes, fill)
        assert not isinstance(caught.value, OutOfMemory)
