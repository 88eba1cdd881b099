"""The frame of the ``gpurt`` command: laziness, exit codes, errors on one line."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import gpurt
from gpurt.cli import main as cli
from gpurt.errors import OutOfMemory


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A subcommand ``toy``; tests set its ``run``."""
    module = types.ModuleType("toy_command")
    module.add_arguments = lambda parser: parser.add_argument("--count", type=int, default=1)
    module.run = lambda args: args.count
    monkeypatch.setitem(sys.modules, "toy_command", module)
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "toy": ("toy_command", "does nothing")})
    return module


def test_exit_code_is_the_commands(command: types.ModuleType) -> None:
    assert cli.main(["toy", "--count", "5"]) == 5
    assert cli.main(["-v", "toy"]) == 1


def test_gpu_error_is_one_line_and_2(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> int:
        raise OutOfMemory("no room\nat all", requested_bytes=8, device_id="cuda:0", hint="free something")

    command.run = run
    assert cli.main(["toy"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "gpurt toy: cuda:0: no room at all (free something)\n"
    assert captured.out == ""


def test_ctrl_c_is_130(command: types.ModuleType) -> None:
    def run(args: object) -> int:
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["toy"]) == 130


def test_other_errors_are_bugs_and_keep_their_traceback(command: types.ModuleType) -> None:
    command.run = lambda args: 1 // 0
    with pytest.raises(ZeroDivisionError):
        cli.main(["toy"])


@pytest.mark.parametrize("arguments", [[], ["nope"], ["toy", "--nope"], ["toy", "--count", "x"]])
def test_usage_errors_are_2(
    command: types.ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    name = "gpurt toy" if arguments[:1] == ["toy"] else "gpurt"
    assert told.startswith(f"{name}: ")
    assert told.endswith(f"(see {name} --help)")


def test_only_the_chosen_command_is_imported(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from gpurt.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert "discover" in loaded
    assert "gpurt.cli.main" in loaded
    assert not {"gpurt.cli.discover_command", "gpurt.cli.bench", "pydantic", "asyncio", "rich", "numpy"} & set(loaded)


@pytest.mark.parametrize("program", [["-m", "gpurt"], ["-c", "from gpurt.cli.main import main; main()"]])
def test_version(program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *program, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"gpurt {gpurt.__version__}\n"


def test_reader_that_goes_away() -> None:
    code = (
        "import sys, types; from gpurt.cli import main as cli\n"
        "toy = types.ModuleType('toy'); toy.add_arguments = lambda p: None\n"
        "toy.run = lambda a: print('x' * 10_000_000) or 0\n"
        "sys.modules['toy'] = toy; cli.COMMANDS['toy'] = ('toy', 'prints')\n"
        "sys.exit(cli.main(['toy']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 141
    assert errors == b""
