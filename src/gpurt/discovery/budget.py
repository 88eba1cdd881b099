"""Usable memory of the devices of one host: what their own drivers say, within the host's limits and the operator's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpurt.runtime.lane import off_loop
from gpurt.sources.host_identity import host_fingerprint
from gpurt.sources.host_memory import HostMemory, memory_budget
from gpurt.types import DeviceKind, GPUDevice
from gpurt.usable_memory import Figures, MemorySettings, with_usable_memory

_PLATFORM_BUDGETS: Final = frozenset({"metal", "sysctl", "budget"})
"""Sources of a usable size that is the platform's bound for one device, whatever is free at the moment."""


class MemoryBudget:
    """
    Args:
        root: where ``/proc``, ``/sys`` and ``/etc`` are found.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._pool: str | None = None

    async def apply(self, devices: Sequence[GPUDevice], environ: Mapping[str, str]) -> tuple[GPUDevice, ...]:
        """``devices`` with what of their memory can be used now. Of simulated ones the host's memory says nothing.

        Raises:
            GPUError: GPURT_MEMORY_LIMIT or GPURT_MEMORY_RESERVE cannot be understood.
        """
        settings = MemorySettings.from_environ(environ)
        real = [device for device in devices if not device.simulated]
        if not real:
            return tuple(with_own_limit(device, settings) for device in devices)
        own = tuple(device.memory_bytes for device in real if device.memory_bytes and _has_own_memory(device))
        host = await off_loop("memory", lambda: self._read(own))
        return tuple(
            with_own_limit(device, settings)
            if device.simulated
            else budgeted(device, settings, host, self._pool or "host")
            for device in devices
        )

    def _read(self, own: tuple[int, ...]) -> HostMemory:
        if self._pool is None:
            self._pool = f"host:{host_fingerprint(self._root)}"
        return memory_budget(self._root, device_memory_bytes=own)


def budgeted(device: GPUDevice, settings: MemorySettings, host: HostMemory, pool: str) -> GPUDevice:
    """One real device with its usable memory, its source and its pool. Pure.

    No more is usable than is free, but for what ``!`` forces: where the device's own figure is older than the host's,
    or leaves out what the kernel would reclaim, the host's counts.
    """
    if device.kind is DeviceKind.CPU and device.backend_name != "numpy":
        # Another library's record of the processor, or of another one: its figures are its own.
        after = with_own_limit(device, settings)
    else:
        after = with_own_limit(device, settings, host=host, host_pool=pool, figures=_figures(device))
    usable, free = after.memory_usable_bytes, after.memory_available
    limit = settings.limit.of(device)
    if usable is None or free is None or usable <= free or (limit is not None and limit.forced):
        return after
    if after.memory_pool_id == pool:
        most = host.usable_bytes if device.memory_bytes is None else min(host.usable_bytes, device.memory_bytes)
        return after.model_copy(update={"memory_available": max(usable, most)})
    return after.model_copy(update={"memory_usable_bytes": free})


def with_own_limit(
    device: GPUDevice,
    settings: MemorySettings,
    *,
    host: HostMemory | None = None,
    host_pool: str | None = None,
    figures: Figures | None = None,
) -> GPUDevice:
    """As :func:`with_usable_memory`. A limit that its backend was opened with stays: no more than that can be
    allocated, whatever is free."""
    after = with_usable_memory(device, settings, host=host, host_pool=host_pool, figures=figures)
    own = device.memory_usable_bytes if device.memory_usable_source == "limit" else None
    if own is None or (after.memory_usable_bytes is not None and after.memory_usable_bytes <= own):
        return after
    return after.model_copy(update={"memory_usable_bytes": own, "memory_usable_source": "limit"})


def _has_own_memory(device: GPUDevice) -> bool:
    return not device.unified_memory and device.kind in (DeviceKind.GPU, DeviceKind.ACCELERATOR)


def _figures(device: GPUDevice) -> Figures | None:
    """What a record tells beyond total and free memory; None where that is all."""
    total, free = device.memory_bytes, device.memory_available
    if device.kind is DeviceKind.CPU:
        part = device.identity is not None and device.identity.partition is not None
        return Figures(total, free, unified=True, budget_bytes=total if part else None)
    if not device.unified_memory:
        return None
    if device.vendor == "amd" and total is not None:
        # GTT: the host's memory, and of it no more than the graphics driver maps for the GPU.
        return Figures(None, None, unified=True, shared_total_bytes=total, shared_free_bytes=free)
    if device.memory_usable_source in _PLATFORM_BUDGETS:
        return Figures(total, free, unified=True, budget_bytes=device.memory_usable_bytes)
    return None
