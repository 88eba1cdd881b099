"""How much of the host's memory this process may use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpurt.sources.host_cgroup import memory_limits
from gpurt.sources.host_files import HostFiles, kibibytes
from gpurt.sources.host_numa import device_nodes, numa_nodes
from gpurt.sources.sysfs import Skipped

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of this host as this process may use it, in bytes.

    Attributes:
        total_bytes: the smallest of physical memory, the limits of this process's cgroups, and the given limit.
        available_bytes: free at this moment, reclaimable page cache counted as free, before the given limit.
        usable_bytes: what can be allocated: the smaller of the two.
        source: what decided ``usable_bytes``: ``meminfo``, ``cgroup``, ``limit``, or ``psutil``.
        skipped: files that are there and could not be understood. A limit among them is not counted.
    """

    total_bytes: int
    available_bytes: int
    usable_bytes: int
    source: str
    skipped: tuple[Skipped, ...] = ()


def memory_budget(
    root: Path = _ROOT, limit: int | None = None, *, device_memory_bytes: Collection[int] = ()
) -> HostMemory:
    """How much memory this process may use.

    Args:
        limit: a configured upper bound in bytes.
        device_memory_bytes: total memory of devices that the kernel may show as nodes of the host's memory, as on
            Grace Hopper. Nodes that are such a device's are not counted here: they are counted as the device's.
    """
    files = HostFiles(root)
    total, available, source = _physical_memory(root, files)
    if device_memory_bytes and source == "meminfo":
        inventory = numa_nodes(root)
        for node in device_nodes(root, inventory.nodes, device_memory_bytes):
            total -= node.memory_total_bytes or 0
            available -= node.memory_free_bytes or 0
        total = max(0, total)
        available = max(0, min(total, available))
        files.skipped.extend(inventory.skipped)
    for level in memory_limits(root, files):
        total = min(total, level.limit_bytes)
        if level.headroom_bytes < available:
            available, source = level.headroom_bytes, "cgroup"
    usable = min(total, available)
    if limit is not None:
        total = min(total, limit)
        if limit < usable:
            usable, source = limit, "limit"
    return HostMemory(total, available, usable, source, tuple(files.skipped))


def _physical_memory(root: Path, files: HostFiles) -> tuple[int, int, str]:
    path = root / "proc/meminfo"
    fields = files.fields(path)
    total = kibibytes(fields.get("memtotal"))
    available = kibibytes(fields.get("memavailable"))
    if available is None:
        # Kernels before 3.14 have no estimate of their own.
        parts = [kibibytes(fields.get(key)) for key in ("memfree", "buffers", "cached")]
        available = sum(part or 0 for part in parts) if parts[0] is not None else None
    if total and available is not None:
        return total, min(available, total), "meminfo"
    if fields:
        files.skip(path, "tells neither total nor free memory")
    # macOS counts what it can reclaim as available, and so does psutil.
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available), "psutil"
