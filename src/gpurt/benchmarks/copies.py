"""How fast the CPU backend moves bytes, beside ``numpy.copyto`` on memory that is already there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gpurt.backends.cpu_backend import CPUBackend
from gpurt.benchmarks.measurement import Call, Measurement, gb_per_second, in_executor, medians


async def measure(*, quick: bool) -> list[Measurement]:
    import numpy as np

    nbytes, rounds = (64 << 20, 3) if quick else (256 << 20, 7)
    mib = nbytes >> 20
    host = np.ones(nbytes, np.uint8)
    other = np.ones(nbytes, np.uint8)

    async def direct_copy() -> None:
        np.copyto(other, host)

    with ThreadPoolExecutor(1) as executor:
        executor_copy = in_executor(executor, np.copyto, other, host)
        executor_bytes = in_executor(executor, other.tobytes)
        async with CPUBackend(devices=2) as backend:
            first, second = (device.device_id for device in backend.devices)
            async with backend.allocation(first, nbytes) as handle, backend.allocation(second, nbytes) as there:
                await backend.copy_to_device(host.data, handle)  # touch the pages once
                await backend.copy_to_device(host.data, there)
                rows: dict[str, tuple[Call, Call, str]] = {
                    "copy_to_device": (
                        lambda: backend.copy_to_device(host.data, handle),
                        executor_copy,
                        "copyto in executor",
                    ),
                    "copy_into, reused memory": (
                        lambda: backend.copy_into(handle, other.data),
                        executor_copy,
                        "copyto in executor",
                    ),
                    "copy_from_device, new bytes": (
                        lambda: backend.copy_from_device(handle),
                        executor_bytes,
                        "tobytes in executor",
                    ),
                    "copy_device_to_device": (
                        lambda: backend.copy_device_to_device(handle, there, nbytes),
                        executor_copy,
                        "copyto in executor",
                    ),
                }
                results: list[Measurement] = []
                for name, (ours, peer, peer_name) in rows.items():
                    figures = await medians(
                        rounds, *(partial(gb_per_second, nbytes, call) for call in (ours, peer, direct_copy))
                    )
                    results.append(
                        Measurement(
                            "copies",
                            f"{name}, {mib} MiB",
                            "GB/s",
                            figures[0],
                            peer=figures[1],
                            peer_name=peer_name,
                            ceiling=figures[2],
                            ceiling_name="copyto, one thread",
                        )
                    )
    return results
