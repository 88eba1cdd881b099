"""Views of allocations: shapes and dtypes in any spelling, and views that nobody closes."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from gpurt.errors import HandleInUse, InvalidHandle, OutOfRange, Unsupported
from gpurt.runtime.backend import DriverBackend
from gpurt.tensors import get_memory_manager
from gpurt.types import MemoryHandle
from tests.memory.test_scope import BAD_SHAPES
from tests.support.reference_driver import ReferenceDriver

DEVICE = "reference:0"


@pytest.fixture
async def backend() -> AsyncIterator[DriverBackend]:
    async with DriverBackend(ReferenceDriver()) as backend:
        yield backend
        assert backend.live_handles == 0


@pytest.fixture
async def handle(backend: DriverBackend) -> AsyncIterator[MemoryHandle]:
    handle = await backend.allocate(DEVICE, 64)
    await backend.copy_to_device(bytes(range(64)), handle)
    yield handle
    await backend.deallocate(handle)


BYTES = np.arange(64, dtype="uint8")


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        (None, "uint8", BYTES),
        (5, "uint8", BYTES[:5]),
        (np.int64(5), "f4", BYTES[:20].view("f4")),
        ((2, np.int32(3)), np.float32, BYTES[:24].view("f4").reshape(2, 3)),
        (np.array([4, 4]), np.dtype("int32"), BYTES.view("i4").reshape(4, 4)),
        ((), "float64", BYTES[:8].view("f8").reshape(())),
        (0, "uint8", BYTES[:0]),
        ((3, 0), "uint8", BYTES[:0].reshape(3, 0)),
        (None, ">f4", BYTES.view(">f4")),
        (None, "S4", BYTES.view("S4")),
        (None, "M8[s]", BYTES.view("M8[s]")),
        (None, np.dtype([("x", "<f4"), ("y", "<i4")]), BYTES.view([("x", "<f4"), ("y", "<i4")])),
    ],
    ids=str,
)
async def test_any_spelling(
    backend: DriverBackend, handle: MemoryHandle, shape: Any, dtype: Any, expected: Any
) -> None:
    with await backend.view(handle, shape, dtype) as view:
        assert view.shape == expected.shape
        assert isinstance(view.dtype, str)
        array = view.numpy()
        assert array.dtype == expected.dtype
        assert array.tobytes() == expected.tobytes()
        assert bytes(view.memoryview()) == expected.tobytes()
        del array


@pytest.mark.parametrize(
    "shape",
    [*(each for each in BAD_SHAPES if str(each) not in ("(0, 3)", "None")), (65,), (0, -1)],
    ids=lambda shape: str(shape)[:20],
)
async def test_bad_shapes(backend: DriverBackend, handle: MemoryHandle, shape: Any) -> None:
    with pytest.raises(OutOfRange) as caught:
        await backend.view(handle, shape)
    assert (caught.value.device_id, caught.value.operation) == (DEVICE, "view")


@pytest.mark.parametrize("dtype", ["V0", "S", "U", "O", object, "no-such", None, "", "(2,3)f4", [], 7], ids=str)
async def test_bad_dtypes(backend: DriverBackend, handle: MemoryHandle, dtype: Any) -> None:
    with pytest.raises(OutOfRange):
        await backend.view(handle, None, dtype)


async def test_types_that_numpy_has_not(backend: DriverBackend, handle: MemoryHandle) -> None:
    with await backend.view(handle, (4, 8), "bfloat16") as view:
        assert (view.dtype, view.shape) == ("bfloat16", (4, 8))
        assert bytes(view.memoryview()) == bytes(range(64))
        if "ml_dtypes" not in sys.modules:
            with pytest.raises(Unsupported, match="ml_dtypes"):
                view.numpy()
    with await backend.view(handle, None, "float8_e5m2") as view:
        assert view.shape == (64,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "f2", np.int16, np.dtype("complex64"), "?"], ids=str)
async def test_scopes_managers_and_views_know_the_same_types(backend: DriverBackend, dtype: Any) -> None:
    manager = await get_memory_manager(DEVICE, backend=backend)
    async with backend.memory_scope() as scope, await manager.allocate((2, 3), dtype) as ours:
        theirs = await scope.allocate((2, 3), dtype)
        with await backend.view(ours.handle, (2, 3), dtype) as view:
            assert ours.dtype == theirs.dtype == view.dtype
            assert ours.handle.size_bytes == theirs.handle.size_bytes == view.memoryview().nbytes


async def test_a_dropped_view_is_told_of_and_keeps_nothing(backend: DriverBackend, handle: MemoryHandle) -> None:
    view = await backend.view(handle)
    array = view.numpy()
    with pytest.warns(ResourceWarning, match="never closed"):
        del view
    assert array[7] == 7
    with pytest.raises(HandleInUse):
        await backend.deallocate(handle)
    del array  # and the fixture can free it


async def test_a_failed_view_is_no_dropped_one(
    backend: DriverBackend, handle: MemoryHandle, recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.raises(OutOfRange):
        await backend.view(handle, 65)
    gc.collect()
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]


async def test_an_array_that_is_shared_beyond_its_block(backend: DriverBackend) -> None:
    manager = await get_memory_manager(DEVICE, backend=backend)
    kept: list[Any] = []

    async def work(fail: bool) -> None:
        async with await manager.allocate(64) as array:
            kept.append(await array.numpy(copy=False))
            if fail:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await work(True)
    assert "views of the allocation are open" in caught.value.__notes__[0]
    with pytest.raises(HandleInUse):
        await work(False)
    assert backend.live_handles == 2
    kept.clear()
    gc.collect()
    await backend.synchronize(DEVICE)
    assert backend.live_handles == 0


@pytest.mark.parametrize("number", [[], {}, None, "1", 1.5])
async def test_malformed_handles(backend: DriverBackend, number: Any) -> None:
    handle = MemoryHandle(number, DEVICE, 64, backend.generation)
    for call in (backend.deallocate, backend.view, backend.copy_from_device):
        with pytest.raises(InvalidHandle):
            await call(handle)
