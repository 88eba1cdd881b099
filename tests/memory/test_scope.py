"""Memory scopes."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import numpy as np
import pytest

from gpurt.errors import BackendClosed, DeviceNotFound, HandleInUse, InvalidHandle, OutOfMemory, OutOfRange
from gpurt.memory.scope import current_scope
from gpurt.runtime.backend import DriverBackend
from gpurt.runtime.elements import MOST_EXTENTS
from gpurt.testing.kit.probe import DriverProbe
from tests.support.reference_driver import ReferenceDriver


@pytest.fixture
async def hold():
    return DriverProbe(ReferenceDriver(chunk_bytes=1 << 14))


@pytest.fixture
async def backend(hold: DriverProbe):
    async with DriverBackend(hold.driver) as backend:
        yield backend
        assert hold.live == 0


async def test_equal_arrays_do_not_share_memory_and_all_end_with_the_scope(
    backend: DriverBackend, hold: DriverProbe
) -> None:
    async with backend.memory_scope() as memory:
        x = await memory.allocate((10, 100), dtype="float32")
        y = await memory.allocate((10, 100), dtype="float32")
        assert (x.shape, x.dtype, x.handle.size_bytes) == ((10, 100), "float32", 4000)
        await backend.copy_to_device(b"x" * 4000, x.handle)
        await backend.copy_to_device(b"y" * 4000, y.handle)
        assert await backend.copy_from_device(x.handle) == b"x" * 4000
        assert hold.live == 2
    assert hold.live == 0
    with pytest.raises(InvalidHandle):
        await backend.copy_from_device(x.handle)


async def test_ends_on_an_exception_and_the_exception_gets_out(backend: DriverBackend, hold: DriverProbe) -> None:
    async def work() -> None:
        async with backend.memory_scope("reference:1") as memory:
            array = await memory.allocate(100)
            assert array.handle.device_id == "reference:1"
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        await work()
    assert hold.live == 0


async def test_ends_on_a_failed_allocation(hold: DriverProbe) -> None:
    async def work(backend: DriverBackend) -> None:
        async with backend.memory_scope() as memory:
            await memory.allocate(600)
            await memory.allocate(600)

    async with DriverBackend(hold.driver, memory_limit=1000) as backend:
        with pytest.raises(OutOfMemory):
            await work(backend)
        assert backend.ledger.usage("reference:0").current_count == 0


@pytest.mark.parametrize("dialect", ["task", "timeout", "anyio"])
async def test_ends_on_cancellation(backend: DriverBackend, hold: DriverProbe, dialect: str) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with backend.memory_scope() as memory:
            for _ in range(5):
                await memory.allocate(64)
            entered.set()
            await asyncio.Event().wait()

    if dialect == "task":
        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif dialect == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await work()
    else:
        with anyio.move_on_after(0.05) as scope:
            await work()
        assert scope.cancelled_caught
    assert entered.is_set()
    await backend.synchronize("reference:0")
    assert hold.live == 0


async def test_cancelled_in_the_middle_of_an_allocation(backend: DriverBackend, hold: DriverProbe) -> None:
    async def work() -> None:
        async with backend.memory_scope() as memory:
            await memory.allocate(64)
            gate = hold.hold("alloc")
            waiting.set_result(gate)
            await memory.allocate(64)

    waiting = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(work())
    gate = await waiting
    await gate.entered()
    task.cancel()
    gate.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.synchronize("reference:0")
    assert hold.live == 0


async def test_freed_by_hand_is_no_mistake(backend: DriverBackend) -> None:
    async with backend.memory_scope() as memory:
        array = await memory.allocate(64)
        await backend.deallocate(array.handle)


async def test_scopes_nest_and_belong_to_their_task(backend: DriverBackend) -> None:
    assert current_scope() is None
    seen: list[object] = []

    async def other() -> None:
        seen.append(current_scope())

    bystander = asyncio.create_task(asyncio.sleep(0))
    async with backend.memory_scope() as outer:
        assert current_scope() is outer
        async with backend.memory_scope() as inner:
            assert current_scope() is inner
            await asyncio.create_task(other())
        assert current_scope() is outer
    assert current_scope() is None
    assert seen == [inner]
    await bystander


BAD_SHAPES: list[Any] = [
    (0, 3),
    -1,
    (2.7,),
    2.7,
    "12",
    b"12",
    bytearray(b"12"),
    True,
    (True, 2),
    (float("inf"),),
    float("nan"),
    None,
    {2: 3},
    {2, 3},
    iter([2, 3]),
    (n for n in [2, 3]),
    ("2",),
    ((2, 3),),
    np.zeros(2),
    np.bool_(True),
    (1,) * (MOST_EXTENTS + 1),
    (1 << 62, 2),
    1 << 200,
]


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=lambda shape: str(shape)[:20])
async def test_bad_shapes(backend: DriverBackend, shape: object) -> None:
    async with backend.memory_scope() as memory:
        with pytest.raises(OutOfRange) as caught:
            await memory.allocate(shape)  # type: ignore[arg-type]
        assert caught.value.operation == "memory_scope"


class Index:
    def __index__(self) -> int:
        return 4

    def __repr__(self) -> str:  # without an address: the name of a test is the same in every process
        return "Index()"


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        (np.int64(4), (4,)),
        (Index(), (4,)),
        (np.array(4), (4,)),
        (np.array([2, 3]), (2, 3)),
        ([2, np.int32(3)], (2, 3)),
        (range(1, 4), (1, 2, 3)),
        ((), ()),
        ((2, Index()), (2, 4)),
    ],
    ids=str,
)
async def test_shapes_of_whatever_counts(backend: DriverBackend, shape: Any, extents: tuple[int, ...]) -> None:
    async with backend.memory_scope() as memory:
        array = await memory.allocate(shape, "float32")
        assert array.shape == extents
        assert all(type(extent) is int for extent in array.shape)
        assert array.handle.size_bytes == 4 * int(np.prod(extents))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "float32"),
        ("f4", "float32"),
        ("<f4", ">f4" if sys.byteorder == "big" else "float32"),
        (np.float32, "float32"),
        (np.dtype("float32"), "float32"),
        (float, "float64"),
        (bool, "bool"),
        ("?", "bool"),
        (np.int64(3).dtype, "int64"),
        ("bfloat16", "bfloat16"),
        ("float8_e5m2", "float8_e5m2"),
        (">u1", "uint8"),
        (np.complex128, "complex128"),
    ],
    ids=str,
)
async def test_dtypes_in_any_spelling(backend: DriverBackend, dtype: Any, name: str) -> None:
    async with backend.memory_scope() as memory:
        assert (await memory.allocate(4, dtype)).dtype == name


@pytest.mark.parametrize(
    "dtype",
    [
        *("no-such-type", "uint7", "", "O", "V0", "S", "S4", ">f4", "M8[D]", "f4,f4"),
        *(None, 3, object, str, [("x", "f4")], np.longdouble, {"a": 1}, np.floating),
    ],
    ids=str,
)
async def test_bad_dtypes(backend: DriverBackend, dtype: Any) -> None:
    async with backend.memory_scope() as memory:
        with pytest.raises(OutOfRange) as caught:
            await memory.allocate(4, dtype)
        assert caught.value.operation == "memory_scope"


async def test_outside_its_block_a_scope_allocates_nothing(backend: DriverBackend) -> None:
    memory = backend.memory_scope()
    with pytest.raises(InvalidHandle):
        await memory.allocate(1)
    async with memory:
        pass
    with pytest.raises(InvalidHandle):
        await memory.allocate(1)


# In another context than it began in


async def test_ends_in_another_task(backend: DriverBackend, hold: DriverProbe) -> None:
    """As asynchronous fixtures do: their two halves are run by two tasks."""

    async def fixture() -> AsyncIterator[None]:
        async with backend.memory_scope() as memory:
            await memory.allocate(64)
            yield

    halves = fixture()
    await asyncio.create_task(anext(halves))  # type: ignore[arg-type]
    assert hold.live == 1
    assert current_scope() is None
    await halves.aclose()  # type: ignore[attr-defined]
    assert hold.live == 0
    assert current_scope() is None


async def test_a_scope_that_another_task_ended_is_nobodys(backend: DriverBackend) -> None:
    async with backend.memory_scope() as outer:
        inner = backend.memory_scope()
        await inner.__aenter__()
        await asyncio.create_task(inner.__aexit__(None, None, None))
        assert current_scope() is outer
    assert current_scope() is None


async def test_a_task_that_outlives_its_scope(backend: DriverBackend) -> None:
    ended, seen = asyncio.Event(), list[object]()

    async def inherits() -> None:
        seen.append(current_scope())
        await ended.wait()
        seen.append(current_scope())

    async with backend.memory_scope() as outer:
        async with backend.memory_scope() as inner:
            task = asyncio.create_task(inherits())
            await asyncio.sleep(0)
        ended.set()
        await task
        assert seen == [inner, outer]


# Backends that are closed or empty


async def test_a_closed_backend() -> None:
    backend = DriverBackend(ReferenceDriver())
    async with backend.memory_scope() as memory:
        with pytest.raises(BackendClosed):
            await memory.allocate(3)


async def test_a_backend_that_closes_inside(hold: DriverProbe) -> None:
    backend = DriverBackend(hold.driver)
    await backend.initialize()
    async with backend.memory_scope() as memory:
        await memory.allocate(3)
        with pytest.warns(ResourceWarning):
            await backend.shutdown()
    assert hold.live == 0


async def test_an_empty_device_id_is_no_default(backend: DriverBackend) -> None:
    async with backend.memory_scope() as memory:
        with pytest.raises(DeviceNotFound):
            await memory.allocate(3, device_id="")


# Views that outlive it


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("what", ["view", "array"])
async def test_the_body_fails_while_a_view_is_open(
    backend: DriverBackend, hold: DriverProbe, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Any] = []

    async def work() -> None:
        async with backend.memory_scope() as memory:
            await memory.allocate(64)
            array = await memory.allocate(64)
            view = await backend.view(array.handle)
            if what == "view":
                kept.append(view)
            else:
                with view:
                    kept.append(view.numpy())
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING, "gpurt"), pytest.raises(ZeroDivisionError) as caught:
        await work()
    (note,) = caught.value.__notes__
    assert "1 views of the allocation are open" in note
    assert any("views of the allocation are open" in record.getMessage() for record in caplog.records)
    assert (hold.live, backend.live_handles) == (1, 1)
    del caught
    if what == "view":
        kept[0].close()
    kept.clear()
    await eventually(lambda: backend.live_handles == 0)
    await eventually(lambda: hold.live == 0)


async def outlive(backend: DriverBackend, views: list[Any], count: int = 1) -> None:
    async with backend.memory_scope() as memory:
        array = await memory.allocate(64)
        for _ in range(count):
            views.append(await backend.view(array.handle))


async def test_ends_with_a_view_open(backend: DriverBackend, hold: DriverProbe) -> None:
    views: list[Any] = []
    with pytest.raises(HandleInUse):
        await outlive(backend, views, 2)
    assert hold.live == 1
    views[0].close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert backend.live_handles == 1  # the other is open
    views[1].close()
    await eventually(lambda: hold.live == 0)


async def test_freed_by_hand_before_its_views_are_gone_is_freed_once(backend: DriverBackend) -> None:
    views: list[Any] = []
    with pytest.raises(HandleInUse):
        await outlive(backend, views)
    views[0].close()
    await backend.deallocate(views[0].handle)  # before the loop came to it
    await asyncio.sleep(0)
    assert backend.live_handles == 0


async def test_shutdown_tells_of_what_views_still_keep(hold: DriverProbe) -> None:
    backend = DriverBackend(hold.driver)
    await backend.initialize()
    views: list[Any] = []
    with pytest.raises(HandleInUse):
        await outlive(backend, views)
    with pytest.warns(ResourceWarning, match="1 of them with open views"):
        await backend.shutdown(timeout=1)
    views[0].close()
