"""Faults of the ``gpurt`` command: hostile nodes, closed streams, signals."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpurt.cli import main as cli
from gpurt.cli.cluster_table import change_line, cluster_table
from gpurt.cluster.changes import Change, ChangeKind
from gpurt.cluster.view import MasterView
from tests.cluster.support import device, free_port, snapshot

EVIL = "H100\x1b[2J\nnode lost n9 \ud800"

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and streams")


def view_of(*devices: Any, nodes: int = 1) -> MasterView:
    view = MasterView()
    for number in range(nodes):
        view.node_up(f"n{number}")
        view.apply_snapshot(snapshot(*devices, node=f"n{number}"))
    return view


def drawn(table: Any) -> str:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), width=200)
    console.print(table)
    console.file.flush()
    buffer: Any = console.file
    return buffer.buffer.getvalue().decode()


def test_what_a_node_says_of_itself_cannot_write_to_the_terminal() -> None:
    picture = view_of(device(name=EVIL)).snapshot()
    line = change_line(Change(ChangeKind.DEVICE_UPDATED, "n0", "GPU-a", message=EVIL), picture)
    for text in (line, drawn(cluster_table(picture))):
        text.encode()
        assert "\x1b" not in text
        assert r"H100\x1b[2J\nnode lost n9" in text
    assert "\n" not in line


def test_more_memory_than_a_float_can_hold_is_not_known() -> None:
    assert "? / ?" in drawn(cluster_table(view_of(device(memory_bytes=10**400)).snapshot()))


def test_a_table_ends_where_the_terminal_does() -> None:
    picture = view_of(*(device(f"GPU-{i}", i) for i in range(8)), nodes=200).snapshot()
    table = cluster_table(picture, max_rows=20)
    assert table.row_count == 21
    assert "197 more nodes" in drawn(table)
    assert cluster_table(picture).row_count == 1600


async def test_a_live_table_draws_once_for_many_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpurt.cli import cluster_table as tables
    from gpurt.cli import master

    monkeypatch.setattr("rich.live.Live.refresh", lambda live: None)
    pictures: list[int] = []

    def counted(picture: Any, **options: Any) -> Any:
        pictures.append(len(picture.nodes))
        return cluster_table(picture, **options)

    monkeypatch.setattr(tables, "cluster_table", counted)
    view = MasterView()
    showing = asyncio.create_task(master._live(view, lambda node: {}))  # pyright: ignore[reportPrivateUsage]
    await asyncio.sleep(0)
    for number in range(200):
        view.node_up(f"n{number}")
        view.apply_snapshot(snapshot(device(), node=f"n{number}"))
        await asyncio.sleep(0)
    deadline = time.monotonic() + 5
    while pictures[-1] != 200 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    showing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await showing
    assert pictures[-1] == 200
    assert len(pictures) < 50  # there were 400 changes


def gpurt(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "gpurt", *arguments], text=True, **options)


@posix
@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(streams: str) -> None:
    command = f'exec "{sys.executable}" -m gpurt master --listen tcp/127.0.0.1:0 {streams}'
    assert subprocess.run(["sh", "-c", command], timeout=30, capture_output=True).returncode == 2
    command = f'exec "{sys.executable}" -m gpurt --version {streams}'
    ended = subprocess.run(["sh", "-c", command], timeout=30, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line_and_2() -> None:
    with open("/dev/full", "w") as full:
        process = gpurt("bench", "--quick", "--json", "import", stdout=full, stderr=subprocess.PIPE)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.count("\n") == 1
    assert "No space left" in said


@posix
@pytest.mark.parametrize("ignore_interrupt", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_worker_that_is_terminated_says_goodbye(tmp_path: Path, number: int, ignore_interrupt: bool) -> None:
    address = f"tcp/127.0.0.1:{free_port()}"
    master = gpurt("master", "--listen", address, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # A shell has its background jobs ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignore_interrupt else None
    try:
        worker = gpurt(
            *("worker", "--simulate", "h100", "--node", "w1", "--connect", address),
            *("--registry", str(tmp_path / "registry.json")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    watchdog = threading.Timer(30, master.kill)  # what it does not say must not be waited for
    watchdog.start()
    try:
        assert worker.stdout is not None
        assert master.stdout is not None
        assert "node_joined" in master.stdout.readline()
        worker.send_signal(number)
        _, said = worker.communicate(timeout=20)
        assert worker.returncode == 128 + number
        assert "Traceback" not in said, said
        lines: list[str] = []
        for line in iter(master.stdout.readline, ""):
            lines.append(line)
            if "node_left" in line:
                break
        else:
            pytest.fail(f"no goodbye: {lines}; the worker said: {said}")
    finally:
        watchdog.cancel()
        for process in (worker, master):
            process.kill()
            process.communicate(timeout=20)


@posix
def test_a_second_signal_does_not_cut_the_end_short() -> None:
    """`timeout` and some service managers send theirs twice."""
    program = (
        "import signal, sys, time\n"
        "from gpurt.cli.signals import interrupted_by_signals\n"
        "ended_by = []\n"
        "try:\n"
        "    with interrupted_by_signals(ended_by):\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"  # while it ends
        "    print('ended', ended_by == [signal.SIGTERM])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended True\n", "")


def test_signal_handlers_are_put_back_and_ignored_signals_stay_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert cli.main(["bench", "nope"]) == 2
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert cli.main(["bench", "nope"]) == 2
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_change_of_health_says_which_health() -> None:
    picture = view_of(device(state="unresponsive", state_reason="no answer")).snapshot()
    line = change_line(Change(ChangeKind.DEVICE_HEALTH, "n0", "GPU-a", message="no answer"), picture)
    assert line == "device health n0 cuda:0 H100: unresponsive no answer"


def test_a_compact_table_has_one_row_for_devices_that_look_alike() -> None:
    picture = view_of(*(device(f"GPU-{i}", i) for i in range(8)), device("GPU-8", 8, state="lost"), nodes=2).snapshot()
    table = cluster_table(picture, compact=True)
    assert table.row_count == 4
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 4 + 5
    assert sum("n1" in line and "8× H100" in line and "healthy" in line for line in lines) == 1  # noqa: RUF001
    assert sum("lost" in line for line in lines) == 2


def test_a_live_demo_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpurt.cli.demo_screen import LiveScreen

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    devices = [device(f"GPU-{i}", i, name="Simulated NVIDIA H100 80GB HBM3") for i in range(8)]
    screen = LiveScreen()
    screen.change(Change(ChangeKind.NODE_SUSPECT, "n1"), view_of(*devices, nodes=2).snapshot())
    for number in range(40):
        screen.say(f"{number} " + 100 * "-")
    for worker in ("n0", "n1"):
        screen.progress(worker, 1, 4)
    picture = screen._picture()  # pyright: ignore[reportPrivateUsage]
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(picture)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") <= 24
    for words in ("n1 ", "8× Simulated", "healthy", "n1 loads", "39 ---"):  # noqa: RUF001
        assert words in text


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_bench_in_ascii(options: list[str]) -> None:
    process = gpurt(
        *("bench", "--quick", "import", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    if options:
        assert json.loads(out)["machine"]["load"] == round(json.loads(out)["machine"]["load"], 2)
    else:
        assert "<= 150" in out
        assert "... and its backend classes" in out
        assert "\\" not in out


def test_a_character_without_a_spelling_becomes_its_code() -> None:
    cli._open_streams()  # pyright: ignore[reportPrivateUsage]
    assert "a…\u4e2d≥".encode("ascii", "gpurt") == b"a...\\u4e2d>="


def test_an_empty_simulation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--simulate", ""]) == 2
    assert "unknown simulated device ''" in capsys.readouterr().err


def test_one_device_is_not_1_devices() -> None:
    from gpurt.cli.worker_words import counted

    assert [counted(number, "device") for number in (0, 1, 2)] == ["0 devices", "1 device", "2 devices"]


def test_an_address_in_use_is_told_without_paths() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp/127.0.0.1:{taken.getsockname()[1]}"
        process = gpurt("master", "--listen", address, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"cannot listen on {address}: Address already in use (os error" in err
    assert ".rs" not in err


def test_a_worker_says_that_it_waits_for_a_master(tmp_path: Path) -> None:
    address = f"tcp/127.0.0.1:{free_port()}"
    worker = gpurt(
        *("worker", "--simulate", "h100", "--node", "w1", "--connect", address),
        *("--registry", str(tmp_path / "registry.json")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    watchdog = threading.Timer(30, worker.kill)
    watchdog.start()
    masters: list[subprocess.Popen[str]] = []

    def said() -> str:
        assert worker.stderr is not None
        return worker.stderr.readline()

    def master() -> None:
        masters.append(gpurt("master", "--listen", address, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    try:
        assert said().startswith(f"waiting for a master at {address}"), "no warning: that is how it begins"
        master()
        assert said() == f"connected to the hub at {address}\n"
        assert worker.stdout is not None
        assert "with 1 device\n" in worker.stdout.readline()
        masters[0].kill()
        masters[0].wait(10)
        assert f"the hub at {address} went away" in said()
        master()
        assert said() == f"connected to the hub at {address} again\n"
    finally:
        watchdog.cancel()
        for process in (worker, *masters):
            process.kill()
            process.communicate(timeout=20)
