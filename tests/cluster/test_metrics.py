"""Metrics of workers and masters, scraped over HTTP and read back by Prometheus' own parsers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpurt.cli import worker as worker_command
from gpurt.cluster.board import ReadingsBoard
from gpurt.cluster.changes import Change, ChangeKind
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.logged import log_change, log_event
from gpurt.cluster.master import Master, MasterConfig, run_master
from gpurt.cluster.metrics import MasterMetrics
from gpurt.cluster.node_metrics import NodeMetrics
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.readings import DeviceReadings, encode_readings
from gpurt.cluster.sequence import Counters
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import WorkerConfig, run_worker
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.health import HealthMonitor
from gpurt.runtime.protocols import LaneActivity
from gpurt.telemetry.backend_metrics import backend_families
from gpurt.telemetry.exporter import Families, MetricsServer, MetricsUnavailable, parse_metrics_address
from gpurt.telemetry.metrics import Family, probe_families, render, xid_families
from gpurt.testing.simulated import create_simulated
from gpurt.types import BackendReport
from tests.cluster.support import E1, HOST_B, FakeClock, device, event_bytes, result, snapshot, until

openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
older = pytest.importorskip("prometheus_client.parser")

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(url: str, accept: str = OPENMETRICS) -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def parsed(text: str) -> Samples:
    """Everything in an OpenMetrics text, which must be one by the format's own rules."""
    found: Samples = {}
    for family in openmetrics.text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


async def scrape(server: MetricsServer) -> Samples:
    status, kind, text = await asyncio.to_thread(get, server.url)
    assert (status, kind.startswith("application/openmetrics-text")) == (200, True)
    return parsed(text)


async def nothing() -> Families:
    family = Family("gpurt_x_seconds", "gauge", "x", "seconds")
    family.add(1.5, device="a")
    count = Family("gpurt_y", "counter", "y")
    count.add(3)
    return lambda: [family, count, Family("gpurt_z", "gauge", "empty")]


# The server


async def test_both_formats_by_what_the_scraper_asks_for() -> None:
    async with MetricsServer(nothing) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        assert await scrape(server) == {
            ("gpurt_x_seconds", frozenset({("device", "a")})): 1.5,
            ("gpurt_y_total", frozenset()): 3,
        }
        status, kind, text = await asyncio.to_thread(get, server.url, "text/plain")
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        names = {sample.name for family in older.text_string_to_metric_families(text) for sample in family.samples}
        assert names == {"gpurt_x_seconds", "gpurt_y_total"}
        *_, text = await asyncio.to_thread(get, f"{server.url}?name[]=gpurt_y_total")
        assert set(parsed(text)) == {("gpurt_y_total", frozenset())}


async def test_two_servers_know_nothing_of_each_other_and_give_their_ports_back() -> None:
    async with MetricsServer(nothing) as first, MetricsServer(nothing) as second:
        assert first.port != second.port
        assert await scrape(first) == await scrape(second)
        port = first.port
    async with MetricsServer(nothing, port=port) as again:
        assert await scrape(again)
    assert not [thread for thread in threading.enumerate() if thread.name == "gpurt:metrics:server"]


async def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    async with MetricsServer(nothing) as server:
        with pytest.raises(MetricsUnavailable, match=rf"127\.0\.0\.1 port {server.port}.*choose another port"):
            async with MetricsServer(nothing, port=server.port):
                pass
        with pytest.raises(MetricsUnavailable, match="192\\.0\\.2\\.1"):
            async with MetricsServer(nothing, "192.0.2.1"):
                pass
        assert await scrape(server)


async def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client.exposition", None)
    with pytest.raises(MetricsUnavailable, match=r"pip install 'gpurt\[api\]'"):
        async with MetricsServer(nothing):
            pass


async def test_a_busy_loop_fails_the_scrape_and_nothing_else() -> None:
    calls = 0

    async def slow() -> Families:
        nonlocal calls
        calls += 1
        if calls == 2:
            await asyncio.Event().wait()
        return await nothing()

    async with MetricsServer(slow, take_s=0.05) as server:
        status, _, text = await asyncio.to_thread(get, server.url)
        assert (status, "the event loop is busy" in text) == (503, True)
        assert await scrape(server)


async def test_a_fault_in_what_is_told_is_logged_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def faulty() -> Families:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError("a fault")
        return await nothing()

    async with MetricsServer(faulty) as server:
        status, *_ = await asyncio.to_thread(get, server.url)
        assert status == 500
        assert "a fault" in caplog.text
        assert await scrape(server)


