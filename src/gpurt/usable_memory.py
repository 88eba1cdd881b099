"""How many bytes of a device can really be used: its figures, the host's limits, a reserve, and what people ask for.

======================  ======================================================================================
variable                meaning
======================  ======================================================================================
GPURT_MEMORY_LIMIT      at most so much per device: ``20GiB``; for some devices only: ``cuda:0=40GiB,20GiB``
GPURT_MEMORY_RESERVE    leave so much free, over the default of :data:`RESERVES`; written the same way
======================  ======================================================================================

A device is named by its id (``cuda:0``), by its stable id (``GPU-1a2b…``), or by its backend (``cuda``); the more exact
name wins, and a size alone is for all others. A size is a number with ``B KB MB GB TB`` (powers of 1000) or ``KiB MiB
GiB TiB``, ``K M G T`` (of 1024); without a unit it is bytes. A limit never raises what the device reports, unless it
ends in ``!``: ``cuda:0=40GiB!`` is believed in place of the device's own figure of free memory, up to its capacity.

Everything here is pure and in bytes. What nobody knows is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from gpurt.errors import GPUError
from gpurt.printable import quoted
from gpurt.sources.host import HostMemory
from gpurt.types import DeviceKind, GPUDevice

LIMIT_VARIABLE: Final = "GPURT_MEMORY_LIMIT"
RESERVE_VARIABLE: Final = "GPURT_MEMORY_RESERVE"

RESERVES: Final[Mapping[DeviceKind, int]] = {
    DeviceKind.GPU: 512 << 20,
    DeviceKind.INTEGRATED_GPU: 512 << 20,
    DeviceKind.ACCELERATOR: 512 << 20,
}
"""Left free by default: what a process's context and its libraries' own buffers take on a GPU before the first
allocation. A decision of ours, between the 457 MiB that Ollama leaves and the 1 GiB of llama.cpp. The host's budget
(:func:`gpurt.sources.host.memory_budget`) needs none: the kernel keeps its own reserve out of it. Simulated devices
have no such context."""

PROFILE: Final = "profile"
"""Source of the usable memory of simulated devices: what the simulation has left."""

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?b?)", re.ASCII | re.I)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes that somebody asked for; ``forced`` stands above what the device reports."""

    size_bytes: int
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Amounts:
    """One amount per device."""

    default: Amount | None = None
    by_name: Mapping[str, Amount] = field(default_factory=dict[str, Amount])

    def of(self, device: GPUDevice) -> Amount | None:
        for name in (device.device_id, device.stable_id, device.backend):
            amount = self.by_name.get(name.lower())
            if amount is not None:
                return amount
        return self.default


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What the environment says about memory."""

    limit: Amounts = Amounts()
    reserve: Amounts = Amounts()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> MemorySettings:
        """Read and check both variables; empty ones count as unset.

        Raises:
            GPUError: a value that cannot be understood, and how it is written.
        """
        return cls(
            limit=parse_amounts(environ.get(LIMIT_VARIABLE, ""), LIMIT_VARIABLE, may_force=True),
            reserve=parse_amounts(environ.get(RESERVE_VARIABLE, ""), RESERVE_VARIABLE),
        )

    def reserve_bytes(self, device: GPUDevice) -> int:
        amount = self.reserve.of(device)
        if amount is not None:
            return amount.size_bytes
        return 0 if device.simulated else RESERVES.get(device.kind, 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known about a device's memory before any policy. None is "not told".

    Attributes:
        total_bytes, free_bytes: as the device's own driver reports them.
        unified: the device works in the host's memory.
        shared_total_bytes, shared_free_bytes: host memory that a device with a part of its own may use besides (GTT of
            AMD's APUs). Of a discrete card it is not counted: it is reached over the bus.
        budget_bytes: the most that the platform lets one device use (Metal's recommended working set).
    """

    total_bytes: int | None
    free_bytes: int | None = None
    unified: bool = False
    shared_total_bytes: int | None = None
    shared_free_bytes: int | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class UsableMemory:
    """What can be used, and who says so.

    Attributes:
        usable_bytes: None when no source tells, and then ``source`` says what is missing.
        source: what decided: ``driver`` (free memory by the device's driver), ``meminfo cgroup psutil`` (the host),
            ``budget`` (the platform's), ``limit`` (asked for), or ``unknown: …``.
        capacity_bytes: the most that could ever be usable.
        reported_total_bytes: the driver's own total, where it is not the capacity.
        pool: devices with equal pools share this memory.
    """

    usable_bytes: int | None
    source: str
    capacity_bytes: int | None
    reserve_bytes: int
    pool: str | None = None
    reported_total_bytes: int | None = None


def usable_memory(
    figures: Figures,
    *,
    host: HostMemory | None = None,
    host_pool: str | None = None,
    limit: Amount | None = None,
    reserve_bytes: int = 0,
) -> UsableMemory:
    """What can be allocated on a device.

    Args:
        host: the host's budget; needed for unified memory.
        host_pool: the pool id of the host's memory, ``host:<fingerprint>``.
        reserve_bytes: taken off what is free, never below 0.
    """
    capacity, free, source, pool, reported = _measured(figures, host, host_pool)
    budget = figures.budget_bytes
    if budget is not None:
        capacity = budget if capacity is None else min(capacity, budget)
        if free is not None and budget < free:
            free, source = budget, "budget"
    usable = None if free is None else max(0, free - reserve_bytes)
    if limit is not None:
        wanted = limit.size_bytes if capacity is None else min(limit.size_bytes, capacity)
        if usable is None or limit.forced or wanted < usable:
            usable, source = wanted, "limit"
    return UsableMemory(usable, source, capacity, reserve_bytes, pool, reported)


