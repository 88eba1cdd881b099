"""The ``gpurt`` command.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). Only the chosen
one is imported, so that ``gpurt --help`` answers at once.

Exit codes beyond the subcommand's own: 2 for a usage error and for any :class:`~gpurt.errors.GPUError`, which is
shown as one line; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; 141 when the reader of our output went away.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from importlib import import_module
from typing import Final

from gpurt.errors import GPUError

COMMANDS: Final = {
    "discover": ("gpurt.cli.discover_command", "list the accelerators of this machine, and say why one is missing"),
    "worker": ("gpurt.cli.worker", "run a worker node: publish this machine's devices to a master"),
    "master": ("gpurt.cli.master", "run a master: show the devices of all nodes"),
    "demo": ("gpurt.cli.demo", "a master and two workers on this machine, for a few seconds"),
    "load": ("gpurt.cli.load", "load weights from safetensors files to a device, and say how fast"),
    "bench": ("gpurt.cli.bench", "measure gpurt on this machine against bare libraries and hardware limits"),
}

_SPELLINGS: Final = {"≥": ">=", "≤": "<=", "µ": "u", "…": "...", "·": "-", "×": "x", "–": "-", "→": "->"}  # noqa: RUF001


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. ``argv`` without the program's name; None is ``sys.argv[1:]``."""
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="gpurt", description="A device runtime for distributed inference workers.")
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log what happens to stderr; twice: more")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # No option of the command itself takes a value, so the first word is the subcommand.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    run: Callable[[argparse.Namespace], int] | None = None
    for name, (path, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            module = import_module(path)
            module.add_arguments(subparser)
            run = module.run
    args = parser.parse_args(arguments)
    verbosity: int = args.verbose
    logging.basicConfig(
        stream=sys.stderr,
        level=(logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)],
        format="%(levelname)s %(name)s: %(message)s",
    )
    assert run is not None, "argparse let a command pass that is not in COMMANDS"
    ended_by: list[int] = []
    try:
        with _interrupted_by_signals(ended_by):
            code = run(args)
        sys.stdout.flush()
    except GPUError as exc:
        sys.stderr.write(f"gpurt {chosen}: {' '.join(str(exc).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + (ended_by[0] if ended_by else signal.SIGINT)
    except BrokenPipeError:
        _give_up_stdout()
        return 141
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        _give_up_stdout()
        sys.stderr.write(f"gpurt {chosen}: {exc}\n")
        return 2
    return code


def _open_streams() -> None:
    """A standard stream that was closed by whoever started us goes nowhere: Python makes it None, and the next file
    or socket would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the process's life)
    # Names of devices are in every script; a terminal that lacks one must not end a worker.
    stdout: object = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        codecs.register_error("gpurt", _spell_out)
        stdout.reconfigure(errors="gpurt")


def _spell_out(error: UnicodeError) -> tuple[str | bytes, int]:
    """What gpurt itself prints in letters that every terminal has, and the rest as its code."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if character in _SPELLINGS:
        return _SPELLINGS[character], error.start + 1
    error.end = error.start + 1
    return codecs.backslashreplace_errors(error)


def _give_up_stdout() -> None:
    # The interpreter flushes stdout once more at exit, which would fail again with a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _interrupted_by_signals(ended_by: list[int]) -> Generator[None]:
    """SIGTERM, which service managers and containers send, and SIGHUP, which a closed terminal does, end a command
    as Ctrl-C does: a worker says goodbye, the demo clears up. Those that the parent has us ignore stay ignored."""

    def handler(number: int, frame: object) -> None:
        ended_by.append(number)
        # asyncio's own handler for Ctrl-C cancels the main task; a background job has none, because its shell
        # ignores the key for it.
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        elif "asyncio" not in sys.modules or not _interrupt_loop():
            raise KeyboardInterrupt

    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # embedded: signals are the host's business
    before = {number: signal.getsignal(number) for number in numbers}
    ours = [number for number in numbers if before[number] is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _interrupt_loop() -> bool:
    from gpurt.cli.running import interrupt

    return interrupt()


class _Version(argparse.Action):
    """As argparse's own version action, but package metadata is read only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from gpurt import __version__

        sys.stdout.write(f"gpurt {__version__}\n")
        parser.exit()
