"""Promises of the runtime that are easily lost in a change: each test was written against a wrong version of it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.runtime.rig import Rig, rig, stand_still

from gpurt import (
    BackendUnavailable,
    DeviceLost,
    DeviceUnresponsive,
    DriverBackend,
    GPUError,
    OutOfRange,
    ReasonCode,
)
from gpurt.testing import CheckingDriver, Fault
from gpurt.testing.loops import PATIENCE, turns, until

HANG_AFTER = 0.1


async def test_synchronize_of_the_target_waits_for_a_peer_copy() -> None:
    async with rig() as r:
        source, target = await r.backend.allocate("checking:0", 64), await r.backend.allocate("checking:1", 64)
        gate = r.hold("copy")
        copying = asyncio.create_task(r.backend.copy_device_to_device(source, target, 64))
        await r.called("copy")
        synchronizing = asyncio.create_task(r.backend.synchronize("checking:1"))
        done, _ = await asyncio.wait({synchronizing}, timeout=0.02)
        assert not done
        gate.set()
        await asyncio.gather(copying, synchronizing)
        for handle in (source, target):
            await r.backend.deallocate(handle)


@pytest.mark.parametrize("method", ["sync", "write", "read", "telemetry"])
async def test_failure_that_was_there_before_its_caller_was_cancelled_is_reported_once(method: str) -> None:
    """Also of a call that has nothing to undo."""
    async with rig() as r:
        handle = await r.backend.allocate("checking:0", 64)
        call = {
            "sync": lambda: r.backend.synchronize("checking:0"),
            "write": lambda: r.backend.copy_to_device(bytes(64), handle),
            "read": lambda: r.backend.copy_from_device(handle),
            "telemetry": lambda: r.backend.get_device_temperature("checking:0"),
        }[method]
        await call()
        late = OSError("late")
        gate = threading.Event()
        r.driver.inject(Fault(method, first=1, gate=gate, raises=late))  # type: ignore[arg-type]
        task: asyncio.Task[Any] = asyncio.ensure_future(call())
        before = r.count(method)
        await r.called(method, before)
        gate.set()
        stand_still()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await until(lambda: bool(r.reported), "the failure was reported")
        await r.backend.deallocate(handle)
        assert [each is late or each.__cause__ is late for each in r.reported] == [True]


def test_results_of_an_opening_that_was_cancelled_arrive_on_the_next_loop() -> None:
    made = Rig()
    gate = made.hold("open")

    async def cancelled() -> None:
        opening = asyncio.create_task(made.backend.initialize())
        await made.called("open")
        opening.cancel()
        await asyncio.wait({opening})

    async def again() -> None:
        async with asyncio.timeout(PATIENCE):
            await made.backend.initialize()
            await made.backend.deallocate(await made.backend.allocate("checking:0", 64))
            await made.backend.shutdown()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(cancelled())
    loop.close()
    gate.set()
    asyncio.run(again())
    assert made.checking.violations == []


async def test_one_thread_for_all_devices_tells_the_callers_of_all() -> None:
    async with rig(threading="backend", hang_after=HANG_AFTER) as r:
        handles = [await r.backend.allocate(f"checking:{index}", 64) for index in range(2)]
        gate = r.hold("write")
        calls = [asyncio.create_task(r.backend.copy_to_device(b"x", handle)) for handle in handles]
        done, _ = await asyncio.wait(calls, timeout=PATIENCE)
        assert len(done) == 2
        for call in calls:
            with pytest.raises(DeviceUnresponsive):
                call.result()
        gate.set()
        await until(lambda: all(device.state == "healthy" for device in r.backend.devices), "the driver came back")
        for handle in handles:
            await r.backend.deallocate(handle)


async def test_waiting_callers_are_told_of_a_lost_device() -> None:
    async with rig(hang_after=3600.0) as r:  # else the hang clock would tell them, later
        handles = [await r.backend.allocate("checking:0", nbytes) for nbytes in (4 << 20, 64)]
        gate = r.hold("read")
        waiting = asyncio.create_task(r.backend.copy_from_device(handles[0]))
        await r.called("read")
        r.checking.lose(0)
        with pytest.raises(DeviceLost):
            await r.backend.copy_to_device(b"x", handles[1])
        done, _ = await asyncio.wait({waiting}, timeout=PATIENCE)
        assert done, "nobody told the caller of a call under way"
        with pytest.raises(DeviceLost):
            waiting.result()
        gate.set()
        for handle in handles:
            await r.backend.deallocate(handle)


async def test_the_hang_clock_goes_on_after_the_first_hang() -> None:
    """Another device hangs while one does, and both come back."""
    async with rig(hang_after=HANG_AFTER) as r:
        handles = [await r.backend.allocate(f"checking:{index}", 64) for index in range(2)]
        heard: list[tuple[str, str]] = []
        r.backend.state_listeners.append(lambda device: heard.append((device.device_id, device.state.value)))
        gates = [r.hold("write", index=0), r.hold("read", index=1)]
        with pytest.raises(DeviceUnresponsive):
            await r.backend.copy_to_device(b"x", handles[0])
        hung = asyncio.create_task(r.backend.copy_from_device(handles[1]))
        done, _ = await asyncio.wait({hung}, timeout=PATIENCE)
        assert done, "the second hang was not noticed"
        with pytest.raises(DeviceUnresponsive):
            hung.result()
        for gate in gates:
            gate.set()
        await until(lambda: len(heard) == 4, f"both devices came back: {heard}")
        assert sorted(heard[2:]) == [("checking:0", "healthy"), ("checking:1", "healthy")]
        for handle in handles:
            await r.backend.deallocate(handle)


@pytest.mark.parametrize("moment", ["in_driver", "result_ready"])
async def test_what_nobody_took_is_freed_on_the_lane_that_made_it(moment: str) -> None:
    async with rig(threading="device") as r:
        gate = r.hold("alloc")
        call = asyncio.create_task(r.backend.allocate("checking:0", 64))
        await r.called("alloc")
        if moment == "result_ready":
            gate.set()
            stand_still()
        call.cancel()
        await asyncio.wait({call})
        gate.set()
        await until(lambda: r.count("free") == 1, "the memory was freed")
        calls = {call.method: call.thread for call in r.driver.calls}
        assert calls["free"] == calls["alloc"]


async def test_a_lane_attaches_once() -> None:
    """Also when many calls are queued before the first of them has run."""
    async with rig() as r:
        gate = r.hold("attach")
        calls = [asyncio.create_task(r.backend.allocate("checking:0", 64)) for _ in range(8)]
        await r.called("attach")
        await turns(3)
        gate.set()
        handles = await asyncio.gather(*calls)
        for handle in handles:
            await r.backend.deallocate(handle)
        lanes = [(call.thread, call.index) for call in r.driver.calls if call.method == "attach"]
        assert len(lanes) == len(set(lanes))


async def test_a_thread_that_could_not_be_attached_is_tried_again() -> None:
    async with rig() as r:
        r.driver.inject(Fault("attach", first=1, raises=OSError("no context")))
        with pytest.raises(GPUError):
            await r.backend.allocate("checking:0", 64)
        await r.backend.deallocate(await r.backend.allocate("checking:0", 64))
        assert r.count("attach") == 2


async def test_a_view_whose_caller_has_gone_keeps_no_memory() -> None:
    async with rig(host_visible=True) as r:
        handle = await r.backend.allocate("checking:0", 64)
        gate = r.hold("host_view")
        call = asyncio.create_task(r.backend.view(handle))
        await r.called("host_view")
        call.cancel()
        await asyncio.wait({call})
        gate.set()
        await r.backend.synchronize("checking:0")
        await r.backend.deallocate(handle)


async def test_trim_asks_the_library_too() -> None:
    async with rig() as r:
        await r.backend.trim("checking:1")
        assert [call.index for call in r.driver.calls if call.method == "trim"] == [1]
        await r.backend.trim()
        assert sorted(call.index or 0 for call in r.driver.calls if call.method == "trim") == [0, 1, 1]


async def test_the_end_of_a_size_that_was_rounded_up_needs_no_alignment() -> None:
    async with rig(alignment_bytes=16) as r:
        handle = await r.backend.allocate("checking:0", 100)
        await r.backend.copy_to_device(b"tail", handle, 96)
        assert await r.backend.copy_from_device(handle, 96, 4) == b"tail"
        with pytest.raises(OutOfRange):
            await r.backend.copy_from_device(handle, 80, 4)
        await r.backend.deallocate(handle)


async def test_a_library_without_devices_is_closed_again() -> None:
    checking = CheckingDriver(devices=0)
    backend = DriverBackend(checking)
    for _ in range(2):
        with pytest.raises(BackendUnavailable) as caught:
            await backend.initialize()
        assert caught.value.reason == ReasonCode.NO_DEVICE
        assert not checking.is_open
    assert checking.violations == []


@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
async def test_what_another_library_saw_is_synchronised_before_it_is_used_again(pool_bytes: int) -> None:
    """It may have work queued on that memory, of which nobody here knows."""
    async with rig(cuda_pointers=True, pool_bytes=pool_bytes) as r:
        handle = await r.backend.allocate("checking:0", 4096)
        (await r.backend.view(handle)).close()
        await r.backend.deallocate(handle)
        again = await r.backend.allocate("checking:0", 4096)
        methods = [call.method for call in r.driver.calls]
        after = methods[methods.index("pointer") :]
        assert "sync" in after
        if not pool_bytes:
            assert after.index("sync") < after.index("free")
        await r.backend.deallocate(again)


async def test_the_loop_makes_no_large_memory() -> None:
    """New bytes of a mebibyte take it a millisecond: from 64 KiB on they are made on a lane."""
    async with rig(inline_copy_bytes=1 << 20, chunk_bytes=1 << 20) as r:
        r.driver.inline_copy_bytes = 1 << 20
        handle = await r.backend.allocate("checking:0", 1 << 20)
        await r.backend.copy_from_device(handle, 0, 1 << 10)
        await r.backend.copy_from_device(handle, 0, 1 << 18)
        small, large = (call.thread for call in r.driver.calls if call.method == "read")
        assert small == threading.current_thread().name
        assert large != threading.current_thread().name
        await r.backend.deallocate(handle)


async def test_deallocate_on_a_hung_device_does_not_wait() -> None:
    async with rig(hang_after=HANG_AFTER) as r:
        handles = [await r.backend.allocate("checking:0", 64) for _ in range(2)]
        gate = r.hold("write")
        with pytest.raises(DeviceUnresponsive):
            await r.backend.copy_to_device(b"x", handles[0])
        for handle in handles:
            call = asyncio.create_task(r.backend.deallocate(handle))
            await turns(3)
            assert call.done(), "it waits for a driver that hangs"
        gate.set()
        await until(lambda: r.count("free") == 2, "the memory was freed when the driver came back")


def test_a_held_job_that_is_skipped_is_complete() -> None:
    """What waits for it goes on. Jobs are held back when a lane has enough of them."""
    from gpurt.runtime.job import Call, Job
    from gpurt.runtime.lane import Lane
    from gpurt.runtime.order import Chain, Order, Queue

    order, chain, entered, release = Order(lambda job: None), Chain(), threading.Event(), threading.Event()
    lane = Lane("gpurt:test", on_done=order.done)
    queue = Queue(CheckingDriver(), lane, 1, lambda error: None)

    def hang(_: Job) -> None:
        entered.set()
        assert release.wait(PATIENCE)

    running, held, after = Call(hang), Call(lambda _: None), Call(lambda _: None)
    order.submit(running, queue)
    order.submit(held, queue, (chain,))
    order.submit(after, queue, (chain,))
    assert entered.wait(PATIENCE)
    order.close()
    release.set()
    lane.stop()
    assert lane.wait_stopped(PATIENCE)
    assert order.outstanding() == []
    assert running.complete
    assert held.complete
    assert after.complete


# Openings


@pytest.mark.parametrize("mode", ["backend", "device", "queue"])
async def test_the_library_is_opened_and_closed_on_one_thread(mode: Any) -> None:
    async with rig(threading=mode) as r:
        await r.backend.deallocate(await r.backend.allocate("checking:0", 64))
    threads = {call.thread for call in r.driver.calls if call.method in ("open", "close")}
    assert threads == {"gpurt:checking" if mode == "backend" else "gpurt:checking:control"}


async def test_memory_of_a_lost_device_is_left_to_the_library() -> None:
    async with rig() as r:
        handles = [await r.backend.allocate(f"checking:{index}", 64) for index in (0, 1)]
        r.checking.lose(0)
        with pytest.raises(DeviceLost):
            await r.backend.copy_to_device(b"x", handles[0])
        with pytest.warns(ResourceWarning, match="2 allocations"):
            await r.backend.shutdown()
    assert [call.index for call in r.driver.calls if call.method == "free"] == [1]


async def test_a_driver_that_lists_a_device_twice_is_refused_and_closed() -> None:
    driver = CheckingDriver()
    listed = driver.open
    driver.open = lambda: [*(devices := listed()), devices[0]]  # type: ignore[method-assign]
    backend = DriverBackend(driver)
    with pytest.raises(BackendUnavailable, match="twice"):
        await backend.initialize()
    assert (driver.opens, driver.closes, driver.violations) == (1, 1, [])


@pytest.mark.parametrize("failure", [OSError("no card"), MemoryError("host"), SystemExit(3)])
async def test_a_failed_open_that_nobody_waits_for_is_reported_once(failure: BaseException) -> None:
    made = Rig()
    gate = threading.Event()
    made.driver.inject(Fault("open", first=1, gate=gate, raises=lambda: failure))
    opening = asyncio.create_task(made.backend.initialize())
    await made.called("open")
    opening.cancel()
    await asyncio.wait({opening})
    gate.set()
    await made.backend.initialize()  # waits for it
    assert [error.__cause__ or error for error in made.reported] == [failure]
    await made.backend.shutdown()
    made.assert_clean()


async def test_an_attachment_that_fails_at_the_end_leaves_no_memory() -> None:
    """The lane that frees may be used for the first time then."""
    async with rig(pins_memory=True, threading="queue") as r:
        buffer = await r.backend.host_buffer("checking:1", 64)
        buffer.close()
        r.fail("attach", OSError("no context"), index=0)
        await r.backend.shutdown()
        assert r.checking.host_live == 0
    assert len(r.reported) == 1
