"""How long a process waits for its backend, and what that does to its loop.

As a program (``python -m gpurt.benchmarks.start BACKEND``) it makes the backend, the first of its process, and prints
one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Final

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.children import ChildFailed, figures_of
from gpurt.benchmarks.clocks import LoopGap
from gpurt.benchmarks.measurement import Measurement, Skipped
from gpurt.factory import create_backend

_MOST_ROUNDS: Final = 5


async def measure(bench: Bench) -> list[Measurement]:
    name = bench.backend.name
    rounds = range(min(bench.plan.rounds, _MOST_ROUNDS))
    try:
        found = [await figures_of("gpurt.benchmarks.start", name) for _ in rounds]
        bare = await _bare_start(len(rounds)) if name == "cuda" else None
    except ChildFailed as exc:
        raise Skipped(f"a process of its own cannot make the backend {name}: {exc}") from exc
    median = {key: statistics.median([figures[key] for figures in found]) for key in found[0]}
    return [
        Measurement(
            "start",
            "create_backend, the first of a process",
            "s",
            median["seconds"],
            peer=bare,
            peer_name="" if bare is None else "import cupy, first context",
            **targets.start(name),
        ),
        *(
            Measurement(
                "start",
                f"gap of the loop meanwhile, {which}",
                "ms",
                median[which],
                **targets.loop_gap(name, which),
            )
            for which in ("p50", "p99", "max")
        ),
    ]


async def _bare_start(rounds: int) -> float:
    """Seconds, without gpurt."""
    return statistics.median(
        [sum((await figures_of("gpurt.benchmarks.cuda_raw", "init")).values()) for _ in range(rounds)]
    )


async def _start(name: str) -> dict[str, float]:
    async with LoopGap() as gap:
        began = time.perf_counter()
        backend = await create_backend(name)
        took = time.perf_counter() - began
    await backend.shutdown()
    return {"seconds": took} | gap.summary()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_start(sys.argv[1]))))
