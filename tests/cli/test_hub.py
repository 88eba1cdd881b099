"""``gpurt hub``: masters come and go, and what they see stays true."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurt.cli import protected
from gpurt.cli.main import main
from tests.cluster.support import free_port, until

pytest.importorskip("zenoh")

Start = Callable[..., "Started"]


class Started:
    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpurt", *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def changes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def sees(self, node: str) -> bool:
        return any(each["node"] == node and each["node_state"] == "healthy" for each in self.changes())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def one(name: str, *arguments: str) -> Started:
        started.append(Started(tmp_path, name, *arguments))
        return started[-1]

    yield one
    for each in started:
        each.kill()


async def test_a_master_is_killed_and_the_next_one_has_the_cluster_within_seconds(start: Start, tmp_path: Path) -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    hub = start("hub", "hub", "--listen", endpoint)
    worker = start(
        "w1", "worker", "--node", "w1", "--connect", endpoint, "--simulate", "h100", "--registry", str(tmp_path / "r")
    )
    first = start("first", "master", "--connect", endpoint, "--json")
    await until(lambda: first.sees("w1"), timeout=30)
    first.kill()
    second = start("second", "master", "--connect", endpoint, "--json")
    await until(lambda: second.sees("w1"), timeout=10)
    assert "watching through" in second.err.read_text()
    assert "went away" not in worker.err.read_text(), "to a worker nothing has happened"
    hub.process.terminate()
    assert hub.process.wait(10) == 143
    assert f"listening at {endpoint}" in hub.err.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "nats://127.0.0.1:4222"], "give it as tcp/HOST:PORT"),
        (["--listen", "tcp/0.0.0.0:7447"], "--insecure"),
        (["--cluster", "A B"], "cluster name 'A B' is not valid"),
    ],
)
def test_what_a_hub_cannot_be(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_master_that_joins_a_hub_shows_no_certificate_of_a_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(protected, "identity_of", lambda args: SimpleNamespace(name="n1", role="node"))
    assert main(["master", "--connect", "tls/h:7447", "--tls", "n1"]) == 2
    assert "that of a node, which may not watch a cluster" in capsys.readouterr().err
