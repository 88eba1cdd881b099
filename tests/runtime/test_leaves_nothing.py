"""Nothing of a caller outlives its call, and nothing of a backend outlives the backend. Garbage collection is off: what
is left waits for a collection that may come minutes later, with buffers, request objects and device memory in it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.runtime.rig import Rig, rig

from gpurt import DriverBackend, GPUError, MemoryHandle, OutOfMemory, get_memory_manager
from gpurt.testing import CheckingDriver, Fault
from gpurt.testing.kit.hostile import EXCEPTIONS, raised
from gpurt.testing.loops import PATIENCE, turns, until

REQUEST: contextvars.ContextVar[object] = contextvars.ContextVar("request")
SIZE = 4096


class Local:
    """A local variable of a caller's."""


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.disable()
    gc.freeze()  # so that a collection visits only what the test makes
    yield
    gc.unfreeze()
    gc.enable()


CALLS: dict[str, Callable[[DriverBackend, MemoryHandle], Awaitable[Any]]] = {
    "write": lambda b, h: b.copy_to_device(bytes(SIZE), h),
    "read": lambda b, h: b.copy_from_device(h),
    "copy_into": lambda b, h: b.copy_into(h, bytearray(SIZE)),
    "copy": lambda b, h: b.copy_device_to_device(h, h, 8, dst_offset_bytes=8),
    "sync": lambda b, h: b.synchronize(h.device_id),
    "telemetry": lambda b, h: b.get_device_temperature(h.device_id),
    "alloc": lambda b, h: b.allocate(h.device_id, SIZE),
    "host_view": lambda b, h: b.view(h),
    "host_alloc": lambda b, h: b.host_buffer(h.device_id, SIZE),
}
METHODS = {"copy_into": "read"}
every_call = pytest.mark.parametrize("name", list(CALLS))


async def give_back(result: Any, backend: DriverBackend) -> None:
    if isinstance(result, MemoryHandle):
        await backend.deallocate(result)
    elif hasattr(result, "close"):
        result.close()


async def serve(backend: DriverBackend, handle: MemoryHandle, name: str, refs: list[weakref.ref[Any]]) -> None:
    """A request: a local and a context variable, and one call."""
    local, request = Local(), Local()
    REQUEST.set(request)
    refs += [weakref.ref(local), weakref.ref(request)]
    with contextlib.suppress(GPUError):
        await give_back(await CALLS[name](backend, handle), backend)


def alive(refs: list[weakref.ref[Any]]) -> list[int]:
    return [number for number, ref in enumerate(refs) if ref() is not None]


@every_call
@pytest.mark.parametrize("end", ["success", "failure", "cancelled", "hang"])
async def test_context_and_locals_of_a_caller_go_with_the_call(name: str, end: str) -> None:
    """The memory that it touched lives on."""
    method: Any = METHODS.get(name, name)
    async with rig(host_visible=True, pins_memory=True, hang_after=0.05 if end == "hang" else PATIENCE) as r:
        handle = await r.backend.allocate("checking:0", SIZE)
        refs: list[weakref.ref[Any]] = []
        gate = r.hold(method) if end in ("cancelled", "hang") else None
        if end == "failure":
            r.driver.inject(Fault(method, first=1, raises=lambda: OSError("no")))
        task = asyncio.create_task(serve(r.backend, handle, name, refs))
        if end == "cancelled":
            await r.called(method, 2 if name == "alloc" else 1)
            task.cancel()
            await turns(2)
            assert gate is not None
            gate.set()
        await asyncio.wait({task}, timeout=PATIENCE)
        assert task.done()
        if gate is not None:
            gate.set()
        del task
        await until(lambda: not alive(refs), "the caller's locals (0) and context (1) went", 1.0)
        if end == "hang":
            await until(lambda: r.backend.devices[0].state == "healthy", "the device came back")
        await r.backend.deallocate(handle)


@contextlib.contextmanager
def no_garbage() -> Generator[None]:
    """Whatever happens within it leaves no cycle of frames and exceptions behind."""
    gc.collect()
    yield
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = sorted({type(each).__name__ for each in gc.garbage})
        frames = [each.f_code.co_qualname for each in gc.garbage if type(each).__name__ == "frame"]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not {"traceback", "frame"} & set(kinds), f"{kinds} of {frames} are left in a cycle"


FAILURES: dict[str, Callable[[Rig, MemoryHandle], Awaitable[Any]]] = {
    "out of range": lambda r, h: r.backend.copy_to_device(bytes(SIZE + 1), h),
    "no size": lambda r, h: r.backend.allocate(h.device_id, -1),
    "no device": lambda r, _: r.backend.allocate("checking:7", 1),
    "no handle": lambda r, _: r.backend.copy_from_device(None),  # type: ignore[arg-type]
    "no buffer": lambda r, h: r.backend.copy_to_device(7, h),  # type: ignore[arg-type]
    "no file": lambda r, h: r.backend.load_file("/nowhere/at/all", h),
    "out of memory": lambda r, h: r.backend.allocate(h.device_id, 1 << 40),
    "no view": lambda r, h: r.backend.view(h, (1 << 20,), "float64"),
    "no kernel": lambda r, h: r.backend.compile(h.device_id, "nothing", "fill"),
    "no time": lambda r, _: r.backend.shutdown(timeout=-1),
    **{f"{name} fails": lambda r, h, name=name: CALLS[name](r.backend, h) for name in CALLS},
}


