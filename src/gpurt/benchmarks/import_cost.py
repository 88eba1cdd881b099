"""What ``import gpurt`` adds to the start of a Python process."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from gpurt.benchmarks.clocks import medians, seconds
from gpurt.benchmarks.measurement import Measurement, Skipped

TARGET_MS = 150.0


async def measure(*, quick: bool) -> list[Measurement]:
    async def run(code: str) -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        if await process.wait():
            raise Skipped(f"a child python failed on {code!r}")

    codes = {
        "bare": "pass",
        "import": "import gpurt",
        "asyncio": "import asyncio",
        "face": "import gpurt; gpurt.create_backend; gpurt.DriverBackend",
        "libraries": "import asyncio, anyio, pydantic",
    }
    figures = await medians(
        3 if quick else 11, {name: partial(seconds, partial(run, code)) for name, code in codes.items()}
    )
    took = {name: figure * 1e3 for name, figure in figures.items()}
    over = {name: max(0.0, ms - took["bare"]) for name, ms in took.items()}
    return [
        Measurement(
            "import",
            "import gpurt, over bare Python",
            "ms",
            over["import"],
            peer=over["asyncio"],
            peer_name="import asyncio",
            target=TARGET_MS,
        ),
        Measurement(
            "import",
            "… and its backend classes",
            "ms",
            over["face"],
            peer=over["libraries"],
            peer_name="asyncio, anyio, pydantic",
        ),
    ]
