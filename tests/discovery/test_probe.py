"""The probe against children that do everything a vendor library does wrong."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpurt.discovery.probe import ChildProber
from gpurt.discovery.probe_child import ENV_TOKEN
from gpurt.discovery.probe_process import kill_tree
from gpurt.discovery.singleflight import SingleFlight
from gpurt.discovery.wire import MAX_ANSWER_BYTES, ProbeOutcome
from gpurt.errors import BackendClosed, ReasonCode
from tests.discovery.records import device

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts use POSIX signals")
on_every_loop = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

PRELUDE = f"""
import json, os, signal, sys, time
def say(stage, **fields):
    line = os.environ[{ENV_TOKEN!r}] + " " + json.dumps(dict(stage=stage, **fields)) + "\\n"
    os.write(1, line.encode())
"""


class Children:
    """Makes probers whose child is a script, and knows every process that the scripts left a trace of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prober(self, script: str) -> ChildProber:
        trace = f"open({str(self.folder)!r} + '/' + str(os.getpid()), 'w').close()\n"
        text = PRELUDE + trace + textwrap.dedent(script)
        return ChildProber(command=lambda name: (sys.executable, "-S", "-c", text, name))

    def pids(self) -> list[int]:
        return [int(entry.name) for entry in self.folder.iterdir()]

    def alive(self) -> list[int]:
        def runs(pid: int) -> bool:
            try:
                return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False

        return [pid for pid in self.pids() if runs(pid)]

    async def gone(self) -> None:
        await until(lambda: not self.alive())


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


@pytest.fixture
def children(tmp_path: Path) -> Children:
    folder = tmp_path / "pids"
    folder.mkdir()
    return Children(folder)


async def probe(prober: ChildProber, deadline: float = 5.0) -> ProbeOutcome:
    return await prober.probe("toy", deadline=deadline, environ=os.environ)


@on_every_loop
async def test_an_answer_is_taken_line_by_line(children: Children) -> None:
    card = device(0).model_dump(mode="json")
    prober = children.prober(
        f"""
        print("noise of a .pth file", flush=True)
        card = json.loads({json.dumps(card)!r})
        say("sighted", devices=[card])
        say("opened", devices=[card])
        say("verified", devices=[card])
        """
    )
    outcome = await probe(prober)
    assert outcome.failure is None
    assert outcome.verified == (device(0),)
    assert outcome.sighted == outcome.opened == (device(0),)
    assert outcome.elapsed_ms > 0
    await children.gone()


