"""Results of short calls are kept back while more wait, and never longer than that."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gpurt.errors import DeviceUnresponsive
from gpurt.runtime.backend import DriverBackend
from gpurt.runtime.job import Call, Job
from gpurt.runtime.lane import HOLD_S, LONG_CALLS, Lane, Mailbox
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.simulated import SimulatedDriver, parse_simulation

WAIT = 5.0


class Announced(Call):
    """Tells in ``log`` when its caller would be woken."""

    def __init__(self, name: str, log: list[str], call: Any = lambda _: None) -> None:
        super().__init__(call)
        self.name, self.log = name, log


def deliver(job: Job) -> None:
    if isinstance(job, Announced):
        job.log.append(job.name)


class Gate:
    """A call that is inside the driver until it is let go."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, _: Job) -> None:
        self.entered.set()
        assert self.release.wait(WAIT)


def run_three(lane: Lane) -> tuple[Gate, Gate, list[str]]:
    """``a`` and ``b`` have run, ``c`` is in the driver and ``d`` waits."""
    first, last, log = Gate(), Gate(), []
    lane.put(Call(first))
    assert first.entered.wait(WAIT)
    for name in ("a", "b"):
        lane.put(Announced(name, log))
    lane.put(Announced("c", log, last))
    lane.put(Announced("d", log))
    first.release.set()
    assert last.entered.wait(WAIT)
    return first, last, log


def test_results_wait_for_each_other_while_more_calls_wait() -> None:
    lane = Lane("gpurt:test", deliver=deliver, hold_s=HOLD_S, clock=lambda: 0.0)
    _, last, log = run_three(lane)
    assert log == []
    last.release.set()
    lane.stop()
    assert lane.wait_stopped(WAIT)
    assert log == ["a", "b", "c", "d"]


def test_the_last_result_before_a_rest_is_told_at_once() -> None:
    told = threading.Event()
    lane = Lane("gpurt:test", hold_s=1000.0, deliver=lambda _: told.set())
    lane.put(Call(lambda _: None))
    assert told.wait(WAIT)
    lane.stop()


def test_results_are_not_kept_longer_than_asked_for() -> None:
    now = [0.0]
    lane = Lane("gpurt:test", deliver=deliver, hold_s=HOLD_S, clock=lambda: now[0])
    first, last, log = Gate(), Gate(), []

    def short(_: Job) -> None:
        now[0] += HOLD_S / LONG_CALLS / 2

    lane.put(Call(first))
    assert first.entered.wait(WAIT)
    names = [f"{number:02}" for number in range(2 * LONG_CALLS)]
    for name in names:
        lane.put(Announced(name, log, short))
    lane.put(Announced("c", log, last))
    lane.put(Announced("d", log))
    first.release.set()
    assert last.entered.wait(WAIT)
    told = len(log)
    last.release.set()
    lane.stop()
    assert lane.wait_stopped(WAIT)
    assert told == 2 * LONG_CALLS
    assert log == [*names, "c", "d"]


def test_beside_a_long_call_nothing_is_kept_back() -> None:
    now = [0.0]
    lane = Lane("gpurt:test", deliver=deliver, hold_s=HOLD_S, clock=lambda: now[0])
    first, last, log = Gate(), Gate(), []

    def long(_: Job) -> None:
        now[0] += HOLD_S / LONG_CALLS

    lane.put(Call(first))
    assert first.entered.wait(WAIT)
    lane.put(Announced("a", log))
    lane.put(Announced("b", log, long))
    lane.put(Announced("c", log, last))
    lane.put(Announced("d", log))
    first.release.set()
    assert last.entered.wait(WAIT)
    assert log == ["a", "b"]
    last.release.set()
    lane.stop()
    assert lane.wait_stopped(WAIT)
    assert log == ["a", "b", "c", "d"]


def test_flush_tells_what_is_kept_back() -> None:
    lane = Lane("gpurt:test", deliver=deliver, hold_s=HOLD_S, clock=lambda: 0.0)
    _, last, log = run_three(lane)
    lane.flush()
    assert log == ["a", "b"]
    last.release.set()
    lane.stop()
    assert lane.wait_stopped(WAIT)
    assert log == ["a", "b", "c", "d"]


def test_other_lanes_keep_nothing_back() -> None:
    lane = Lane("gpurt:test", deliver=deliver, clock=lambda: 0.0)
    _, last, log = run_three(lane)
    assert log == ["a", "b"]
    last.release.set()
    lane.stop()


@pytest.mark.parametrize("end", ["hang", "shutdown"])
async def test_a_finished_copy_is_told_although_the_next_one_hangs(end: str) -> None:
    gate, first = threading.Event(), threading.Event()
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x1")))
    backend = DriverBackend(driver, hang_after=WAIT if end == "shutdown" else 0.3)
    await backend.initialize()
    device = (await backend.list_devices())[0].device_id
    handles = [await backend.allocate(device, 4096) for _ in range(3)]
    # The first holds the lane until the others are queued behind it; the third never returns.
    driver.inject(Fault("write", nth=1, gate=first))
    driver.inject(Fault("write", nth=3, gate=gate))
    copies = [asyncio.create_task(backend.copy_to_device(b"x" * 4096, handle)) for handle in handles]
    try:
        await asyncio.sleep(0)
        first.set()
        async with asyncio.timeout(WAIT):
            if end == "shutdown":
                await asyncio.to_thread(driver.wait_until_called, "write", 3)
                copies[2].cancel()
                await backend.shutdown(timeout=0.001)  # sooner than the hang clock looks
            await asyncio.gather(*copies[:2])
            if end == "hang":
                with pytest.raises(DeviceUnresponsive):
                    await copies[2]
    finally:
        gate.set()
        await backend.shutdown()


async def test_results_told_from_two_threads_arrive_once() -> None:
    loop = asyncio.get_running_loop()
    lane = Lane("gpurt:test", hold_s=HOLD_S, deliver=Mailbox(loop, lambda: None).post)
    jobs = [Call(lambda _: None) for _ in range(5000)]
    for job in jobs:
        job.future = loop.create_future()
        lane.put(job)
    async with asyncio.timeout(WAIT):
        for job in jobs:
            lane.flush()
            assert job.future is not None
            await job.future
    lane.stop()
