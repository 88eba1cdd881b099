"""Drivers that fail where nobody expects it: in the middle of a trim, while another failure is being reported, in a
copy on the event loop, with tokens that are None."""

from __future__ import annotations

import asyncio
import copy
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.runtime.rig import Rig, rig

from gpurt import DeviceLost, DeviceUnresponsive, DriverBackend, GPUError, OutOfMemory
from gpurt.testing import CheckingDriver, Fault
from gpurt.testing.kit.hostile import EXCEPTIONS, assert_typed, causes, raised
from gpurt.testing.loops import PATIENCE, turns, until

BLOCK = 4096
hostile = pytest.mark.parametrize("kind", list(EXCEPTIONS))


# Reports of failures


@hostile
async def test_readings_that_fail_leave_out_of_memory_without_figures(kind: str) -> None:
    async with rig(capacity_bytes=BLOCK) as r:
        r.driver.inject(Fault("telemetry", raises=EXCEPTIONS[kind]))
        with pytest.raises(OutOfMemory) as caught:
            await r.backend.allocate("checking:0", 1 << 40)
        assert caught.value.requested_bytes == 1 << 40
        assert (caught.value.free_bytes, caught.value.total_bytes) == (None, None)
        assert isinstance(list(causes(caught.value))[-1], MemoryError)
        assert r.count("telemetry") <= 2


async def test_a_reading_that_is_out_of_memory_is_read_once() -> None:
    async with rig() as r:
        r.driver.inject(Fault("telemetry", raises=lambda: MemoryError("host")))
        with pytest.raises(OutOfMemory) as caught:
            await r.backend.get_device_temperature("checking:0")
        assert (caught.value.free_bytes, caught.value.total_bytes) == (None, None)
        assert r.count("telemetry") <= 2


# Pools


async def pooled(r: Rig, count: int, device_id: str = "checking:0") -> None:
    for handle in [await r.backend.allocate(device_id, BLOCK) for _ in range(count)]:
        await r.backend.deallocate(handle)
    assert r.backend.pool_statistics(device_id).cached_count == count


async def _make_room(r: Rig) -> Any:
    await r.backend.deallocate(await r.backend.allocate("checking:0", 9 * BLOCK))


MAKING_ROOM: dict[str, Callable[[Rig], Any]] = {
    "trim": lambda r: r.backend.trim(),
    "shutdown": lambda r: r.backend.shutdown(),
    "library": _make_room,
}


@pytest.mark.parametrize("way", list(MAKING_ROOM))
@pytest.mark.parametrize(
    "which", [pytest.param(1, marks=pytest.mark.wide), 5, pytest.param(10, marks=pytest.mark.wide)]
)
@hostile
async def test_one_block_that_cannot_be_freed_takes_no_other_with_it(way: str, which: int, kind: str) -> None:
    made = Rig(pool_bytes=1 << 20, capacity_bytes=10 * BLOCK)
    await made.backend.initialize()
    await pooled(made, 10)
    original = EXCEPTIONS[kind]()
    made.fail("free", original, first=None, nth=which)
    error = await raised(MAKING_ROOM[way](made))
    assert error is None or isinstance(error, GPUError)
    told = sum(original in causes(each) for each in (error, *made.reported) if each is not None)
    assert told == 1, f"{kind} was told {told} times"
    if way == "shutdown":
        await made.backend.initialize()
    # Each of the others was freed, or is still to be had.
    assert made.checking.live - made.backend.pool_statistics("checking:0").cached_count in (0, 1)
    made.driver.clear()
    await made.backend.trim()
    assert made.checking.live <= 1
    await made.backend.shutdown()


