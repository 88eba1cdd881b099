"""What gpurt did not write itself is printed without driving the terminal, and never a megabyte of it."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpurt.cli.cluster_table import change_line
from gpurt.cli.logs import log_to_stderr
from gpurt.cluster.changes import Change, ChangeKind
from gpurt.cluster.records import ClusterSnapshot
from gpurt.discover import main
from gpurt.discovery.report import render
from gpurt.errors import GPUError
from gpurt.health.policy import HealthPolicy
from gpurt.plugins import known_names
from gpurt.printable import MAX_WORD, printable, quoted
from gpurt.settings import SelectionSettings
from gpurt.telemetry.collector import TelemetryCollector
from gpurt.usable_memory import MemorySettings
from gpurt.watch.picture import picture
from tests.discovery.records import absent, cpu, result

FIXTURES = Path(__file__).parents[1] / "fixtures"
EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31m\x9b1m\u202e[/red]"
HUGE = "z" * 120_000


def is_clean(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def recording(tmp_path: Path, drivers: dict[str, Any], **meta: Any) -> Path:
    directory = shutil.copytree(FIXTURES / "nvidia-h100", tmp_path / "there")
    (directory / "drivers.json").write_text(json.dumps(drivers))
    content = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps(content | meta))
    return directory


def device(**changes: Any) -> dict[str, Any]:
    return cpu().model_copy(update={"device_id": "cuda:0", "backend": "cuda"}).model_dump(mode="json") | changes


def test_escapes_are_shown() -> None:
    assert printable("a\x1b[2Jb\nc\u202e\ud800\U000e0001") == r"a\x1b[2Jb\nc\u202e\ud800\U000e0001"
    assert printable("NVIDIA H100 80GB HBM3 µ") == "NVIDIA H100 80GB HBM3 µ"


def test_the_middle_of_a_long_text_is_left_out() -> None:
    text = printable(f"begin{HUGE}end")
    assert text.startswith("beginz")
    assert text.endswith("zend")
    assert f"({len(HUGE) + 8 - MAX_WORD} more characters)" in text
    assert len(text) < MAX_WORD + 50
    assert printable("x" * MAX_WORD) == "x" * MAX_WORD
    assert len(quoted(HUGE)) < MAX_WORD + 50


@given(st.text(alphabet=st.characters(codec=None)))
def test_whatever_it_is(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()


@pytest.mark.parametrize("options", [(), ("--explain",)])
@pytest.mark.parametrize(
    "drivers",
    [
        {"cuda": {"verified": [device(name=EVIL)]}},
        {"cuda": {"verified": [device(device_id=f"cuda:0{EVIL}")]}},
        {"cuda": {"verified": [device(usable=False, state="lost", state_reason=f"error: {EVIL}")]}},
        {"cuda": {"failure": {"reason": "error", "message": EVIL, "hint": EVIL}}},
        {"cuda": {"failure": {"reason": "error", "message": HUGE, "hint": HUGE}}},
    ],
    ids=["name", "device id", "state", "failure", "long failure"],
)
def test_discoveries_of_a_recording(
    drivers: dict[str, Any], options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--fixture", str(recording(tmp_path, drivers)), *options])
    shown = capsys.readouterr()
    assert shown.out
    assert is_clean(shown.out + shown.err)
    assert len(shown.out) < 20_000


def test_names_of_backends_and_dates_of_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = recording(tmp_path, {}, backends=[f"cuda{EVIL}", "cuda"], recorded_at=EVIL)
    for options in ([], ["--explain"]):
        main(["--fixture", str(there), *options])
        shown = capsys.readouterr()
        assert r"\x1b[2J" in shown.out
        assert is_clean(shown.out + shown.err)
    main(["--fixture", str(there), "--json"])
    assert json.loads(capsys.readouterr().out)["recorded"]["at"] == EVIL, "JSON escapes by itself and stays as it is"


def test_the_table() -> None:
    found = result(
        cpu().model_copy(update={"name": EVIL * 1000, "state_reason": EVIL, "backends": (EVIL,)}),
        reports=[absent(EVIL, message=EVIL).model_copy(update={"hint": EVIL})],
    )
    out = io.StringIO()
    console = Console(file=out, width=140, markup=False, highlight=False)
    for part in render(found):
        console.print(part)
    assert is_clean(out.getvalue())
    assert len(out.getvalue()) < 20_000


def test_the_live_table() -> None:
    evil = cpu().model_copy(update={"name": EVIL, "device_id": f"x{EVIL}", "state_reason": EVIL})
    out = io.StringIO()
    shown = picture(
        [evil], TelemetryCollector({}), {evil.stable_id: EVIL}, [EVIL], absent={EVIL: EVIL}, width=140, height=24
    )
    Console(file=out, width=140, markup=False, highlight=False).print(shown)
    assert is_clean(out.getvalue())


def test_a_change_of_a_cluster() -> None:
    change = Change(kind=ChangeKind.NODE_LEFT, node=f"n{EVIL}", message=f"{EVIL}\n{HUGE}")
    line = change_line(change, ClusterSnapshot(cluster_id="c", nodes={}))
    assert line.isprintable()
    assert len(line) < 4000


def test_logged_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        log_to_stderr(logging.WARNING)
        try:
            raise ValueError(EVIL)
        except ValueError:
            logging.getLogger("gpurt.test").warning("%s of\n%s", EVIL, HUGE, exc_info=True)
    finally:
        root.setLevel(level)
    err = capsys.readouterr().err
    assert err.startswith(r"WARNING gpurt.test: \x1b]0;title")
    assert is_clean(err)
    assert "Traceback" in err
    assert len(err) < 10_000


@pytest.mark.parametrize("value", [EVIL, HUGE], ids=["escapes", "huge"])
def test_the_variable_that_chooses_a_backend(value: str) -> None:
    assert "cpu" in known_names()
    command = [sys.executable, "-m", "gpurt.discover", "--backend", "cpu", "--registry", os.devnull]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "GPURT_BACKEND": value}
    )
    assert "names no backend" in done.stderr
    assert is_clean(done.stderr)
    assert len(done.stderr) < 5000


@pytest.mark.parametrize(
    ("read", "variable"),
    [
        (MemorySettings.from_environ, "GPURT_MEMORY_LIMIT"),
        (MemorySettings.from_environ, "GPURT_MEMORY_RESERVE"),
        (HealthPolicy.from_environ, "GPURT_THERMAL_LIMIT"),
        (HealthPolicy.from_environ, "GPURT_HEALTH_XIDS"),
        (SelectionSettings.from_environ, "GPURT_FALLBACK"),
        (SelectionSettings.from_environ, "GPURT_PLUGINS"),
    ],
)
@pytest.mark.parametrize("value", [EVIL, HUGE, f"{HUGE}={EVIL}"], ids=["escapes", "huge", "both"])
def test_variables_that_cannot_be_understood(read: Any, variable: str, value: str) -> None:
    with pytest.raises(GPUError) as caught:
        read({variable: value})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_visibility_variable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = shutil.copytree(FIXTURES / "nvidia-h100", tmp_path / "there")
    (directory / "environ.json").write_text(
        json.dumps({"CUDA_VISIBLE_DEVICES": HUGE, "NVIDIA_VISIBLE_DEVICES": HUGE + EVIL})
    )
    main(["--fixture", str(directory), "--explain"])
    shown = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES='zzz" in shown
    assert is_clean(shown)
    assert len(shown) < 20_000
