"""Runs a tool of the operating system with a deadline. Blocking; never raises for what the tool does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpurt.errors import ReasonCode
from gpurt.sources.table import Absence

_REAP_S: Final = 1.0
"""A process that a driver holds ignores even SIGKILL: it is waited for this long, and then left alone."""

_MOST_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool wrote on stdout, or why there is nothing."""

    output: bytes | None
    absence: Absence | None = None


def run_tool(argv: Sequence[str], deadline_s: float, *, partial: bool = False) -> ToolAnswer:
    """The output of ``argv``, whose first element is an absolute path: a ``PATH`` of somebody else's is not searched.

    At the deadline the tool is killed with all that it started.

    Args:
        partial: take what a tool wrote although its exit status says that some of it is missing.
    """
    name = os.path.basename(argv[0])
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        )
    except FileNotFoundError:
        return _none(ReasonCode.NO_LIBRARY, f"there is no {argv[0]}")
    except PermissionError:
        return _none(ReasonCode.NO_PERMISSION, f"this process may not run {argv[0]}")
    except (OSError, ValueError) as exc:  # iOS has no processes for us at all
        return _none(ReasonCode.ERROR, f"{argv[0]} cannot be run: {exc}")
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return _none(ReasonCode.TIMEOUT, f"{name} did not answer within {deadline_s:g} s")
    if process.returncode != 0 and not (partial and output):
        words = errors.decode(errors="replace").strip().splitlines()
        return _none(ReasonCode.ERROR, f"{name} ended with status {process.returncode}: {words[-1] if words else ''}")
    if len(output) > _MOST_BYTES:
        return _none(ReasonCode.ERROR, f"{name} wrote {len(output)} bytes, more than can be its answer")
    return ToolAnswer(output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        # The session that it was started in is the group's number.
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        process.kill()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    try:
        process.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        return


def _none(reason: ReasonCode, message: str) -> ToolAnswer:
    return ToolAnswer(None, Absence(reason, message))
