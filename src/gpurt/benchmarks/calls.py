"""What one call costs: 4 KiB copies and synchronisation, alone and 64 at once, beside ``asyncio.to_thread``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Final

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import Call, Cost, cost_per_call, in_turns
from gpurt.benchmarks.measurement import Measurement
from gpurt.benchmarks.plan import SMALL_BYTES
from gpurt.benchmarks.raw import Blocking, Threads, opened

CALLERS: Final = (1, 64)
_COPY: Final = "copy_to_device 4 KiB"


async def measure(bench: Bench) -> list[Measurement]:
    import numpy as np

    await bench.fitting(SMALL_BYTES, host=2, device=1)
    backend, raw = bench.backend, bench.raw(SMALL_BYTES)
    async with opened(raw) as threads, backend.allocation(bench.device_id, SMALL_BYTES) as handle:
        source, target = (np.ones(SMALL_BYTES, np.uint8) for _ in range(2))
        operations: dict[str, tuple[Call, Blocking]] = {
            _COPY: (partial(backend.copy_to_device, source.data, handle), raw.writer(source.data)),
            "copy_into 4 KiB": (partial(backend.copy_into, handle, target.data), raw.reader(target.data)),
            "synchronize": (partial(backend.synchronize, bench.device_id), raw.synchronize),
        }
        rows: list[Measurement] = []
        for name, (ours, blocking) in operations.items():
            for callers in CALLERS:
                rows += await _rows(bench, threads, name, callers, ours, blocking)
    return rows


async def _rows(
    bench: Bench, threads: Threads, name: str, callers: int, ours: Call, blocking: Blocking
) -> list[Measurement]:
    async def directly() -> None:
        blocking()

    contenders = {"ours": ours, "peer": partial(threads, blocking), "ceiling": directly}
    calls = {
        way: partial(cost_per_call, call, calls=bench.plan.calls, callers=callers) for way, call in contenders.items()
    }
    costs = await in_turns(bench.plan.rounds, calls)
    called = f"{name}, {callers} caller{'s' if callers > 1 else ''}"

    def row(what: str, pick: Callable[[Cost], float], bounds: targets.Bounds) -> Measurement:
        figures = {way: statistics.median(map(pick, found)) for way, found in costs.items()}
        return Measurement(
            "calls",
            f"{called}, {what}",
            "µs",
            figures["ours"],
            peer=figures["peer"],
            peer_name="asyncio.to_thread",
            ceiling=figures["ceiling"],
            ceiling_name="called directly",
            **bounds,
        )

    many = name == _COPY and callers > 1
    rows = [
        row("wall time", lambda cost: cost.wall_us, {}),
        row("CPU time", lambda cost: cost.cpu_us, targets.many_small_copies(bench.backend.name) if many else {}),
    ]
    if name == _COPY and callers == 1:
        wall = rows[0]
        assert wall.peer is not None
        assert wall.ceiling is not None
        rows.append(
            Measurement(
                "calls",
                f"{called}, over a direct call",
                "µs",
                max(0.0, wall.ours - wall.ceiling),
                peer=max(0.0, wall.peer - wall.ceiling),
                peer_name="asyncio.to_thread",
                **targets.added_to_a_small_copy(bench.backend.name),
            )
        )
    return rows