@pytest.mark.parametrize("what", ["hangs", "fails", "is lost"])
async def test_trim_goes_on_to_the_other_devices(what: str) -> None:
    async with rig(pool_bytes=1 << 20, hang_after=0.05) as r:
        for device_id in ("checking:0", "checking:1"):
            await pooled(r, 3, device_id)
        gate: threading.Event | None = None
        if what == "hangs":
            gate = r.hold("sync", index=0)
            with pytest.raises(DeviceUnresponsive):
                await r.backend.synchronize("checking:0")
        elif what == "fails":
            r.fail("free", OSError("no"), index=0)
        else:
            r.checking.lose(0)
        error = await raised(r.backend.trim())
        if what == "fails":
            assert isinstance(error, GPUError)
            assert error.device_id == "checking:0"
        else:  # there is nothing to be had of it now
            assert error is None or isinstance(error, DeviceLost)
        assert r.backend.pool_statistics("checking:1").cached_count == 0
        if gate is not None:
            gate.set()
            await until(lambda: r.backend.devices[0].state == "healthy", "the device came back")
        if what == "fails":
            assert r.checking.live <= 3
            r.checking.lose(0)  # what could not be freed must not be missed at the end


@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
async def test_a_token_may_be_none(pool_bytes: int) -> None:
    async with rig(none_token=True, pool_bytes=pool_bytes, host_visible=True) as r:
        for _ in range(3):
            handles = [await r.backend.allocate("checking:0", BLOCK) for _ in range(2)]
            for number, handle in enumerate(handles):
                await r.backend.copy_to_device(bytes([number]) * BLOCK, handle)
            for number, handle in enumerate(handles):
                assert await r.backend.copy_from_device(handle) == bytes([number]) * BLOCK
                await r.backend.deallocate(handle)
        assert r.checking.live == (2 if pool_bytes else 0)
        assert r.count("alloc") == (2 if pool_bytes else 6)
        call = asyncio.create_task(r.backend.allocate("checking:1", BLOCK))
        await turns(1)
        call.cancel()
        await asyncio.wait({call})
        await r.backend.trim()
        assert r.checking.live == 0


async def test_a_block_of_exactly_the_size_that_fitted_is_used_again() -> None:
    """Where its size class did not fit any more. What is pooled and never taken again is lost until the next trim."""
    async with rig(pool_bytes=1 << 20, capacity_bytes=5100) as r:
        for _ in range(3):
            handle = await r.backend.allocate("checking:0", 5000)
            assert r.checking.live_bytes == 5000
            await r.backend.deallocate(handle)
            kept, calls = r.checking.live, r.count("alloc")
            again = await r.backend.allocate("checking:0", 5000)
            assert not kept or r.count("alloc") == calls, "a block is kept that serves nobody"
            await r.backend.deallocate(again)


# Copies on the event loop


@hostile
@pytest.mark.parametrize("method", ["write", "read"])
async def test_inline_copies_wrap_whatever_is_raised(method: Any, kind: str) -> None:
    if kind == "keyboard_interrupt":
        pytest.skip("on the main thread that is Ctrl-C, which must not be held up")
    async with rig(inline_copy_bytes=BLOCK) as r:
        handle, buffer = await r.backend.allocate("checking:0", 64), bytearray(64)
        calls: list[Callable[[], Any]] = [lambda: r.backend.copy_to_device(buffer, handle)]
        if method == "read":
            calls = [lambda: r.backend.copy_from_device(handle), lambda: r.backend.copy_into(handle, buffer)]
        for call in calls:
            original = EXCEPTIONS[kind]()
            r.fail(method, original)
            error = await raised(call())
            assert error is not None
            assert_typed(error, original)
            buffer.append(0)  # nobody looks into it
            buffer.pop()
            await call()
        await r.backend.deallocate(handle)


# Loops


@pytest.mark.parametrize("mode", ["backend", "device", "queue"])
def test_a_loop_closed_in_the_middle_leaves_every_call_on_its_thread(mode: Any) -> None:
    for attempt in range(10):
        made = Rig(threading=mode)

        async def work(made: Rig = made, attempt: int = attempt) -> list[asyncio.Task[Any]]:
            await made.backend.initialize()
            calls = [asyncio.create_task(made.backend.allocate(f"checking:{n % 2}", 64)) for n in range(40)]
            await turns(1 + attempt)
            return calls

        async def again(made: Rig = made) -> None:
            await made.backend.initialize()
            await made.backend.shutdown()

        loop = asyncio.new_event_loop()
        calls = loop.run_until_complete(work())
        loop.close()
        for call in calls:
            call._log_destroy_pending = False  # type: ignore[attr-defined]
        asyncio.run(again())
        made.assert_clean()


