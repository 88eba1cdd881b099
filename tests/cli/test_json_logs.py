"""``--log-format json``: one line of JSON for each record, whatever is in it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpurt.cli.json_logs import MAX_TEXT, JsonLines

ROOT = Path(__file__).parents[2]


def record(message: Any = "hello", *args: object, level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("gpurt.x", level, "x.py", 1, message, args, None)
    made.created = 1_800_000_000.25
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def line(made: logging.LogRecord, node: str | None = None) -> dict[str, Any]:
    formatter = JsonLines()
    formatter.node = node
    text = formatter.format(made)
    assert "\n" not in text
    assert text.isascii()
    return json.loads(text)


def test_fields() -> None:
    assert line(record("%s of %d", "one", 2, node="n1", device="GPU-a", event="added")) == {
        "time": "2027-01-15T08:00:00.250+00:00", "level": "info", "logger": "gpurt.x", "message": "one of 2",
        "node": "n1", "device": "GPU-a", "event": "added",
    }  # fmt: skip
    bare = line(record(level=logging.WARNING))
    assert (bare["level"], bare["node"], bare["device"], bare["event"]) == ("warning", None, None, None)
    assert "exception" not in bare


def test_a_worker_speaks_of_itself_unless_a_record_says_otherwise() -> None:
    assert line(record(), "n1")["node"] == "n1"
    assert line(record(node="n2"), "n1")["node"] == "n2"


@pytest.mark.parametrize("text", ["two\nlines\r", "\x1b[31mred", "half \ud800 pair", "名前", '"quoted\\"', "\u2028"])
def test_any_text_is_one_line(text: str) -> None:
    assert line(record(text, device=text))["message"] == text
    assert line(record(device=text))["device"] == text


def test_an_exception_is_one_field() -> None:
    made = record(level=logging.ERROR)
    try:
        raise ValueError("wrong\nthing")
    except ValueError:
        made.exc_info = sys.exc_info()
    told = line(made)
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("ValueError: wrong\nthing")


def test_what_is_too_long_loses_its_middle_and_bad_arguments_lose_no_record() -> None:
    assert len(line(record("x" * 10_000_000))["message"]) < MAX_TEXT + 100
    assert line(record("%d", "word"))["message"] == "%d (arguments do not fit: TypeError)"
    assert line(record({"a": 1}))["message"] == "{'a': 1}"
    assert line(record(device=7))["device"] == "7"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpurt", *arguments]


def test_errors_of_the_command_are_records_too() -> None:
    done = subprocess.run(
        command("master", "--log-format", "json", "--listen", "nonsense"),
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    (told,) = map(json.loads, done.stderr.splitlines())
    assert (told["level"], told["logger"]) == ("error", "gpurt.cli")
    assert "nonsense" in told["message"]


def test_a_worker_and_a_master_log_nothing_but_json(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    from tests.cluster.support import free_port

    endpoint = f"tcp/127.0.0.1:{free_port()}"
    logs = {name: tmp_path / f"{name}.err" for name in ("master", "worker")}
    arguments = {
        "master": ["--listen", endpoint],
        "worker": ["--node", "n1", "--connect", endpoint, "--simulate", "h100", "--registry", str(tmp_path / "r.json")],
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, path in logs.items():
            with path.open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command(name, "--log-format", "json", "--metrics", "0", *arguments[name]),
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT,
                    )
                )  # fmt: skip
        deadline = time.monotonic() + 30
        while "device_added" not in logs["master"].read_text() or "snapshot" not in logs["worker"].read_text():
            assert time.monotonic() < deadline, {name: path.read_text() for name, path in logs.items()}
            time.sleep(0.05)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 143
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = {name: [json.loads(each) for each in path.read_text().splitlines()] for name, path in logs.items()}
    assert {each["node"] for each in told["worker"]} == {"n1"}
    assert "snapshot" in {each["event"] for each in told["worker"]}
    assert {"node_joined", "device_added", "node_left"} <= {each["event"] for each in told["master"]}
    for records in told.values():
        assert any("metrics are served at http://127.0.0.1:" in each["message"] for each in records)
