"""Ctrl-C at any moment ends every command with exit code 130 and without a traceback, also while it imports."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpurt.cli.main import COMMANDS
from tests.cluster.support import free_port

pytestmark = pytest.mark.skipif(os.name == "nt", reason="there Ctrl-C is no signal that one process sends another")

END_S = 20.0
SPAN_S = 2.5
"""Moments lie within this time; what has ended by then has ended by itself."""
DONE = (0, 1, 2)
"""Exit codes of a command that has ended by itself: nothing found, no hub there."""


def commands(port: int, folder: Path) -> dict[str, list[str]]:
    address = f"tcp/127.0.0.1:{port}"
    watching = ["--endpoint", address]
    registry = str(folder / "registry.json")
    return {
        "discover": ["discover"],
        "doctor": ["discover", "--doctor"],
        "hub": ["hub", "--listen", address],
        "master": ["master", "--listen", address, "--json"],
        "worker": ["worker", "--connect", address, "--node", "w1", "--simulate", "h100", "--registry", registry],
        "top": ["top", *watching],
        "drain": ["drain", "w1", *watching],
        "links": ["links", "--measure", *watching],
        "cluster": ["cluster", "init", str(folder / "c"), "--host", "localhost"],
        "place": ["place", "--help"],
        "demo": ["demo"],
        "simulate": ["simulate", "--nodes", "8", "--seconds", "2"],
        "calibrate": ["calibrate", "--backend", "cpu", "--registry", registry],
        "load": ["load", str(folder / "nothing.safetensors")],
        "bench": ["bench", "import"],
    }


def test_every_command_is_interrupted() -> None:
    tried = {words[0] for words in commands(1, Path()).values()}
    assert tried == set(COMMANDS)


def interrupt(words: list[str], folder: Path, after_s: float) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "gpurt", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    try:
        _, told = process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{words} goes on, {END_S:g} s after an interrupt at {after_s:.3f} s") from None
    if "Traceback" in told and "gpurt" not in told:
        return  # Python itself was still starting: none of our code has run
    assert "Traceback" not in told, f"at {after_s:.3f} s: {told}"
    # A process that has set no handler yet is ended by the signal; shells call that 130, too.
    assert process.returncode in (130, -signal.SIGINT, *DONE), f"at {after_s:.3f} s: {process.returncode}: {told}"


def test_an_interrupt_ends_it_without_a_traceback(tmp_path: Path) -> None:
    interrupt(commands(free_port(), tmp_path)["bench"], tmp_path, 0.15)


@pytest.mark.wide
@pytest.mark.parametrize("name", commands(1, Path()))
def test_an_interrupt_at_any_moment(name: str, tmp_path: Path) -> None:
    moments = random.Random(f"{name} 20")
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        # Half of them in the first half second, which is imports.
        span = SPAN_S if number % 2 else 0.5
        interrupt(commands(free_port(), folder)[name], folder, moments.uniform(0.03, span))