@pytest.mark.parametrize("kind", ["copy", "failure"])
async def test_a_small_result_waits_a_millisecond_at_most(kind: str) -> None:
    """Whatever runs behind it: here a call that does not return before it is told."""
    async with rig() as r:
        handles = [await r.backend.allocate("checking:0", 64) for _ in range(3)]
        waited: list[float] = []
        for _ in range(8):
            # The first keeps the lane until the others are queued, the second is quick, the third hangs.
            starts, hangs = r.hold("write"), r.hold("write", first=None, nth=3)
            if kind == "failure":
                r.fail("write", OSError("no"), first=None, nth=2)
            calls = r.count("write")
            copies = [asyncio.create_task(r.backend.copy_to_device(b"x", handle)) for handle in handles]
            await r.called("write", calls + 1)
            starts.set()
            await r.called("write", calls + 3)
            began = time.perf_counter()
            await asyncio.wait({copies[1]}, timeout=PATIENCE)
            waited.append(time.perf_counter() - began)
            assert copies[1].done()
            hangs.set()
            results = await asyncio.gather(*copies, return_exceptions=True)
            assert [result is None for result in results] == [True, kind == "copy", True]
            r.driver.clear()
        # The best half of some, since others use this machine, too: the hang clock alone would need 50 ms for each.
        assert sorted(waited)[3] < 0.02, waited
        for handle in handles:
            await r.backend.deallocate(handle)


def test_without_an_event_loop_of_asyncio_the_error_says_so() -> None:
    made = Rig()
    backend = made.backend
    for call in (backend.initialize, backend.shutdown, backend.list_devices):
        coroutine = call()
        with pytest.raises(GPUError):
            coroutine.send(None)
    coroutine = backend.initialize()
    with pytest.raises(GPUError, match="asyncio"):
        coroutine.send(None)
    assert made.lanes() == []


def test_under_trio_the_error_says_that_asyncio_is_needed() -> None:
    trio = pytest.importorskip("trio")
    backend = DriverBackend(CheckingDriver())
    with pytest.raises(GPUError, match="asyncio"):
        trio.run(backend.initialize)
    with pytest.raises(GPUError, match=r"asyncio|not open"):
        trio.run(backend.list_devices)


# Copies of Python objects


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("what", ["view", "host_buffer"])
async def test_a_copy_of_a_view_does_not_close_it(how: Callable[[Any], Any], what: str) -> None:
    async with rig(host_visible=True, pins_memory=True) as r:
        handle = await r.backend.allocate("checking:0", 64)
        held: Any = await (r.backend.view(handle) if what == "view" else r.backend.host_buffer("checking:0", 64))
        try:
            twin = how(held)
        except TypeError:
            twin = None  # refused: as good
        del twin
        gc.collect()
        assert not held.closed
        held.numpy()[:] = 1
        held.close()
        await r.backend.deallocate(handle)


# Processes

FORK = """
import gc, os, sys, threading
from gpurt.weights.quiet import MANY, quiet
inside, done = threading.Event(), threading.Event()
def load():
    with quiet(MANY):
        inside.set()
        done.wait()
thread = threading.Thread(target=load)
before = sys.getswitchinterval()
thread.start()
inside.wait()
assert not gc.isenabled()
pid = os.fork()
if pid == 0:
    os._exit((0 if gc.isenabled() else 1) + (0 if abs(sys.getswitchinterval() - before) < 1e-6 else 2))
done.set()
thread.join()
assert gc.isenabled()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork here")
def test_a_fork_while_collection_pauses_does_not_leave_it_off() -> None:
    """The thread that paused it does not exist in the child, so nobody there would turn it on again."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.returncode} (1: collection is off, 2: short turns) {done.stderr.decode()}"
