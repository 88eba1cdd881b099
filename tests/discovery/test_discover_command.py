"""``python -m gpurt.discover`` as people and scripts run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpurt.cli.discover_command import _exit_code, main
from gpurt.discovery.events import diff
from gpurt.discovery.report import describe
from gpurt.types import DeviceKind, DeviceState
from tests.discovery.records import GIB, absent, cpu, device, result
from tests.support.nvml_stub import UUID_A, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

KEYS = ["schema", "backend_name", "devices", "reports", "discovery_status", "timestamp", "registry"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpurt.discover", *arguments]


def discover(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, env=env)


def test_json_is_one_document_and_nothing_else(tmp_path: Path) -> None:
    registry = tmp_path / "new" / "registry.json"
    done = discover("--json", "--registry", str(registry))
    document = json.loads(done.stdout)
    assert list(document) == KEYS
    assert document["schema"] == 1
    assert document["registry"] == str(registry)
    assert registry.exists()
    assert "cpu:0" in [device["device_id"] for device in document["devices"]]
    for report in document["reports"]:
        assert {"name", "status", "reason", "elapsed_ms", "hint"} <= report.keys()
        assert report["status"] == "ok" or report["hint"]
    accelerators = [d for d in document["devices"] if d["usable"] and d["kind"] not in ("cpu", "software")]
    assert done.returncode == (0 if accelerators else 1)


def test_the_table_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    done = discover("--registry", str(tmp_path / "r.json"), "--explain")
    assert done.returncode in (0, 1)
    assert "cpu:0" in done.stdout
    assert "GiB" in done.stdout
    if done.returncode == 1:
        assert "cuda" in done.stdout
        assert "to do:" in done.stdout
        assert "install" in done.stdout
    assert "environment:" in done.stdout
    assert done.stderr == ""


def test_a_card_without_its_library_is_shown(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    done = discover("--registry", str(tmp_path / "r.json"), "--backend", "CUDA", env=nvml_stub.env("ok2"))
    assert UUID_A in done.stdout
    assert "79.6 GiB" in done.stdout
    assert "cpu:0" not in done.stdout


def test_a_corrupt_registry_is_a_warning_on_stderr(tmp_path: Path) -> None:
    registry = tmp_path / "registry.json"
    registry.write_text("{")
    done = discover("--json", "--backend", "cpu", "--registry", str(registry))
    assert json.loads(done.stdout)["backend_name"] == "cpu"
    assert done.returncode == 1
    assert "corrupt" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backend", "no_such"], "choose one of"),
        (["--registry", ""], "not a path"),
        (["--registry", "/dev/null/registry.json"], "not a directory"),
        (["--registry", os.path.dirname(__file__)], "is a directory"),
        (["--registry", "/no_such_directory/gpurt/r.json"], "/no_such_directory does not exist"),
        (["--backend", "cpu", "--backend", "no_such"], "'no_such'"),
        (["--timeout", "0"], "positive"),
        (["--timeout", "soon"], "positive"),
        (["--watch", "nan"], "positive"),
        (["--watch", "-3"], "positive"),
        (["surplus"], "unrecognized"),
    ],
)
def test_bad_arguments_are_exit_code_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exc:
        code = exc.code
    assert code == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


def test_a_bad_variable_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPURT_PLUGINS", "perhaps")
    assert main(["--registry", str(tmp_path / "r.json")]) == 2
    assert "GPURT_PLUGINS" in capsys.readouterr().err


def test_a_variable_that_names_no_backend_is_a_warning(tmp_path: Path) -> None:
    env = {**os.environ, "GPURT_BACKEND": "cdua"}
    done = discover("--backend", "cpu", "--registry", str(tmp_path / "r.json"), env=env)
    assert done.returncode == 1
    assert "GPURT_BACKEND=cdua names no backend" in done.stderr


def test_several_backends_can_be_asked(tmp_path: Path) -> None:
    done = discover("--json", "--registry", str(tmp_path / "r.json"), "--backend", "rocm", "--backend", "CPU")
    assert [report["name"] for report in json.loads(done.stdout)["reports"]] == ["rocm", "cpu"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("options", [["--json"], []])
def test_output_that_cannot_be_written_is_exit_code_2(options: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*options, "--backend", "cpu", "--registry", str(tmp_path / "r.json")),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_variable_with_a_letter_missing_is_a_warning(tmp_path: Path) -> None:
    env = dict(os.environ) | {"GPURT_MEMORY_LIMT": "20GiB", "GPURT_ACME_TOKEN": "x"}
    done = discover("--backend", "cpu", "--registry", str(tmp_path / "r.json"), env=env)
    assert "GPURT_MEMORY_LIMT is no variable of gpurt's and does nothing; GPURT_MEMORY_LIMIT is one" in done.stderr
    assert "ACME" not in done.stderr


def test_help_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "`" not in capsys.readouterr().out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_directory_that_cannot_be_made_is_not_called_one_that_is_not_writable() -> None:
    done = discover("--explain", "--backend", "cpu", "--registry", "/proc/gpurt/r.json")
    assert "does NOT hold" in done.stdout
    assert "can be made and written" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)])
def test_lines_of_a_watch_end_with_the_code_of_the_signal(number: int, code: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--json", "--watch", "5", "--backend", "cpu", "--registry", str(tmp_path / "r.json")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, number)],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        assert process.wait(timeout=10) == code
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_registry_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    done = discover("--json", "--backend", "cpu", "--registry", "/proc/registry.json")
    assert json.loads(done.stdout)["backend_name"] == "cpu"
    assert "is not saved" in done.stderr
    assert "another process" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("options", "text"), [(["--json"], '"cpu:0"'), ([], "device")])
def test_watch_goes_on_until_interrupted(options: list[str], text: str, tmp_path: Path) -> None:
    arguments = [*options, "--watch", "0.05", "--backend", "cpu", "--registry", str(tmp_path / "r.json")]
    # An ignored signal is inherited: a test run in the background of a shell could not interrupt it.
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        assert any(text in line for line in lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 0
        process.stdout.read()


def test_the_exit_code_tells_an_accelerator_from_a_processor() -> None:
    assert _exit_code(result(device(0), cpu())) == 0
    assert _exit_code(result(cpu())) == 1
    assert _exit_code(result(device(0, usable=False), cpu())) == 1
    assert _exit_code(result(device(0, kind=DeviceKind.SOFTWARE), cpu())) == 1
    assert _exit_code(result(device(0, usable=False))) == 2
    assert _exit_code(result()) == 2


def test_a_change_is_one_line() -> None:
    lost = device(0, state=DeviceState.LOST, usable=False, state_reason="Xid 79")
    (line,) = map(describe, diff(result(device(0)), result(lost)))
    assert "lost  cuda:0 NVIDIA H100" in line
    assert "healthy -> lost" in line
    assert "Xid 79" in line
    (line,) = map(describe, diff(result(device(0)), result(device(0, memory_available=GIB))))
    assert "1.0 GiB free / 80.0 GiB" in line
    (line,) = map(describe, diff(result(device(0)), result(device(0, memory_usable_bytes=GIB))))
    assert "1.0 GiB / 80.0 GiB" in line
    (line, _) = map(describe, diff(result(device(0)), result(reports=[absent("cuda", message="hung")])))
    assert "backend_unavailable  cuda  timeout: hung" in line


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl, and a stub that is an ELF library")
def test_a_killed_parent_leaves_no_probe_behind(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("--backend", "cuda", "--timeout", "60", "--registry", str(tmp_path / "r.json")),
        env=nvml_stub.env("hang"),
        stdout=subprocess.DEVNULL,
    )
    parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    while not (children and "probe_child" in " ".join(children[0].cmdline())):
        assert process.poll() is None
        children = parent.children()
    # It hangs in the driver once it has set itself up; a kill before that is a race that its watchdog ends.
    while children[0].status() != psutil.STATUS_SLEEPING or b"libnvidia-ml" not in _maps(children[0].pid):
        assert process.poll() is None
    process.kill()
    process.wait()
    children[0].wait(timeout=5)


def _maps(pid: int) -> bytes:
    return Path(f"/proc/{pid}/maps").read_bytes()
