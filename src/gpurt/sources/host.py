"""What the operating system tells about this host: memory that may really be used, CPUs, identity.

Every reader takes ``root``, the directory under which ``proc``, ``sys`` and ``etc`` lie. Where there is no
``/proc`` (macOS, Windows) psutil answers instead. All functions read files and block; none caches.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path("/")

_CPU_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon", "CentaurHauls": "zhaoxin"}
# Linux arch/arm64/include/asm/cputype.h
_ARM_IMPLEMENTERS = {
    0x41: "arm",
    0x42: "broadcom",
    0x46: "fujitsu",
    0x48: "hisilicon",
    0x4E: "nvidia",
    0x51: "qualcomm",
    0x53: "samsung",
    0x61: "apple",
    0xC0: "ampere",
}
# Widest first: flag or feature of /proc/cpuinfo, and our name for it.
_INSTRUCTION_SETS = (
    ("avx512f", "avx512"),
    ("avx2", "avx2"),
    ("avx", "avx"),
    ("sse4_2", "sse4.2"),
    ("sve2", "sve2"),
    ("sve", "sve"),
    ("asimd", "neon"),
    ("neon", "neon"),
)

# Kernel drivers that read the processor itself, not its surroundings.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of this host as this process may use it, in bytes.

    Attributes:
        total_bytes: the smallest of physical memory, the limits of this process's cgroups, and the given limit.
        available_bytes: free at this moment, reclaimable page cache counted as free, before the given limit.
        usable_bytes: what can be allocated: the smaller of the two.
        source: what decided ``usable_bytes``: ``meminfo``, ``cgroup``, ``limit``, or ``psutil``.
    """

    total_bytes: int
    available_bytes: int
    usable_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The first processor of this host: ``vendor`` is ``unknown`` and ``instruction_set`` the machine where untold."""

    name: str
    vendor: str
    instruction_set: str


def memory_budget(root: Path = _ROOT, limit: int | None = None) -> HostMemory:
    """How much memory this process may use. ``limit`` is a configured upper bound in bytes."""
    total, available, source = _physical_memory(root)
    for directory, version in _cgroup_levels(root, "memory"):
        # A limit is always set against the usage of its own level: a parent counts siblings too.
        maximum = _limit(_read(directory / ("memory.max" if version == 2 else "memory.limit_in_bytes")))
        if maximum is None:
            continue
        usage = _integer(_read(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes"))) or 0
        cache = _stat(directory / "memory.stat", "inactive_file" if version == 2 else "total_inactive_file")
        headroom = max(0, maximum - max(0, usage - cache))
        total = min(total, maximum)
        if headroom < available:
            available, source = headroom, "cgroup"
    usable = min(total, available)
    if limit is not None:
        total = min(total, limit)
        if limit < usable:
            usable, source = limit, "limit"
    return HostMemory(total, available, usable, source)


def cpu_count(root: Path = _ROOT) -> int:
    """CPUs this process may keep busy: the smaller of affinity and cgroup quota, the quota rounded up."""
    count = _affinity(root)
    for directory, version in _cgroup_levels(root, "cpu"):
        if version == 2:
            quota, _, period = _read(directory / "cpu.max").partition(" ")
        else:
            quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        share, length = _limit(quota), _integer(period)
        if share and length and length > 0:
            count = min(count, math.ceil(share / length))
    return max(1, count)


def cpu_info(root: Path = _ROOT) -> CpuInfo:
    """Name, vendor and widest vector instruction set of the processor."""
    fields = _first_block(root / "proc/cpuinfo")
    machine = platform.machine().lower() or "unknown"
    if not fields and platform.system() == "Darwin" and machine == "arm64":
        return CpuInfo(platform.processor() or "Apple silicon", "apple", "neon")
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    vendor = _CPU_VENDORS.get(fields.get("vendor_id", ""), "unknown")
    implementer = _integer(fields.get("cpu implementer", ""), base=16)
    if implementer is not None:
        vendor = _ARM_IMPLEMENTERS.get(implementer, "unknown")
    name = (
        fields.get("model name")
        or _read(root / "proc/device-tree/model").strip("\0")
        or fields.get("hardware")
        or platform.processor()
        or f"{machine} CPU"
    )
    return CpuInfo(name, vendor, next((ours for flag, ours in _INSTRUCTION_SETS if flag in flags), machine))


def cpu_name(root: Path = _ROOT) -> str:
    """Name of the processor as the system prints it."""
    return cpu_info(root).name


def cpu_clock_mhz(*, highest: bool = False) -> int | None:
    """Present clock of the processor, or the highest it can reach, in MHz; None where the system does not tell."""
    import psutil

    try:
        frequency = psutil.cpu_freq()
    except (OSError, RuntimeError, NotImplementedError):  # psutil, by platform, where there is no such sensor
        return None
    value = (frequency.max or frequency.current) if frequency and highest else frequency.current if frequency else 0
    return round(value) or None


def cpu_temperature_c() -> float | None:
    """The hottest of the processor's sensors, in °C; None where there is none, as in most virtual machines."""
    import psutil

    # psutil has this function on Linux and FreeBSD only.
    read: Callable[[], dict[str, list[Any]]] | None = getattr(psutil, "sensors_temperatures", None)
    try:
        sensors = read() if read else {}
    except (OSError, RuntimeError):
        return None
    values = [entry.current for driver in _CPU_SENSORS for entry in sensors.get(driver, ())]
    return max((float(value) for value in values if value is not None and -50 < value < 250), default=None)


