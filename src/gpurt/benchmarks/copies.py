"""Copies within a device, and across to another where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import rates, seconds
from gpurt.benchmarks.measurement import Measurement, size_name
from gpurt.benchmarks.plan import MIB
from gpurt.benchmarks.raw import opened
from gpurt.types import GPUDevice

TOGETHER: Final = 16


async def measure(bench: Bench) -> list[Measurement]:
    rows: list[Measurement] = []
    for nbytes in sorted({min(MIB, bench.plan.bulk_bytes), bench.plan.bulk_bytes}):
        rows.append(await _copy(bench, nbytes, None))
        if bench.second is not None:
            rows.append(await _copy(bench, nbytes, bench.second))
    if bench.second is not None:
        # A model's shards come one behind the other: what waits for its turn costs the link nothing.
        rows.append(await _copy(bench, bench.plan.bulk_bytes, bench.second, together=TOGETHER))
    return rows


async def _copy(bench: Bench, nbytes: int, second: GPUDevice | None, *, together: int = 1) -> Measurement:
    """``together``: how many copies are submitted at once; those of the bare library follow each other."""
    import numpy as np

    across, backend = second is not None, bench.backend
    nbytes = await bench.fitting(nbytes, host=1, device=1 if across else 2, raw=2, second=second)
    raw = bench.raw(2 * nbytes, second)
    async with (
        opened(raw) as threads,
        backend.allocation(bench.device_id, nbytes) as here,
        backend.allocation(second.device_id if second else bench.device_id, nbytes) as there,
    ):
        host = await threads(partial(np.ones, nbytes, np.uint8))
        await backend.copy_to_device(host.data, here)
        copy = partial(backend.copy_device_to_device, here, there, nbytes)
        await copy()  # gpurt's first copy enables the direct path, for the bare one as well
        ordinary, best = raw.device_copies(nbytes, across=across)
        ways = {way.name: threads.timed(partial(_repeat, way.call, together)) for way in (ordinary, best) if way}

        async def ours() -> None:
            await asyncio.gather(*(copy() for _ in range(together)))

        turns = bench.plan.turns(nbytes)
        figures = await rates(together * nbytes, turns, ways | {"ours": partial(seconds, ours)})
    ceiling = raw.ceiling(figures, best.name, None if ordinary is None else ordinary.name)
    # A small copy is call overhead, of which nothing is promised here.
    bounds = targets.device_copy(backend.name, across=across) if nbytes > MIB else targets.Bounds()
    return Measurement(
        "copies",
        f"{'across to a second device' if across else 'within the device'}, {size_name(nbytes)}"
        + (f", {together} submitted together" if together > 1 else ""),
        "GB/s",
        figures["ours"],
        peer=None if ordinary is None else figures[ordinary.name],
        peer_name="" if ordinary is None else ordinary.name,
        ceiling=figures[ceiling],
        ceiling_name=ceiling,
        **bounds,
    )


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()
