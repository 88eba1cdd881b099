"""Readings and reasons on their way to whoever looks at the master."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpurt.cli import master as command
from gpurt.cli.cluster_table import cluster_table, measured
from gpurt.cluster import DeviceReadings, InProcessBus, InProcessEngine, MasterConfig, ReadingsBoard, run_master
from gpurt.cluster.board import SILENT_S, ReadingsFeed
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.master import Master
from gpurt.cluster.readings import encode_readings
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
from tests.cluster.support import E1, E2, FakeClock, device, snapshot, until


def told(key: str = "GPU-a", **fields: Any) -> DeviceReadings:
    return DeviceReadings.model_validate({"device": key, "age_s": 0.5, "contact": "healthy", **fields})


@asynccontextmanager
async def running(bus: InProcessBus, view: MasterView) -> AsyncIterator[Master]:
    ready: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        run_master(MasterConfig(cluster="test"), view, on_ready=ready.set_result, engine=InProcessEngine(bus))
    )
    try:
        yield await asyncio.wait_for(ready, 10)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_master_has_the_readings_of_its_workers(tmp_path: Path) -> None:
    bus, view = InProcessBus("test"), MasterView()
    config = WorkerConfig(
        node="n1", cluster="test", registry_path=tmp_path / "r.json", simulate="h100x2", telemetry_s=0.02
    )
    async with running(bus, view) as master:
        assert master.readings("n1") == {}
        worker = asyncio.create_task(run_worker(config, engine=InProcessEngine(bus)))
        await until(lambda: len(master.readings("n1")) == 2)
        node = view.node("n1")
        assert node is not None
        assert set(master.readings("n1")) == set(node.devices)
        first = next(iter(master.readings("n1").values()))
        assert (first.contact, first.utilization_percent) == ("healthy", 0.0)
        assert first.temperature_c is not None
        await until(lambda: next(iter(master.readings("n1").values())).age_s > first.age_s)
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker
        await until(lambda: view.node("n1").state == "left")  # type: ignore[union-attr]
        assert master.readings("n1") == {}, "a node that has left measures nothing"


class Board(ReadingsBoard):
    """One that a test tells what a node has sent."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(InProcessEngine(InProcessBus("test")), clock=clock)

    def hear(self, node: str, *readings: DeviceReadings, epoch: str = "e1") -> None:
        for payload in encode_readings(node, epoch, readings):
            self._take(node, payload)


def due(feed: ReadingsFeed) -> list[str]:
    names: list[str] = []
    while (name := feed._next()[0]) is not None:
        names.append(name)
    return names


def test_a_node_is_told_once_a_second_at_most_and_only_for_other_values() -> None:
    clock = FakeClock()
    board = Board(clock)
    board.hear("n0", told())
    feed = board.changes(1.0)
    assert due(feed) == ["n0"]
    for celsius in range(50):
        board.hear("n1", told(temperature_c=float(celsius)))
        board.hear("n2", told(temperature_c=40.0, age_s=celsius))
    assert due(feed) == ["n1", "n2"]
    board.hear("n1", told(temperature_c=60.0))
    board.hear("n2", told(temperature_c=40.0))
    assert due(feed) == []
    assert feed._next() == (None, 1.0)
    clock.now += 1
    assert due(feed) == ["n1"], "what n2 says has not changed, however old it is"
    board.hear("n2", told(temperature_c=41.0))
    board.forget("n2")
    clock.now += 1
    assert due(feed) == []
    assert feed._next() == (None, None)
    with pytest.raises(ValueError, match="negative"):
        board.changes(float("nan"))


