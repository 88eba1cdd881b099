"""Measuring the way from one device to another, through the backend's public calls only."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import permutations
from statistics import median
from typing import Final

from gpurt.backend import GPUBackend
from gpurt.errors import BackendClosed, DeviceNotFound, GPUError, OutOfRange, TransferFailed, Unsupported, WrongLoop
from gpurt.links.keep import keep_links
from gpurt.links.way import peer_access, way_between
from gpurt.registry.records import Link, LinkType, between, utc_now
from gpurt.runtime.handles import brief, whole_number
from gpurt.runtime.lane import off_loop
from gpurt.types import GPUDevice, MemoryHandle

MAX_BYTES: Final = 128 << 20
"""Of each large copy, and taken on either device."""
SHARE: Final = 4
"""At most a quarter of what is free is taken of a device."""
SMALL_BYTES: Final = 4096
ROUNDS: Final = 5
ROUND_S: Final = 0.02
QUEUED: Final = 8
"""A round is as many large copies in a row as take ROUND_S, at most so many, so that the time between two of them,
and the way back to the event loop, do not count as the link's: 128 MiB take 0.3 ms at 400 GB/s."""
SMALL_ROUNDS: Final = 50
PATTERN_BYTES: Final = 1 << 20
CHECK_BYTES: Final = 64 << 10

_log = logging.getLogger("gpurt.links")


async def measure_links(
    backend: GPUBackend,
    device_ids: Sequence[str] | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    keep: bool = True,
    registry_path: str | os.PathLike[str] | None = None,
) -> tuple[Link, ...]:
    """Measure every ordered pair of different devices, one after the other, and keep that in the registry file, but for
    devices without a stable identity.

    A pair that cannot be measured (no memory left, device lost, wrong bytes) is in the result with its ``failure``,
    and costs no other; the file keeps its earlier figures, if it has any, beside that failure. Nothing else should use
    the devices meanwhile: it would be measured, too. Takes about 0.2 s a pair, and up to 1 s where copies go through
    the host.

    Args:
        backend: initialised.
        device_ids: only these; None is every usable device.
        max_bytes: of each large copy, and at most taken on either device.
        keep: False writes no file. A file that cannot be written is logged and no error.
        registry_path: the registry file; None is the one in the user's state directory.

    Raises:
        DeviceNotFound, BackendClosed, WrongLoop. OutOfRange: no backend, or ``max_bytes`` is no size.
    """
    _check("measure_links", backend, max_bytes)
    devices = await _devices(backend, device_ids)
    links: list[Link] = []
    for src, dst in permutations(devices, 2):
        try:
            link = await measure_link(backend, src.device_id, dst.device_id, max_bytes=max_bytes)
        except (BackendClosed, WrongLoop, DeviceNotFound):
            raise
        except GPUError as exc:
            _log.warning("%s to %s is not measured: %s", src.device_id, dst.device_id, exc)
            link = _link(
                src, dst, link_type=LinkType.UNKNOWN, link_reason="not measured", failure=str(exc), failed_at=utc_now()
            )
        links.append(link)
    if keep:
        # Where a device is known by its position only, the next start may mean another by it.
        lasting = {device.stable_id for device in devices if device.identity is not None and device.identity.stable}
        await keep_links(between(links, lasting), registry_path)
    return tuple(links)


