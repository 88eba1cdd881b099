"""The ``gpurt`` command.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). Only the chosen
one is imported, so that ``gpurt --help`` answers at once.

Exit codes beyond the subcommand's own: 2 for a usage error and for any :class:`~gpurt.errors.GPUError`, which is
shown as one line; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; 141 when the reader of our output went away.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NoReturn

from gpurt.cli.logs import log_to_stderr
from gpurt.cli.signals import give_up_stdout, interrupted_by_signals, interruptible
from gpurt.errors import GPUError
from gpurt.printable import MAX_LINE, printable

COMMANDS: Final = {
    "discover": ("gpurt.cli.discover_command", "list the accelerators of this machine, and say why one is missing"),
    "worker": ("gpurt.cli.worker", "run a worker node: publish this machine's devices to a master"),
    "master": ("gpurt.cli.master", "run a master: show the devices of all nodes"),
    "hub": ("gpurt.cli.hub", "run a hub without a master: where masters and workers connect"),
    "cluster": ("gpurt.cli.cluster", "make the certificates of a cluster, and set the term of its nodes back"),
    "drain": ("gpurt.cli.drain", "take a node of a cluster out of new placements, or let it take part again"),
    "links": ("gpurt.cli.links_command", "the ways between the nodes of a cluster: round trip and bandwidth"),
    "top": ("gpurt.cli.top", "watch the nodes and devices of a cluster, and what they measure"),
    "place": ("gpurt.cli.place", "place a model on the devices of a cluster: which layers where, how fast, and why"),
    "demo": ("gpurt.cli.demo", "a model placed on three workers of this machine, loaded, and repaired after a crash"),
    "simulate": ("gpurt.cli.simulate", "a cluster of simulated nodes with faults, and whether its master is right"),
    "calibrate": ("gpurt.cli.calibrate", "measure what the devices do, for placement, and keep it"),
    "load": ("gpurt.cli.load", "load weights from safetensors files to a device, and say how fast"),
    "bench": ("gpurt.cli.bench", "measure gpurt on this machine against bare libraries and hardware limits"),
}

_SPELLINGS: Final = {"≥": ">=", "≤": "<=", "µ": "u", "…": "...", "·": "-", "×": "x", "–": "-", "→": "->"}  # noqa: RUF001


def main(argv: Sequence[str] | None = None, *, at_start: Callable[[int, object], None] | None = None) -> int:
    """Run the command; returns the exit code.

    Args:
        argv: without the program's name; None is ``sys.argv[1:]``.
        at_start: the handler of Ctrl-C that the program has set for its start, and that it has for its end again.
    """
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="gpurt", description="A device runtime for distributed inference workers.")
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
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        option = next((word for word in unknown if word.startswith("-")), None)
        wrong = f"one argument too many: {unknown[0]}" if option is None else f"there is no option {option}"
        (subparsers.choices.get(chosen or "") or parser).error(wrong)
    verbosity: int = args.verbose
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    json_logs = getattr(args, "log_format", "text") == "json"
    if json_logs:
        from gpurt.cli.json_logs import log_json_to_stderr

        log_json_to_stderr(level)
    else:
        log_to_stderr(level)
    assert run is not None, "argparse let a command pass that is not in COMMANDS"
    ended_by: list[int] = []
    try:
        with interruptible(at_start), interrupted_by_signals(ended_by):
            code = run(args)
        sys.stdout.flush()
    except GPUError as exc:
        text = printable(" ".join(str(exc).split()), MAX_LINE)
        if json_logs:
            logging.getLogger("gpurt.cli").error("gpurt %s: %s", chosen, text)
        else:
            sys.stderr.write(f"gpurt {chosen}: {text}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + (ended_by[0] if ended_by else signal.SIGINT)
    except BrokenPipeError:
        give_up_stdout()
        return 128 + ended_by[0] if ended_by else 141
    except OSError as exc:
        if ended_by and exc.errno == errno.EIO:  # the terminal that has hung up takes no farewell
            give_up_stdout()
            return 128 + ended_by[0]
        if exc.errno != errno.ENOSPC:
            raise
        give_up_stdout()
        sys.stderr.write(f"gpurt {chosen}: {exc}\n")
        return 2
    except Exception:
        if not json_logs:
            raise
        # A traceback of its own would be many lines that are no records.
        logging.getLogger("gpurt.cli").critical("gpurt %s has failed", chosen, exc_info=True)
        return 1
    # A command that takes an interruption for its ordinary end has not ended by itself.
    return 128 + ended_by[0] if ended_by else code


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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error is said, and where all options are told."""

    def error(self, message: str) -> NoReturn:
        text = printable(" ".join(message.split()), MAX_LINE)
        sys.stderr.write(f"{self.prog}: {text} (see {self.prog} --help)\n")
        self.exit(2)


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
