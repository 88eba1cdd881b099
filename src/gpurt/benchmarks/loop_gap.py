"""How long the event loop stands still beside bulk copies and allocations."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, Final

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import Call, LoopGap
from gpurt.benchmarks.measurement import Measurement, size_name
from gpurt.benchmarks.plan import MIB
from gpurt.benchmarks.raw import Raw, opened

_BYTES: Final = 256 * MIB
"""What is promised for every backend; beside it, what the plan holds for bulk."""


async def measure(bench: Bench) -> list[Measurement]:
    # The array, new bytes, and a new array of the peer's.
    fitting = partial(bench.fitting, host=3, device=2)
    bulk = bench.plan.bulk_bytes
    sizes = {await fitting(nbytes) for nbytes in (min(_BYTES, bulk), bulk)}
    return [row for nbytes in sorted(sizes) for row in await _beside(bench, nbytes)]


async def _beside(bench: Bench, nbytes: int) -> list[Measurement]:
    import numpy as np

    backend, device_id, raw = bench.backend, bench.device_id, bench.raw(nbytes)

    async def allocate() -> None:
        async with backend.allocation(device_id, nbytes):
            pass
        await backend.trim(device_id)

    async with opened(raw) as threads, backend.allocation(device_id, nbytes) as handle:
        host = await threads(partial(np.ones, nbytes, np.uint8))
        await backend.copy_to_device(host.data, handle)
        plain = (await threads(raw.allocations, nbytes))[0]
        operations: dict[str, tuple[Call, Call, str]] = {
            "copy_to_device": (
                partial(backend.copy_to_device, host.data, handle),
                partial(threads, raw.writer(host.data)),
                raw.copy_name,
            ),
            "copy_into": (
                partial(backend.copy_into, handle, host.data),
                partial(threads, raw.reader(host.data)),
                raw.copy_name,
            ),
            "copy_from_device": (
                partial(backend.copy_from_device, handle),
                partial(threads, _new_bytes, raw, nbytes),
                f"{raw.copy_name}, tobytes",
            ),
            "allocate": (allocate, partial(threads, plain.call), plain.name),
        }
        idle = await _gaps(None, bench.plan.seconds)
        rows: list[Measurement] = []
        for name, (ours, peer, peer_name) in operations.items():
            await ours()
            beside = await _gaps(ours, bench.plan.seconds)
            ordinary = await _gaps(peer, bench.plan.seconds)
            rows += [
                Measurement(
                    "loop",
                    f"gap beside {name} {size_name(nbytes)}, {which}",
                    "ms",
                    beside[which],
                    peer=ordinary[which],
                    peer_name=f"{peer_name} in a thread",
                    ceiling=idle[which],
                    ceiling_name="idle loop",
                    **targets.loop_gap(backend.name, which),
                )
                for which in beside
            ]
    return rows


async def _gaps(call: Call | None, duration: float) -> dict[str, float]:
    """Gaps of the loop in ms while ``call`` runs again and again; None leaves the loop idle."""
    async with LoopGap() as gap:
        end = time.perf_counter() + duration
        while time.perf_counter() < end:
            await (asyncio.sleep(duration) if call is None else call())
    return gap.summary()


def _new_bytes(raw: Raw, nbytes: int) -> Any:
    import numpy as np

    array = np.empty(nbytes, np.uint8)
    raw.reader(array.data)()
    return array.tobytes()
