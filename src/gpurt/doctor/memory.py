"""How much memory of each device can be used, and who says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpurt.discovery.report import is_out_of_reach, shown_id, size_text
from gpurt.doctor.explanation import Explanation
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
    """A sentence for each device, one for each memory that several of them share, and one for each amount that was
    asked for a device that is not here."""
    try:
        settings = MemorySettings.from_environ(environ)
    except GPUError as exc:
        variable = RESERVE_VARIABLE if exc.message.startswith(RESERVE_VARIABLE) else LIMIT_VARIABLE
        yield Explanation("memory", variable, "not understood", f"{exc.message}.", exc.hint)
        settings = MemorySettings()
    pools: defaultdict[str, list[str]] = defaultdict(list)
    for device in devices:
        yield _memory(device, settings, environ, shown_id(device, recorded))
        if device.memory_pool_id is not None:
            pools[device.memory_pool_id].append(shown_id(device, recorded))
    for pool, ids in pools.items():
        if len(ids) > 1:
            yield Explanation("memory", pool, "shared", f"{', '.join(ids)} share one memory: it counts once.")
    names = {name.lower() for device in devices for name in (device.device_id, device.stable_id, device.backend)}
    for variable, what, amounts in (
        (LIMIT_VARIABLE, "limit", settings.limit),
        (RESERVE_VARIABLE, "reserve", settings.reserve),
    ):
        for name, amount in amounts.by_name.items():
            if name not in names:
                text = f"{variable} sets a {what} of {size_text(amount.size_bytes)} for {name}, which is not here."
                todo = f"name one of {', '.join(device.device_id for device in devices) or 'the devices'} in it"
                yield Explanation("memory", variable, "no effect", text, todo)


def _memory(device: GPUDevice, settings: MemorySettings, environ: Mapping[str, str], shown: str) -> Explanation:
    total, free, usable = device.memory_bytes, device.memory_available, device.memory_usable_bytes
    if total is None:
        text = f"How much memory {shown} has is unknown: no source tells its total, and none is guessed."
        return Explanation("memory", device.device_id, "unknown", text, "see what is said of its backend")
    unified = " (shared with the host)" if device.unified_memory else ""
    if is_out_of_reach(device):
        before = "" if usable is None else f"; when it last answered, {size_text(usable)} of it could be used"
        text = (
            f"{shown} has {size_text(total)} of memory{unified}; how much of it can be used is unknown, because "
            f"it does not answer now{before}."
        )
        return Explanation("memory", device.device_id, "unknown", text)
    if usable is None:
        told = f"{size_text(free)} of it are free" if free is not None else "how much of it is free no source tells"
        why = (device.memory_usable_source or "").removeprefix("unknown: ") or (
            "nothing was opened on it" if not device.usable else "no source tells more"
        )
        text = f"{shown} has {size_text(total)} of memory{unified}; {told}, and what can be used is unknown ({why})."
        return Explanation("memory", device.device_id, "unknown", text)
    source = device.memory_usable_source or "driver"
    by = _SOURCES.get(source, source)
    reserve = settings.reserve_bytes(device)
    asked = settings.reserve.of(device) is not None
    kept = free is not None and usable <= max(0, free - reserve)
    decides = bool(reserve) and asked and kept and source != "limit"
    if decides:
        by = f"the reserve of {size_text(reserve)} that was asked for ({RESERVE_VARIABLE}), taken off {by}"
    has = "has" if device.usable else "cannot be used now, and would have"
    parts = [f"{shown} {has} {size_text(usable)} of its {size_text(total)} of memory{unified} to use, decided by {by}"]
    limit = settings.limit.of(device)
    status = "limited" if decides or source in ("limit", "cgroup", "budget", "metal", "sysctl") else "known"
    if limit is not None:
        force = "in force" if usable <= limit.size_bytes else "not reached" if source == "limit" else "not applied here"
        parts.append(f"the limit of {size_text(limit.size_bytes)} ({LIMIT_VARIABLE}) is {force}")
    else:
        parts.append(f"no limit is set{' for it' if settings.limit.by_name else ''} ({LIMIT_VARIABLE})")
    if reserve and not decides:
        by = RESERVE_VARIABLE if asked else f"the default, {RESERVE_VARIABLE} sets it"
        parts.append(f"a reserve of {size_text(reserve)} ({by}) is {'kept free' if kept else 'not taken off'}")
    todo = None
    if source == "limit":
        todo = f"to allow more, change or unset {LIMIT_VARIABLE}={environ.get(LIMIT_VARIABLE, '')}"
    elif decides:
        todo = f"to allow more, change or unset {RESERVE_VARIABLE}={environ.get(RESERVE_VARIABLE, '')}"
    elif source == "cgroup":
        todo = "to allow more, raise the container's or service's memory limit (docker run --memory, MemoryMax=)"
    return Explanation("memory", device.device_id, status, f"{'; '.join(parts)}.", todo)