async def measure_link(
    backend: GPUBackend,
    src_device_id: str,
    dst_device_id: str,
    *,
    max_bytes: int = MAX_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Measure the way from one device to another, or within one; nothing is kept (:func:`~gpurt.links.keep_links`).

    What arrives is compared with what was sent, so a link that has a figure delivers.

    Args:
        max_bytes: of each large copy, and at most taken on either device; less where a quarter of what is free is less.
            Rounded down to a multiple of 4,096.
        clock: seconds.

    Raises:
        TransferFailed: a copy failed, or other bytes arrived. OutOfMemory, DeviceLost, DeviceNotFound, BackendClosed.
        OutOfRange: no backend, or ``max_bytes`` is less than 4,096.
    """
    _check("measure_link", backend, max_bytes)
    src, dst = await _device(backend, src_device_id), await _device(backend, dst_device_id)
    nbytes = min(max_bytes, await _affordable(backend, src_device_id), await _affordable(backend, dst_device_id))
    nbytes = max(nbytes // SMALL_BYTES, 1) * SMALL_BYTES
    async with backend.allocation(src_device_id, nbytes) as source, backend.allocation(dst_device_id, nbytes) as target:
        pattern = await _fill(backend, source)
        bandwidth_gbps = await _bandwidth(backend, source, target, clock)
        latency_us = await _latency(backend, source, target, clock)
        await _compare(backend, source, target, pattern)
    # Only now: the first copy finds out.
    peers = peer_access(backend, src_device_id, dst_device_id)
    way = await off_loop("links", lambda: way_between(src, dst, peers))
    return _link(src, dst, **asdict(way), bandwidth_gbps=bandwidth_gbps, latency_us=latency_us, bytes_measured=nbytes)


def _check(operation: str, backend: object, max_bytes: object) -> None:
    if not isinstance(backend, GPUBackend):
        raise OutOfRange(
            f"backend must be an initialised backend, not {type(backend).__name__}",
            operation=operation,
        )
    if whole_number(max_bytes, "max_bytes") < SMALL_BYTES:
        raise OutOfRange(f"max_bytes must be {SMALL_BYTES:,} at least, not {brief(max_bytes)}", operation=operation)


async def _devices(backend: GPUBackend, device_ids: Sequence[str] | None) -> list[GPUDevice]:
    if device_ids is None:
        return [device for device in await backend.list_devices() if device.usable]
    return [await _device(backend, device_id) for device_id in dict.fromkeys(device_ids)]


async def _device(backend: GPUBackend, device_id: str) -> GPUDevice:
    device = await backend.get_device(device_id)
    if device is None:
        known = ", ".join(each.device_id for each in backend.devices)
        raise DeviceNotFound(
            f"no such device; there are {known or 'none'}",
            backend=backend.name,
            device_id=device_id,
            operation="measure_link",
        )
    return device


async def _affordable(backend: GPUBackend, device_id: str) -> int:
    """Bytes that may be taken."""
    try:
        memory = await backend.get_device_memory_info(device_id)
    except Unsupported:
        return PATTERN_BYTES
    return memory.available_bytes // SHARE


async def _fill(backend: GPUBackend, source: MemoryHandle) -> bytes:
    """Random bytes, repeated to the end by the device itself. Nothing that an earlier measurement left is like them,
    and no memory that was never touched is measured, which a host reads faster than it can."""
    pattern = os.urandom(min(PATTERN_BYTES, source.size_bytes))
    await backend.copy_to_device(pattern, source)
    done = len(pattern)
    while done < source.size_bytes:
        more = min(done, source.size_bytes - done)
        await backend.copy_device_to_device(source, source, more, dst_offset_bytes=done)
        done += more
    return pattern


async def _bandwidth(
    backend: GPUBackend, source: MemoryHandle, target: MemoryHandle, clock: Callable[[], float]
) -> float:
    nbytes = source.size_bytes

    async def seconds(copies: int) -> float:
        started = clock()
        await asyncio.gather(*(backend.copy_device_to_device(source, target, nbytes) for _ in range(copies)))
        return max(clock() - started, 1e-9) / copies

    await seconds(1)  # makes contexts, enables access, touches memory
    queued = max(1, min(QUEUED, int(ROUND_S / await seconds(1))))
    return nbytes / median([await seconds(queued) for _ in range(ROUNDS)]) / 1e9


async def _latency(
    backend: GPUBackend, source: MemoryHandle, target: MemoryHandle, clock: Callable[[], float]
) -> float:
    figures: list[float] = []
    for _ in range(SMALL_ROUNDS):
        started = clock()
        await backend.copy_device_to_device(source, target, SMALL_BYTES)
        figures.append(max(clock() - started, 1e-9))
    return median(figures) * 1e6


async def _compare(backend: GPUBackend, source: MemoryHandle, target: MemoryHandle, pattern: bytes) -> None:
    """The begin, the middle and the end of what arrived."""
    window = min(CHECK_BYTES, len(pattern))
    for start in dict.fromkeys((0, (target.size_bytes - window) // 2, target.size_bytes - window)):
        shift = start % len(pattern)
        sent = (pattern + pattern[:window])[shift : shift + window]
        if await backend.copy_from_device(target, start, window) != sent:
            raise TransferFailed(
                f"other bytes arrive than were sent, in {window} bytes at offset {start}",
                backend=backend.name,
                device_id=target.device_id,
                operation=f"measure_link({source.device_id}, {target.device_id})",
                hint="switch the IOMMU or PCIe ACS off, or do without direct access between these devices",
            )


def _link(src: GPUDevice, dst: GPUDevice, **fields: object) -> Link:
    known = {
        "src": src.stable_id,
        "dst": dst.stable_id,
        "src_device_id": src.device_id,
        "dst_device_id": dst.device_id,
        "driver_version": dst.driver_version if src.driver_version is None else src.driver_version,
        "measured_at": utc_now(),
        "simulated": src.simulated or dst.simulated,
    }
    return Link.model_validate(known | fields)
