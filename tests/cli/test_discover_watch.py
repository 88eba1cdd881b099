"""``--watch`` on a terminal: a table that lives, tells no 0 for "unknown", and leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import GPUError
from gpurt.telemetry.collector import TelemetryCollector
from gpurt.telemetry.readers import BlockingReader, NvmlReader
from gpurt.types import DeviceKind, DeviceState, GPUDevice, Telemetry
from gpurt.watch.live import LiveWatch
from gpurt.watch.picture import picture
from gpurt.watch.sources import Source, source_of
from gpurt.watch.sparkline import ASCII, BLOCKS, sparkline, ticks_for
from tests.discovery.records import GIB, cpu, device
from tests.sources import trees
from tests.telemetry.rig import Clock, Device


def test_sparklines_show_values_in_their_range_and_gaps_as_gaps() -> None:
    assert sparkline([0, 50, 100], 8, low=0, high=100) == "▁▅█"
    assert sparkline([0, None, 100], 8, low=0, high=100) == "▁ █"
    assert sparkline([-5, 500], 8, low=0, high=100) == "▁█"
    assert sparkline(list(range(100)), 4, low=0, high=99) == "████"
    assert sparkline([1, 2, 4], 3, low=0) == "▃▅█", "the highest that is shown is the highest tick"
    assert sparkline([None, None], 4, low=0) == "  "
    assert sparkline([0, 0], 4, low=0) == "▁▁"
    assert sparkline([], 4, low=0) == ""
    assert sparkline([1, 2], 0, low=0) == ""
    assert sparkline([0, 100], 4, low=0, high=100, ticks=ASCII) == "_#"


def test_ticks_are_those_that_the_terminal_has() -> None:
    assert ticks_for("utf-8") == BLOCKS
    assert ticks_for("ascii") == ticks_for("latin-1") == ticks_for(None) == ticks_for("nonsense") == ASCII


def text_of(part: Any, width: int = 160, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, markup=False, emoji=False)
    console.print(part)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


async def polled(readings: Sequence[dict[str, Any]], **first: Any) -> tuple[TelemetryCollector, Device, Clock]:
    """A collector that has read ``cuda:0`` once for each of ``readings``."""
    clock, source = Clock(), Device(**first)
    collector = TelemetryCollector({device(0).stable_id: source}, clock=clock)
    for values in readings:
        source.values |= values
        clock.now += 1
        await collector.poll()
    return collector, source, clock


def shown(
    collector: TelemetryCollector,
    devices: Sequence[GPUDevice],
    *,
    lines: Sequence[str] = (),
    why_none: dict[str, str] | None = None,
    width: int = 160,
    height: int = 40,
) -> str:
    part = picture(devices, collector, why_none or {}, lines, width=width, height=height)
    return text_of(part, width, height)


async def test_a_row_has_values_their_course_and_their_age() -> None:
    collector, _, clock = await polled(
        [{"memory_used_bytes": n * 20 * GIB, "utilization_percent": 25 * n} for n in range(5)]
    )
    clock.now += 7
    text = shown(collector, [device(0)])
    assert "80.0 / 80.0 GiB ▁▃▅▆█" in text
    assert "memory used / total" in text
    assert "100 % ▁▃▅▆█" in text
    assert "41 °C" in text
    assert "70 W" in text
    assert "7 s" in text
    assert "healthy" in text


async def test_what_is_not_told_says_why_and_is_never_0() -> None:
    collector, _, _ = await polled([{"power_w": None, "utilization_percent": float("nan"), "temperature_c": None}])
    text = shown(collector, [device(0)])
    assert "not told" in text
    assert "unsupported" not in text
    assert "invalid" in text
    assert "0 W" not in text
    assert "0 %" not in text


async def test_old_values_are_stale_and_not_values() -> None:
    collector, _, clock = await polled([{}])
    clock.now += 100
    text = shown(collector, [device(0)])
    assert "stale" in text
    assert "41 °C" not in text
    assert "100 s" in text


async def test_devices_without_a_reader_say_why() -> None:
    collector, _, _ = await polled([])
    text = shown(
        collector, [device(0), device(1)], why_none={device(1).stable_id: "NVML has no readings of a MIG partition"}
    )
    assert "not read yet" in text
    assert "reader" not in text
    assert "cuda:1: no readings: NVML has no readings of a MIG partition" in text


async def test_small_memory_has_units_of_its_own() -> None:
    collector, _, _ = await polled([{"memory_used_bytes": 300 << 20}])
    assert "300 MiB / 80.0 GiB" in shown(collector, [device(0)])


async def test_what_is_missing_is_one_line_and_what_is_waited_for_the_last() -> None:
    collector, _, _ = await polled([{}])
    part = picture(
        [device(0)], collector, {}, ["an event"], status="looking …", absent={"rocm": "no device", "cuda": "timeout"},
        width=160, height=40,
    )  # fmt: skip
    lines = text_of(part).splitlines()
    assert lines[-3:] == ["not available: rocm (no device), cuda (timeout)", "an event", "looking …"]


async def test_a_device_that_stops_answering_is_shown_so() -> None:
    collector, source, clock = await polled([{}])
    source.error = RuntimeError("NVML 999")
    clock.now += 1
    await collector.poll()
    assert "suspect (reading)" in shown(collector, [device(0)])
    lost = device(0, state=DeviceState.LOST, usable=False)
    assert "lost, not usable" in shown(collector, [lost])


@pytest.mark.parametrize(("width", "height"), [(160, 40), (100, 24), (80, 12), (60, 8), (40, 5)])
async def test_it_fits_whatever_the_terminal_is(width: int, height: int) -> None:
    collector, _, _ = await polled([{}])
    many = [device(n % 6, known="none", device_id=f"cuda:{n}") for n in range(20)]
    text = shown(collector, many, lines=[f"event {n}" for n in range(50)], width=width, height=height)
    rows = text.splitlines()
    assert len(rows) <= height
    assert max(map(len, rows)) <= width
    if height >= 12:
        assert "event 49" in text, "the news are never what is cut off"
        assert ("more: make the terminal higher" in text) == (height < 30)


async def test_no_device_can_move_the_cursor() -> None:
    collector, _, _ = await polled([{}])
    text = shown(collector, [device(0, name="[red]\x1b[2J")], lines=["\x1b]0;title\x07"])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (device(0, simulated=True), "simulated"),
        (device(0, kind=DeviceKind.SOFTWARE), "program"),
        (device(0, vendor="apple"), "root only"),
        (device(0, vendor="qualcomm"), "qualcomm"),
        (device(0, known="uuid"), "PCI address"),
        (device(0, identity=device(0).identity.model_copy(update={"partition": "2/0"})), "MIG"),  # type: ignore[union-attr]
    ],
)
def test_devices_that_cannot_be_read(record: GPUDevice, words: str) -> None:
    source = source_of(record)
    assert source.reader is None
    assert words in (source.why_none or "")


async def test_readers_of_every_vendor_and_of_the_host(tmp_path: Path) -> None:
    def build() -> None:
        trees.mi210_host(tmp_path)
        trees.card(tmp_path, 3, "0000:04:00.0", vendor="0x8086", device="0xe20b", driver="xe", render=133,
                   files={"tile0/physical_vram_size_bytes": trees.XE_VRAM})  # fmt: skip
        trees.write(tmp_path, "proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1024 kB\nMemAvailable: 1024 kB\n")

    await asyncio.to_thread(build)

    def at(address: str, vendor: str) -> GPUDevice:
        identity = device(0, known="pci").identity
        assert identity is not None
        return device(0, vendor=vendor, identity=identity.model_copy(update={"pci_address": address}))

    readers = {
        "amd": source_of(at("00000000:03:00.0", "amd"), tmp_path).reader,
        "intel": source_of(at("00000000:04:00.0", "intel"), tmp_path).reader,
        "host": source_of(cpu(), tmp_path).reader,
        "gone": source_of(at("00000000:7f:00.0", "amd"), tmp_path).reader,
    }
    assert isinstance(source_of(device(0)).reader, NvmlReader)
    told: dict[str, Any] = {}
    for name, reader in readers.items():
        assert reader is not None
        try:
            told[name] = await reader()
        except Exception as exc:
            told[name] = str(exc)
        reader.close()
    assert told["amd"].values["temperature_c"] == 46
    assert told["intel"].values["memory_total_bytes"] == trees.XE_VRAM
    assert told["host"].values["memory_used_bytes"] == 3072 << 10
    assert "no AMD GPU" in told["gone"]


class _Fake(BlockingReader):
    closed = 0

    def close(self) -> None:
        type(self).closed += 1
        super().close()


async def test_a_cancelled_watch_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C cancels it: readers are closed, the service is shut down, the last picture stays."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=20)
    _Fake.closed = 0
    service = GPUDiscoveryService(registry_path=tmp_path / "r.json", backends=["cpu"], interval=0.05)
    watch = LiveWatch(
        service,
        console,
        interval_s=0.05,
        source=lambda _: Source(_Fake(lambda: Telemetry(temperature_c=55.0), "test")),
    )
    task = asyncio.create_task(watch.run(verify=True))
    file = console.file
    assert isinstance(file, io.StringIO)
    async with asyncio.timeout(20):
        while "55 °C" not in file.getvalue():
            assert not task.done()
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _Fake.closed == 1
    after = file.getvalue().rsplit("\x1b[?1049l", 1)
    assert len(after) == 2, "the terminal's own screen is back"
    assert "cpu:0" in after[1]
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h"), "and so is its cursor"


async def test_a_look_up_that_found_nothing_new_leaves_no_word_that_it_goes_on(tmp_path: Path) -> None:
    """The second watch begins with what the registry remembers, and nothing of it changes."""

    def service() -> GPUDiscoveryService:
        return GPUDiscoveryService(registry_path=tmp_path / "r.json", backends=["cpu", "rocm"], interval=60)

    async with service() as first:
        await first.discover_all_devices()
    console = Console(file=io.StringIO(), force_terminal=True, width=140, height=20)
    task = asyncio.create_task(LiveWatch(service(), console, interval_s=60.0).run())
    file = console.file
    assert isinstance(file, io.StringIO)

    def last() -> str:
        return file.getvalue().rsplit("\x1b[H", 1)[-1]

    async with asyncio.timeout(20):
        while "cpu:0" not in last() or "looking" in last():
            assert not task.done()
            await asyncio.sleep(0.02)
    assert "not available: rocm (" in last()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "looking" not in file.getvalue().rsplit("\x1b[?1049l", 1)[1]


async def test_a_variable_that_is_wrong_is_one_error(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=20)
    service = GPUDiscoveryService(registry_path=tmp_path / "r.json", environ={"GPURT_PLUGINS": "perhaps"})
    with pytest.raises(GPUError, match="perhaps"):
        await LiveWatch(service, console, interval_s=1.0).run()


class OnTerminal:
    """A command whose terminal is ours."""

    def __init__(self, *arguments: str) -> None:
        import pty

        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", *arguments])
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import termios

        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # the terminal goes away with its last process
                self.seen += os.read(self.master, 65536).decode(errors="replace")

    def until(self, condition: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition(self.seen):
            assert time.monotonic() < deadline, self.seen[-2000:]
            self.read()

    def end(self, *, hung_up: bool = False) -> int:
        """The exit code."""
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline, self.seen[-2000:]
            if not hung_up:
                self.read()
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)


def is_drawn(text: str) -> bool:
    return "GiB ▁" in text or "GiB ▂" in text or "GiB █" in text


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pseudo-terminals")


@on_linux
def test_ctrl_c_on_a_terminal_that_was_resized(tmp_path: Path) -> None:
    command = OnTerminal("gpurt.discover", "--watch", "0.2", "--backend", "cpu", "--registry", str(tmp_path / "r"))
    try:
        command.resize(30, 140)
        command.until(is_drawn)
        command.resize(20, 90)
        command.seen = ""

        def narrow(text: str) -> bool:
            rules = re.findall("┏[━┳]+┓", text)
            return bool(rules) and len(rules[-1]) <= 90

        command.until(narrow)
        os.write(command.master, b"\x03")
        command.seen = ""
        assert command.end() == 0
        assert "\x1b[?25h" in command.seen, "the cursor is back"
        assert "\x1b[?1049l" in command.seen
        assert "Traceback" not in command.seen
    finally:
        os.close(command.master)


@on_linux
@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        (["gpurt.discover"], signal.SIGTERM, 143),
        (["gpurt.discover"], signal.SIGHUP, 129),
        (["gpurt", "discover"], signal.SIGTERM, 143),
        (["gpurt", "discover"], signal.SIGHUP, 129),
    ],
)
def test_a_signal_gives_the_terminal_back(program: list[str], number: int, code: int, tmp_path: Path) -> None:
    command = OnTerminal(*program, "--watch", "1", "--backend", "cpu", "--registry", str(tmp_path / "r"))
    try:
        command.resize(30, 140)
        command.until(is_drawn)
        os.kill(command.pid, number)
        assert command.end() == code
        assert command.seen.count("\x1b[?1049l") == command.seen.count("\x1b[?1049h") == 1
        assert command.seen.count("\x1b[?25l") == command.seen.count("\x1b[?25h"), "the cursor is back"
        assert "Traceback" not in command.seen
    finally:
        os.close(command.master)


@on_linux
def test_a_terminal_that_hangs_up(tmp_path: Path) -> None:
    command = OnTerminal("gpurt.discover", "--watch", "1", "--backend", "cpu", "--registry", str(tmp_path / "r"))
    command.resize(30, 140)
    command.until(is_drawn)
    os.close(command.master)
    assert command.end(hung_up=True) == 129


@on_linux
def test_a_live_table_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    command = OnTerminal("gpurt.discover", "--watch", "1", "--explain", "--backend", "cpu")
    try:
        assert command.end() == 2
        command.until(lambda text: "no room for --explain" in text)
        assert "\x1b[?1049h" not in command.seen
    finally:
        os.close(command.master)
