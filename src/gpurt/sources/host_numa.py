"""NUMA nodes and huge pages of the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar, cast

from gpurt.sources.host_files import HostFiles, kibibytes
from gpurt.sources.sysfs import Skipped, parse_number

_ROOT = Path("/")
_T = TypeVar("_T")
_MOST_BYTES: Final = 2**60
_NODES: Final = "sys/devices/system/node"

_DEVICE_TOLERANCE: Final = 16
"""A node is a device's memory when their sizes differ by less than a sixteenth: drivers keep a few percent."""

_NODE = re.compile(r"node(0|[1-9][0-9]{0,8})", re.ASCII)
_NODE_LINE = re.compile(r"Node\s+[0-9]+\s+([A-Za-z]+):\s*(.*)", re.ASCII)
_NUMA_STATUS = re.compile(r"^Node:\s*([0-9]{1,5})\s*$", re.ASCII | re.M)
_POOL = re.compile(r"hugepages-([0-9]{1,12})kB", re.ASCII)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node. Bytes; None is "not told", and ``unavailable`` says why."""

    number: int
    cpus: frozenset[int] | None
    """Empty for memory that no CPU is next to: a GPU's, or memory behind CXL."""
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    """Not used for anything: page cache counts as used here."""
    distances: tuple[int, ...] | None
    """To every node in order, 10 being the node itself (ACPI SLIT)."""
    unavailable: dict[str, str] = field(default_factory=dict[str, str], hash=False)


@dataclass(frozen=True, slots=True)
class NumaInventory:
    """Every node that the kernel shows, and what could not be understood. No nodes: the kernel knows of none."""

    nodes: tuple[NumaNode, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class HugePagePool:
    """Pages of one size that were set aside. Counts of pages; None is "not told"."""

    page_bytes: int
    total: int | None
    free: int | None
    reserved: int | None
    """Of the free ones promised to somebody."""


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages of this host."""

    pools: tuple[HugePagePool, ...] = ()
    transparent: Literal["always", "madvise", "never"] | None = None
    """Whether ordinary memory gets them by itself; None where the kernel cannot or does not tell."""
    skipped: tuple[Skipped, ...] = ()


def numa_nodes(root: Path = _ROOT) -> NumaInventory:
    """Nodes by number. Blocking, about a millisecond a node."""
    files = HostFiles(root)
    directory = root / _NODES
    numbers = sorted(int(match[1]) for name in files.names(directory) if (match := _NODE.fullmatch(name)))
    nodes = tuple(_node(files, number, directory / f"node{number}") for number in numbers)
    return NumaInventory(nodes, tuple(files.skipped))


def device_nodes(root: Path, nodes: Sequence[NumaNode], device_memory_bytes: Collection[int]) -> tuple[NumaNode, ...]:
    """Those of ``nodes`` that are the memory of a device, for each device at most one.

    They have no CPUs, and either NVIDIA's driver names them, or they are as large as the device. Other nodes without
    CPUs are the host's.
    """
    named: set[int] = set()
    files = HostFiles(root)
    gpus = root / "proc/driver/nvidia/gpus"
    for name in files.names(gpus):
        named.update(int(number) for number in _NUMA_STATUS.findall(files.text(gpus / name / "numa_status") or ""))
    left = list(device_memory_bytes)
    chosen: list[NumaNode] = []
    # Those that are named take their device first, so that another of the same size does not.
    for node in sorted(nodes, key=lambda node: (node.number not in named, node.number)):
        size = node.memory_total_bytes
        if node.cpus is None or node.cpus or not size:
            continue
        near = sorted((abs(total - size), total) for total in left if abs(total - size) * _DEVICE_TOLERANCE < total)
        if near:
            left.remove(near[0][1])
        if near or node.number in named:
            chosen.append(node)
    return tuple(sorted(chosen, key=lambda node: node.number))


def huge_pages(root: Path = _ROOT) -> HugePages:
    """Pools by page size, and the setting for transparent ones. Blocking, less than a millisecond."""
    files = HostFiles(root)
    base = root / "sys/kernel/mm"
    pools: list[HugePagePool] = []
    for name in files.names(base / "hugepages"):
        path = base / "hugepages" / name
        match = _POOL.fullmatch(name)
        if match is None or int(match[1]) == 0:
            files.skip(path, "not a size of pages")
            continue
        counts = [files.number(path / count, 2**48) for count in ("nr_hugepages", "free_hugepages", "resv_hugepages")]
        pools.append(HugePagePool(int(match[1]) * 1024, *counts))
    setting = base / "transparent_hugepage/enabled"
    text = files.text(setting)
    chosen = re.findall(r"\[(always|madvise|never)\]", text or "")
    if text is not None and len(chosen) != 1:
        files.not_a(setting, "setting", text)
        chosen = []
    transparent = cast("Literal['always', 'madvise', 'never'] | None", chosen[0] if chosen else None)
    return HugePages(tuple(sorted(pools, key=lambda pool: pool.page_bytes)), transparent, tuple(files.skipped))


def _node(files: HostFiles, number: int, path: Path) -> NumaNode:
    unavailable: dict[str, str] = {}

    def told(name: str, get: Callable[[], _T | None]) -> _T | None:
        noted = len(files.skipped)
        value = get()
        if value is None:
            unavailable[name] = "unsupported" if len(files.skipped) == noted else "invalid"
        return value

    table = path / "meminfo"
    sizes: dict[str, str] = {}
    for line in (files.text(table) or "").splitlines():
        match = _NODE_LINE.fullmatch(line.strip())
        if match:
            sizes.setdefault(match[1].lower(), match[2])
    total = told("memory_total_bytes", lambda: _size(files, table, sizes, "memtotal", _MOST_BYTES))
    return NumaNode(
        number=number,
        cpus=told("cpus", lambda: files.cpus(path / "cpulist")),
        memory_total_bytes=total,
        memory_free_bytes=told(
            "memory_free_bytes", lambda: _size(files, table, sizes, "memfree", _MOST_BYTES if total is None else total)
        ),
        distances=told("distances", lambda: _distances(files, path)),
        unavailable=unavailable,
    )


def _size(files: HostFiles, path: Path, sizes: dict[str, str], key: str, most: int) -> int | None:
    value = kibibytes(sizes.get(key))
    if key in sizes and (value is None or value > most):
        files.not_a(path, f"possible {key}", sizes[key])
        return None
    return value


def _distances(files: HostFiles, path: Path) -> tuple[int, ...] | None:
    text = files.text(path / "distance")
    values = [parse_number(word) for word in (text or "").split()]
    if text is None:
        return None
    if any(value is None or not 0 <= value <= 255 for value in values):
        files.not_a(path / "distance", "row of distances", text)
        return None
    return tuple(value for value in values if value is not None)
