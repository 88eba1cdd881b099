"""How much memory of each device can be used, and who says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpurt.discovery.report import shown_id
from gpurt.doctor.explanation import Explanation, gib
from gpurt.errors import GPUError
from gpurt.types import GPUDevice
from gpurt.usable_memory import LIMIT_VARIABLE, RESERVE_VARIABLE, MemorySettings

_SOURCES: Final[Mapping[str, str]] = {
    "driver": "free memory as the device's driver tells it",
    "meminfo": "the host's free memory (/proc/meminfo)",
    "cgroup": "the memory limit of this process's control group",
    "psutil": "the host's free memory as the system tells it",
    "budget": "what the platform lets one process use",
    "metal": "the working set that Metal recommends for one process",
    "sysctl": "the working set that an administrator has set (iogpu.wired_limit_mb)",
    "limit": f"a limit that was asked for ({LIMIT_VARIABLE})",
    "profile": "the profile of a simulated device",
}


def explain_memory(
    devices: Sequence[GPUDevice], environ: Mapping[str, str], *, recorded: bool = False
) -> Iterator[Explanation]:
    """A sentence for each device, and one for each memory that several of them share."""
    try:
        settings = MemorySettings.from_environ(environ)
    except GPUError as exc:
        yield Explanation("memory", LIMIT_VARIABLE, "not understood", f"{exc.message}.", exc.hint)
        settings = MemorySettings()
    pools: defaultdict[str, list[str]] = defaultdict(list)
    for device in devices:
        yield _memory(device, settings, environ, shown_id(device, recorded))
        if device.memory_pool_id is not None:
            pools[device.memory_pool_id].append(shown_id(device, recorded))
    for pool, ids in pools.items():
        if len(ids) > 1:
            yield Explanation("memory", pool, "shared", f"{', '.join(ids)} share one memory: it counts once.")


def _memory(device: GPUDevice, settings: MemorySettings, environ: Mapping[str, str], shown: str) -> Explanation:
    total, free, usable = device.memory_bytes, device.memory_available, device.memory_usable_bytes
    if total is None:
        text = f"How much memory {shown} has is unknown: no source tells its total, and none is guessed."
        return Explanation("memory", device.device_id, "unknown", text, "see what is said of its backend")
    unified = " (shared with the host)" if device.unified_memory else ""
    if usable is None:
        told = f"{gib(free)} of it are free" if free is not None else "how much of it is free no source tells"
        why = device.memory_usable_source or (
            "nothing was opened on it" if not device.usable else "no source tells more"
        )
        text = f"{shown} has {gib(total)} of memory{unified}; {told}, and what can be used is unknown ({why})."
        return Explanation("memory", device.device_id, "unknown", text)
    source = device.memory_usable_source or "driver"
    by = _SOURCES.get(source, source)
    parts = [f"{shown} has {gib(usable)} of its {gib(total)} of memory{unified} to use, decided by {by}"]
    limit, status = settings.limit.of(device), "known"
    if source in ("limit", "cgroup", "budget", "metal", "sysctl"):
        status = "limited"
    if limit is not None:
        force = "in force" if usable <= limit.size_bytes else "not reached" if source == "limit" else "not applied here"
        parts.append(f"the limit of {gib(limit.size_bytes)} ({LIMIT_VARIABLE}) is {force}")
    else:
        parts.append(f"no limit is set ({LIMIT_VARIABLE})")
    reserve = settings.reserve_bytes(device)
    if reserve:
        asked = (
            RESERVE_VARIABLE if settings.reserve.of(device) is not None else f"the default, {RESERVE_VARIABLE} sets it"
        )
        kept = free is not None and usable <= max(0, free - reserve)
        parts.append(f"a reserve of {gib(reserve)} ({asked}) is {'kept free' if kept else 'not taken off'}")
    todo = None
    if source == "limit":
        todo = f"to allow more, change or unset {LIMIT_VARIABLE}={environ.get(LIMIT_VARIABLE, '')}"
    elif source == "cgroup":
        todo = "to allow more, raise the container's or service's memory limit (docker run --memory, MemoryMax=)"
    return Explanation("memory", device.device_id, status, f"{'; '.join(parts)}.", todo)
