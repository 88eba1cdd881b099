"""to_device (A04): the same values come out, nothing is copied twice, nothing is left behind."""

from __future__ import annotations

import array
import asyncio
import ctypes
import mmap
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

import gpurt
from gpurt import ambient
from gpurt.errors import (
    BackendClosed,
    DeviceLost,
    DeviceNotFound,
    HandleInUse,
    InvalidHandle,
    OutOfMemory,
    OutOfRange,
    TransferFailed,
    Unsupported,
    WrongLoop,
)
from gpurt.memory import hosttensor
from gpurt.memory.arrays import DeviceArray
from gpurt.memory.scope import ScopedArray
from gpurt.runtime.backend import DriverBackend
from gpurt.tensors import get_memory_manager, to_device
from gpurt.testing import Fault, FaultyDriver, create_simulated
from tests.support.reference_driver import ReferenceDriver

DEVICES = ("reference:0", "reference:1")


@pytest.fixture
async def driver() -> FaultyDriver:
    return FaultyDriver(ReferenceDriver(chunk_bytes=1 << 14))


@pytest.fixture
async def backend(driver: FaultyDriver) -> AsyncIterator[DriverBackend]:
    async with DriverBackend(driver) as backend:
        yield backend
        driver.clear()
        await backend.synchronize(DEVICES[0])
        await nothing_is_left(backend)


async def nothing_is_left(backend: DriverBackend) -> None:
    async with asyncio.timeout(5):
        while backend.live_handles or any(backend.ledger.usage(name).committed_bytes for name in DEVICES):
            await asyncio.sleep(0.002)


def count(driver: FaultyDriver, *methods: str) -> int:
    return sum(call.method in methods for call in driver.calls)


DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32"]
DTYPES += ["float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_numpy_values_come_back(backend: DriverBackend, dtype: str) -> None:
    values = np.random.default_rng(3).integers(0, 100, (3, 5, 7)).astype(dtype)
    async with await to_device(values, DEVICES[1], backend=backend) as there:
        assert isinstance(there, ScopedArray)
        assert (there.shape, there.dtype, there.device_id) == ((3, 5, 7), dtype, DEVICES[1])
        assert there.nbytes == values.nbytes
        back = await there.numpy()
        assert back.dtype == values.dtype
        np.testing.assert_array_equal(back, values)
        assert await there.tobytes() == values.tobytes()
        back[...] = 0  # a copy: what it becomes is nobody's business
        np.testing.assert_array_equal(await there.numpy(), values)


SQUARE = np.arange(36, dtype="float32").reshape(6, 6)
READ_ONLY = SQUARE.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "values",
    [
        SQUARE.T,
        SQUARE[::2, 1::2],
        SQUARE[::-1],
        np.asfortranarray(SQUARE),
        np.broadcast_to(SQUARE[0], (4, 6)),
        READ_ONLY,
    ],
    ids=["transposed", "strided", "reversed", "fortran", "broadcast", "read-only"],
)
async def test_any_order_of_elements(backend: DriverBackend, values: Any) -> None:
    async with await to_device(values, DEVICES[0], backend=backend) as there:
        assert there.shape == values.shape
        np.testing.assert_array_equal(await there.numpy(), values)


@pytest.mark.parametrize("value", [np.float32(2.5), np.array(2.5, "float32"), ctypes.c_float(2.5)])
async def test_a_single_number(backend: DriverBackend, value: Any) -> None:
    async with await to_device(value, DEVICES[0], backend=backend) as there:
        assert (there.shape, there.dtype) == ((), "float32")
        assert (await there.numpy()).item() == 2.5


class OnlyDLPack:
    """What PyTorch, JAX and others look like when neither is known by name."""

    def __init__(self, values: Any, device: tuple[int, int] | None = None) -> None:
        self.values, self.device = values, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device or self.values.__dlpack_device__()


class OnlyArray:
    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values


