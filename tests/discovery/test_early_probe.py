"""The probe that ``python -m gpurt.discover`` starts before its own imports."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpurt.discovery import probe_process
from gpurt.discovery.probe import ChildProber
from gpurt.discovery.probe_process import EarlyProbe, start_early
from gpurt.errors import ReasonCode
from tests.discovery.test_remembered import Rig, rig  # noqa: F401
from tests.support.nvml_stub import nvml_stub  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "pidfd_open"), reason="Linux only")

PATIENCE = 20.0

COMMAND = """
import os
from gpurt.discovery import probe_process
probe_process._NVIDIA = ("/",)
probe_process.start_early, started = (lambda start: (lambda *args: started.append(start(*args)) or started[0], []))(
    probe_process.start_early
)
leave = os._exit
os._exit = lambda code: leave(code if started[0] is not None else 70)
import gpurt.discover
gpurt.discover._run()
"""


async def early(
    monkeypatch: pytest.MonkeyPatch, script: str = "", options: tuple[str, ...] = ("--json",)
) -> EarlyProbe:
    """One that runs ``script`` in place of the probe."""
    monkeypatch.setattr(probe_process, "_NVIDIA", ("/",))
    monkeypatch.setattr(probe_process, "early_command", lambda name: (sys.executable, "-S", "-c", script, name))
    started = await asyncio.to_thread(start_early, list(options), os.environ)  # it is for before there is a loop
    assert started is not None
    return started


async def gone(pid: int) -> bool:
    async with asyncio.timeout(PATIENCE):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.005)
    return True


def test_it_is_the_one_probe_of_the_command(rig: Rig) -> None:  # noqa: F811
    arguments = ["--json", "--registry", str(rig.registry)]
    for opened in (1, 1):
        run = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments],
            env=rig.environ(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        document = json.loads(run.stdout)
        shown = [device["device_id"] for device in document["devices"] if device["kind"] != "software"]
        assert shown == ["cuda:0", "cuda:1", "cpu:0"]
        assert rig.opened == opened


def test_nothing_heavy_is_imported_before_it() -> None:
    program = "import sys, gpurt.discover, gpurt.discovery.probe_process; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"asyncio", "pydantic", "logging", "argparse", "subprocess"} & set(run.stdout.split())


@pytest.mark.parametrize("option", ["--fixture", "--fix", "--backend=cpu", "--watch", "--doctor", "--record", "--help"])
def test_other_commands_start_none(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(probe_process, "_NVIDIA", ("/",))
    monkeypatch.setattr("os.posix_spawn", lambda *args, **kwargs: pytest.fail("started"))
    assert start_early(["--json", option], {}) is None


def test_none_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe_process, "_NVIDIA", (str(tmp_path / "version"),))
    assert start_early(["--json"], {}) is None


def test_a_system_without_pidfd_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "not implemented")

    monkeypatch.setattr("os.pidfd_open", refuse)
    monkeypatch.setattr(probe_process, "_NVIDIA", ("/",))
    monkeypatch.setattr(
        probe_process, "early_command", lambda name: (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    )
    before = set(os.listdir("/proc/self/fd"))
    others = psutil.Process().children()
    assert start_early([], os.environ) is None
    assert psutil.Process().children() == others
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_hung_one_is_killed_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    started = await early(monkeypatch, "import time; time.sleep(60)")
    prober = ChildProber()
    await prober.adopt(started)
    outcome = await prober.probe("cuda", deadline=0.1, environ=os.environ)
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.TIMEOUT
    assert not psutil.pid_exists(started.pid)


async def test_one_that_crashes_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, sys; sys.stdin.readline(); print('no such thing', file=sys.stderr, flush=True); os.abort()"
    started = await early(monkeypatch, script)
    prober = ChildProber()
    await prober.adopt(started)
    outcome = await prober.probe("cuda", deadline=PATIENCE, environ=os.environ)
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.CRASHED
    assert "SIGABRT" in outcome.failure.message
    assert "no such thing" in outcome.failure.message


async def test_one_for_another_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    started = await early(monkeypatch, "import sys; sys.stdin.readline()")
    prober = ChildProber(command=lambda name: (sys.executable, "-S", "-c", "raise SystemExit(7)"))
    await prober.adopt(started)
    outcome = await prober.probe("cuda", deadline=PATIENCE, environ={**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
    assert outcome.failure is not None
    assert "exit code 7" in outcome.failure.message
    assert await gone(started.pid)


async def test_one_that_is_never_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    started = await early(monkeypatch, "import time; time.sleep(60)")
    prober = ChildProber()
    await prober.adopt(started)
    await prober.discard()
    assert not psutil.pid_exists(started.pid)
    await asyncio.sleep(0)
    assert set(os.listdir("/proc/self/fd")) == before