async def test_closing_does_not_wait_for_a_scrape_and_a_scraper_that_says_nothing_is_in_nobodys_way() -> None:
    taking = asyncio.Event()
    calls = 0

    async def endless() -> Families:
        nonlocal calls
        calls += 1
        if calls > 1:
            taking.set()
            await asyncio.Event().wait()
        return await nothing()

    async with MetricsServer(endless) as server:
        silent = socket.create_connection((server.address, server.port))
        scraping = asyncio.create_task(asyncio.to_thread(get, server.url))
        await asyncio.wait_for(taking.wait(), 10)
    status, *_ = await asyncio.wait_for(scraping, 10)
    assert status == 503
    silent.close()


def test_addresses() -> None:
    good = {
        "9464": ("127.0.0.1", 9464), "0": ("127.0.0.1", 0), "127.0.0.1:1": ("127.0.0.1", 1),
        "0.0.0.0:9464": ("0.0.0.0", 9464), "localhost:80": ("127.0.0.1", 80), "[::1]:80": ("::1", 80),
    }  # fmt: skip
    assert {text: parse_metrics_address(text) for text in good} == good
    for bad in (
        "",
        ":",
        ":80",
        "x:80",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:65536",
        "::1:80",
        "[::1]",
        "1.2.3.4:-1",
        "80 80",
        "٣",
    ):
        with pytest.raises(ValueError, match=r"address|port"):
            parse_metrics_address(bad)


async def test_an_address_that_others_reach_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with MetricsServer(nothing, "0.0.0.0"):
        assert "everybody who reaches this machine" in caplog.text


# A worker