def resident_bytes() -> int:
    """Physical memory that this process occupies."""
    import psutil

    return psutil.Process().memory_info().rss


def pci_numa_node(pci_address: str, root: Path = _ROOT) -> int | None:
    """NUMA node next to the PCI device at ``dddddddd:bb:dd.f``, or None where the system does not tell."""
    domain, rest = pci_address.split(":", 1)
    # sysfs prints domains with at least four digits.
    node = _integer(_read(root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node"))
    return node if node is not None and node >= 0 else None


def boot_id(root: Path = _ROOT) -> str | None:
    """Identifier of this boot of the kernel, or None where the system has none."""
    return _read(root / "proc/sys/kernel/random/boot_id") or None


def host_fingerprint(root: Path = _ROOT) -> str:
    """16 hexadecimal digits that stay the same for this host across reboots.

    Derived from ``/etc/machine-id``, which must not be published itself (machine-id(5)); where there is none,
    from host name and, if the host has one, hardware network address.
    """
    source = _read(root / "etc/machine-id")
    if not source:
        node = uuid.getnode()
        # With the multicast bit set it is a random number of this process, not an address (RFC 9562).
        source = socket.gethostname() + ("" if node >> 40 & 1 else f"/{node:012x}")
    return hashlib.sha256(f"gpurt host {source}".encode()).hexdigest()[:16]


def _physical_memory(root: Path) -> tuple[int, int, str]:
    fields = _first_block(root / "proc/meminfo")
    total = _kibibytes(fields.get("memtotal"))
    available = _kibibytes(fields.get("memavailable"))
    if available is None:
        # Kernels before 3.14 have no estimate of their own.
        parts = [_kibibytes(fields.get(key)) for key in ("memfree", "buffers", "cached")]
        available = sum(part or 0 for part in parts) if parts[0] is not None else None
    if total is not None and available is not None:
        return total, min(available, total), "meminfo"
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available), "psutil"


def _cgroup_levels(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Directories of this process's cgroups for ``controller``, innermost first, each with its cgroup version.

    On a hybrid system a controller lives in one of the two hierarchies; files of the other do not exist, and
    what does not exist is no limit.
    """
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts, version = (base, base / "unified"), 2
        elif controller in controllers.split(","):
            mounts, version = (base / controllers, base / controller), 1
        else:
            continue
        # Inside a container the path may be the host's while the mount shows our part only: then no directory
        # of that name exists, and the walk ends at the mount, which is our own cgroup.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                directory = mount.joinpath(*parts[:depth])
                if directory.is_dir():
                    yield directory, version


def _affinity(root: Path) -> int:
    listed = _first_block(root / "proc/self/status").get("cpus_allowed_list", "")
    count = 0
    for part in listed.split(","):
        first, _, last = part.strip().partition("-")
        low, high = _integer(first), _integer(last or first)
        if low is not None and high is not None:
            count += high - low + 1
    return count or os.cpu_count() or 1


def _read(path: Path) -> str:
    """The text of a small file, or "" when there is none that we may read: these files all mean "not told" then."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _first_block(path: Path) -> dict[str, str]:
    """``key: value`` lines up to the first blank line, keys in lower case."""
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            break
        fields.setdefault(key.strip().lower(), value.strip())
    return fields


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _integer(value) or 0
    return 0


def _integer(text: str, base: int = 10) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None


def _limit(text: str) -> int | None:
    """A cgroup limit, or None for the ways to write "unlimited": ``max``, -1, and the largest page-aligned number."""
    value = _integer(text)
    return value if value is not None and 0 <= value < 2**63 - 2**16 else None


def _kibibytes(text: str | None) -> int | None:
    value = _integer(text.split()[0]) if text else None
    return value * 1024 if value is not None else None
