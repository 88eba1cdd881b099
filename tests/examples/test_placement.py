"""examples/placement: a master and two workers as they stand there, over a real hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.support import free_port, until

pytest.importorskip("zenoh")

EXAMPLE = Path(__file__).parents[2] / "examples/placement"
GUIDE = (EXAMPLE.parents[1] / "docs/cluster.md").read_text(encoding="utf-8")

Start = Callable[..., "Started"]


class Started:
    def __init__(self, folder: Path, name: str, script: str, *arguments: str) -> None:
        self.out = folder / f"{name}.out"
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE / script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "TMPDIR": str(folder)},
            )

    def said(self) -> str:
        return self.out.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def one(name: str, script: str, *arguments: str) -> Started:
        started.append(Started(tmp_path, name, script, *arguments))
        return started[-1]

    yield one
    for each in started:
        each.kill()


@pytest.mark.wide
async def test_a_plan_is_made_loaded_and_loaded_again(start: Start) -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    master = start("master", "master.py", endpoint)
    workers = {name: start(name, "worker.py", name, endpoint) for name in ("w1", "w2")}
    place = re.compile(r"^(w[12]) \S+: layers (\d+)-(\d+)$", re.MULTILINE)
    await until(lambda: len(place.findall(master.said())) == 2, "both parts", timeout=60)
    assert "plan (1, 1) of tiny is committed" in master.said()
    told = place.findall(master.said())
    assert [node for node, _, _ in told] == ["w1", "w2"]
    assert sorted(layer for _, first, last in told for layer in range(int(first), int(last) + 1)) == list(range(24))
    for node, first, last in told:
        assert f"layers {first}-{last} of tiny on simulated:0" in workers[node].said()
    workers["w1"].kill()
    again = start("w1-again", "worker.py", "w1", endpoint)
    await until(lambda: "of tiny on simulated:0" in again.said(), "its part again", timeout=60)


def test_the_guide_shows_what_the_example_does() -> None:
    """The short form in the guide has no call that the example has not."""
    source = (EXAMPLE / "master.py").read_text() + (EXAMPLE / "worker.py").read_text()
    short = "".join(block for block in re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL))
    calls = set(re.findall(r"\b([A-Za-z_]+)\(", short))
    assert {"commit", "solve_placement", "use", "load", "run_master", "run_worker"} <= calls
    assert calls <= set(re.findall(r"\w+", source)), "or the example has changed"
    for script in ("master.py", "worker.py"):
        assert f"examples/placement/{script}" in GUIDE
