"""``gpurt top``: any cluster on any terminal, as lines without one, and what it says of a hub that is not there."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gpurt.cli import protected, top
from gpurt.cli.main import main
from gpurt.cli.top_overview import STALE_S, Overview, overview
from gpurt.cli.top_picture import lines, picture, summary
from gpurt.cluster.errors import BusUnavailable
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import MasterConfig
from gpurt.cluster.readings import DeviceReadings, encode_readings
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.types import DeviceState
from tests.cluster.support import E1, HOST_B, FakeClock, device, event_bytes, free_port, snapshot, until

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
GPU = {"memory_usable_bytes": 70 * GIB}
READING = {"utilization_percent": 97.6, "temperature_c": 61.2, "memory_used_bytes": 12 * GIB, "power_w": 312.4}


def told(key: str = "GPU-a", **fields: Any) -> DeviceReadings:
    return DeviceReadings.model_validate({"device": key, "age_s": 2.2, "contact": "healthy", **READING, **fields})


class Cluster:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.view = MasterView(clock=self.clock)
        self.readings: dict[str, dict[str, DeviceReadings]] = {}

    def join(self, name: str, *devices: Any, readings: Any = (), **fields: Any) -> Cluster:
        self.view.node_up(name)
        self.view.apply_snapshot(snapshot(*devices, node=name, **fields))
        self.readings[name] = {each.device: each for each in readings}
        return self

    @property
    def seen(self) -> Overview:
        return overview(self.view.snapshot(), lambda name: self.readings.get(name, {}), self.clock.now)


def large(nodes: int, devices: int) -> Cluster:
    cluster = Cluster()
    for index in range(nodes):
        cards = [device(f"G{index}-{each}", each, **GPU) for each in range(devices)]
        cluster.join(f"n{index:03}", *cards, readings=[told(f"G{index}-{each}") for each in range(devices)])
    return cluster


def drawn(seen: Overview, *notices: str, width: int = 160, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, markup=False, emoji=False)
    console.print(picture(seen, "cluster test at here", notices, width=width, height=height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def row(seen: Overview, start: str, **size: int) -> list[str]:
    found = next(line for line in drawn(seen, **size) if line.startswith(f"│ {start}"))
    return [cell.strip() for cell in found.strip("│").split("│")]


def test_a_row_of_a_device() -> None:
    seen = Cluster().join("n1", device(**GPU), readings=[told()]).seen
    assert row(seen, "n1") == [
        "n1",
        "cuda:0",
        "H100",
        "12.0 GiB",
        "70.0 GiB",
        "98 %",
        "61 °C",
        "312 W",
        "healthy",
        "2 s",
    ]
    assert summary(seen) == "1 node (1 healthy), 1 device, 1 available, memory 12.0 GiB used, 70.0 GiB usable"


def test_what_is_unknown_is_no_zero() -> None:
    seen = Cluster().join("n1", device()).seen
    assert row(seen, "n1") == ["n1", "cuda:0", "H100", *["?"] * 5, "healthy", "-"]
    assert "memory ? used, ? usable" in summary(seen)
    some = Cluster().join("n1", device(**GPU), device("b", 1), readings=[told()]).seen
    assert "memory ≥ 12.0 GiB used, ≥ 70.0 GiB usable" in summary(some)


def test_what_a_device_never_tells_has_its_reason() -> None:
    bare: dict[str, Any] = {"power_w": None, "temperature_c": None, "memory_used_bytes": None}
    why = {"power_w": "unsupported", "temperature_c": "no_permission", "memory_used_bytes": "\x1b[31mwhatever"}
    seen = Cluster().join("n1", device(**GPU), readings=[told(**bare, unavailable=why)]).seen
    figures = ["?", "70.0 GiB", "98 %", "no permission", "not told"]
    assert row(seen, "n1")[3:8] == figures
    assert "temp no permission  power not told" in list(lines(seen))[1]
    assert seen.document()["nodes"][0]["devices"][0]["unavailable"]["power_w"] == "unsupported"
    cards = [device("a", **GPU), device("b", 1, **GPU)]
    both = [told("a", **bare, unavailable=why), told("b", **bare, unavailable=why | {"temperature_c": "error"})]
    cluster = large(30, 1).join("n000", *cards, readings=both)
    assert row(cluster.seen, "n000", height=20)[3:8] == ["?", "140.0 GiB", "98 %", "?", "not told"], "one reason, or ?"


def test_marks() -> None:
    cluster = Cluster()
    cluster.join("n1", device(simulated=True, **GPU), readings=[told(age_s=STALE_S + 1)])
    cluster.join("n2", device(state=DeviceState.DEGRADED, usable=False), readings=[told()])
    cluster.join("n3", device(), readings=[told()])
    cluster.join("n4", device(), readings=[told(contact="unresponsive")])
    cluster.join("n5", device(), readings=[told()])
    cluster.join("n6", device(usable=False))
    cluster.view.node_down("n3")
    cluster.clock.now += 3
    cluster.view.tick()
    cluster.view.node_down("n5")
    seen = cluster.seen
    marks = {line.found.node: line.marks for line in seen.devices}
    assert marks["n1"] == ("simulated", "stale")
    assert marks["n2"] == ("degraded",)
    assert marks["n3"] == ("lost",)
    assert marks["n4"] == ("unresponsive",)
    assert marks["n5"] == ("suspect",)
    assert row(seen, "n1")[2::7] == ["H100 (simulated)", "61 s stale"]
    assert row(seen, "n3")[0] == "n3 (lost 0 s)"
    assert row(seen, "n5")[0] == "n5 (suspect 0 s)"
    assert row(seen, "n6")[8] == "healthy, not usable"
    assert [node.name for node in seen.nodes] == ["n2", "n3", "n4", "n5", "n1", "n6"], "who needs somebody comes first"
    cluster.view.node_down("n2", left=True)
    assert cluster.seen.nodes[-1].name == "n2"


def test_a_conflict_is_told() -> None:
    cluster = Cluster().join("n1", device())
    cluster.view.apply_snapshot(snapshot(device("b"), node="n1", host=HOST_B))
    shown = drawn(cluster.seen, width=260)
    assert any("n1 (name used twice)" in line for line in shown)
    assert any("start one under another name" in line for line in shown)


def test_memory_that_is_shared_counts_once_in_sums() -> None:
    shared = {"memory_pool_id": "host", "memory_usable_bytes": 20 * GIB}
    cards = [device("igpu", 0, **shared), device("cpu", 1, **shared)]
    seen = Cluster().join("n1", *cards, readings=[told("igpu"), told("cpu")]).seen
    assert "memory 12.0 GiB used, 20.0 GiB usable" in summary(seen)
    assert seen.document()["memory_usable_bytes"] == 20 * GIB


@pytest.mark.parametrize("width", [1, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 24, 60])
@pytest.mark.parametrize(
    "cluster", [Cluster(), large(1, 1), large(3, 8), large(200, 8)], ids=["0", "1", "3x8", "200x8"]
)
def test_it_fits_any_terminal(cluster: Cluster, width: int, height: int) -> None:
    shown = drawn(cluster.seen, "12 s ago: the hub went away", width=width, height=height)
    assert max(map(len, shown)) <= width
    assert len(shown) <= max(height, 10)
    if width >= 60 and height >= 24:
        text = "\n".join(shown)
        assert "the hub went away" in text
        for heading in ("node", "health", "age") if cluster.readings else ("no node is there now",):
            assert heading in text


def test_a_long_name_gives_way_before_any_figure() -> None:
    card = device(name="NVIDIA " + "x" * 200, **GPU)
    seen = Cluster().join("n1", card, readings=[told()]).seen
    for width in (300, 120, 96):
        cells = row(seen, "n1", width=width)
        assert cells[3:] == ["12.0 GiB", "70.0 GiB", "98 %", "61 °C", "312 W", "healthy", "2 s"]
        assert cells[2].startswith("NVIDIA xxx")


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    seen = large(1, 2).seen
    assert len(row(seen, "n000", width=160)) == 10
    assert row(seen, "n000", width=80)[0] == "n000"
    assert "12.0 GiB" in row(seen, "n000", width=50)
    assert "healthy" in row(seen, "n000", width=50)


def test_200_nodes_are_a_row_each_and_the_rest_is_counted() -> None:
    cluster = large(200, 8)
    cluster.view.node_down("n150")
    shown = drawn(cluster.seen, height=40)
    assert "200 nodes (199 healthy, 1 suspect), 1600 devices, 1592 available" in shown[1]
    assert row(cluster.seen, "n150")[8] == "suspect", "the one that needs somebody is the first"
    assert row(cluster.seen, "n000") == [
        "n000", "8 devices", "8\u00d7 H100", "96.0 GiB", "560.0 GiB", "98 %", "61 °C", "2499 W", "healthy", "2 s"
    ]  # fmt: skip
    assert any(re.search(r"… and 1\d\d more nodes: make the terminal higher", line) for line in shown)


def test_a_node_in_one_row_tells_the_worst_of_it() -> None:
    cluster = large(30, 2)
    bad = device("bad", 1, state=DeviceState.DEGRADED, usable=False)
    cluster.join(
        "n000", device("G0-0", **GPU), bad, readings=[told("G0-0", power_w=None), told("bad", temperature_c=99)]
    )
    assert row(cluster.seen, "n000", height=20)[5:] == ["98 %", "99 °C", "≥ 312 W", "1 degraded", "2 s"]


def test_names_drive_no_terminal_and_are_no_markup() -> None:
    evil = device(name="\x1b[31m[red]x[/red]\n")
    cluster = Cluster().join("n1", evil, readings=[told(power_w=1e300, memory_used_bytes=1 << 80, age_s=1e300)])
    text = "\n".join([*drawn(cluster.seen), *lines(cluster.seen)])
    assert "\x1b" not in text
    assert r"\x1b[31m[red]x[/red]\n" in text
    assert "? h" in text


def test_lines_have_everything() -> None:
    said = list(lines(large(200, 8).join("empty").seen))
    assert len(said) == 1 + 1600 + 1
    figures = "used 12.0 GiB  usable 70.0 GiB  use 98 %  temp 61 °C  power 312 W  health healthy  age 2 s"
    assert said[2] == f"n000  cuda:0  H100  {figures}"
    assert said[1].startswith("empty  -  no device")


def test_a_document_is_plain_json() -> None:
    document = json.loads(json.dumps(large(1, 1).seen.document(), allow_nan=False))
    assert document["nodes_by_state"]["healthy"] == 1
    (node,) = document["nodes"]
    (one,) = node["devices"]
    assert (node["node"], node["state"], one["device"], one["health"]) == ("n000", "healthy", "G0-0", "healthy")
    assert (one["memory_used_bytes"], one["age_s"], one["stale"], one["simulated"]) == (12 * GIB, 2.2, False, False)
    silent = json.loads(json.dumps(Cluster().join("n1", device()).seen.document()))["nodes"][0]["devices"][0]
    assert (silent["memory_used_bytes"], silent["age_s"], silent["temperature_c"]) == (None, None, None)


# The command, over a bus in this process


@asynccontextmanager
async def on_a_bus(*names: str) -> AsyncIterator[tuple[InProcessBus, dict[str, InProcessEngine]]]:
    bus, nodes = InProcessBus("test"), {}
    for name in names:
        nodes[name] = engine = InProcessEngine(bus)
        await engine.start()
        await engine.join(name, encode_snapshot(snapshot(device(f"GPU-{name}", **GPU), node=name)))
    yield bus, nodes
    for engine in nodes.values():
        await engine.close()


def watch(bus: InProcessBus, **options: Any) -> top.Watch:
    config = MasterConfig("test", listen=False)
    return top.Watch(config, engine=InProcessEngine(bus), **{"wait_s": 0.02, "interval_s": 0.01, **options})


@asynccontextmanager
async def running(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with on_a_bus("n1", "n2") as (bus, nodes):
        (payload,) = encode_readings("n2", str(E1), [told("GPU-n2")])

        async def tell() -> None:
            await until(lambda: bus.readers)
            await nodes["n2"].publish_telemetry(payload)

        telling = asyncio.create_task(tell())
        await watch(bus, wait_s=1.0).once()
        await telling
        said = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in said] == ["2", "n1", "n2"]
        assert "use 98 %" in said[2]
        await watch(bus).once(as_json=True)
        (line,) = capsys.readouterr().out.splitlines()
        assert [node["node"] for node in json.loads(line)["nodes"]] == ["n1", "n2"]
        assert [member.node for member in bus.members] == ["n1", "n2"], "who watches is no node"


async def test_once_on_an_empty_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    async with on_a_bus() as (bus, _):
        await watch(bus).once()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0 nodes, 0 devices, 0 available"
    assert said[1].startswith("no node is there now")
    assert "known to a master that was there" in said[2]


async def test_documents_until_it_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    async with on_a_bus("n1") as (bus, nodes):
        said: list[str] = []

        def states() -> list[str]:
            said.extend(capsys.readouterr().out.splitlines())
            return [node["state"] for line in said for node in json.loads(line)["nodes"]]

        async with running(watch(bus).documents()):
            await until(lambda: "healthy" in states())
            await nodes["n1"].leave()
            await until(lambda: "left" in states())


async def test_without_a_terminal_changes_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    async with on_a_bus("n1") as (bus, nodes):
        said: list[str] = []

        def text() -> str:
            said.append(capsys.readouterr().out)
            return "".join(said)

        async with running(watch(bus).changes()):
            await until(lambda: "1 node (1 healthy)" in text())
            await nodes["n1"].leave()
            await until(lambda: "node left n1" in text())


async def test_a_hub_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    class Nowhere(InProcessEngine):
        async def start(self) -> None:
            await asyncio.Event().wait()

    absent = top.Watch(MasterConfig("test", listen=False), engine=Nowhere(InProcessBus("test")), connect_s=0.02)
    for show in (absent.once, absent.documents, absent.changes, lambda: absent.live(Console(file=io.StringIO()))):
        with pytest.raises(
            BusUnavailable, match=r"no hub .* tcp/127\.0\.0\.1:7447 .*start it with gpurt master --listen"
        ):
            await show()


async def test_a_bus_that_ends_while_it_watches_ends_the_watch() -> None:
    async with on_a_bus("n1") as (bus, _):
        engine = InProcessEngine(bus)
        seen = top.Watch(MasterConfig("test", listen=False), engine=engine, wait_s=0.01, interval_s=0.01)
        task = asyncio.create_task(seen.documents())
        await until(lambda: seen._view.node("n1"))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(BusUnavailable, match="the bus was closed"):
            await asyncio.wait_for(task, 10)


async def test_the_picture_lives_and_what_the_bus_warns_of_is_on_it() -> None:
    import logging

    async with on_a_bus("n1") as (bus, nodes):
        console = Console(file=io.StringIO(), width=160, height=30, force_terminal=True)

        def text() -> str:
            return console.file.getvalue()  # type: ignore[attr-defined]

        async with running(watch(bus).live(console)):
            await until(lambda: "GPU" in text() or "cuda:0" in text())
            logging.getLogger("gpurt.cluster.zenoh").warning("the hub at %s went away", "tcp/x")
            await until(lambda: "s ago: the hub at tcp/x went away" in text())
            await nodes["n1"].publish(event_bytes(1))
            await nodes["n1"].leave()
            await until(lambda: "n1 (left" in text())
        assert "\x1b[?1049h" in text()
        after = text().rpartition("\x1b[?1049l")[2]
        assert "n1 (left" in after, "the last picture stays"
        assert logging.getLogger("gpurt.cluster").propagate


# The command as people start it


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpurt", *arguments]


def test_nobody_at_the_address() -> None:
    pytest.importorskip("zenoh")
    for options in (["--once"], []):
        arguments = ["top", "--endpoint", f"tcp/127.0.0.1:{free_port()}", *options]
        code = (
            "from gpurt.cli import main, top\n"
            "top.Watch.__init__.__kwdefaults__['connect_s'] = 0.3\n"
            f"raise SystemExit(main.main({arguments!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert "gpurt top: no hub of a cluster answers at tcp/127.0.0.1:" in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("role", ["node", "hub"])
def test_a_certificate_that_may_not_watch_is_no_empty_cluster(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(protected, "identity_of", lambda args: SimpleNamespace(name="n1", role=role))
    assert main(["top", "--once", "--tls", "n1"]) == 2
    assert f"the certificate of n1 is that of a {role}" in (error := capsys.readouterr().err)
    assert "--role observer" in error


class Terminal:
    """A pseudo-terminal and the command on it."""

    def __init__(self, *arguments: str, rows: int = 30, columns: int = 120) -> None:
        import fcntl
        import pty
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environ = {**os.environ, "TERM": "xterm"} | {"COLUMNS": str(columns), "LINES": str(rows)}
        self.process = subprocess.Popen(
            command(*arguments), stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environ, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def until(self, condition: Callable[[str], bool], timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 1 << 16).decode("utf-8", "replace")
                except OSError:  # the other end is closed: the process has ended, or is about to
                    self.process.wait(10)
                    assert condition(self.text), self.text[-3000:]
                    return

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.until(lambda _: self.process.poll() is not None)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_on_a_terminal_a_hub_goes_away_and_comes_back_and_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    endpoint = f"tcp/127.0.0.1:{free_port()}"

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )

    hub = start("master", "--listen", endpoint)
    deadline = time.monotonic() + 60
    while True:  # a `top` waits for a hub for 5 s, and this machine may do other things
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    node = start(
        "worker", "--node", "n1", "--connect", endpoint, "--simulate", "h100", "--registry", str(tmp_path / "r.json")
    )
    terminal = Terminal("top", "--endpoint", endpoint, "--interval", "0.1")
    try:
        terminal.until(lambda text: "1 node (1 healthy)" in text and "simulated:0" in text)
        hub.kill()
        hub.wait()
        terminal.until(lambda text: "went away; waiting until it is back" in text and "n1 (unknown" in text)
        terminal.text = ""
        hub = start("master", "--listen", endpoint)
        terminal.until(lambda text: "1 node (1 healthy)" in text and "connected to the hub" in text)
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text
        assert terminal.text.count("\x1b[?25h") >= 1, "the cursor is there again"
    finally:
        terminal.close()
        for process in (node, hub):
            process.kill()
            process.wait()
