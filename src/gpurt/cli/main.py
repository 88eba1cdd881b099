"""The ``gpurt`` command.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). Only the chosen
one is imported, so that ``gpurt --help`` answers at once.

Exit codes beyond the subcommand's own: 2 for a usage error and for any :class:`~gpurt.errors.GPUError`, which is
shown as one line; 130 after Ctrl-C; 141 when the reader of our output went away.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from gpurt.errors import GPUError

COMMANDS: Final = {
    "discover": ("gpurt.discover", "list the accelerators of this machine, and say why one is missing"),
    "worker": ("gpurt.cli.worker", "run a worker node: publish this machine's devices to a master"),
    "master": ("gpurt.cli.master", "run a master: show the devices of all nodes"),
    "demo": ("gpurt.cli.demo", "a master and two workers on this machine, for a few seconds"),
    "bench": ("gpurt.cli.bench", "measure gpurt on this machine against bare libraries and hardware limits"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. ``argv`` without the program's name; None is ``sys.argv[1:]``."""
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
    try:
        code = run(args)
        sys.stdout.flush()
    except GPUError as exc:
        sys.stderr.write(f"gpurt {chosen}: {' '.join(str(exc).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which would fail again with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


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
