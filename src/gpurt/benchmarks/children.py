"""Programs of this package in child processes: for what can happen once a process only."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final

DEADLINE_S: Final = 120.0


class ChildFailed(Exception):
    """The child did not answer; the message is the end of what it said."""


async def figures_of(*words: str) -> dict[str, float]:
    """What ``python words …``, such as ``-m module argument``, prints: one JSON object of figures.

    Raises:
        ChildFailed: it failed, or took longer than ``DEADLINE_S``; it is gone then, as it is after a cancellation.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            answer, errors = await process.communicate()
    except TimeoutError as exc:
        raise ChildFailed(f"no answer in {DEADLINE_S:.0f} s") from exc
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ChildFailed(next(reversed(errors.decode(errors="replace").strip().splitlines()), "it said nothing"))
    return json.loads(answer)
