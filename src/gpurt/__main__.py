"""The program ``gpurt``, and ``python -m gpurt``.

Until the command itself begins, Ctrl-C ends the process at once: Python would show a traceback from the middle of an
import. The handler is therefore set before anything is imported that takes time.
"""

import os
import signal
import sys


def _end_at_once(number: int, frame: object) -> None:
    os._exit(128 + number)


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    # A shell has its background jobs ignore the key, and that stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    from gpurt.cli.main import main as command

    return command(at_start=_end_at_once)


if __name__ == "__main__":
    sys.exit(main())
