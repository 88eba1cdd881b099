"""``python -m gpurt.discovery.probe_child NAME``: examine one backend and die.

Reads one line of JSON, the request, from stdin and answers with JSON lines on what was its stdout; anything that a
library prints goes to stderr instead. Without the variables that :mod:`gpurt.discovery.probe` sets it reads nothing
and prints its lines all the same, which helps when debugging.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gpurt.discovery.line import ProbeLine

ENV_TOKEN: Final = "GPURT_PROBE_TOKEN"
"""Begins every line of the answer."""
ENV_PATH: Final = "GPURT_PROBE_PATH"
"""The parent's ``sys.path``, JSON."""

ORPHAN_GRACE_S: Final = 2.0
"""How long after its deadline a probe that nobody killed ends itself."""

UNASKED_S: Final = 600.0
"""How long a probe that was started early may take to look and then to be asked."""


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
    # A watchdog thread in C, so it works while a library holds the GIL. Ends us on every platform.
    faulthandler.dump_traceback_later(UNASKED_S, exit=True)

    from gpurt.discovery.examine import Request, examine

    def emit(line: ProbeLine) -> None:
        # One write of a whole line: a crash right after it does not lose it.
        os.write(answer, f"{token} {line.model_dump_json()}\n".encode())

    def request() -> Request:
        asked: dict[str, Any] = _read_request() if token else {"deadline": UNASKED_S}
        faulthandler.dump_traceback_later(float(asked["deadline"]) + ORPHAN_GRACE_S, exit=True)
        return Request(*(frozenset[str](asked.get(key, ())) for key in ("verified", "known")))

    examine(arguments[0], emit, request, before_opening=_load_site)
    return 0


def _load_site() -> None:
    """Started without ``site`` for looking alone; what a backend's library needs of it comes now: the start-up files
    of packages, and with them the finders of editable installations."""
    if sys.flags.no_site:
        import site

        site.main()


def _read_request() -> dict[str, Any]:
    """The parent's line. Libraries find stdin at its end."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise SystemExit(0)  # the parent went away, or does not want to know any more
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return json.loads(line)


def _take_stdout() -> int:
    """A private descriptor to the parent; descriptor 1 becomes stderr."""
    private = os.dup(1)
    os.dup2(2, 1)
    return private


def _die_with_parent() -> None:
    """Leave no orphan in a hung driver call when the parent is killed: it cannot kill us then."""
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
