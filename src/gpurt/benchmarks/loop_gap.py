"""How long the event loop stands still beside large copies and allocations on the CPU backend."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from gpurt.backends.cpu_backend import CPUBackend
from gpurt.benchmarks.measurement import Call, LoopGap, Measurement, Skipped, in_executor

COPY_BYTES = 256 << 20
LARGE_BYTES = 1 << 30
TARGET_MS = 50.0


async def measure(*, quick: bool) -> list[Measurement]:
    import numpy as np

    repeats = 2 if quick else 8

    async def longest_gap(call: Call) -> float:
        async with LoopGap() as gap:
            for _ in range(repeats):
                await call()
        return gap.longest_ms

    with ThreadPoolExecutor(1) as executor:
        async with CPUBackend() as backend:
            device = backend.devices[0].device_id
            free = (await backend.get_device_memory_info(device)).available_bytes
            if free < 4 * COPY_BYTES:
                raise Skipped(f"needs {4 * COPY_BYTES:,} bytes of free memory, there are {free:,}")
            large = min(LARGE_BYTES, free // 2)
            host = np.ones(COPY_BYTES, np.uint8)
            other = np.ones(COPY_BYTES, np.uint8)

            async def allocate_large() -> None:
                async with backend.allocation(device, large):
                    pass

            async def idle() -> None:
                await asyncio.sleep(0.1)

            executor_copy = in_executor(executor, np.copyto, other, host)
            executor_bytes = in_executor(executor, other.tobytes)
            executor_allocate = in_executor(executor, lambda: np.empty(large, np.uint8).nbytes)
            async with backend.allocation(device, COPY_BYTES) as handle:
                await backend.copy_to_device(host.data, handle)
                quiet = await longest_gap(idle)
                rows: list[tuple[str, Call, Call, str]] = [
                    (
                        "copy_to_device 256 MiB",
                        lambda: backend.copy_to_device(host.data, handle),
                        executor_copy,
                        "copyto in executor",
                    ),
                    (
                        "copy_into 256 MiB",
                        lambda: backend.copy_into(handle, other.data),
                        executor_copy,
                        "copyto in executor",
                    ),
                    (
                        "copy_from_device 256 MiB",
                        lambda: backend.copy_from_device(handle),
                        executor_bytes,
                        "tobytes in executor",
                    ),
                    (
                        f"allocate {large >> 20} MiB, free",
                        allocate_large,
                        executor_allocate,
                        "np.empty in executor",
                    ),
                ]
                return [
                    Measurement(
                        "loop",
                        f"longest gap beside {name}",
                        "ms",
                        await longest_gap(ours),
                        peer=await longest_gap(peer),
                        peer_name=peer_name,
                        ceiling=quiet,
                        ceiling_name="idle loop",
                        target=TARGET_MS,
                    )
                    for name, ours, peer, peer_name in rows
                ]
