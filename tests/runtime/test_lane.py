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
from gpurt.runtime.job import NOTHING, Call, Job
from gpurt.runtime.lane import Lane, Mailbox
from gpurt.runtime.order import Queue

WAIT = 5.0


@pytest.fixture
def lane():
    lane = Lane("gpurt:test")
    yield lane
    lane.stop()
    assert lane.wait_stopped(WAIT)


def reporting(job: Call, lane: Lane, reported: list[BaseException]) -> Call:
    """``job`` as the order would hand it to ``lane``: its errors go to ``reported``."""
    job.queue = Queue(None, lane, 1, reported.append)  # type: ignore[arg-type]
    return job


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
        lane.put(Call(lambda _, number=number: seen.append(number)))
    lane.submit(lambda: None).result(WAIT)
    assert seen == list(range(200))


def test_cancelled_future_of_submit_never_runs(lane: Lane) -> None:
    held = Held()
    lane.put(Call(held))
    ran = threading.Event()
    future = lane.submit(ran.set)
    assert future.cancel()
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert not ran.is_set()


def test_dropped_job_is_skipped_and_undone_with_nothing(lane: Lane) -> None:
    held, undone, ran = Held(), [], threading.Event()
    lane.put(Call(held))
    job = Call(lambda _: ran.set(), undo=undone.append)
    lane.put(job)
    assert job.abandon() is None
    assert undone == [NOTHING]
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert not ran.is_set()
    assert undone == [NOTHING]


def test_abandoned_while_running_is_undone_on_the_lane(lane: Lane) -> None:
    held, undone = Held("token"), []
    job = Call(held, undo=lambda value: undone.append((value, threading.current_thread().name)))
    lane.put(job)
    assert held.entered.wait(WAIT)
    assert job.abandon() is None
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert undone == [("token", "gpurt:test")]


def test_abandoned_and_then_failed_is_undone_with_nothing_and_reported(lane: Lane) -> None:
    held, undone, reported = Held(error=OSError("no")), [], []
    job = reporting(Call(held, undo=undone.append), lane, reported)
    lane.put(job)
    assert held.entered.wait(WAIT)
    job.abandon()
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert undone == [NOTHING]
    assert [str(error) for error in reported] == ["no"]


