"""How long a process waits for its backend, and what a backend's life does to its loop: start, first copies, end.

As a program (``python -m gpurt.benchmarks.start BACKEND DEVICE BYTES``) it makes the backend, the first of its process,
and prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.children import ChildFailed, figures_of
from gpurt.benchmarks.clocks import LoopGap
from gpurt.benchmarks.measurement import Measurement, Skipped, size_name
from gpurt.benchmarks.plan import MIB
from gpurt.factory import create_backend

_MOST_ROUNDS: Final = 5
_COPY_BYTES: Final = 256 * MIB


async def measure(bench: Bench) -> list[Measurement]:
    name = bench.backend.name
    nbytes = await bench.fitting(_COPY_BYTES, host=1, device=1, raw=0)
    rounds = range(min(bench.plan.rounds, _MOST_ROUNDS))
    words = (*bench.start_program, name, bench.device_id, str(nbytes))
    try:
        found = [await figures_of(*words) for _ in rounds]
        bare = await _bare_start(len(rounds)) if name == "cuda" else None
    except ChildFailed as exc:
        raise Skipped(f"a process of its own cannot make the backend {name}: {exc}") from exc
    median = {key: statistics.median([figures[key] for figures in found]) for key in found[0]}
    longest = targets.Bounds(target=targets.LONGEST_GAP_MS)
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
        Measurement(
            "start",
            f"gap of the loop beside the first copies, {size_name(nbytes)}, max",
            "ms",
            median["copies_max"],
            **longest,
        ),
        Measurement("start", "shutdown, the device having been used", "s", median["shutdown_seconds"]),
        Measurement("start", "gap of the loop during shutdown, max", "ms", median["shutdown_max"], **longest),
    ]


async def _bare_start(rounds: int) -> float:
    """Seconds, without gpurt."""
    return statistics.median(
        [sum((await figures_of("-m", "gpurt.benchmarks.cuda_raw", "init")).values()) for _ in range(rounds)]
    )


async def _life(name: str, device_id: str, nbytes: int) -> dict[str, float]:
    async with LoopGap() as starting:
        began = time.perf_counter()
        backend = await create_backend(name)
        took = time.perf_counter() - began
    host = await asyncio.to_thread(_touched, nbytes)
    async with LoopGap() as copying, backend.allocation(device_id, nbytes) as handle:
        await backend.copy_to_device(host, handle)
        await backend.copy_into(handle, host)
    async with LoopGap() as ending:
        began = time.perf_counter()
        await backend.shutdown()
        ended = time.perf_counter() - began
    return {
        "seconds": took,
        **starting.summary(),
        "copies_max": copying.longest_ms,
        "shutdown_seconds": ended,
        "shutdown_max": ending.longest_ms,
    }


def _touched(nbytes: int) -> memoryview:
    import numpy as np

    return np.ones(nbytes, np.uint8).data


def main(arguments: Sequence[str]) -> None:
    """The program, without its name."""
    name, device_id, nbytes = arguments
    figures = asyncio.run(_life(name, device_id, int(nbytes)))
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
