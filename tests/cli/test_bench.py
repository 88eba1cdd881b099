"""``gpurt bench`` and the library behind it: that it measures and reports, not what it measures (C31)."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt.benchmarks import DEVICE_TOPICS, TOPICS, calls, copies, cupy_evaluation, runner, wire
from gpurt.benchmarks.clocks import LoopGap, PeakMemory, cost_per_call, in_turns, medians
from gpurt.benchmarks.measurement import Measurement, Skipped, size_name
from gpurt.benchmarks.plan import Plan
from gpurt.cli import main as cli
from gpurt.errors import GPUError

TINY = Plan(
    sizes=(4096, 1 << 20), bulk_bytes=1 << 20, file_bytes=1 << 20, rounds=1, most_turns=2, calls=64, seconds=0.03
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "QUICK", TINY)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


def bench(*words: str) -> int:
    return cli.main(["bench", "--quick", *words])


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert bench("--json", *words) == 0
    return json.loads(capsys.readouterr().out)


class TestCommand:
    def test_every_topic_of_a_device(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        record = measured(capsys, "--device", "cpu:0", *DEVICE_TOPICS)
        assert (record["schema"], record["loop"], record["quick"]) == (1, "asyncio", True)
        assert (record["skipped"], record["failed"]) == ({}, {})
        assert record["device"]["device_id"] == "cpu:0"
        rows = record["measurements"]
        assert {row["topic"] for row in rows} == set(DEVICE_TOPICS)
        assert len({(row["topic"], row["name"]) for row in rows}) == len(rows), "compared by topic and name"
        for row in rows:
            assert 0 <= row["ours"] < math.inf
            assert row["peer"] is None or row["peer_name"]
            assert row["ceiling"] is None or row["ceiling_name"]
            if row["unit"] == "GB/s" and row["ceiling"]:
                assert row["of_ceiling"] == pytest.approx(row["ours"] / row["ceiling"])
        assert not list((tmp_path / "tmp").iterdir()), "files of the benchmark are left"

    def test_rows_of_host_copies(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = measured(capsys, "--device", "cpu:0", "wire")["measurements"]
        to, back = ("bytes", "NumPy", "host buffer"), ("warm NumPy", "new NumPy", "new bytes", "host buffer")
        expected = {
            f"{direction}, {size}, {memory}"
            for direction, memories in (("to device", to), ("from device", back))
            for memory in memories
            for size in ("4 KiB", "1 MiB")
        }
        assert {row["name"] for row in rows if "both ways" not in row["name"]} == expected
        by_name = {row["name"]: row for row in rows}
        assert by_name["to device, 1 MiB, NumPy"]["peer_name"] == "np.copyto"
        assert by_name["to device, 1 MiB, NumPy"]["least_of_peer"] == 0.9
        assert "np.copyto in an executor" in by_name["from device, 1 MiB, warm NumPy"]["others"]
        assert by_name["from device, 1 MiB, new bytes"]["peer_name"] == "new np.empty, np.copyto"

    def test_best_device_on_the_other_loop(self, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("uvloop")
        record = measured(capsys, "copies", "--loop", "uvloop")
        assert record["loop"] == "uvloop"
        assert record["device"]["device_id"].endswith(":0")

    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench("calls", "copies", "--device", "cpu:0") == 0
        out = capsys.readouterr().out
        for text in ("copy_to_device 4 KiB, 1 caller, CPU time", "asyncio.to_thread", "within the device, 1 MiB"):
            assert text in out
        # A bar of the least length is half a character.
        assert any(bar in next(line for line in out.splitlines() if "within the device" in line) for bar in "━╸")
        assert out.index("\ncalls ") < out.index("\ncopies "), "grouped by topic"

    def test_narrow_terminal_gets_ratios(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("gpurt.benchmarks.report._PIPE_WIDTH", 80)
        assert bench("copies", "--device", "cpu:0") == 0
        out = capsys.readouterr().out
        assert "of ceiling" in out
        assert "np.copyto" not in out
        assert "A wider terminal" in " ".join(out.split())
        assert all(len(line) <= 80 for line in out.splitlines())

    def test_unknown_topic(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench("nope") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "nope" in captured.err
        assert all(topic in captured.err for topic in TOPICS)

    @pytest.mark.parametrize(("device", "answer"), [("cpu:7", "devices: cpu:0"), ("nope:0", "no backend named 'nope'")])
    def test_unknown_device(self, device: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench("copies", "--device", device, "--json") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert answer in captured.err

    @pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="has CuPy")
    def test_device_that_this_machine_cannot_drive(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench("copies", "--device", "cuda:0") == 2
        assert "cupy-cuda12x" in capsys.readouterr().err

    def test_a_failing_topic_costs_no_other(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async def fail(_: object) -> list[Measurement]:
            async with asyncio.TaskGroup():
                raise GPUError("the device went away")

        async def skip(_: object) -> list[Measurement]:
            raise Skipped("no room")

        monkeypatch.setattr(wire, "measure", fail)
        monkeypatch.setattr(calls, "measure", skip)
        assert bench("calls", "wire", "copies", "--json", "--device", "cpu:0") == 1
        captured = capsys.readouterr()
        record = json.loads(captured.out)
        assert (record["failed"], record["skipped"]) == ({"wire": "the device went away"}, {"calls": "no room"})
        assert {row["topic"] for row in record["measurements"]} == {"copies"}
        assert "wire failed: the device went away" in captured.err

    @pytest.mark.slow
    @pytest.mark.parametrize("topic", ["import", "discovery"])
    def test_topics_of_the_host(self, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
        record = measured(capsys, topic)
        assert record["device"] is None
        assert all(row["ours"] >= 0 for row in record["measurements"])


class TestComparison:
    @pytest.fixture(autouse=True)
    def _known_figures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def measure(_: object) -> list[Measurement]:
            return [
                Measurement("copies", "rate up", "GB/s", 20.0),
                Measurement("copies", "rate down", "GB/s", 10.0),
                Measurement("copies", "time up", "µs", 20.0),
                Measurement("copies", "time down", "µs", 10.0),
                Measurement("copies", "within the tolerance", "µs", 12.0),
                Measurement("copies", "from nothing", "ms", 1.0),
                Measurement("copies", "not there before", "ms", 1.0),
            ]

        monkeypatch.setattr(copies, "measure", measure)

    @pytest.fixture
    def old(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
        """As an earlier run of this machine printed it."""
        record = measured(capsys, "copies", "--device", "cpu:0")
        before = {"rate up": 10, "rate down": 20, "time up": 10, "time down": 20, "within the tolerance": 10}
        before |= {"from nothing": 0}
        rows = [row | {"ours": before[row["name"]]} for row in record["measurements"] if row["name"] in before]
        rows.append(rows[0] | {"name": "gone"})
        rows.append(rows[0] | {"topic": "wire", "name": "not measured this time"})
        path = tmp_path / "old.json"
        path.write_text(json.dumps(record | {"measurements": rows}))
        return path

    def test_json(self, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
        comparison = measured(capsys, "copies", "--device", "cpu:0", "--compare", str(old))["comparison"]
        assert comparison["file"] == str(old)
        assert comparison["differences"] == []
        assert {row["name"]: (row["ratio"], row["verdict"]) for row in comparison["rows"]} == {
            "rate up": (2.0, "better"),
            "rate down": (0.5, "worse"),
            "time up": (2.0, "worse"),
            "time down": (0.5, "better"),
            "within the tolerance": (1.2, "same"),
            "from nothing": (None, "worse"),
            "not there before": (None, "new"),
            "gone": (None, "missing"),
        }

    @pytest.mark.parametrize("width", [80, 240])
    def test_table(
        self, old: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("gpurt.benchmarks.report._PIPE_WIDTH", width)
        assert bench("copies", "--device", "cpu:0", "--compare", str(old)) == 0
        lines = capsys.readouterr().out.splitlines()

        def line(text: str) -> str:
            return next(line for line in lines if text in line)

        assert "×0.50 worse" in line("rate down")  # noqa: RUF001
        assert "20 GB/s" in line("rate down"), "what it was before"
        assert "×0.50 better" in line("time down")  # noqa: RUF001
        assert "new" in line("not there before")
        assert line("gone") == "copies: no longer measured: gone"
        assert not any("not measured this time" in line for line in lines)

    def test_other_conditions_are_said(self, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
        record = json.loads(old.read_text())
        record["device"]["name"] = "Another Device"
        record["quick"] = False
        old.write_text(json.dumps(record))
        assert bench("copies", "--device", "cpu:0", "--compare", str(old)) == 0
        out = capsys.readouterr().out
        assert "not the same conditions: device: Another Device before" in out
        assert "not the same conditions: quick: False before, True now" in out

    @pytest.mark.parametrize(
        "content",
        [
            None,
            b"",
            b"\xff\xfe",
            b"not JSON",
            b"[]",
            b"{}",
            b'{"schema": 2, "measurements": []}',
            b'{"schema": 1}',
            b'{"schema": 1, "measurements": {}}',
            b'{"schema": 1, "measurements": [{"topic": "copies", "name": "x", "unit": "GB/s"}]}',
            b'{"schema": 1, "measurements": [{"topic": "copies", "name": "x", "unit": "GB/s", "ours": "fast"}]}',
            b'{"schema": 1, "measurements": [{"topic": "copies", "name": "x", "unit": "GB/s", "ours": NaN}]}',
            b'{"schema": 1, "measurements": [{"topic": "copies", "name": "x", "unit": "GB/s", "ours": -1}]}',
        ],
    )
    def test_file_that_is_no_result(
        self,
        content: bytes | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def too_late(*_: object, **__: object) -> None:
            raise AssertionError("measured before the file was looked at")

        monkeypatch.setattr(runner, "measure", too_late)
        path = tmp_path / "old.json"
        if content is not None:
            path.write_bytes(content)
        assert bench("copies", "--json", "--compare", str(path)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("gpurt bench: ")
        assert str(path) in captured.err
        assert captured.err.count("\n") == 1


class TestMeasuring:
    def test_ratios_say_how_good_ours_is(self) -> None:
        slow = Measurement("t", "n", "ms", 20.0, peer=10.0, ceiling=5.0, target=15.0)
        assert (slow.of_peer, slow.of_ceiling, slow.on_target) == (0.5, 0.25, False)
        fast = Measurement("t", "n", "GB/s", 20.0, peer=10.0, ceiling=40.0, target=15.0)
        assert (fast.of_peer, fast.of_ceiling, fast.on_target) == (2.0, 0.5, True)
        alone = Measurement("t", "n", "ms", 20.0)
        assert (alone.of_peer, alone.of_ceiling, alone.on_target) == (None, None, None)

    def test_every_promise_counts(self) -> None:
        def row(**bounds: float) -> Measurement:
            return Measurement("t", "n", "GB/s", 20.0, peer=10.0, ceiling=40.0, **bounds)

        assert row(least_of_peer=2, least_of_ceiling=0.5).on_target is True
        assert row(least_of_peer=2, least_of_ceiling=0.6).on_target is False
        assert row(target=30, least_of_peer=2).on_target is False
        assert Measurement("t", "n", "GB/s", 20.0, least_of_peer=2).on_target is None, "nothing to hold it against"

    def test_size_names(self) -> None:
        assert [size_name(size) for size in (1, 4096, 1 << 20, 3 << 29, 4 << 30)] == [
            "1 B",
            "4 KiB",
            "1 MiB",
            "1.5 GiB",
            "4 GiB",
        ]

    async def test_loop_gap_sees_a_blocked_loop(self) -> None:
        async with LoopGap() as gap:
            block = time.sleep
            block(0.08)
        assert 60 < gap.longest_ms < 1000
        summary = gap.summary()
        assert summary["p50"] <= summary["p99"] <= summary["max"] == gap.longest_ms

    async def test_peak_memory_sees_what_is_gone_again(self) -> None:
        async with PeakMemory() as peak:
            array = np.ones(64 << 20, np.uint8)
            async with asyncio.timeout(10):
                while peak.grown_bytes < array.nbytes - (4 << 20):
                    await asyncio.sleep(0.001)
            del array
        assert peak.grown_bytes < 256 << 20

    async def test_contenders_take_turns(self) -> None:
        turns: list[str] = []

        def contender(name: str, figures: list[float]):
            async def run() -> float:
                turns.append(name)
                return figures.pop(0)

            return run

        contenders = {"a": contender("a", [1, 9, 2]), "b": contender("b", [5, 5, 7])}
        assert await medians(3, contenders) == {"a": 2, "b": 5}
        assert [set(turns[i : i + 2]) for i in (0, 2, 4)] == [{"a", "b"}] * 3

    async def test_order_of_contenders_changes(self) -> None:
        turns: list[str] = []

        async def run(name: str) -> None:
            turns.append(name)

        await in_turns(20, {name: lambda name=name: run(name) for name in "ab"})
        assert {"".join(turns[i : i + 2]) for i in range(0, 40, 2)} == {"ab", "ba"}

    async def test_callers_share_the_calls(self) -> None:
        running = highest = calls = 0

        async def call() -> None:
            nonlocal running, highest, calls
            calls += 1
            running += 1
            highest = max(highest, running)
            await asyncio.sleep(0)
            running -= 1

        cost = await cost_per_call(call, calls=64, callers=8)
        assert (calls, highest) == (64, 8)
        assert cost.wall_us > 0

    async def test_waiting_costs_no_cpu_time(self) -> None:
        cost = await cost_per_call(lambda: asyncio.sleep(0.05), calls=2, callers=1)
        assert cost.wall_us >= 50_000
        assert cost.cpu_us < cost.wall_us / 2


class TestCuPyEvaluation:
    @pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="has CuPy")
    async def test_without_cupy(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert await cupy_evaluation.benchmark_cupy_cuda_init() is None
        assert await cupy_evaluation.benchmark_cupy_memory_operations() == {}
        cupy_evaluation.print_evaluation_report()
        out = capsys.readouterr().out
        assert "nothing measured" in out
        assert "cupy-cuda12x" in out

    async def test_figures_come_from_the_child(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stand-in for CuPy that takes a known time: figures are measured, not constants."""
        (tmp_path / "cupy").mkdir()
        (tmp_path / "cupy" / "__init__.py").write_text(
            "import time, types\n"
            "time.sleep(0.2)\n"
            "runtime = types.SimpleNamespace(setDevice=lambda i: time.sleep(0.1), free=lambda p: None)\n"
            "cuda = types.SimpleNamespace(runtime=runtime)\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        took = await cupy_evaluation.benchmark_cupy_cuda_init()
        assert took is not None
        assert 0.3 <= took < 5
        assert "cupy" not in sys.modules
        report = io.StringIO()
        cupy_evaluation.print_evaluation_report(file=report)
        assert "CUDA start" in report.getvalue()

    async def test_failing_library_is_no_figure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "cupy.py").write_text("raise RuntimeError('no driver')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert await cupy_evaluation.benchmark_cupy_cuda_init() is None
        assert "no driver" in caplog.text

    @pytest.mark.gpu
    async def test_on_a_gpu(self) -> None:
        took = await cupy_evaluation.benchmark_cupy_cuda_init()
        assert took is not None
        assert 0.01 < took < 60
        figures = await cupy_evaluation.benchmark_cupy_memory_operations()
        assert figures["h2d_pinned_gb_s"] > 1
        assert figures["d2h_pinned_gb_s"] > 1
        again = await cupy_evaluation.benchmark_cupy_memory_operations()
        assert again != figures