def test_finished_but_not_taken_hands_its_undo_to_the_caller(lane: Lane) -> None:
    undone: list[Any] = []
    job = Call(lambda _: "token", undo=undone.append)
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
    good = Call(lambda _: "token", undo=undone.append)
    bad = Call(lambda _: 1 // 0, undo=undone.append)
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
    lane.put(Call(held))

    def free(_: Job) -> None:
        ran.append(True)
        raise OSError("free failed")

    job = reporting(Call(free), lane, reported)
    lane.put(job)
    job.disown()
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    assert ran == [True]
    assert [str(error) for error in reported] == ["free failed"]


def test_callers_context_is_carried(lane: Lane) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")
    job = Call(lambda _: variable.get())
    lane.put(job)
    lane.submit(lambda: None).result(WAIT)
    assert job.take() == "mine"


def test_a_stopped_lane_runs_what_it_has_and_refuses_more() -> None:
    told = threading.Event()
    lane, held = Lane("gpurt:test", on_stop=told.set), Held()
    first, second = Call(held), Call(lambda _: "second")
    lane.put(first)
    lane.put(second)
    lane.stop()
    assert told.is_set()
    lane.stop()
    with pytest.raises(GPUError, match="stopped"):
        lane.put(Call(lambda _: None))
    held.release.set()
    assert lane.wait_stopped(WAIT)
    assert second.take() == "second"


def test_hang_clock_runs_only_inside_a_call() -> None:
    now = [100.0]
    lane, held = Lane("gpurt:test", clock=lambda: now[0]), Held()
    assert lane.running_since is None
    lane.put(Call(held))
    assert held.entered.wait(WAIT)
    assert lane.running_since == 100.0
    held.release.set()
    lane.submit(lambda: None).result(WAIT)
    lane.stop()
    assert lane.wait_stopped(WAIT)
    assert lane.running_since is None


@pytest.mark.parametrize("what", ["call", "undo", "report", "done", "deliver"])
@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_nothing_that_is_raised_ends_the_thread(what: str, kind: type[BaseException]) -> None:
    reported: list[BaseException] = []

    def fail(_: object = None) -> None:
        raise kind(what)

    def report(exc: BaseException) -> None:
        reported.append(exc)
        if what == "report":
            raise kind(what)

    on_done, deliver = fail if what == "done" else None, fail if what == "deliver" else None
    lane = Lane("gpurt:test", on_done=on_done, deliver=deliver, report=report)
    for _ in range(3):
        held = Held("token")
        job = Call(fail if what in ("call", "report") else held, undo=fail if what == "undo" else None)
        job.queue = Queue(None, lane, 1, report)  # type: ignore[arg-type]
        if what in ("call", "report", "undo"):
            if what == "undo":
                lane.put(job)
                assert held.entered.wait(WAIT)
                job.abandon()
                held.release.set()
            else:
                job.disown()
                lane.put(job)
        else:
            held.release.set()
            lane.put(job)
    thread = lane.submit(threading.current_thread).result(WAIT)
    lane.stop()
    assert lane.wait_stopped(WAIT)
    assert not thread.is_alive()
    roots = [exc.__cause__ or exc for exc in reported]
    assert sum(isinstance(exc, kind) for exc in roots) >= 3


async def test_many_results_need_one_wake_up() -> None:
    loop = asyncio.get_running_loop()
    mailbox, wakes = Mailbox(loop, lambda: None), []
    original = loop.call_soon_threadsafe

    class Counting:
        def call_soon_threadsafe(self, callback: Any, *args: Any) -> None:
            wakes.append(callback)
            original(callback, *args)

        def is_closed(self) -> bool:
            return False

    mailbox.loop = Counting()  # type: ignore[assignment]
    lane = Lane("gpurt:test", deliver=mailbox.post)
    jobs = [Call(lambda _: None) for _ in range(50)]
    for job in jobs:
        job.future = loop.create_future()
        lane.put(job)
    lane.submit(lambda: None).result(WAIT)  # blocks this loop on purpose: results pile up meanwhile
    await asyncio.gather(*(job.future for job in jobs if job.future))
    assert len(wakes) == 1
    lane.stop()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_closed_loop_is_found_out_at_the_next_result(in_flight: bool) -> None:
    loop = asyncio.new_event_loop()
    told: list[str] = []
    mailbox = Mailbox(loop, lambda: told.append(threading.current_thread().name))
    lane = Lane("gpurt:test", deliver=mailbox.post)
    jobs = [Call(lambda _: "token") for _ in range(2)]
    for job in jobs:
        job.future = loop.create_future()
    if in_flight:
        lane.put(jobs[0])
        lane.submit(lambda: None).result(WAIT)  # its wake-up is in flight
    loop.close()
    assert told == []
    lane.put(jobs[1])
    lane.submit(lambda: None).result(WAIT)
    assert told == ["gpurt:test"]
    lane.stop()


async def test_results_from_many_lanes_all_arrive() -> None:
    loop = asyncio.get_running_loop()
    mailbox = Mailbox(loop, lambda: None)
    lanes = [Lane(f"gpurt:test:{number}", deliver=mailbox.post) for number in range(4)]
    jobs = [Call(lambda _: None) for _ in range(2000)]
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
from gpurt.runtime.job import Call
from gpurt.runtime.lane import Lane
idle, hung = Lane("idle"), Lane("hung")
idle.submit(print, "ran").result()
entered = threading.Event()
hung.put(Call(lambda _: (entered.set(), threading.Event().wait())))
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
