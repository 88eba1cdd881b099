"""Lanes: order, claim and undo, mailboxes, stopping, process rules."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from typing import Any

import pytest

from gpurt.errors import GPUError
from gpurt.runtime.job import NOTHING, Job
from gpurt.runtime.lane import Lane, Mailbox

WAIT = 5.0


@pytest.fixture
def lane():
    lane = Lane("gpurt:test")
    yield lane
    lane.stop()
    assert lane.wait_stopped(WAIT)


class Held:
    """A call that is inside the driver until it is let go."""

    def __init__(self, value: Any = "value", error: Exception | None = None) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.value, self.error = value, error

    def __call__(self, job: Job) -> Any:
        self.entered.set()
        assert self.release.wait(WAIT)
        if self.error:
            raise self.error
        return self.value


def test_is_an_executor_with_a_named_daemon_thread(lane: Lane) -> None:
    thread = lane.submit(threading.current_thread).result(WAIT)
    assert thread.name == "gpurt:test"
    assert thread.daemon
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 // 0).result(WAIT)


def test_runs_first_in_first_out(lane: Lane) -> None:
    seen: list[int] = []
    for number in range(200):
        lane.put(Job(lambda _, number=number: seen.append(number)))
    lane.submit(lambda: None).result(WAIT)
    assert seen == list(range(200))


def test_cancelled_future_of_submit_never_runs(lane: Lane) -> None:
    held = Held()
    lane.put(Job(held))
    ran = threading.Event()
    future = lane.submit(ran.set)
    assert future.cancel()
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert not ran.is_set()


def test_dropped_job_is_skipped_and_undone_with_nothing(lane: Lane) -> None:
    held, undone, ran = Held(), [], threading.Event()
    lane.put(Job(held))
    job = Job(lambda _: ran.set(), undo=undone.append)
    lane.put(job)
    assert job.abandon() is None
    assert undone == [NOTHING]
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert not ran.is_set()
    assert undone == [NOTHING]


def test_abandoned_while_running_is_undone_on_the_lane(lane: Lane) -> None:
    held, undone = Held("token"), []
    job = Job(held, undo=lambda value: undone.append((value, threading.current_thread().name)))
    lane.put(job)
    assert held.entered.wait(WAIT)
    assert job.abandon() is None
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert undone == [("token", "gpurt:test")]


def test_abandoned_and_then_failed_is_undone_with_nothing_and_reported(lane: Lane) -> None:
    held, undone, reported = Held(error=OSError("no")), [], []
    job = Job(held, undo=undone.append, on_orphan_error=reported.append)
    lane.put(job)
    assert held.entered.wait(WAIT)
    job.abandon()
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert undone == [NOTHING]
    assert [str(error) for error in reported] == ["no"]


def test_finished_but_not_taken_hands_its_undo_to_the_caller(lane: Lane) -> None:
    undone: list[Any] = []
    job = Job(lambda _: "token", undo=undone.append)
    lane.put(job)
    lane.submit(lambda: None).result(WAIT)
    undo = job.abandon()
    assert undo is not None
    assert undone == []
    undo()
    assert undone == ["token"]
    assert job.abandon() is None


def test_a_taken_value_is_never_undone_and_a_taken_error_is(lane: Lane) -> None:
    undone: list[Any] = []
    good = Job(lambda _: "token", undo=undone.append)
    bad = Job(lambda _: 1 // 0, undo=undone.append)
    lane.put(good)
    lane.put(bad)
    lane.submit(lambda: None).result(WAIT)
    assert good.take() == "token"
    assert good.abandon() is None
    with pytest.raises(ZeroDivisionError):
        bad.take()
    assert undone == [NOTHING]


def test_disowned_job_still_runs_and_only_its_error_is_reported(lane: Lane) -> None:
    held, ran, reported = Held(), [], []
    lane.put(Job(held))

    def free(_: Job) -> None:
        ran.append(True)
        raise OSError("free failed")

    job = Job(free, on_orphan_error=reported.append)
    lane.put(job)
    job.disown()
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert ran == [True]
    assert [str(error) for error in reported] == ["free failed"]


def test_callers_context_is_carried(lane: Lane) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")
    job = Job(lambda _: variable.get())
    lane.put(job)
    lane.submit(lambda: None).result(WAIT)
    assert job.take() == "mine"


def test_a_stopped_lane_runs_what_it_has_and_refuses_more() -> None:
    ended = threading.Event()
    lane, held = Lane("gpurt:test", on_stop=ended.set), Held()
    first, second = Job(held), Job(lambda _: "second")
    lane.put(first)
    lane.put(second)
    lane.stop()
    lane.stop()
    with pytest.raises(GPUError, match="stopped"):
        lane.put(Job(lambda _: None))
    held.release.set()
    assert lane.wait_stopped(WAIT)
    assert ended.is_set()
    assert second.take() == "second"


def test_hang_clock_runs_only_inside_a_call() -> None:
    now = [100.0]
    lane, held = Lane("gpurt:test", clock=lambda: now[0]), Held()
    assert lane.running_since is None
    lane.put(Job(held))
    assert held.entered.wait(WAIT)
    assert lane.running_since == 100.0
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    lane.stop()
    assert lane.wait_stopped(WAIT)
    assert lane.running_since is None


async def test_many_results_need_one_wake_up(lane: Lane) -> None:
    loop = asyncio.get_running_loop()
    mailbox, wakes = Mailbox(loop), []
    original = loop.call_soon_threadsafe

    class Counting:
        def call_soon_threadsafe(self, callback: Any, *args: Any) -> None:
            wakes.append(callback)
            original(callback, *args)

        def is_closed(self) -> bool:
            return False

    mailbox.loop = Counting()  # type: ignore[assignment]
    jobs = [Job(lambda _: None, mailbox=mailbox) for _ in range(50)]
    for job in jobs:
        job.future = loop.create_future()
        lane.put(job)
    lane.submit(lambda: None).result(WAIT)  # blocks this loop on purpose: results pile up meanwhile
    await asyncio.gather(*(job.future for job in jobs if job.future))
    assert len(wakes) == 1


def test_results_for_a_closed_loop_are_undone(lane: Lane) -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    undone: list[Any] = []
    lane.put(Job(lambda _: "token", undo=undone.append, mailbox=mailbox))
    lane.submit(lambda: None).result(WAIT)
    assert undone == ["token"]


def test_results_are_undone_when_the_loop_closes_before_it_wakes(lane: Lane) -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    undone: list[Any] = []
    lane.put(Job(lambda _: "first", undo=undone.append, mailbox=mailbox))
    lane.submit(lambda: None).result(WAIT)  # its wake-up is in flight
    loop.close()
    assert undone == []
    lane.put(Job(lambda _: "second", undo=undone.append, mailbox=mailbox))
    lane.submit(lambda: None).result(WAIT)
    assert undone == ["first", "second"]


async def test_results_from_many_lanes_all_arrive() -> None:
    loop = asyncio.get_running_loop()
    mailbox, lanes = Mailbox(loop), [Lane(f"gpurt:test:{number}") for number in range(4)]
    jobs = [Job(lambda _: None, mailbox=mailbox) for _ in range(2000)]
    for number, job in enumerate(jobs):
        job.future = loop.create_future()
        lanes[number % 4].put(job)
        if not number % 50:
            await asyncio.sleep(0)
    async with asyncio.timeout(WAIT):
        await asyncio.gather(*(job.future for job in jobs if job.future))
    for lane in lanes:
        lane.stop()
        assert await asyncio.to_thread(lane.wait_stopped, WAIT)


EXIT_SCRIPT = """
import threading, time
from gpurt.runtime.job import Job
from gpurt.runtime.lane import Lane
idle, hung = Lane("idle"), Lane("hung")
idle.submit(print, "ran").result()
entered = threading.Event()
hung.put(Job(lambda _: (entered.set(), threading.Event().wait())))
entered.wait()
"""


def test_a_hung_lane_does_not_keep_the_process_alive() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT_SCRIPT], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


FORK_SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from gpurt.errors import GPUError
from gpurt.runtime.lane import Lane
lane = Lane("parent")
lane.submit(int).result()
pid = os.fork()
if pid == 0:
    try:
        lane.submit(int)
    except GPUError as error:
        sys.exit(7 if "parent process" in str(error) else 1)
    sys.exit(2)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork here")
def test_a_lane_refuses_work_in_a_forked_child() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_SCRIPT], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 7, done.stderr