@asynccontextmanager
async def working(tmp_path: Path, bus: InProcessBus, **options: Any) -> AsyncIterator[worker_command._Session]:
    config = WorkerConfig(
        node="n1", cluster="test", registry_path=tmp_path / "r.json", simulate="h100x2", telemetry_s=0.02
    )
    asked: dict[str, Any] = {"check_bytes": None, "calibrate": False, "weights": None, "verify": True}
    session = worker_command._Session(config, **asked, as_json=True, **options)
    served = asyncio.Event()

    serve = session._serve

    async def serving(*what: Any) -> None:
        await serve(*what)
        served.set()

    session._serve = serving  # type: ignore[method-assign]
    task = asyncio.create_task(run_worker(config, on_ready=session._ready, engine=InProcessEngine(bus)))
    try:
        waiting = asyncio.ensure_future(served.wait())
        await asyncio.wait({task, waiting}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert served.is_set()
        yield session
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_worker_tells_its_devices_probes_and_memory(tmp_path: Path) -> None:
    async with MetricsServer(NodeMetrics("n0").take) as early:
        assert await scrape(early) == {("gpurt_node_joined", frozenset({("node", "n0")})): 0} | {
            ("gpurt_devices", frozenset({("state", state)})): 0
            for state in ("healthy", "suspect", "degraded", "unresponsive", "lost", "removed")
        }
    async with working(tmp_path, InProcessBus("test")) as session, MetricsServer(session.metrics.take) as server:
        worker = session.metrics._worker
        assert worker is not None
        assert worker.monitoring is not None
        await until(lambda: len(worker.monitoring.readings()) == 2)
        worker.monitoring.service.xid(31, "sim:n1:h100:0")
        worker.monitoring.service.xid(4711, "sim:n1:h100:1")
        worker.monitoring.service.xid(4712, "sim:n1:h100:1")
        backend = worker.backend
        assert backend is not None
        handle = await backend.allocate("simulated:0", 1 << 20)
        await backend.copy_to_device(b"x" * 4096, handle)
        samples = await scrape(server)
        await backend.deallocate(handle)
        pooled = await scrape(server)
    one = {"device": "sim:n1:h100:0"}
    assert value(samples, "gpurt_node_joined", node="n1") == 1
    assert value(samples, "gpurt_devices", state="healthy") == 1
    assert value(samples, "gpurt_devices", state="degraded") == 1, "by an Xid that nobody knows"
    assert value(samples, "gpurt_device_state", **one, state="healthy") == 1
    assert value(samples, "gpurt_device_usable", **one) == 1
    assert (value(samples, "gpurt_memory_usable_bytes", **one) or 0) > 0
    assert value(samples, "gpurt_backend_available", backend="simulated") == 1
    assert 0 < (value(samples, "gpurt_probe_duration_seconds", backend="simulated") or 0) < 20
    assert value(samples, "gpurt_xids_recent", **one, xid="31") == 1
    assert value(samples, "gpurt_xids_recent", device="sim:n1:h100:1", xid="other") == 2
    assert value(samples, "gpurt_utilization_ratio", **one) == 0
    assert (value(samples, "gpurt_temperature_celsius", **one) or 0) > 0
    assert 0 <= (value(samples, "gpurt_reading_age_seconds", **one) or 0) < 10
    # Discovery verifies devices meanwhile, with some memory of its own.
    assert (value(samples, "gpurt_allocated_bytes", backend="simulated", **one) or 0) >= 1 << 20
    assert (value(pooled, "gpurt_allocated_bytes", backend="simulated", **one) or 0) < 1 << 20
    described = [dict(labels) for name, labels in samples if name == "gpurt_device_info"]
    assert {each["simulated"] for each in described} == {"true"}
    assert {each["device_id"] for each in described} == {"simulated:0", "simulated:1"}


class Busy:
    """A backend that tells what it is doing."""

    def __init__(self) -> None:
        self.name, self.devices = "cuda", (device(index=0),)
        self.copied: dict[tuple[str, str], int] = {}

    def lanes(self) -> list[LaneActivity]:
        return [LaneActivity("cuda:0:h2d", 7, 3, 12.5), LaneActivity("cuda:0:d2h", 0, 0, None)]

    def copied_bytes(self) -> Any:
        return self.copied


def test_lanes_copies_and_the_hang_clock_of_a_backend_that_tells() -> None:
    backend: Any = Busy()
    backend.copied = {("cuda:0", "host_to_device"): 11, ("cuda:9", "device_to_host"): 1}
    samples = parsed(render(backend_families([backend, backend])))
    lane = {"backend": "cuda", "lane": "cuda:0:h2d"}
    assert value(samples, "gpurt_lane_calls", **lane) == 7
    assert value(samples, "gpurt_lane_held_calls", **lane) == 3
    assert value(samples, "gpurt_lane_call_seconds", **lane) == 12.5
    assert value(samples, "gpurt_lane_call_seconds", backend="cuda", lane="cuda:0:d2h") == 0
    copied = {"backend": "cuda", "direction": "host_to_device"}
    assert value(samples, "gpurt_copied_bytes_total", **copied, device="GPU-a") == 11
    assert value(samples, "gpurt_copied_bytes_total", backend="cuda", device="cuda:9", direction="device_to_host") == 1


async def test_a_backend_that_is_closed_tells_nothing() -> None:
    backend = create_simulated("h100", seed="x")
    await backend.initialize()
    assert parsed(render(backend_families([backend])))
    await backend.shutdown()
    assert parsed(render(backend_families([backend]))) == {}


def test_probes_and_xids() -> None:
    reports = [
        BackendReport(name="cuda", status="unavailable", reason="no_driver", elapsed_ms=12.5),
        BackendReport(name="cpu", status="ok"),
        BackendReport(name="cpu", status="ok", elapsed_ms=1500.0),
    ]
    samples = parsed(render(probe_families(reports)))
    assert value(samples, "gpurt_probe_duration_seconds", backend="cuda") == 0.0125
    assert value(samples, "gpurt_probe_duration_seconds", backend="cpu") == 1.5
    assert value(samples, "gpurt_backend_available", backend="cuda") == 0
    assert value(samples, "gpurt_backend_unavailable", backend="cuda", reason="no_driver") == 1
    clock = FakeClock()
    monitor = HealthMonitor(clock=clock)
    for number in range(500):
        monitor.xid("a", number)
    assert len(parsed(render(xid_families(monitor.get_health_report(1.0))))) <= 30, "any number is no series of its own"
    clock.now += 3601
    assert parsed(render(xid_families(monitor.get_health_report(1.0)))) == {}


# A master


class Cluster:
    """A master without tasks: tests feed it by hand."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.view = MasterView(clock=self.clock)
        engine = InProcessEngine(InProcessBus("test"))
        self.observer = ClusterObserver(engine, self.view)
        self.board = ReadingsBoard(engine, clock=self.clock)
        self.metrics = MasterMetrics("test")
        self.metrics.watch(Master(MasterConfig(cluster="test"), engine, self.observer, self.board))

    def join(self, name: str, *devices: Any, **fields: Any) -> None:
        self.view.node_up(name)
        self.view.apply_snapshot(snapshot(*devices, node=name, **fields))

    def hear(self, name: str, *keys: str, age_s: float = 0.0) -> None:
        told = [DeviceReadings.model_validate({"device": key, "age_s": age_s, "contact": "healthy"}) for key in keys]
        for payload in encode_readings(name, str(E1), told):
            self.board._take(name, payload)

    async def samples(self) -> Samples:
        return parsed(render((await self.metrics.take())()))


async def test_sums_of_a_cluster_and_no_series_for_a_node() -> None:
    cluster = Cluster()
    for index in range(100):
        cluster.join(f"n{index}", device(f"GPU-{index}", memory_usable_bytes=1 << 30))
        cluster.hear(f"n{index}", f"GPU-{index}", age_s=index / 10)
    cluster.join("sim", device("S", simulated=True, memory_usable_bytes=5))
    cluster.join("full", draining=True)
    cluster.view.node_down("n0")
    cluster.view.node_down("n1", left=True)
    cluster.clock.now += 1
    samples = await cluster.samples()
    assert value(samples, "gpurt_cluster_master_listening", cluster="test") == 1
    counts = {
        state: value(samples, "gpurt_cluster_nodes", state=state) for state in ("healthy", "suspect", "lost", "left")
    }
    assert counts == {"healthy": 100, "suspect": 1, "lost": 0, "left": 1}
    assert value(samples, "gpurt_cluster_nodes_draining") == 1
    assert value(samples, "gpurt_cluster_devices", health="suspect") == 1
    assert value(samples, "gpurt_cluster_devices", health="removed") == 1
    assert value(samples, "gpurt_cluster_devices_available", simulated="false") == 98
    assert value(samples, "gpurt_cluster_devices_available", simulated="true") == 1
    assert value(samples, "gpurt_cluster_memory_usable_bytes", simulated="false") == 98 << 30
    assert value(samples, "gpurt_cluster_memory_usable_bytes", simulated="true") == 5
    assert value(samples, "gpurt_cluster_oldest_reading_age_seconds") == pytest.approx(10.9)
    assert value(samples, "gpurt_cluster_devices_without_readings") == 1
    small = Cluster()
    small.join("n1", device(memory_usable_bytes=1))
    small.hear("n1", "GPU-a")
    assert set(samples) == set(await small.samples()), "a larger cluster has no more series"


async def test_before_it_listens_a_master_tells_that_it_does_not() -> None:
    samples = parsed(render((await MasterMetrics("test").take())()))
    assert value(samples, "gpurt_cluster_master_listening", cluster="test") == 0
    assert value(samples, "gpurt_cluster_nodes", state="healthy") == 0
    assert value(samples, "gpurt_cluster_oldest_reading_age_seconds") is None


async def test_counters_never_become_less_when_a_node_is_forgotten_or_comes_back() -> None:
    cluster = Cluster()
    counters: dict[str, Counters] = {}
    cluster.observer.counters = lambda node: counters.get(node, Counters())  # type: ignore[method-assign]

    async def applied() -> tuple[float | None, float | None]:
        samples = await cluster.samples()
        events, gone = "gpurt_cluster_events_total", "gpurt_cluster_snapshots_total"
        return value(samples, events, outcome="applied"), value(samples, gone)

    for name in ("n1", "n2"):
        cluster.join(name, device())
        counters[name] = Counters(applied=10, snapshots=1)
    assert await applied() == (20, 2)
    assert await applied() == (20, 2)
    del counters["n1"]  # the observer has forgotten it
    assert await applied() == (20, 2)
    counters["n1"] = Counters(applied=3)
    assert await applied() == (23, 2)
    del cluster.view._nodes["n1"]
    counters["n1"] = Counters(applied=5)
    assert await applied() == (25, 2), "one that the view alone has forgotten goes on"
    del counters["n1"]
    assert await applied() == (25, 2)
    assert await applied() == (25, 2)
    assert set(cluster.metrics._seen) == {"n2"}, "who is gone takes no room"
    counters["n2"] = Counters(applied=1, snapshots=5)
    assert await applied() == (26, 7), "one that counts afresh"


async def test_a_master_over_a_bus_tells_gaps_resyncs_and_what_it_refused() -> None:
    bus, view, metrics = InProcessBus("test"), MasterView(), MasterMetrics("test")
    ready: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        run_master(MasterConfig(cluster="test"), view, on_ready=ready.set_result, engine=InProcessEngine(bus))
    )
    master = await asyncio.wait_for(ready, 10)
    metrics.watch(master)
    node = InProcessEngine(bus)
    await node.start()
    await node.join("n1", encode_snapshot(snapshot(device(), seq=0)))
    await until(lambda: view.node("n1"))
    for seq in (1, 2, 2, 3):
        await node.publish(event_bytes(seq))
    await node.publish(b"no event")
    await node.set_state(encode_snapshot(snapshot(device(), seq=9)))
    await node.publish(event_bytes(9))
    await until(lambda: master.observer.resyncs["gap"] and master.observer.counters("n1").snapshots >= 2)
    async with MetricsServer(metrics.take) as server:
        samples = await scrape(server)
    assert value(samples, "gpurt_cluster_events_total", outcome="applied") == 3
    assert value(samples, "gpurt_cluster_events_total", outcome="duplicates") == 1
    assert value(samples, "gpurt_cluster_resyncs_total", reason="gap") == 1
    assert value(samples, "gpurt_cluster_resyncs_total", reason="joined") == 1
    assert value(samples, "gpurt_cluster_rejected_total", reason="malformed") == 1
    assert value(samples, "gpurt_cluster_ignored_total", reason="unknown_type") == 3
    assert value(samples, "gpurt_cluster_dropped_total") == 0
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await node.close()


async def test_a_thousand_nodes_do_not_keep_the_loop() -> None:
    """No step between two turns of the loop looks at more than a part of the cluster's readings."""
    cluster = Cluster()
    for index in range(1000):
        cluster.join(f"n{index}", *(device(f"GPU-{index}-{each}", each) for each in range(2)))
    taking = asyncio.ensure_future(cluster.metrics.take())
    turns = 0
    while not taking.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 1000 // 32
    assert taking.result()()


# Records with fields


def test_changes_are_records_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpurt.cluster.changes")
    view = MasterView(clock=FakeClock())
    changes = view.changes()
    view.node_up("n1")
    view.apply_snapshot(snapshot(device()))
    view.node_down("n1")
    view.apply_snapshot(snapshot(node="n2", host=HOST_B))
    for change in list(changes._queue):
        log_change(change, view)
    log_change(Change(ChangeKind.MISSED, missed=7), view)
    told: list[Any] = caplog.records
    assert [(r.levelname, r.event, r.node, r.device) for r in told] == [
        ("INFO", "node_joined", "n1", None),
        ("INFO", "device_added", "n1", "GPU-a"),
        ("WARNING", "node_suspect", "n1", None),
        ("INFO", "node_joined", "n2", None),
        ("WARNING", "missed", None, None),
    ]
    assert "its connection ended" in told[2].getMessage()
    assert "7 changes" in told[-1].getMessage()


def test_events_of_a_node_are_records_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpurt.cluster.changes")
    card = device()
    log_event("n1", DeviceEvent(type=EventType.SNAPSHOT, snapshot=result(card)))
    log_event("n1", DeviceEvent(type=EventType.LOST, device=card, stable_id="GPU-a", reason="Xid 79"))
    bad = card.model_copy(update={"usable": False})
    log_event("n1", DeviceEvent(type=EventType.HEALTH, device=bad, stable_id="GPU-a"))
    log_event("n1", DeviceEvent(type=EventType.HEALTH, device=card, stable_id="GPU-a"))
    log_event("n1", DeviceEvent(type=EventType.BACKEND_UNAVAILABLE, backend="cuda", reason="timeout"))
    told: list[Any] = caplog.records
    assert [(r.levelname, r.event, r.node, r.device) for r in told] == [
        ("INFO", "snapshot", "n1", None),
        ("WARNING", "lost", "n1", "GPU-a"),
        ("WARNING", "health", "n1", "GPU-a"),
        ("INFO", "health", "n1", "GPU-a"),
        ("WARNING", "backend_unavailable", "n1", None),
    ]
    assert "Xid 79" in told[1].getMessage()


async def test_a_worker_logs_what_happens_to_its_devices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpurt.cluster.changes")
    async with working(tmp_path, InProcessBus("test"), log_events=True):
        await until(lambda: any(getattr(record, "event", "") == "snapshot" for record in caplog.records))
    assert json.dumps([getattr(record, "node", None) for record in caplog.records]) == '["n1"]'
