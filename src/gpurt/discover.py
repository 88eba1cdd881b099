"""``python -m gpurt.discover``, the same as ``gpurt discover``: :mod:`gpurt.cli.discover_command`.

A door of its own because half of the time of a quick answer is imports: the probe of the NVIDIA driver, which has its
own, is started before them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def main(argv: list[str] | None = None) -> int:
    """``argv`` without the program's name; None is ``sys.argv[1:]``. Returns the exit code."""
    from gpurt.cli.discover_command import main as command

    return command(argv)


def _run() -> NoReturn:
    # pydantic would read the metadata of every installed package to look for plug-ins of its own: time, for nothing.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from gpurt.discovery.probe_process import start_early

    early = start_early(sys.argv[1:], os.environ)
    from gpurt.cli.discover_command import main as command

    code = command(early=early)
    # Taking a thousand modules apart is a tenth of the time of a quick answer, and the process is over anyway. All
    # children, files and locks are closed by now; what an error left to be written is in these two.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by whoever reads it, or never there
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _run()