def _measured(
    figures: Figures, host: HostMemory | None, host_pool: str | None
) -> tuple[int | None, int | None, str, str | None, int | None]:
    """Capacity, free bytes, who says so, pool, and the driver's own total where it is another."""
    total, free = figures.total_bytes, figures.free_bytes
    shared = figures.shared_total_bytes
    if not figures.unified or (shared is not None and total is not None and total >= shared):
        # A part of memory carved out for a GPU by the firmware is like a card's own: the host cannot use it.
        return total, free, "driver" if free is not None else "unknown: free memory is not told", None, None
    if host is None:
        return total, None, "unknown: the host's memory is not told", host_pool, None
    if shared is None:
        # What such drivers report as free leaves out reclaimable page cache, or is the host's figure of some moment;
        # what they report as total may be a part only.
        reported = total if total != host.total_bytes else None
        return host.total_bytes, host.usable_bytes, host.source, host_pool, reported
    shared_free = shared if figures.shared_free_bytes is None else figures.shared_free_bytes
    source = "driver" if shared_free <= host.usable_bytes else host.source
    usable = (free or 0) + min(shared_free, host.usable_bytes)
    return (total or 0) + shared, usable, source, host_pool, total


def with_usable_memory(
    device: GPUDevice,
    settings: MemorySettings,
    *,
    host: HostMemory | None = None,
    host_pool: str | None = None,
    figures: Figures | None = None,
) -> GPUDevice:
    """``device`` with its usable memory, source and pool filled in; other fields stay.

    Args:
        figures: default: the record's own total, free memory and ``unified_memory``.
    """
    if device.simulated:
        # The host's memory has nothing to do with it, also where the device simulates unified memory.
        figures, host = Figures(device.memory_bytes, device.memory_available), None
    elif figures is None:
        unified = device.unified_memory or (device.kind is DeviceKind.CPU and host is not None)
        figures = Figures(device.memory_bytes, device.memory_available, unified)
    usable = usable_memory(
        figures,
        host=host,
        host_pool=host_pool,
        limit=settings.limit.of(device),
        reserve_bytes=settings.reserve_bytes(device),
    )
    return device.model_copy(
        update={
            "memory_usable_bytes": usable.usable_bytes,
            "memory_usable_source": PROFILE if device.simulated and usable.source == "driver" else usable.source,
            "memory_pool_id": usable.pool or device.memory_pool_id,
        }
    )


def total_usable_bytes(devices: Iterable[GPUDevice]) -> int:
    """What all these devices of one host can take together: a shared pool counts once, as its best member reports it.
    Devices that do not tell count nothing."""
    pools: dict[str, int] = {}
    alone = 0
    for device in devices:
        usable = device.memory_usable_bytes or 0
        if device.memory_pool_id is None:
            alone += usable
        else:
            pools[device.memory_pool_id] = max(pools.get(device.memory_pool_id, 0), usable)
    return alone + sum(pools.values())


def parse_amounts(text: str, variable: str, *, may_force: bool = False) -> Amounts:
    """``cuda:0=40GiB,20GiB`` as amounts; names in lower case.

    Raises:
        GPUError: with the part that cannot be understood.
    """
    default: Amount | None = None
    by_name: dict[str, Amount] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = item.rpartition("=")
        name, size = name.strip().lower(), size.strip()
        forced = size.endswith("!")
        amount = Amount(_size(size.removesuffix("!"), item, variable), forced)
        if forced and not may_force:
            raise _bad(variable, item, "'!' means nothing here")
        if bool(equals) != bool(name):
            raise _bad(variable, item, "the device's name is missing")
        if (name in by_name) if name else (default is not None):
            raise _bad(variable, item, "there is a second size for the same devices")
        if name:
            by_name[name] = amount
        else:
            default = amount
    return Amounts(default, by_name)


def parse_size(text: str) -> int:
    """``40GiB`` in bytes, rounded down; see the module's text for the units.

    Raises:
        ValueError: not a size, or more than 2^63 bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{quoted(text)} is not a size")
    number, unit = match[1], match[2].lower()
    # "ib" is no unit, and neither is a lone "i".
    if unit in ("i", "ib") or (unit.endswith("i")):
        raise ValueError(f"{quoted(text)} has no unit that is known")
    base = 1000 if unit.endswith("b") and not unit.endswith("ib") and unit != "b" else 1024
    size = int(Fraction(number) * base ** _POWERS[unit[:1] if unit != "b" else ""])
    if size >= 1 << 63:
        raise ValueError(f"{quoted(text)} is more than any machine has")
    return size


def _size(size: str, item: str, variable: str) -> int:
    try:
        return parse_size(size)
    except ValueError as exc:
        raise _bad(variable, item, str(exc)) from exc


def _bad(variable: str, item: str, why: str) -> GPUError:
    return GPUError(
        f"{variable}: cannot understand {quoted(item)}: {why}",
        hint="write a size such as 20GiB, or name devices: cuda:0=40GiB,20GiB",
    )
