"""A small copy beside bulk loads on the same device, and what the loads lose by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import Call, seconds, summary
from gpurt.benchmarks.measurement import Measurement, size_name
from gpurt.benchmarks.plan import SMALL_BYTES
from gpurt.benchmarks.raw import opened

_PAUSE_S = 0.001


async def measure(bench: Bench) -> list[Measurement]:
    import numpy as np

    backend, device_id = bench.backend, bench.device_id
    nbytes = await bench.fitting(bench.plan.bulk_bytes, host=2, device=2)
    raw = bench.raw(nbytes)
    async with (
        opened(raw) as threads,
        backend.allocation(device_id, nbytes) as handle,
        backend.allocation(device_id, SMALL_BYTES) as little,
    ):
        host = await threads(partial(np.ones, nbytes, np.uint8))
        source = bytes(SMALL_BYTES)
        load = partial(_bulk, nbytes, partial(backend.copy_to_device, host.data, handle))
        small = partial(_small, partial(backend.copy_to_device, source, little))
        bare_load = partial(_bulk, nbytes, partial(threads, raw.writer(host.data)))
        bare_small = partial(_small, partial(threads, raw.writer(memoryview(source))))
        during = partial(_during, bench.plan.seconds)

        await backend.copy_to_device(host.data, handle)
        (alone,) = await during(small)
        (rate_before,) = await during(load)
        beside, rate = await during(small, load)
        (rate_after,) = await during(load)
        bare_beside, _ = await during(bare_small, bare_load)
    figures = {"alone": summary(alone), "beside": summary(beside), "bare": summary(bare_beside)}
    name, size = backend.name, size_name(nbytes)
    rows = [
        Measurement(
            "latency",
            f"4 KiB copy_to_device beside {size} loads, {which}",
            "ms",
            figures["beside"][which],
            peer=figures["bare"][which],
            peer_name=f"{raw.copy_name} beside {raw.copy_name}",
            ceiling=figures["alone"][which],
            ceiling_name="without the loads",
            **targets.small_copy_beside_bulk(name, which),
        )
        for which in figures["beside"]
    ]
    without = (rate_before + rate_after) / 2
    bulk = Measurement(
        "latency",
        f"{size} loads beside 4 KiB copies",
        "GB/s",
        rate,
        peer=without,
        peer_name="without them",
        **targets.bulk_beside_small_copies(name),
    )
    return [*rows, bulk]


async def _during(duration: float, *tasks: Callable[[asyncio.Event], Awaitable[Any]]) -> list[Any]:
    """What each returned that was told to stop after ``duration`` seconds; all are over then, also on cancellation."""
    stop = asyncio.Event()

    async def run(task: Callable[[asyncio.Event], Awaitable[Any]]) -> Any:
        return await task(stop)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(run(task)) for task in tasks]
        await asyncio.sleep(duration)
        stop.set()
    return [task.result() for task in running]


async def _small(call: Call, stop: asyncio.Event) -> list[float]:
    """ms of each copy, a moment between two."""
    took: list[float] = []
    while not took or not stop.is_set():
        took.append(await seconds(call) * 1e3)
        await asyncio.sleep(_PAUSE_S)
    return took


async def _bulk(nbytes: int, call: Call, stop: asyncio.Event) -> float:
    """GB/s of copies without a pause."""
    done, started = 0, time.perf_counter()
    while not done or not stop.is_set():
        await call()
        done += nbytes
    return done / (time.perf_counter() - started) / 1e9
