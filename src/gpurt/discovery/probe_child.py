"""``python -m gpurt.discovery.probe_child NAME``: examine one backend and die.

Answers with JSON lines on what was its stdout; anything that a library prints goes to stderr instead. Without the
variables that :mod:`gpurt.discovery.probe` sets it prints its lines all the same, which helps when debugging.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpurt.discovery.wire import ProbeLine

ENV_TOKEN: Final = "GPURT_PROBE_TOKEN"
"""Begins every line of the answer."""
ENV_DEADLINE: Final = "GPURT_PROBE_DEADLINE"
"""Seconds."""
ENV_PATH: Final = "GPURT_PROBE_PATH"
"""The parent's ``sys.path``, JSON."""
ENV_VERIFIED: Final = "GPURT_PROBE_VERIFIED"
"""Keys of devices that need no verification, JSON."""

ORPHAN_GRACE_S: Final = 2.0
"""How long after its deadline a probe that nobody killed ends itself."""


def main(argv: list[str] | None = None) -> int:
    """Run the probe; 0 when an answer was written, whatever it says."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m gpurt.discovery.probe_child NAME\n")
        return 2
    answer = _take_stdout()
    _die_with_parent()
    # What the parent can import must be importable here, whatever the parent did to its sys.path: plug-ins, and in a
    # source tree our own dependencies. Hence no import of them before this line.
    sys.path.extend(entry for entry in json.loads(os.environ.get(ENV_PATH, "[]")) if entry not in sys.path)
    token = os.environ.pop(ENV_TOKEN, "")
    verified = frozenset[str](json.loads(os.environ.pop(ENV_VERIFIED, "[]")))

    from gpurt.discovery.examine import examine

    def emit(line: ProbeLine) -> None:
        # One write of a whole line: a crash right after it does not lose it.
        os.write(answer, f"{token} {line.model_dump_json()}\n".encode())

    examine(arguments[0], emit, verified=verified)
    return 0


def _take_stdout() -> int:
    """A private descriptor to the parent; descriptor 1 becomes stderr."""
    private = os.dup(1)
    os.dup2(2, 1)
    return private


def _die_with_parent() -> None:
    """Leave no orphan in a hung driver call when the parent is killed: it cannot kill us then."""
    deadline = os.environ.get(ENV_DEADLINE)
    if deadline:
        # A watchdog thread in C, so it works while a library holds the GIL. Ends us on every platform.
        faulthandler.dump_traceback_later(float(deadline) + ORPHAN_GRACE_S, exit=True)
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
