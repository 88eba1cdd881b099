"""Allocating and freeing: from the pool, and from the library where the pool has nothing."""

from __future__ import annotations

from functools import partial
from typing import Final

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import Call, cost_per_call, medians
from gpurt.benchmarks.measurement import Measurement, size_name
from gpurt.benchmarks.plan import MIB, SMALL_BYTES
from gpurt.benchmarks.raw import Blocking, Threads, opened

_MISSES: Final = 16
"""A round's allocations that the library has to make: each takes up to milliseconds."""


async def measure(bench: Bench) -> list[Measurement]:
    kept = {SMALL_BYTES, min(64 * MIB, bench.plan.bulk_bytes)}
    rows: list[Measurement] = []
    for nbytes in sorted(kept | {bench.plan.bulk_bytes}):
        # One allocation at a time, of gpurt's or of the peer's, beside what a pool keeps.
        lack = await bench.lack(nbytes, host=0, device=3, raw=0)
        if lack is not None:
            bench.skipped[f"allocation, {size_name(nbytes)}"] = lack
            continue
        rows += await _one_size(bench, nbytes, kept=nbytes in kept)
    return rows


async def _one_size(bench: Bench, nbytes: int, *, kept: bool) -> list[Measurement]:
    backend, device_id = bench.backend, bench.device_id
    raw = bench.raw(SMALL_BYTES)

    async def allocate() -> None:
        await backend.deallocate(await backend.allocate(device_id, nbytes))

    async def allocate_anew() -> None:
        await allocate()
        await backend.trim(device_id)  # so that the next one finds nothing

    async def wall(call: Call, calls: int) -> float:
        return (await cost_per_call(call, calls=calls, callers=1)).wall_us

    async with opened(raw) as threads:
        ways = await threads(raw.allocations, nbytes)
        contenders = {way.name: partial(_alone, threads, way.call) for way in ways}
        contenders["anew"] = partial(wall, allocate_anew, _MISSES)
        figures = await medians(bench.plan.rounds, contenders)
        if kept:
            await allocate()
            again = partial(wall, allocate, bench.plan.calls)
            figures |= await medians(bench.plan.rounds, {"again": again})
    plain, *others = ways

    def row(name: str, ours: float, bounds: targets.Bounds) -> Measurement:
        return Measurement(
            "allocation",
            f"allocate + deallocate {size_name(nbytes)}, {name}",
            "µs",
            ours,
            peer=figures[plain.name],
            peer_name=plain.name,
            others={way.name: figures[way.name] for way in others},
            **bounds,
        )

    rows = [row("pool hit", figures["again"], targets.pool_hit(backend.name))] if kept else []
    return [*rows, row("pool miss, and trim", figures["anew"], {})]


async def _alone(threads: Threads, call: Blocking) -> float:
    """µs per call, many calls on one thread."""

    def calls() -> None:
        for _ in range(_MISSES):
            call()

    return await threads.timed(calls)() / _MISSES * 1e6
