"""Answers of libraries, each asked in a process of its own: some of them load drivers, which may hang or crash."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from gpurt.discovery.probe import REAP_S
from gpurt.discovery.probe_process import kill_tree

DEADLINE_S: Final = 30.0
"""For all of them together; they are asked at the same time."""

_OF_BACKEND: Final[Mapping[str, str]] = {
    "cuda": "nvml",
    "vulkan": "vulkan",
    "opencl": "opencl",
    "metal": "apple",
    "directml": "dxgi",
}
"""The table of each backend that has one."""


async def read_tables(
    backends: Sequence[str], environ: Mapping[str, str], deadline: float | None = None
) -> dict[str, dict[str, Any]]:
    """The tables of these backends, by name. One that hangs, crashes or answers nonsense says so in place of it.

    Args:
        environ: the environment of the processes.
        deadline: seconds; None is :data:`DEADLINE_S`.
    """
    names = [_OF_BACKEND[name] for name in backends if name in _OF_BACKEND]
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_ask(name, environ, deadline or DEADLINE_S)) for name in names}
    return {name: task.result() for name, task in tasks.items()}


async def _ask(name: str, environ: Mapping[str, str], deadline: float) -> dict[str, Any]:
    token = secrets.token_hex(8)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gpurt.recording.tables", name, token),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(environ),
            start_new_session=True,
        )
    except (OSError, NotImplementedError) as exc:
        return _nothing("error", f"the process could not be started: {exc}")
    try:
        async with asyncio.timeout(deadline):
            output, _ = await process.communicate()
    except TimeoutError:
        return _nothing("timeout", f"no answer within {deadline:g} s")
    finally:
        # Libraries fork, and whoever cancels us must not leave them behind. One that is stuck in its driver does not
        # die: it is not waited for.
        kill_tree(process.pid)
        await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=REAP_S)
    line = next((line for line in output.splitlines() if line.startswith(token.encode())), b"")
    try:
        table: object = json.loads(line[len(token) :])
    except ValueError:
        table = None
    if not isinstance(table, dict):
        return _nothing("crashed", f"the process ended with code {process.returncode} and no answer")
    return cast("dict[str, Any]", table)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    env = dict(environ)
    root = str(Path(__file__).parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), root)))
    return env


def _nothing(reason: str, message: str) -> dict[str, Any]:
    return {"error": {"reason": reason, "message": message}}


def main() -> int:
    """``python -m gpurt.recording.tables NAME TOKEN``: one table on one line of stdout, behind the token."""
    from gpurt.discovery.sight import table_of

    name, token = sys.argv[1:]
    # Libraries print on stdout.
    private = os.dup(1)
    os.dup2(2, 1)
    try:
        table = table_of(name) or _nothing("error", f"there is no table {name}")
    except Exception as exc:  # written down: the recording is to show what went wrong
        table = _nothing("error", f"{type(exc).__name__}: {exc}")
    answer = f"{token}{json.dumps(table, default=str)}\n".encode()
    while answer:
        answer = answer[os.write(private, answer) :]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