@pytest.mark.parametrize("failure", list(FAILURES))
@pytest.mark.parametrize("inline", [0, SIZE])
async def test_a_failure_leaves_no_cycle(failure: str, inline: int) -> None:
    async with rig(host_visible=True, pins_memory=True, kernels=True, inline_copy_bytes=inline) as r:
        handle = await r.backend.allocate("checking:0", SIZE)
        call = FAILURES[failure]
        for kind in ("memory_error", "panic", "stop_iteration") if failure.endswith("fails") else (None,):
            if kind is not None:
                name = failure.removesuffix(" fails")
                method: Any = METHODS.get(name, name)
                r.driver.inject(Fault(method, first=8 if kind == "memory_error" else 1, raises=EXCEPTIONS[kind]))
            refs: list[weakref.ref[Any]] = []

            async def caller(refs: list[weakref.ref[Any]] = refs) -> None:
                local = Local()
                refs.append(weakref.ref(local))
                await call(r, handle)

            with no_garbage():
                assert isinstance(await raised(caller()), GPUError)
                await turns(2)
            assert not alive(refs)
            r.driver.clear()
        await r.backend.deallocate(handle)


async def test_a_lost_device_keeps_no_caller() -> None:
    """Its error is told to everybody who comes later; the frames of the first are not for them."""
    async with rig() as r:
        handle = await r.backend.allocate("checking:0", SIZE)
        refs: list[weakref.ref[Any]] = []
        r.checking.lose(0)
        for name in ("write", "sync", "alloc"):
            await asyncio.create_task(serve(r.backend, handle, name, refs))
        await turns(2)
        assert not alive(refs)
        await r.backend.deallocate(handle)


async def test_peaks_count_what_was_live() -> None:
    async with rig(capacity_bytes=1 << 20) as r:
        manager = await get_memory_manager("checking:0", backend=r.backend)
        handles = [await r.backend.allocate("checking:0", SIZE) for _ in range(3)]
        for nbytes in (1 << 60, 2 << 20):
            with pytest.raises(OutOfMemory):
                await r.backend.allocate("checking:0", nbytes)
        gate = threading.Event()
        r.driver.inject(Fault("alloc", first=1, gate=gate, raises=OSError("no")))
        calls = r.count("alloc")
        cancelled = asyncio.create_task(r.backend.allocate("checking:0", 5 * SIZE))
        await r.called("alloc", calls + 1)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        gate.set()
        await r.backend.deallocate(handles.pop())
        handles.append(await r.backend.allocate("checking:0", SIZE))
        assert manager.pool.peak_live_bytes == 3 * SIZE
        for handle in handles:
            await r.backend.deallocate(handle)
        assert manager.pool.peak_live_bytes == 3 * SIZE


@asynccontextmanager
async def dropped(made: Rig, caught: list[Any]) -> AsyncIterator[None]:
    """The last reference to the backend goes at the end of this block."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        await made.backend.initialize()
        yield
        del made.backend
        gc.collect()
        await until(
            lambda: not made.lanes() and not made.checking.is_open, "its threads ended and the library was closed"
        )
    caught += [str(each.message) for each in record if each.category is ResourceWarning]


@pytest.mark.parametrize("threading_", ["backend", "device", "queue"])
@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
async def test_a_dropped_backend_says_so_once_and_ends(threading_: Any, pool_bytes: int) -> None:
    made, caught = Rig(threading=threading_, pool_bytes=pool_bytes, pins_memory=True), []
    async with dropped(made, caught):
        handles = [await made.backend.allocate(f"checking:{n % 2}", 1000) for n in range(3)]
        await made.backend.deallocate(handles.pop())
        (await made.backend.host_buffer("checking:0", 5000)).close()
    made.assert_clean()
    [text] = caught
    assert "checking" in text
    assert re.search(r"\b2\b", text), text
    assert "2,000" in text
    assert "thread" in text


async def test_a_dropped_backend_whose_driver_hangs_ends_when_it_returns() -> None:
    made, caught = Rig(), []
    gate = made.hold("write")
    async with dropped(made, caught):
        handle = await made.backend.allocate("checking:0", 64)
        call = asyncio.create_task(made.backend.copy_to_device(b"x", handle))
        await made.called("write")
        call.cancel()
        await asyncio.wait({call})
        del call
        threading.Timer(0.05, gate.set).start()
    made.assert_clean()
    assert len(caught) == 1


def test_a_backend_dropped_with_its_loop_says_so_once_and_ends() -> None:
    made = Rig()

    async def run() -> None:
        await made.backend.initialize()
        await made.backend.allocate("checking:0", 1 << 20)

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        asyncio.run(run())
        del made.backend
        gc.collect()
        deadline = time.monotonic() + PATIENCE
        while made.lanes() or made.checking.is_open:
            assert time.monotonic() < deadline, made.lanes()
            time.sleep(0.001)
    made.assert_clean()
    [text] = [str(each.message) for each in record if each.category is ResourceWarning]
    assert "1,048,576" in text


async def test_a_backend_that_was_never_opened_or_is_shut_down_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DriverBackend(CheckingDriver())
        made = Rig()
        async with made.backend:
            pass
        del made.backend
        gc.collect()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
def test_a_life_with_eager_tasks() -> None:
    made = Rig()

    async def life() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        for timeout in (10, None, 0.5):
            async with asyncio.timeout(PATIENCE):
                await made.backend.initialize()
                handle = await made.backend.allocate("checking:0", 64)
                writes = [asyncio.create_task(made.backend.copy_to_device(bytes([n]) * 64, handle)) for n in range(9)]
                assert await made.backend.copy_from_device(handle) == b"\x08" * 64
                await asyncio.gather(*writes)
                with pytest.raises(ValueError, match="timeout"):
                    await made.backend.shutdown(timeout="10")  # type: ignore[arg-type]
                await made.backend.deallocate(handle)
                await made.backend.shutdown(timeout=timeout)

    asyncio.run(life())
    made.assert_clean()