def anonymous(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


@pytest.mark.parametrize(
    ("tensor", "equal"),
    [
        (b"tensor data", np.frombuffer(b"tensor data", "uint8")),
        (bytearray(b"tensor data"), np.frombuffer(b"tensor data", "uint8")),
        (anonymous(b"tensor data"), np.frombuffer(b"tensor data", "uint8")),
        (memoryview(b"abcdefgh")[::2], np.frombuffer(b"aceg", "uint8")),
        (memoryview(b"abcdefgh").cast("H"), np.frombuffer(b"abcdefgh", "uint16")),
        (memoryview(b"abcdef").cast("B", (2, 3)), np.frombuffer(b"abcdef", "uint8").reshape(2, 3)),
        (array.array("d", [1, 2, 3]), np.array([1.0, 2.0, 3.0])),
        (array.array("l", [1, 2, 3]), np.array([1, 2, 3], f"int{8 * array.array('l').itemsize}")),
        ((ctypes.c_double * 3)(1, 2, 3), np.array([1.0, 2.0, 3.0])),
        (memoryview(SQUARE), SQUARE),
        (memoryview(np.array([True, False])), np.array([True, False])),
        (memoryview(np.array([1 + 2j], "complex64")), np.array([1 + 2j], "complex64")),
        (memoryview(SQUARE.T), SQUARE.T),
        (OnlyDLPack(SQUARE), SQUARE),
        (OnlyDLPack(SQUARE.T), SQUARE.T),
        (OnlyArray(SQUARE), SQUARE),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_whatever_has_bytes_in_it(backend: DriverBackend, tensor: Any, equal: Any) -> None:
    async with await to_device(tensor, DEVICES[0], backend=backend) as there:
        assert (there.shape, there.dtype) == (equal.shape, equal.dtype.name)
        np.testing.assert_array_equal(await there.numpy(), equal)


async def test_host_buffers_and_views_of_devices(backend: DriverBackend) -> None:
    with await backend.host_buffer(DEVICES[0], 100) as buffer:
        buffer.memory[:] = bytes(range(100))
        there = await to_device(buffer, DEVICES[0], backend=backend)
    floats = await to_device(SQUARE, DEVICES[0], backend=backend)
    with await floats.view() as view:
        again = await to_device(view, DEVICES[1], backend=backend)
    np.testing.assert_array_equal(await again.numpy(), SQUARE)
    assert await there.tobytes() == bytes(range(100))
    for each in (there, floats, again):
        await each.free()


async def test_a_contiguous_tensor_goes_to_the_driver_as_it_lies(
    backend: DriverBackend, driver: FaultyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(1000, dtype="float32")
    seen: list[int] = []

    def write(index: int, mem: Any, offset: int, src: memoryview) -> None:
        seen.append(np.frombuffer(src, np.uint8).ctypes.data)
        driver.inner.write(index, mem, offset, src)

    monkeypatch.setattr(driver, "write", write)
    for tensor in (values, OnlyDLPack(values), memoryview(values), OnlyArray(values)):
        await (await to_device(tensor, DEVICES[0], backend=backend)).free()
    assert seen == [values.ctypes.data] * 4
    await (await to_device(values[::2], DEVICES[0], backend=backend)).free()
    assert seen[4] != values.ctypes.data


async def test_large_tensors_are_put_in_order_off_the_loop(
    backend: DriverBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def ordered(values: Any, contiguous: Any = np.ascontiguousarray) -> Any:
        threads.append(threading.current_thread().name)
        return contiguous(values)

    monkeypatch.setattr(np, "ascontiguousarray", ordered)
    large = np.arange(hosttensor.INLINE_BYTES, dtype="float32")[::2]
    for tensor in (large, memoryview(large)):
        async with await to_device(tensor, DEVICES[0], backend=backend) as there:
            assert await there.tobytes() == large.tobytes()
    assert threads == ["gpurt:host"] * 2
    assert "gpurt:host" not in {thread.name for thread in threading.enumerate()} or await gone("gpurt:host")


async def gone(name: str) -> bool:
    async with asyncio.timeout(5):
        while name in {thread.name for thread in threading.enumerate()}:
            await asyncio.sleep(0.002)
    return True


# Where it is already


async def test_no_copy_when_it_is_there_already(backend: DriverBackend, driver: FaultyDriver) -> None:
    there = await to_device(SQUARE, DEVICES[1], backend=backend)
    before = len(driver.calls)
    manager = await get_memory_manager(DEVICES[1], backend=backend)
    assert await to_device(there, DEVICES[1], backend=backend) is there
    assert await to_device(there, backend.devices[1], backend=backend) is there
    assert await to_device(there, manager) is there
    assert await to_device(there) is there
    assert len(driver.calls) == before
    await there.free()


async def test_to_another_device_of_the_backend_directly(backend: DriverBackend, driver: FaultyDriver) -> None:
    first = await to_device(SQUARE, DEVICES[0], backend=backend)
    through_host = count(driver, "read", "write")
    second = await to_device(first, DEVICES[1], backend=backend)
    assert (second.device_id, second.shape, second.dtype) == (DEVICES[1], (6, 6), "float32")
    assert count(driver, "read", "write") == through_host
    assert count(driver, "copy") == 1
    np.testing.assert_array_equal(await second.numpy(), SQUARE)
    np.testing.assert_array_equal(await first.numpy(), SQUARE)  # the original stays
    await first.free()
    await second.free()


async def test_to_another_backend(backend: DriverBackend) -> None:
    first = await to_device(SQUARE, DEVICES[0], backend=backend)
    async with create_simulated("h100") as other:
        second = await to_device(first, backend=other)
        assert (second.backend, second.device_id) == (other, "simulated:0")
        np.testing.assert_array_equal(await second.numpy(), SQUARE)
        await second.free()
        assert other.live_handles == 0
    await first.free()


# What cannot be


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (np.array([object()]), "objects"),
        (np.array([{}, 1], dtype=object), "objects"),
        (np.array(["text"]), "str"),
        (np.array(["2026-11-28"], "datetime64[D]"), "datetime64"),
        (np.zeros(2, [("x", "f4"), ("y", "f4")]), "void"),
        (np.zeros(2, np.longdouble), "float"),
        (np.arange(4, dtype=">f4"), "byte order"),
        (memoryview(np.arange(4, dtype=">i4")), "byte order"),
        ((ctypes.c_int32.__ctype_be__ * 2)(1, 2), "byte order"),
        (np.ma.masked_array([1, 2], [True, False]), "mask"),
        (np.zeros((0, 3), "float32"), "no element"),
        (np.zeros((3, 0), ">f8"), "byte order"),
        (b"", "no element"),
        (bytearray(), "no element"),
        ([1, 2, 3], "list is not a tensor"),
        ("text", "str is not a tensor"),
        (3.5, "float is not a tensor"),
        (None, "NoneType is not a tensor"),
        (array.array("u", "text"), "no numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else type(value).__name__,
)
async def test_no_tensor(backend: DriverBackend, driver: FaultyDriver, tensor: Any, says: str) -> None:
    calls = len(driver.calls)
    with pytest.raises(OutOfRange, match=says) as caught:
        await to_device(tensor, DEVICES[0], backend=backend)
    assert caught.value.operation == "to_device"
    assert len(driver.calls) == calls, "refused before the device is touched"


async def test_big_endian_single_bytes_are_no_matter(backend: DriverBackend) -> None:
    async with await to_device(np.arange(4, dtype=">u1"), DEVICES[0], backend=backend) as there:
        assert await there.tobytes() == bytes(range(4))


async def test_memory_of_a_foreign_device(backend: DriverBackend) -> None:
    with pytest.raises(Unsupported, match="device"):
        await to_device(OnlyDLPack(SQUARE, device=(2, 0)), DEVICES[0], backend=backend)


async def test_a_memoryview_that_was_closed(backend: DriverBackend) -> None:
    memory = memoryview(bytearray(10))
    memory.release()
    with pytest.raises(OutOfRange):
        await to_device(memory, DEVICES[0], backend=backend)


@pytest.mark.parametrize("device", ["reference:7", "reference:", "elsewhere:0", "", 0, (1,)])
async def test_no_such_device(backend: DriverBackend, device: Any) -> None:
    with pytest.raises(DeviceNotFound):
        await to_device(b"data", device, backend=backend)


async def test_devices_by_any_name(backend: DriverBackend) -> None:
    manager = await get_memory_manager(DEVICES[1], backend=backend)
    for device, expected in [
        (None, DEVICES[0]),
        ("reference", DEVICES[0]),
        (backend.devices[1], DEVICES[1]),
        (manager, DEVICES[1]),
    ]:
        async with await to_device(b"data", device, backend=backend) as there:
            assert there.device_id == expected
    async with create_simulated("h100") as other:
        with pytest.raises(DeviceNotFound, match="another backend"):
            await to_device(b"data", manager, backend=other)


async def test_a_closed_backend(driver: FaultyDriver) -> None:
    backend = DriverBackend(driver)
    with pytest.raises(BackendClosed):
        await to_device(b"data", DEVICES[0], backend=backend)


# Failures and cancellation leave nothing


async def test_no_room(driver: FaultyDriver) -> None:
    async with DriverBackend(driver, memory_limit=100) as backend:
        with pytest.raises(OutOfMemory):
            await to_device(bytes(101), DEVICES[0], backend=backend)
        await nothing_is_left(backend)


async def test_a_copy_that_fails(backend: DriverBackend, driver: FaultyDriver) -> None:
    driver.inject(Fault("write", nth=2, raises=OSError("link down")))
    with pytest.raises(TransferFailed, match="link down"):
        await to_device(bytes(1 << 15), DEVICES[0], backend=backend)
    assert backend.live_handles == 0


async def test_a_device_that_is_lost(backend: DriverBackend, driver: FaultyDriver) -> None:
    driver.inject(Fault("write", index=1, lose=True))
    with pytest.raises(DeviceLost):
        await to_device(bytes(1 << 15), DEVICES[1], backend=backend)
    assert backend.live_handles == 0


@pytest.mark.parametrize("dialect", ["task", "timeout", "anyio"])
async def test_cancelled_in_the_driver(backend: DriverBackend, driver: FaultyDriver, dialect: str) -> None:
    gate = threading.Event()
    driver.inject(Fault("write", gate=gate))
    source = bytes(1 << 16)
    if dialect == "task":
        task = asyncio.create_task(to_device(source, DEVICES[0], backend=backend))
        await asyncio.to_thread(driver.wait_until_called, "write")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif dialect == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await to_device(source, DEVICES[0], backend=backend)
    else:
        with anyio.move_on_after(0.05) as scope:
            await to_device(source, DEVICES[0], backend=backend)
        assert scope.cancelled_caught
    assert not gate.is_set()  # it did not wait for the driver
    gate.set()
    await nothing_is_left(backend)
    assert count(driver, "write") == 1


async def test_cancelled_on_the_way_to_another_backend(backend: DriverBackend, driver: FaultyDriver) -> None:
    async with create_simulated("h100") as other:
        first = await to_device(bytes(1 << 16), backend=other)
        gate = threading.Event()
        driver.inject(Fault("write", gate=gate))
        task = asyncio.create_task(to_device(first, DEVICES[0], backend=backend))
        await asyncio.to_thread(driver.wait_until_called, "write")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await nothing_is_left(backend)
        await first.free()


# Ownership


async def test_freed_by_a_scope_by_hand_or_by_a_block(backend: DriverBackend) -> None:
    async with backend.memory_scope(DEVICES[1]) as scope:
        kept = await to_device(SQUARE, DEVICES[1], backend=backend, scope=scope)
        early = await to_device(SQUARE, DEVICES[1], backend=backend, scope=scope)
        assert isinstance(kept, DeviceArray)
        np.testing.assert_array_equal(await kept.numpy(), SQUARE)
        await early.free()
        assert backend.live_handles == 1
    assert backend.live_handles == 0
    with pytest.raises(InvalidHandle):
        await kept.numpy()
    with pytest.raises(InvalidHandle):
        await kept.free()
    async with await to_device(SQUARE, DEVICES[0], backend=backend) as array:
        await array.free()  # is no mistake


async def test_a_scope_of_another_backend(backend: DriverBackend, caplog: pytest.LogCaptureFixture) -> None:
    other_driver = FaultyDriver(ReferenceDriver())
    async with DriverBackend(other_driver) as other, other.memory_scope() as scope:
        there = await to_device(SQUARE, DEVICES[0], backend=backend)
        manager = await get_memory_manager(DEVICES[0], backend=backend)
        for tensor, device, given in [
            (SQUARE, DEVICES[0], backend),
            (SQUARE, manager, None),
            (there, DEVICES[1], backend),
        ]:
            with pytest.raises(InvalidHandle, match="another backend"):
                await to_device(tensor, device, backend=given, scope=scope)
        assert not count(other_driver, "alloc")  # refused before anything was allocated
        await there.free()
    assert not caplog.records


async def test_a_scope_says_which_backend(backend: DriverBackend) -> None:
    async with backend.memory_scope() as scope:
        array = await to_device(SQUARE, DEVICES[1], scope=scope)
        assert (array.backend, array.device_id) == (backend, DEVICES[1])
        assert (await to_device(SQUARE, scope=scope)).device_id == DEVICES[0]
        with pytest.raises(DeviceNotFound):
            await to_device(SQUARE, "elsewhere:0", scope=scope)
    with pytest.raises(InvalidHandle, match="not open"):
        await to_device(SQUARE, DEVICES[0], scope=scope)


# Arguments that are none


async def test_arguments_of_other_types(backend: DriverBackend) -> None:
    there = await to_device(SQUARE, DEVICES[0], backend=backend)
    nonsense: Any
    for nonsense in (3, "cpu", object(), backend.driver):
        for tensor in (SQUARE, there):
            with pytest.raises(OutOfRange, match="no backend") as caught:
                await to_device(tensor, DEVICES[0], backend=nonsense)
            assert caught.value.operation == "to_device"
            with pytest.raises(OutOfRange, match="no memory scope"):
                await to_device(tensor, DEVICES[0], backend=backend, scope=nonsense)
        with pytest.raises(OutOfRange, match="no backend"):
            await get_memory_manager(DEVICES[0], backend=nonsense)
    for nonsense in (3, b"cpu", ["cpu"]):
        with pytest.raises(OutOfRange, match="name is a str"):
            await gpurt.default_backend(nonsense)
    await there.free()


async def test_records_of_devices_that_the_backend_has_not(backend: DriverBackend) -> None:
    async with create_simulated("h100x2") as ours, create_simulated("m2-ultra") as theirs:
        for record in (*theirs.devices, *backend.devices):
            with pytest.raises(DeviceNotFound, match="does not have"):
                await to_device(b"data", record, backend=ours)
            with pytest.raises(DeviceNotFound, match="does not have"):
                await get_memory_manager(record, backend=ours)


async def test_a_record_means_the_device_whatever_it_is_called_here() -> None:
    async with create_simulated("m2-ultra,h100") as first, create_simulated("h100") as second:
        (h100,) = second.devices
        assert h100.device_id == "simulated:0"
        async with await to_device(b"data", h100, backend=first) as there:
            assert there.device_id == "simulated:1"


async def test_an_array_that_was_freed(backend: DriverBackend, driver: FaultyDriver) -> None:
    there = await to_device(SQUARE, DEVICES[0], backend=backend)
    await there.free()
    calls = len(driver.calls)
    for device, given in [(DEVICES[0], backend), (None, None), (DEVICES[1], backend)]:
        with pytest.raises(InvalidHandle, match="freed already") as caught:
            await to_device(there, device, backend=given)
        assert caught.value.operation == "to_device"
    assert len(driver.calls) == calls


async def test_an_array_whose_backend_closes_inside_its_block(driver: FaultyDriver) -> None:
    backend = DriverBackend(driver)
    await backend.initialize()
    async with await to_device(SQUARE, DEVICES[0], backend=backend):
        with pytest.warns(ResourceWarning):
            await backend.shutdown()  # frees it


async def test_an_array_of_a_closed_backend(driver: FaultyDriver) -> None:
    async with DriverBackend(driver) as backend:
        there = await to_device(SQUARE, DEVICES[0], backend=backend)
        await there.free()
    with pytest.raises(BackendClosed):
        await to_device(there, DEVICES[0], backend=backend)


# Without a copy, where the host can address the memory


async def test_a_shared_array(backend: DriverBackend, driver: FaultyDriver) -> None:
    there = await to_device(SQUARE, DEVICES[0], backend=backend)
    moved = count(driver, "read", "write", "copy")
    shared = await there.numpy(copy=False)
    assert shared.shape == (6, 6)
    assert count(driver, "read", "write", "copy") == moved
    shared[0, 0] = 77
    assert (await there.numpy())[0, 0] == 77
    with pytest.raises(HandleInUse):
        await there.free()
    del shared
    await there.free()


async def test_where_the_host_cannot_address_the_memory() -> None:
    async with create_simulated("h100") as backend:
        there = await to_device(SQUARE, backend=backend)
        with pytest.raises(Unsupported, match="cannot address"):
            await there.numpy(copy=False)
        np.testing.assert_array_equal(await there.numpy(copy=None), SQUARE)
        with pytest.raises(Unsupported):
            await there.view()
        await there.free()


async def test_dtypes_that_numpy_has_not(backend: DriverBackend) -> None:
    manager = await get_memory_manager(DEVICES[0], backend=backend)
    async with await manager.allocate(4, "bfloat16") as there:
        await backend.copy_to_device(b"12345678", there.handle)
        assert await there.tobytes() == b"12345678"
        if "ml_dtypes" not in sys.modules:
            with pytest.raises(Unsupported, match="bfloat16"):
                await there.numpy()


# PyTorch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


async def test_torch_tensors(backend: DriverBackend, torch: Any) -> None:
    grad = torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_()
    for tensor in (grad, grad.detach(), grad.T, torch.nn.Parameter(grad.detach()), torch.tensor(2.5)):
        async with await to_device(tensor, DEVICES[0], backend=backend) as there:
            assert there.shape == tuple(tensor.shape)
            np.testing.assert_array_equal(await there.numpy(), tensor.detach().numpy())
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    async with await to_device(conjugate, DEVICES[0], backend=backend) as there:
        np.testing.assert_array_equal(await there.numpy(), conjugate.resolve_conj().numpy())
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64):
        tensor = torch.tensor([[1, 0, 1]]).to(dtype)
        async with await to_device(tensor, DEVICES[0], backend=backend) as there:
            assert there.dtype == str(dtype).removeprefix("torch.")
            assert await there.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


async def test_torch_tensors_that_cannot_be(backend: DriverBackend, torch: Any) -> None:
    with pytest.raises(Unsupported, match="meta"):
        await to_device(torch.empty(3, device="meta"), DEVICES[0], backend=backend)
    with pytest.raises(OutOfRange, match="sparse"):
        await to_device(torch.eye(3).to_sparse(), DEVICES[0], backend=backend)
    with pytest.raises(OutOfRange, match="no element"):
        await to_device(torch.empty(0, 3), DEVICES[0], backend=backend)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with pytest.raises(OutOfRange, match="nested"):
            await to_device(nested, DEVICES[0], backend=backend)


# Without a backend: the loop's own


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURT_BACKEND", "cpu")


async def test_one_call_is_enough(on_cpu: None) -> None:
    there = await gpurt.to_device(SQUARE)
    assert there.device_id == "cpu:0"
    np.testing.assert_array_equal(await there.numpy(), SQUARE)
    by_name = await gpurt.to_device(b"data", "cpu:0")
    assert by_name.backend is there.backend is await gpurt.default_backend() is await gpurt.default_backend("cpu")
    await there.free()
    await by_name.free()
    await gpurt.close_default_backends()
    with pytest.raises(BackendClosed):
        await there.backend.list_devices()
    await gpurt.close_default_backends()  # nothing to close is no mistake


async def test_callers_at_once_get_one_backend(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    create = gpurt.GPUBackendFactory.create_backend
    made: list[Any] = []

    async def counted(name: str | None = None) -> Any:
        made.append(await create(name))
        return made[-1]

    monkeypatch.setattr(gpurt.GPUBackendFactory, "create_backend", counted)
    opened = await asyncio.gather(*(gpurt.default_backend("cpu") for _ in range(4)))
    assert set(opened) == set(made)
    assert len(made) == 1
    # Automatic choice comes to the same one; the instance that it opened to find out is closed again.
    assert await gpurt.default_backend() is made[0]
    assert [len(each.devices) for each in made] == [1, 0]
    await gpurt.close_default_backends()


async def test_asked_for_while_it_closes(on_cpu: None) -> None:
    first = await gpurt.default_backend()
    second, _ = await asyncio.gather(gpurt.default_backend(), gpurt.close_default_backends())
    again = await gpurt.default_backend()
    assert await again.list_devices()
    assert second in (first, again)
    await gpurt.close_default_backends()


async def test_one_that_was_shut_down_is_opened_again(on_cpu: None) -> None:
    backend = await gpurt.default_backend()
    await backend.shutdown()
    async with await gpurt.to_device(b"data") as there:
        assert there.backend is backend
    await gpurt.close_default_backends()


def test_it_ends_with_its_loop(on_cpu: None) -> None:
    async def use() -> Any:
        async with await gpurt.to_device(SQUARE) as there:
            return there.backend

    first, second = asyncio.run(use()), asyncio.run(use())
    assert first is not second
    assert first.devices == second.devices == ()
    assert not ambient._ambient


def test_what_a_loop_left_open_is_closed_by_the_next(on_cpu: None) -> None:
    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(gpurt.default_backend())
    loop.close()  # without loop.shutdown_asyncgens()
    assert left.devices

    async def use() -> None:
        await gpurt.default_backend()
        assert left.devices == ()

    asyncio.run(use())
    assert not ambient._ambient


def test_arrays_of_another_loop(on_cpu: None) -> None:
    loop = asyncio.new_event_loop()
    there = loop.run_until_complete(gpurt.to_device(SQUARE))
    with pytest.raises(WrongLoop):
        asyncio.run(there.numpy())
    loop.run_until_complete(there.free())
    loop.run_until_complete(gpurt.close_default_backends())
    loop.close()
