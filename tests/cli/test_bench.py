"""``gpurt bench`` and the library behind it: that it measures and reports, not what it measures (C31)."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import sys
import time
from pathlib import Path

import pytest

from gpurt.benchmarks import TOPICS, cupy_evaluation
from gpurt.benchmarks.measurement import LoopGap, Measurement, medians, microseconds_per_call
from gpurt.cli import main as cli


class TestCommand:
    @pytest.mark.parametrize("topic", ["import", "copies"])
    def test_json(self, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "--quick", "--json", topic]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["schema"] == 1
        assert record["skipped"] == {}
        rows = record["measurements"]
        assert rows
        assert {row["topic"] for row in rows} == {topic}
        assert all(row["ours"] >= 0 and row["peer"] > 0 for row in rows)
        if topic == "copies":
            for row in rows:
                assert row["of_ceiling"] == pytest.approx(row["ours"] / row["ceiling"])

    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "--quick", "calls"]) == 0
        out = capsys.readouterr().out
        for text in ("copy_to_device 4 KiB, 1 caller ", "synchronize, 64 callers", "run_in_executor", "of ceiling"):
            assert text in out

    def test_unknown_topic(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "nope"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "nope" in captured.err
        assert all(topic in captured.err for topic in TOPICS)

    @pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="has CuPy")
    def test_topic_that_this_machine_cannot_measure(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "--quick", "--json", "cuda"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["measurements"] == []
        assert "cupy-cuda12x" in record["skipped"]["cuda"]

    @pytest.mark.slow
    @pytest.mark.parametrize("topic", ["calls", "loop", "discovery"])
    def test_every_topic_runs(self, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "--quick", "--json", topic]) == 0
        assert json.loads(capsys.readouterr().out)["measurements"]


class TestMeasuring:
    def test_ratios_say_how_good_ours_is(self) -> None:
        slow = Measurement("t", "n", "ms", 20.0, peer=10.0, ceiling=5.0, target=15.0)
        assert (slow.of_peer, slow.of_ceiling, slow.on_target) == (0.5, 0.25, False)
        fast = Measurement("t", "n", "GB/s", 20.0, peer=10.0, ceiling=40.0, target=15.0)
        assert (fast.of_peer, fast.of_ceiling, fast.on_target) == (2.0, 0.5, True)
        alone = Measurement("t", "n", "ms", 20.0)
        assert (alone.of_peer, alone.of_ceiling, alone.on_target) == (None, None, None)

    async def test_loop_gap_sees_a_blocked_loop(self) -> None:
        async with LoopGap() as gap:
            block = time.sleep
            block(0.08)
        assert 60 < gap.longest_ms < 1000

    async def test_contenders_take_turns(self) -> None:
        turns: list[str] = []

        def contender(name: str, figures: list[float]):
            async def run() -> float:
                turns.append(name)
                return figures.pop(0)

            return run

        assert await medians(3, contender("a", [1, 9, 2]), contender("b", [5, 5, 7])) == [2, 5]
        assert turns == ["a", "b"] * 3

    async def test_callers_share_the_calls(self) -> None:
        running = highest = calls = 0

        async def call() -> None:
            nonlocal running, highest, calls
            calls += 1
            running += 1
            highest = max(highest, running)
            await asyncio.sleep(0)
            running -= 1

        assert await microseconds_per_call(call, calls=64, callers=8) > 0
        assert (calls, highest) == (64, 8)


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
