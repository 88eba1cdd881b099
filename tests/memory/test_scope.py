"""Memory scopes."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from gpurt.errors import InvalidHandle, OutOfMemory, OutOfRange
from gpurt.memory.scope import current_scope
from gpurt.shell import DriverBackend
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


@pytest.mark.parametrize(
    ("shape", "dtype"), [((0, 3), "float32"), (-1, "uint8"), ((2,), "no-such-type"), ((), "uint7")]
)
async def test_bad_arrays(backend: DriverBackend, shape: object, dtype: str) -> None:
    async with backend.memory_scope() as memory:
        with pytest.raises(OutOfRange):
            await memory.allocate(shape, dtype)  # type: ignore[arg-type]


async def test_outside_its_block_a_scope_allocates_nothing(backend: DriverBackend) -> None:
    memory = backend.memory_scope()
    with pytest.raises(InvalidHandle):
        await memory.allocate(1)
    async with memory:
        pass
    with pytest.raises(InvalidHandle):
        await memory.allocate(1)
