"""``GPURT_MEMORY_LIMIT`` and ``GPURT_MEMORY_RESERVE`` on their way to the backends that are made."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gpurt.backend import GPUBackend
from gpurt.runtime.protocols import LimitsMemory, MemoryLimit
from gpurt.types import GPUDevice
from gpurt.usable_memory import LIMIT_VARIABLE, Amounts, MemorySettings

_log = logging.getLogger("gpurt.factory")


def memory_limit(environ: Mapping[str, str]) -> MemoryLimit | None:
    """What the two variables allow on each device, or None where they say nothing.

    Raises:
        GPUError: it cannot be understood.
    """
    return limit_of(MemorySettings.from_environ(environ))


def limit_of(settings: MemorySettings) -> MemoryLimit | None:
    """What ``settings`` allow on each device, or None where they set no limit."""
    limits, reserves = settings.limit, settings.reserve
    if limits == reserves == Amounts():
        return None

    def of(device: GPUDevice) -> int | None:
        limit, reserve = limits.of(device), reserves.of(device)
        free = device.memory_bytes if device.memory_available is None else device.memory_available
        allowed = None if limit is None else limit.size_bytes
        if reserve is None or free is None:
            return allowed
        left = max(0, free - reserve.size_bytes)
        return left if allowed is None else min(allowed, left)

    return of


def limit_memory(backend: GPUBackend, limit: MemoryLimit | None) -> None:
    """Set ``limit`` on a backend that is not initialised yet; a backend that keeps no accounts is only warned of."""
    if limit is None:
        return
    if isinstance(backend, LimitsMemory):
        backend.limit_memory(limit)
    else:
        _log.warning("%s does not reach backend %s, which keeps no accounts", LIMIT_VARIABLE, backend.name)
