"""Faults of the ``gpurt`` command: hostile nodes, closed streams, signals."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
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
        assert "H100?[2J?node lost n9" in text
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
    showing = asyncio.create_task(master._live(view))  # pyright: ignore[reportPrivateUsage]
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
        assert (worker.returncode, "Traceback" in said) == (128 + number, False)
        assert any("node_left" in line for line in iter(master.stdout.readline, "") if "node_lost" not in line)
    finally:
        watchdog.cancel()
        for process in (worker, master):
            process.kill()
            process.communicate(timeout=20)


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
