"""What one call through gpurt costs beside the bare executor, on the CPU backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gpurt.backends.cpu_backend import CPUBackend
from gpurt.benchmarks.measurement import Call, Measurement, medians, microseconds_per_call

SMALL_BYTES = 4096
CALLERS = (1, 64)


async def measure(*, quick: bool) -> list[Measurement]:
    import numpy as np

    calls, rounds = (640, 3) if quick else (3200, 9)
    loop = asyncio.get_running_loop()
    source = np.ones(SMALL_BYTES, np.uint8)
    target = np.empty(SMALL_BYTES, np.uint8)

    def copy() -> None:
        np.copyto(target, np.frombuffer(source.data, np.uint8))

    def nothing() -> None: ...

    def allocate() -> Any:
        return np.empty(SMALL_BYTES, np.uint8)

    results: list[Measurement] = []
    with ThreadPoolExecutor(1) as executor:

        def in_executor(*blocking: Callable[[], Any]) -> Call:
            async def call() -> None:
                for function in blocking:
                    await loop.run_in_executor(executor, function)

            return call

        def directly(*blocking: Callable[[], Any]) -> Call:
            async def call() -> None:
                for function in blocking:
                    function()

            return call

        async with CPUBackend() as backend:
            device = backend.devices[0].device_id

            async def allocate_and_free() -> None:
                await backend.deallocate(await backend.allocate(device, SMALL_BYTES))

            async with backend.allocation(device, SMALL_BYTES) as handle:
                operations: dict[str, tuple[Call, tuple[Callable[[], Any], ...]]] = {
                    "copy_to_device 4 KiB": (lambda: backend.copy_to_device(source.data, handle), (copy,)),
                    "synchronize": (lambda: backend.synchronize(device), (nothing,)),
                    "allocate + deallocate 4 KiB": (allocate_and_free, (allocate, nothing)),
                }
                for name, (ours, blocking) in operations.items():
                    for callers in CALLERS:
                        timed = partial(microseconds_per_call, calls=calls, callers=callers)
                        ways = (ours, in_executor(*blocking), directly(*blocking))
                        figures = await medians(rounds, *(partial(timed, way) for way in ways))
                        results.append(
                            Measurement(
                                "calls",
                                f"{name}, {callers} caller{'s' if callers > 1 else ''}",
                                "µs",
                                figures[0],
                                peer=figures[1],
                                peer_name="run_in_executor",
                                ceiling=figures[2],
                                ceiling_name="called directly",
                            )
                        )
    return results
