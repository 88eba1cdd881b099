"""Faults of the runtime, each with the smallest sequence of calls that shows it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpurt.backends.cpu_backend import CPUBackend
from gpurt.errors import BackendClosed, GPUError, HandleInUse, OutOfMemory, OutOfRange
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.types import DeviceState, Telemetry

FIRST, SECOND = "simulated:0", "simulated:1"


def driver() -> FaultyDriver:
    return FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))


async def called(faulty: FaultyDriver, method: Any, n: int = 1) -> None:
    await asyncio.to_thread(faulty.wait_until_called, method, n)


async def ended(tasks: set[asyncio.Task[Any]], timeout: float = 2.0) -> int:
    """How many of ``tasks`` have an outcome by then. None is left behind."""
    done, pending = await asyncio.wait(tasks, timeout=timeout)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return len(done)


async def test_shutdown_frees_an_allocation_that_was_under_way() -> None:
    faulty, gate = driver(), threading.Event()
    backend = DriverBackend(faulty)
    await backend.initialize()
    faulty.inject(Fault("alloc", gate=gate))
    allocating = asyncio.create_task(backend.allocate(FIRST, 4096))
    await called(faulty, "alloc")
    closing = asyncio.create_task(backend.shutdown())
    await asyncio.sleep(0)
    gate.set()
    await closing
    await asyncio.gather(allocating, return_exceptions=True)
    order = [call.method for call in faulty.calls if call.method in ("alloc", "free", "close")]
    assert order == ["alloc", "free", "close"]


async def test_shutdown_of_a_hung_driver_lets_the_waiting_callers_go() -> None:
    faulty, gate = driver(), threading.Event()
    backend = DriverBackend(faulty)
    await backend.initialize()
    handles = [await backend.allocate(FIRST, 64) for _ in range(2)]
    faulty.inject(Fault("write", gate=gate))
    writing = {asyncio.create_task(backend.copy_to_device(b"x", handle)) for handle in handles}
    try:
        await called(faulty, "write")
        await backend.shutdown(timeout=0.05)
        assert await ended(writing) == 2
    finally:
        gate.set()


async def test_shutdown_of_a_hung_driver_lets_the_callers_go_who_waited_for_a_place() -> None:
    faulty, gate = driver(), threading.Event()
    backend = DriverBackend(faulty, max_pending=1)
    await backend.initialize()
    handles = [await backend.allocate(FIRST, 64) for _ in range(3)]
    faulty.inject(Fault("write", gate=gate))
    writing = {asyncio.create_task(backend.copy_to_device(b"x", handle)) for handle in handles}
    try:
        await called(faulty, "write")
        await backend.shutdown(timeout=0.05)
    finally:
        gate.set()
    assert await ended(writing) == 3


async def test_shutdown_during_initialize_leaves_nothing_open() -> None:
    faulty, gate = driver(), threading.Event()
    faulty.inject(Fault("open", gate=gate))
    backend = DriverBackend(faulty)
    opening = asyncio.create_task(backend.initialize())
    await called(faulty, "open")
    closing = asyncio.create_task(backend.shutdown())
    await asyncio.sleep(0.02)
    gate.set()
    await closing
    await asyncio.gather(opening, return_exceptions=True)
    await backend.shutdown()
    for _ in range(200):  # an undone open is closed by its lane
        if [call.method for call in faulty.calls].count("close") == 1:
            break
        await asyncio.sleep(0.01)
    assert [call.method for call in faulty.calls] == ["open", "close"]


async def test_a_thread_that_could_not_be_started_costs_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    backend = DriverBackend(driver())
    await backend.initialize()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError):
                await backend.allocate(FIRST, 64)
        async with asyncio.timeout(2):
            handle = await backend.allocate(FIRST, 64)
        await backend.deallocate(handle)
        assert backend.ledger.usage(FIRST).committed_bytes == 0
    finally:
        await backend.shutdown(timeout=0.1)


async def test_a_pooled_backend_gives_what_fits_the_limit() -> None:
    # 1.5 MiB are rounded to 2 MiB, twice which do not fit into 3 MiB; without a pool both allocations do.
    async with CPUBackend(memory_limit=3 << 20, pool_bytes=64 << 20) as backend:
        handles = [await backend.allocate("cpu:0", 3 << 19) for _ in range(2)]
        for handle in handles:
            await backend.deallocate(handle)


async def test_a_pooled_backend_keeps_to_the_largest_allocation_of_the_library() -> None:
    class Limited(SimulatedDriver):
        capabilities = SimulatedDriver.capabilities.model_copy(update={"max_allocation_bytes": 3 << 20})

        def alloc(self, index: int, nbytes: int) -> Any:
            assert nbytes <= 3 << 20, f"{nbytes} bytes asked of a library that takes {3 << 20} at most"
            return super().alloc(index, nbytes)

    async with DriverBackend(Limited(parse_simulation("h100")), pool_bytes=64 << 20) as backend:
        await backend.deallocate(await backend.allocate(FIRST, 3 << 20))


async def test_memory_that_an_array_still_looks_into_is_not_given_to_the_next() -> None:
    import numpy as np

    async with CPUBackend(pool_bytes=64 << 20) as backend:
        handle = await backend.allocate("cpu:0", 1 << 20)
        await backend.copy_to_device(b"A" * 16, handle)
        view = await backend.view(handle)
        array = np.frombuffer(view.memoryview(), np.uint8)
        with contextlib.suppress(BufferError):  # it cannot let go, and may say so
            view.close()
        with pytest.raises(HandleInUse):
            await backend.deallocate(handle)
        del array
        view.close()
        await backend.deallocate(handle)


async def test_a_copy_to_a_lost_device_does_not_lose_the_other_one() -> None:
    faulty = driver()
    async with DriverBackend(faulty) as backend:
        source, target = await backend.allocate(FIRST, 64), await backend.allocate(SECOND, 64)
        faulty.lose(1)
        with pytest.raises(GPUError):
            await backend.copy_device_to_device(source, target, 64)
        assert [device.state for device in backend.devices] == [DeviceState.HEALTHY, DeviceState.LOST]
        await backend.deallocate(source)
        await backend.deallocate(target)


async def test_an_exception_that_a_driver_raises_twice_harms_no_caller() -> None:
    # The traceback of an exception object that is raised again still has the frames of the first time, among them
    # those of a caller that is suspended: it waits for the numbers of its OutOfMemory.
    again, gate = MemoryError("no room"), threading.Event()
    faulty = driver()
    async with DriverBackend(faulty) as backend:
        faulty.inject(Fault("alloc", raises=again))
        faulty.inject(Fault("telemetry", gate=gate))
        first = asyncio.create_task(backend.allocate(FIRST, 64))
        await called(faulty, "telemetry")
        second = asyncio.create_task(backend.allocate(FIRST, 64))
        await called(faulty, "alloc", 2)
        await asyncio.sleep(0.05)
        gate.set()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [OutOfMemory, OutOfMemory]


def test_a_shutdown_that_died_with_its_loop_does_not_close_the_next_opening() -> None:
    faulty, gate = driver(), threading.Event()
    backend = DriverBackend(faulty)

    async def hang() -> None:
        await backend.initialize()
        handle = await backend.allocate(FIRST, 64)
        faulty.inject(Fault("write", gate=gate))
        tasks = [asyncio.create_task(backend.copy_to_device(b"x", handle))]
        await called(faulty, "write")
        tasks.append(asyncio.create_task(backend.shutdown()))
        await asyncio.sleep(0.02)

    async def go_on() -> int:
        again = asyncio.create_task(backend.initialize())
        await asyncio.sleep(0.02)
        assert not again.done()  # the library is not opened beside its last opening
        gate.set()
        await again
        gc.collect()  # the tasks of the loop that is no more
        gc.collect()
        try:
            return len(await backend.list_devices())
        finally:
            await backend.shutdown()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(hang())
    loop.close()
    assert asyncio.run(go_on()) == 2


HUGE = 10**5000  # more digits than Python is willing to print


@pytest.mark.parametrize(
    "call",
    [
        lambda backend, handle: backend.allocate("cpu:0", HUGE),
        lambda backend, handle: backend.copy_from_device(handle, HUGE, 1),
        lambda backend, handle: backend.copy_from_device(handle, -HUGE),
        lambda backend, handle: backend.copy_from_device(handle, 0, HUGE),
        lambda backend, handle: backend.copy_device_to_device(handle, handle, HUGE),
        lambda backend, handle: backend.copy_to_device(_released(), handle),
        lambda backend, handle: backend.copy_to_device(_unbufferable(), handle),
    ],
    ids=["allocate", "offset", "negative-offset", "size", "peer", "released-view", "datetime-array"],
)
async def test_bad_arguments_are_errors_of_ours(call: Callable[[Any, Any], Awaitable[Any]]) -> None:
    async with CPUBackend() as backend:
        handle = await backend.allocate("cpu:0", 64)
        try:
            with pytest.raises(GPUError):
                await call(backend, handle)
        finally:
            await backend.deallocate(handle)


async def test_a_device_name_that_cannot_be_one_is_no_device() -> None:
    async with CPUBackend() as backend:
        assert await backend.get_device(["cpu:0"]) is None  # pyright: ignore[reportArgumentType]


def _released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


def _unbufferable() -> Any:
    import numpy as np

    return np.zeros(4, "M8[s]")


def test_a_driver_that_tries_to_end_the_process_does_not_stop_the_loop() -> None:
    class Leaver(SimulatedDriver):
        def telemetry(self, index: int) -> Telemetry:
            sys.exit(3)

    async def use() -> str:
        async with DriverBackend(Leaver(parse_simulation("h100"))) as backend:
            # In a task of its own: that is where asyncio lets SystemExit through to run_forever().
            reading = asyncio.create_task(backend.get_telemetry(FIRST))
            (outcome,) = await asyncio.gather(reading, return_exceptions=True)
            return type(outcome).__name__

    try:
        name = asyncio.run(use())
    except SystemExit:
        name = "SystemExit out of the loop"
    assert name == "TransferFailed"


async def test_a_call_that_a_shutdown_cuts_off_is_told_so() -> None:
    """It looked up the name of its device among those that the shutdown had forgotten."""
    gate = threading.Event()
    faulty = FaultyDriver(SimulatedDriver(parse_simulation("h100")), [Fault("write", gate=gate)])
    backend = DriverBackend(faulty)
    await backend.initialize()
    handle = await backend.allocate(FIRST, 8)
    copy = asyncio.create_task(backend.copy_to_device(b"12345678", handle))
    try:
        await called(faulty, "write")
        await backend.shutdown(timeout=0.05)
        with pytest.raises(BackendClosed):
            await copy
    finally:
        gate.set()


async def test_what_is_no_path_is_an_error_of_ours() -> None:
    async with DriverBackend(driver()) as backend:
        handle = await backend.allocate(FIRST, 8)
        with pytest.raises(OutOfRange, match="NoneType is not a path"):
            await backend.load_file(None, handle)  # type: ignore[arg-type]
