"""``gpurt links``: what was measured between nodes, and having it measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpurt.cli.links_command import Seen, look
from gpurt.cli.main import main
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import MasterConfig
from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.worker import WorkerConfig, run_worker
from gpurt.errors import GPUError

CONFIG = MasterConfig("test", listen=False)
BUDGET = (256 << 10, 1.0)


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[InProcessBus]:
    """Two workers."""
    made = InProcessBus("test")
    tasks: list[asyncio.Task[None]] = []
    for name in ("w1", "w2"):
        joined = asyncio.Event()

        async def ready(_: Any, joined: asyncio.Event = joined) -> None:
            joined.set()

        config = WorkerConfig(name, "test", registry_path=tmp_path / f"{name}.json", simulate="h100", telemetry_s=None)
        tasks.append(asyncio.create_task(run_worker(config, on_ready=ready, engine=InProcessEngine(made))))
        await joined.wait()
    yield made
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_what_was_measured_is_shown(bus: InProcessBus) -> None:
    async def seen(**options: Any) -> Seen:
        return await look(CONFIG, engine=InProcessEngine(bus), **options)

    nothing = await seen()
    assert "gpurt links --measure" in await asyncio.to_thread(nothing.text)
    measured = await seen(measure=BUDGET)
    assert (measured.nodes, measured.failed) == (["w1", "w2"], {})
    text = await asyncio.to_thread(measured.text)
    assert text.count("MB/s") == 2
    again = await seen()
    assert again == measured
    document = again.document()
    assert {(link["source"], link["peer"]) for link in document["links"]} == {("w1", "w2"), ("w2", "w1")}
    assert (await seen(nodes=["w1"])).links == {}
    for options in ({"nodes": ["w9"]}, {"measure": (1 << 40, 1.0)}, {"measure": (1 << 20, 1e9)}):
        with pytest.raises(GPUError):
            await seen(**options)


def test_an_observer_has_nothing_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "cluster"
    init_cluster(folder, cluster="test", hosts=["127.0.0.1"], port=7449)
    enrol(folder, "o1", role=Role.OBSERVER)
    assert main(["links", "--measure", "--tls", str(folder / "nodes" / "o1")]) == 2
    assert "observer, which may not have nodes measure" in capsys.readouterr().err


def test_who_has_measured_already_is_not_told_to() -> None:
    assert Seen(["w1"], {}, {}).text() == (
        "a way is between two nodes, and w1 is alone (gpurt worker --node NAME starts another)\n"
    )
    assert Seen([], {}, {}).text().startswith("a way is between two nodes, and there is none")
    assert Seen(["w1", "w2"], {}, {("w1", "w2"): "refused"}).text() == "w1 -> w2: not measured: refused\n"


def test_many_nodes_are_lines_and_what_failed_is_said() -> None:
    names = [f"n{index}" for index in range(9)]
    links = NodeLinks().with_sample("n1", 0.00021, 940e6)
    seen = Seen(names, {("n0", "n1"): links.measured[0]}, {("n0", "n2"): "gone\x1b[2J"})
    assert seen.text().splitlines()[0] == "n0 -> n1: 0.21 ms, 940.0 MB/s"
    assert "n0 -> n2: not measured: gone" in seen.text()
    assert "\x1b" not in seen.text()