async def test_waiting_for_readings_can_be_cancelled_and_loses_nothing() -> None:
    board = Board(FakeClock())
    feed = board.changes(0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(feed)
    waiting = asyncio.create_task(anext(feed))
    await asyncio.sleep(0)
    board.hear("n1", told())
    assert await asyncio.wait_for(waiting, 10) == "n1"


def test_what_an_earlier_run_has_measured_comes_too_late() -> None:
    clock = FakeClock()
    board = Board(clock)

    def hear(epoch: Epoch, celsius: float) -> None:
        board.hear("n1", told(temperature_c=celsius), epoch=str(epoch))

    def shown() -> list[float | None]:
        return [each.temperature_c for each in board.readings("n1").values()]

    hear(E1, 40.0)
    hear(E2, 50.0)
    hear(E1, 41.0)
    assert (shown(), board.stale) == ([50.0], 1)
    # One that has lost its registry counts from 1 again, and is believed once the run before is over.
    clock.now += SILENT_S
    hear(E1, 42.0)
    assert (shown(), board.stale) == ([42.0], 1)
    hear(E2, 51.0)
    assert shown() == [51.0]


def test_a_board_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurt.cluster.board.MAX_NODES", 3)
    monkeypatch.setattr("gpurt.cluster.board.MAX_DEVICES", 2)
    board = Board(FakeClock())
    for name in ("n1", "n2", "n3", "n1", "n4"):
        board.hear(name, told("a"), told("b"), told("c"))
    assert [set(board.readings(name)) for name in ("n1", "n2", "n3", "n4")] == [
        {"a", "b"},
        set(),
        {"a", "b"},
        {"a", "b"},
    ]


def test_what_is_measured_in_words() -> None:
    full = told(utilization_percent=97.6, temperature_c=61.2, memory_used_bytes=12 << 30, power_w=312.4, age_s=2.2)
    assert measured(full) == "98 %, 61 °C, 12.0 GiB used, 312 W, 2 s ago"
    assert measured(told(contact="lo\x1bst", power_w=1e300)).startswith("lo")
    assert "\x1b" not in measured(told(contact="lo\x1bst"))
    assert "? W" in measured(told(power_w=1e300))
    assert measured(None) == "-"


def test_the_table_shows_what_is_measured() -> None:
    view = MasterView()
    view.node_up("n1")
    view.apply_snapshot(snapshot(device(), node="n1"))
    readings = {"n1": {"GPU-a": told(temperature_c=61.0)}}
    table = cluster_table(view.snapshot(), readings=lambda node: readings.get(node, {}))
    assert [column.header for column in table.columns][-1] == "measured"
    assert list(table.columns[-1].cells) == ["? %, 61 °C, ? used, ? W, 0 s ago"]
    assert [column.header for column in cluster_table(view.snapshot()).columns][-1] == "identity"


async def test_json_lines_of_readings(capsys: pytest.CaptureFixture[str]) -> None:
    bus, view = InProcessBus("test"), MasterView()
    async with running(bus, view) as master:
        view.node_up("n1")
        view.apply_snapshot(snapshot(device(), node="n1"))
        listening: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
        listening.set_result(master)
        lines = asyncio.create_task(command._readings(listening))
        await asyncio.sleep(0)
        for name in ("n1", "stranger"):
            (payload,) = encode_readings(name, "e1", [told(temperature_c=61.0), told("GPU-zzz")])
            master.board._take(name, payload)
        said = ""
        async with asyncio.timeout(10):
            while not said:
                await asyncio.sleep(0.01)
                said = capsys.readouterr().out
        lines.cancel()
        with suppress(asyncio.CancelledError):
            await lines
    (line,) = (json.loads(each) for each in said.splitlines())
    assert (line["change"], line["node"], line["node_state"]) == ("readings", "n1", "healthy")
    assert line["readings"]["GPU-a"]["temperature_c"] == 61.0
    assert list(line["readings"]) == ["GPU-a"], "only of devices that the node lists"


def test_every_change_of_a_node_says_why() -> None:
    clock = FakeClock()
    view = MasterView(clock=clock)
    changes = view.changes()
    view.node_up("n1")
    view.apply_snapshot(snapshot(device(), node="n1"))
    view.apply_snapshot(snapshot(device(), node="n1", seq=1, discovery_status="partial"))
    view.node_down("n1")
    clock.now += 2
    view.tick()
    clock.now += 5
    view.node_up("n1")
    view.apply_snapshot(snapshot(device(), node="n1", seq=2, discovery_status="partial"))
    view.apply_snapshot(snapshot(node="n1", seq=3, discovery_status="partial"))
    view.node_down("n1", left=True)
    posted = [change for change in changes._queue if change.kind is not ChangeKind.DEVICE_ADDED]
    said = {change.kind: change.message for change in posted}
    assert None not in said.values()
    assert said[ChangeKind.NODE_SUSPECT] == "its connection ended"
    assert said[ChangeKind.NODE_LOST] == "not heard for 2.0 s"
    assert said[ChangeKind.NODE_LEFT] == "it said goodbye"
    assert said[ChangeKind.NODE_BACK] == "the same run of it is there, after 5.0 s as lost"
    assert said[ChangeKind.NODE_UPDATED] == "discovery: partial"
    assert said[ChangeKind.DEVICE_REMOVED] == "its node no longer lists it"
    (updated,) = (change for change in posted if change.kind is ChangeKind.NODE_UPDATED)
    document = command.change_document(updated, view.snapshot())
    assert document["summary"]["discovery_status"] == "partial"
    assert document["message"] == updated.message


async def test_a_worker_reads_through_the_backend_that_it_opens(tmp_path: Path) -> None:
    """Of the processor the system alone tells no memory that this process holds; with the backend both are asked."""
    from gpurt.cli.worker import _Session

    bus = InProcessBus("test")
    config = WorkerConfig(
        node="n1", cluster="test", registry_path=tmp_path / "r.json", backends=["cpu"], telemetry_s=0.02
    )
    session = _Session(config, check_bytes=None, calibrate=False, weights=None, verify=True, as_json=True)
    joined: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def on_ready(worker: Worker) -> None:
        joined.set_result(worker)
        await session._ready(worker)

    running = asyncio.create_task(run_worker(config, on_ready=on_ready, engine=InProcessEngine(bus)))
    worker = await asyncio.wait_for(joined, 20)
    monitoring = worker.monitoring
    assert monitoring is not None
    await until(lambda: [backend.name for backend in monitoring._backends] == ["cpu"])
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
