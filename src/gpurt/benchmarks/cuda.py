"""Copies between host and NVIDIA GPUs through gpurt, beside ``cudaMemcpy`` and the pinned ceiling of the same run."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gpurt.benchmarks.cuda_raw import DEVICE_TO_HOST, HOST_TO_DEVICE, RawCopies
from gpurt.benchmarks.measurement import (
    Call,
    LoopGap,
    Measurement,
    Skipped,
    gb_per_second,
    in_executor,
    medians,
    microseconds_per_call,
)
from gpurt.errors import BackendUnavailable
from gpurt.factory import create_backend

SMALL_BYTES = 4096
GAP_TARGET_MS = 50.0


async def measure(*, quick: bool) -> list[Measurement]:
    try:
        backend = await create_backend("cuda", environ={})
    except BackendUnavailable as exc:
        raise Skipped(str(exc)) from exc
    async with backend:
        results: list[Measurement] = []
        for nbytes in (64 << 20,) if quick else (256 << 20, 1 << 30):
            results += await _bulk(backend, nbytes, rounds=3 if quick else 7)
        results += await _small(backend, calls=320 if quick else 3200, rounds=3 if quick else 9)
        if len(backend.devices) > 1:
            results.append(await _peer(backend, 1 << 30, rounds=3 if quick else 7))
        return results


async def _bulk(backend: Any, nbytes: int, rounds: int) -> list[Measurement]:
    loop = asyncio.get_running_loop()
    device = backend.devices[0].device_id
    mib = nbytes >> 20
    results: list[Measurement] = []

    with ThreadPoolExecutor(1) as executor:
        raw = await loop.run_in_executor(executor, RawCopies, nbytes)
        try:
            async with backend.allocation(device, nbytes) as handle:
                host = raw.pageable.data
                rows: dict[str, tuple[Call, int]] = {
                    "copy_to_device": (lambda: backend.copy_to_device(host, handle), HOST_TO_DEVICE),
                    "copy_into": (lambda: backend.copy_into(handle, host), DEVICE_TO_HOST),
                }
                for name, (ours, kind) in rows.items():
                    peer = in_executor(executor, raw.pageable_copy, kind)
                    ceiling = in_executor(executor, raw.pinned_copy, kind)
                    async with LoopGap() as gap:
                        await ours()
                    figures = await medians(
                        rounds, *(partial(gb_per_second, nbytes, call) for call in (ours, peer, ceiling))
                    )
                    results.append(
                        Measurement(
                            "cuda",
                            f"{name}, {mib} MiB pageable",
                            "GB/s",
                            figures[0],
                            peer=figures[1],
                            peer_name="cudaMemcpy",
                            ceiling=figures[2],
                            ceiling_name="pinned",
                        )
                    )
                    results.append(
                        Measurement(
                            "cuda", f"longest gap beside {name} {mib} MiB", "ms", gap.longest_ms, target=GAP_TARGET_MS
                        )
                    )
        finally:
            await loop.run_in_executor(executor, raw.__exit__, None, None, None)
    return results


async def _small(backend: Any, calls: int, rounds: int) -> list[Measurement]:
    loop = asyncio.get_running_loop()
    device = backend.devices[0].device_id
    with ThreadPoolExecutor(1) as executor:
        raw = await loop.run_in_executor(executor, RawCopies, SMALL_BYTES)
        try:
            async with backend.allocation(device, SMALL_BYTES) as handle:
                source = raw.pageable.data

                async def directly() -> None:
                    raw.pageable_copy(HOST_TO_DEVICE)

                contenders: list[Call] = [
                    lambda: backend.copy_to_device(source, handle),
                    in_executor(executor, raw.pageable_copy, HOST_TO_DEVICE),
                    directly,
                ]
                results: list[Measurement] = []
                for callers in (1, 64):
                    figures = await medians(
                        rounds,
                        *(partial(microseconds_per_call, call, calls=calls, callers=callers) for call in contenders),
                    )
                    results.append(
                        Measurement(
                            "cuda",
                            f"copy_to_device 4 KiB, {callers} caller{'s' if callers > 1 else ''}",
                            "µs",
                            figures[0],
                            peer=figures[1],
                            peer_name="cudaMemcpy in executor",
                            ceiling=figures[2],
                            ceiling_name="cudaMemcpy, called directly",
                        )
                    )
                return results
        finally:
            await loop.run_in_executor(executor, raw.__exit__, None, None, None)


async def _peer(backend: Any, nbytes: int, rounds: int) -> Measurement:
    """Between two devices; the ceiling is the same copy without gpurt, once gpurt has enabled the path."""
    loop = asyncio.get_running_loop()
    first, second = (device.device_id for device in backend.devices[:2])

    with ThreadPoolExecutor(1) as executor:
        raw = await loop.run_in_executor(executor, RawCopies, nbytes)
        runtime = raw.runtime

        def make_target() -> int:
            runtime.setDevice(1)
            target: int = runtime.malloc(nbytes)
            runtime.setDevice(0)
            return target

        def copy(target: int) -> None:
            runtime.setDevice(0)
            runtime.memcpyPeerAsync(target, 1, raw.device, 0, nbytes, raw.stream)
            runtime.streamSynchronize(raw.stream)

        def staged(target: int) -> None:
            raw.pinned_copy(DEVICE_TO_HOST)
            runtime.memcpyAsync(target, raw.pinned, nbytes, HOST_TO_DEVICE, raw.stream)
            runtime.streamSynchronize(raw.stream)

        target = await loop.run_in_executor(executor, make_target)
        try:
            async with backend.allocation(first, nbytes) as here, backend.allocation(second, nbytes) as there:
                contenders: list[Call] = [
                    lambda: backend.copy_device_to_device(here, there, nbytes),
                    in_executor(executor, staged, target),
                    in_executor(executor, copy, target),
                ]
                await contenders[0]()  # enables the path
                figures = await medians(rounds, *(partial(gb_per_second, nbytes, call) for call in contenders))
        finally:
            await loop.run_in_executor(executor, runtime.free, target)
            await loop.run_in_executor(executor, raw.__exit__, None, None, None)
    return Measurement(
        "cuda",
        f"copy_device_to_device, {nbytes >> 20} MiB, two devices",
        "GB/s",
        figures[0],
        peer=figures[1],
        peer_name="through pinned memory",
        ceiling=figures[2],
        ceiling_name="cudaMemcpyPeerAsync",
    )
