"""``gpurt cluster`` and what docs/cluster.md says of it, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpurt.cli.main import main
from gpurt.cluster.security.authority import Role, issue, make_authority
from gpurt.cluster.security.identity import Identity, load_identity, read_roster
from gpurt.cluster.security.refusal import refusal
from tests.cluster.security.conftest import Made
from tests.cluster.support import free_port, until

DOCS = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```sh\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


class Command:
    """A running ``gpurt``, its output in files."""

    def __init__(self, folder: Path, name: str, *arguments: object, **environment: str) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpurt", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "XDG_STATE_HOME": str(folder / name), **environment},
            )

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def changes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(15)


@pytest.fixture
def started() -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.process.kill()
        command.process.wait(10)


def nodes(master: Command) -> dict[str, str]:
    """State by node, as the master told last."""
    return {change["node"]: change["node_state"] for change in master.changes() if change["node"]}


@pytest.mark.wide
async def test_from_init_to_a_node_that_is_enrolled_while_all_run(
    made: Made, tmp_path: Path, started: list[Command]
) -> None:
    def run(name: str, *arguments: object, **environment: str) -> Command:
        started.append(Command(tmp_path, name, *arguments, **environment))
        return started[-1]

    def master(name: str) -> Command:
        return run(name, "-v", "master", "--json", "--tls", made.hub)

    def worker(name: str) -> Command:
        return run(name, "worker", "--tls", made.node(name), "--simulate", "h100", "--json")

    first = await asyncio.to_thread(master, "first")
    one = await asyncio.to_thread(worker, "w1")
    await until(lambda: nodes(first) == {"w1": "healthy"}, "w1 at the master", timeout=30)
    assert "node w1 is connected from tls/127.0.0.1" in first.said()
    assert await asyncio.to_thread(main, ["cluster", "enrol", "w3", "--dir", str(made.folder)]) == 0
    three = await asyncio.to_thread(worker, "w3")
    await until(lambda: nodes(first) == {"w1": "healthy", "w3": "healthy"}, "w3, with the hub as it is", timeout=30)
    assert await asyncio.to_thread(first.end) == 143
    second = await asyncio.to_thread(master, "second")
    await until(lambda: nodes(second) == {"w1": "healthy", "w3": "healthy"}, "both", timeout=30)
    assert one.process.poll() is three.process.poll() is None
    # Another node's certificate, and none at all.
    for arguments, words in (
        (["--tls", made.node("w2"), "--node", "w1"], "is of node 'w2', not of node 'w1'"),
        (["--tls", made.hub], "is of hub 'hub', not of a node"),
        (["--connect", made.endpoint], "needs certificates (give --tls FOLDER"),
        (["--connect", "tcp/10.255.255.1:7447"], "can be reached from other machines, unencrypted"),
        (
            ["--tls", made.node("w2"), "--connect", made.endpoint.replace("tls", "tcp")],
            "would not use the certificates",
        ),
        (["--tls", tmp_path], "cannot read"),
        (["--tls", made.node("w2"), "--insecure"], "not allowed with argument"),
    ):
        refused = await asyncio.to_thread(run, "refused", "worker", "--simulate", "h100", *arguments)
        assert await asyncio.to_thread(refused.process.wait, 30) == 2
        assert words in refused.said()
    assert set(nodes(second)) == {"w1", "w3"}


async def test_whom_a_hub_refuses_stands_in_zenohs_log_for_who_asks(
    made: Made, tmp_path: Path, started: list[Command]
) -> None:
    said = {
        "old": "invalid peer certificate: certificate expired",
        "other": "invalid peer certificate: UnknownIssuer",
    }
    hub = await asyncio.to_thread(Command, tmp_path, "hub", "master", "--tls", made.hub, RUST_LOG="zenoh_link_tls=warn")
    started.append(hub)
    await until(lambda: "listening at" in hub.said(), timeout=30)
    old = await asyncio.to_thread(made.changed, tmp_path / "old", "w1", begin=timedelta(days=-3), days=2)
    other = await asyncio.to_thread(made.changed, tmp_path / "other", "w2", begin=timedelta(), days=2)
    forged = issue(make_authority("test"), cluster="test", name="w2", role=Role.NODE)
    await asyncio.to_thread((other / "cert.pem").write_bytes, forged.certificate)
    await asyncio.to_thread((other / "key.pem").write_bytes, forged.key)
    good = await asyncio.to_thread(load_identity, made.node("w1"))
    fields = {name: getattr(good, name) for name in Identity.__dataclass_fields__}
    for folder, reason in ((old, "alert certificate expired"), (other, "alert unknown ca")):
        # As those see it whose own checks let it through.
        known = Identity(**{**fields, "folder": folder})
        told = await asyncio.to_thread(refusal, known, made.endpoint)
        assert told is not None
        assert "it refuses the certificate of 'w1'" in told
        assert reason in told
        await until(lambda words=said[folder.name]: words in hub.said())
    assert await asyncio.to_thread(refusal, good, made.endpoint) is None
    assert await asyncio.to_thread(refusal, good, f"tls/127.0.0.1:{free_port()}") is None


def test_what_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Those that make files; one that speaks to nodes needs a hub.
    cluster = [words[1:] for words in COMMANDS if words[:2] == ["gpurt", "cluster"] and "reset-term" not in words]
    assert len(cluster) >= 6
    for words in cluster:
        assert main(words) == 0, words
    out = capsys.readouterr().out
    hub = load_identity("gpurt-cluster/hub")
    assert (hub.endpoint, hub.listen_endpoint) == ("tls/gpu-1.example:7447", "tls/0.0.0.0:7447")
    assert hub.roster == {"w1": "node", "m1": "master"}
    # The next steps that were printed are the guide's own.
    for words in (["master", "--tls", "gpurt-cluster/hub"], ["worker", "--tls", "w1"]):
        assert ["gpurt", *words] in COMMANDS
        assert f"  gpurt {' '.join(words)}   " in out
    assert "keep it to yourself" in out


def test_what_the_guide_starts_is_understood(monkeypatch: pytest.MonkeyPatch, made: Made, tmp_path: Path) -> None:
    """Masters and workers of the guide, up to where they would run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpurt-cluster").symlink_to(made.folder)
    (tmp_path / "w1").symlink_to(made.node("w1"))
    configs: list[Any] = []

    async def take(config: Any, *args: object, **kwargs: object) -> None:
        configs.append(config)

    monkeypatch.setattr("gpurt.cluster.worker.run_worker", take)
    monkeypatch.setattr("gpurt.cluster.master.run_master", take)
    for words in COMMANDS:
        if words[1] in ("master", "worker"):
            assert main(words[1:]) == 0, words
    names = [(type(config).__name__, config.endpoint, getattr(config, "node", None)) for config in configs]
    assert names == [
        ("MasterConfig", "tcp/127.0.0.1:7447", None),
        ("WorkerConfig", "tcp/127.0.0.1:7447", "w1"),
        ("WorkerConfig", "tcp/127.0.0.1:7447", "w2"),
        ("MasterConfig", made.endpoint, None),
        ("WorkerConfig", made.endpoint, "w1"),
        ("MasterConfig", "tcp/127.0.0.1:7447", None),
        ("MasterConfig", "nats://127.0.0.1:4222", None),
        ("WorkerConfig", "nats://127.0.0.1:4222", "w1"),
        ("MasterConfig", "nats://gpu-1.example:4222", None),
        ("WorkerConfig", "nats://gpu-1.example:4222", "w1"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init", "gpurt-cluster", "--host", "a b"], "neither the name of a host"),
        (["init", "other", "--cluster", "A"], "cluster name 'A' is not valid"),
        (["enrol", "w1", "--dir", "nowhere"], "cannot read nowhere/cluster.json"),
        (["enrol", "W1"], "node name 'W1' is not valid"),
        (["enrol", "w1"], "--renew makes another all the same"),
        (["enrol", "w9", "--role", "hub"], "the hub's name is 'hub'"),
        (["revoke", "w9"], "'w9' is not enrolled"),
        (["init"], "keys are never overwritten"),
    ],
)
def test_what_is_refused_says_what_to_do(
    words: list[str],
    said: str,
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    made.folder.rename("gpurt-cluster")
    before = read_roster(tmp_path / "gpurt-cluster" / "hub")
    assert main(["cluster", *words]) == 2
    assert said in capsys.readouterr().err
    assert read_roster(tmp_path / "gpurt-cluster" / "hub") == before


@pytest.mark.parametrize(
    "words", [["init", "--port", "0"], ["enrol", "w1", "--days", "0"], ["enrol", "w1", "--days", "x"]]
)
def test_figures_that_are_none(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", *words])


def test_this_machines_names_are_the_hubs_unless_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "init", "here"]) == 0
    assert platform.node() in capsys.readouterr().out
    assert load_identity(tmp_path / "here" / "hub").endpoint == f"tls/{platform.node()}:7447"