@on_every_loop
async def test_a_hanging_child_is_killed_at_its_deadline_and_the_loop_goes_on(children: Children) -> None:
    prober = children.prober(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("doing", message="asking the driver")
        sys.stderr.write("last words\\n"); sys.stderr.flush()
        signal.pause()
        """
    )
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    started = time.monotonic()
    outcome = await probe(prober, deadline=0.5)
    ticker.cancel()
    assert time.monotonic() - started < 1.5
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.TIMEOUT
    assert "asking the driver" in outcome.failure.message
    assert "last words" in outcome.failure.message
    assert ticks > 10
    await children.gone()


@on_every_loop
async def test_a_segfault_is_an_answer_and_keeps_what_was_said_before(children: Children) -> None:
    card = device(0).model_dump(mode="json")
    prober = children.prober(
        f"""
        say("sighted", devices=[json.loads({json.dumps(card)!r})])
        say("doing", message="loading the library")
        sys.stderr.write("first line\\nlibbroken: bad pointer\\n\\n"); sys.stderr.flush()
        import ctypes; ctypes.string_at(0)
        """
    )
    outcome = await probe(prober)
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.CRASHED
    assert "SIGSEGV" in outcome.failure.message
    assert "loading the library" in outcome.failure.message
    assert outcome.failure.message.endswith("libbroken: bad pointer")
    assert outcome.sighted == (device(0),)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("print('hello', flush=True)", "exit code 0"),
        ("sys.exit(3)", "exit code 3"),
        ("os.write(1, os.urandom(4096) + b'\\n')", "exit code 0"),
        ("say('verified', devices=[{'device_id': 1}])", "no answer"),
        ("say('no such stage')", "no answer"),
        ("os.write(1, (os.environ['GPURT_PROBE_TOKEN'] + ' {not json\\n').encode())", "no answer"),
        ("os.write(1, (os.environ['GPURT_PROBE_TOKEN'] + ' {\"stage\": \"verified\"').encode())", "exit code 0"),
    ],
)
async def test_what_is_no_answer_is_a_crash(children: Children, script: str, text: str) -> None:
    outcome = await probe(children.prober(script))
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.CRASHED
    assert text in outcome.failure.message


async def test_a_flood_is_cut_off(children: Children) -> None:
    outcome = await probe(children.prober("while True: os.write(1, b'x' * 65536)"))
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.CRASHED
    assert f"{MAX_ANSWER_BYTES >> 20} MiB" in outcome.failure.message
    await children.gone()


@on_every_loop
async def test_a_grandchild_that_keeps_the_pipes_does_not_hold_up_the_probe(children: Children) -> None:
    prober = children.prober(
        f"""
        if os.fork() == 0:
            open({str(children.folder)!r} + '/' + str(os.getpid()), 'w').close()
            signal.pause()
        while len(os.listdir({str(children.folder)!r})) < 2: time.sleep(0.01)
        os._exit(0)
        """
    )
    started = time.monotonic()
    outcome = await probe(prober, deadline=30.0)
    assert time.monotonic() - started < 5.0
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.CRASHED
    assert len(children.pids()) == 2
    await children.gone()


async def test_a_child_that_hangs_while_it_closes_has_answered(children: Children) -> None:
    started = time.monotonic()
    outcome = await probe(children.prober("say('verified', devices=[]); signal.pause()"), deadline=30.0)
    assert time.monotonic() - started < 4.0
    assert outcome.verified == ()
    await children.gone()


async def test_what_was_started_early_is_asked_once_and_only_in_its_environment(children: Children) -> None:
    script = """
        sys.stdin.readline()
        say("failed", reason="no_device", message=os.environ.get("PLACE", ""))
        """
    prober = children.prober(script)
    await prober.prepare("toy", os.environ)
    await prober.prepare("toy", os.environ)
    assert (await probe(prober)).failure is not None
    assert len(children.pids()) == 1
    await probe(prober)
    assert len(children.pids()) == 2
    await prober.prepare("toy", os.environ)
    elsewhere = await prober.probe("toy", deadline=5.0, environ={"PLACE": "elsewhere"})
    assert elsewhere.failure is not None
    assert elsewhere.failure.message == "elsewhere"
    await children.gone()


async def test_what_was_started_early_and_is_not_asked_dies(children: Children) -> None:
    prober = children.prober("sys.stdin.read(); signal.pause()")
    await prober.prepare("toy", os.environ)
    await until(lambda: len(children.pids()) == 1)
    await prober.discard()
    await prober.discard()
    await children.gone()


async def test_a_crash_before_the_question_is_the_answer(children: Children) -> None:
    prober = children.prober("say('doing', message='looking'); os.kill(os.getpid(), signal.SIGSEGV)")
    await prober.prepare("toy", os.environ)
    await until(lambda: bool(children.pids()) and not children.alive())
    outcome = await probe(prober)
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.CRASHED
    assert "while looking" in outcome.failure.message
    assert len(children.pids()) == 1


def test_the_child_ends_when_nobody_asks_it() -> None:
    command = [sys.executable, "-P", "-m", "gpurt.discovery.probe_child", "cpu"]
    done = subprocess.run(command, env=os.environ | {ENV_TOKEN: "t"}, stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


def test_the_child_by_hand_waits_for_nobody() -> None:
    command = [sys.executable, "-P", "-m", "gpurt.discovery.probe_child", "cpu"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert '"stage":"verified"' in done.stdout


async def test_a_program_that_cannot_start_is_reported() -> None:
    outcome = await probe(ChildProber(command=lambda name: ("/no/such/interpreter", name)))
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.ERROR


async def test_hng_1_a_child_that_cannot_be_killed_is_not_waited_for_and_not_doubled(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What uninterruptible sleep looks like from outside: SIGKILL has no effect, and the process stays.
    stays = True
    monkeypatch.setattr("gpurt.discovery.probe.is_alive", lambda pid: stays)
    scripted = children.prober("signal.pause()")
    prober = ChildProber(command=scripted._command, kill=lambda pid: None)
    started = time.monotonic()
    first = await probe(prober, deadline=0.4)
    second = await probe(prober, deadline=0.4)
    assert time.monotonic() - started < 2.5
    assert first.failure is not None
    assert second.failure is not None
    assert second.failure.reason is ReasonCode.TIMEOUT
    assert "stuck" in second.failure.message
    assert len(children.pids()) == 1
    stays = False
    third = await probe(prober, deadline=0.4)
    assert third.failure is not None
    assert "stuck" not in third.failure.message
    for pid in children.pids():
        kill_tree(pid)
    await children.gone()


@on_every_loop
async def test_cancelling_one_of_two_callers_leaves_the_child_to_the_other(children: Children) -> None:
    flight = SingleFlight[ProbeOutcome]()
    gate = children.folder.parent / "gate"
    prober = children.prober(
        f"""
        while not os.path.exists({str(gate)!r}): time.sleep(0.01)
        say("verified", devices=[])
        """
    )
    callers = [asyncio.create_task(flight.run(lambda: probe(prober, deadline=30.0))) for _ in range(2)]
    await until(lambda: len(children.alive()) == 1)
    callers[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await callers[0]
    gate.touch()
    assert (await callers[1]).verified == ()
    assert len(children.pids()) == 1


@on_every_loop
async def test_cancelling_the_last_caller_kills_the_child(children: Children) -> None:
    flight = SingleFlight[ProbeOutcome]()
    prober = children.prober("signal.pause()")
    callers = [asyncio.create_task(flight.run(lambda: probe(prober, deadline=30.0))) for _ in range(3)]
    await until(lambda: len(children.alive()) == 1)
    for caller in callers:
        caller.cancel()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    await children.gone()


@on_every_loop
async def test_stop_kills_the_child_and_tells_the_callers(children: Children) -> None:
    flight = SingleFlight[ProbeOutcome]()
    caller = asyncio.create_task(flight.run(lambda: probe(children.prober("signal.pause()"), deadline=30.0)))
    await until(lambda: len(children.alive()) == 1)
    started = time.monotonic()
    await flight.stop(1.0)
    assert time.monotonic() - started < 1.0
    with pytest.raises(BackendClosed):
        await caller
    await children.gone()


async def test_a_thorough_caller_does_not_share_a_run_that_is_not() -> None:
    flight = SingleFlight[str]()
    gate = asyncio.Event()

    async def quick() -> str:
        await gate.wait()
        return "quick"

    async def thorough() -> str:
        return "thorough"

    first = asyncio.create_task(flight.run(quick, thorough=False))
    second = asyncio.create_task(flight.run(thorough, thorough=True))
    await asyncio.sleep(0)
    gate.set()
    assert [await first, await second] == ["quick", "thorough"]


def living_of(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    living: list[int] = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                living.append(process.pid)
        except ProcessLookupError:
            continue
    return living


FORKING = """
import os, time
if os.fork():
    os._exit(0)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@on_every_loop
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 6])
async def test_cancelled_while_it_starts_nothing_is_left(turns: int) -> None:
    pids: list[int] = []
    prober = ChildProber(
        command=lambda _: (sys.executable, "-S", "-c", FORKING), kill=lambda pid: (pids.append(pid), kill_tree(pid))[1]
    )
    probe = asyncio.create_task(prober.probe("cuda", deadline=5.0, environ=os.environ))
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(0.05)  # a busy loop: the child has forked and ended meanwhile
    probe.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait({probe})
    assert probe.cancelled()
    async with asyncio.timeout(5):
        while any(living_of(pid) for pid in pids):
            await asyncio.sleep(0.01)


@on_every_loop
async def test_a_child_that_has_ended_before_it_is_asked_is_a_crash() -> None:
    prober = ChildProber(command=lambda _: (sys.executable, "-S", "-c", "raise SystemExit(3)"))
    await prober.prepare("cuda", os.environ)
    async with asyncio.timeout(5):
        await asyncio.wait({prober._prepared["cuda"].exited})
    outcome = await prober.probe("cuda", deadline=5.0, environ=os.environ)
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.CRASHED
    assert "exit code 3" in outcome.failure.message
