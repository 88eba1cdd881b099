"""AMD's compute topology: ``/sys/class/kfd/kfd/topology/nodes`` (kfd_topology.c of the Linux kernel)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpurt.sources.amd_gfx import gfx_name
from gpurt.sources.sysfs import Skipped, SysfsReader, numbered, parse_number, read

_NODES: Final = "sys/class/kfd/kfd/topology/nodes"
_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1
_MOST_BYTES: Final = 2**50
_MOST_MHZ: Final = 100_000
_DEVICE_HEAPS: Final = (1, 2)
"""kfd_crat.h: memory of the device that the host can see, and such that it cannot."""


@dataclass(frozen=True, slots=True)
class KfdNode:
    """One GPU, or one partition of one, as the compute driver shows it. Bytes, MHz, bits; None is "not told".

    ``unavailable`` says why a field is None: ``unsupported no_permission error invalid``.
    """

    node: int
    gpu_id: int | None = None
    codename: str | None = None
    """The kernel's name of the chip (``aldebaran``); newer kernels say ``ip discovery``, which is none."""
    cpu_cores: int | None = None
    """Not 0: processor and GPU are one node, as in older APUs."""
    compute_units: int | None = None
    gfx: str | None = None
    uuid: str | None = None
    """``GPU-`` and 16 hexadecimal digits, as ROCm prints it. Partitions of one card may share it."""
    pci_address: str | None = None
    partition: int | None = None
    """The number of the partition where the kernel tells it apart from the PCI address."""
    device_id: int | None = None
    render_minor: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_width_bits: int | None = None
    memory_clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class KfdTopology:
    """Every GPU node in the order of the nodes, which is ROCm's own order before any visibility variable."""

    nodes: tuple[KfdNode, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    present: bool = False
    """The driver shows a topology at all."""


def read_kfd(root: Path) -> KfdTopology:
    """All GPUs of the topology below ``root``, and each other node with the reason why it is not one. Blocking."""
    entries, reason = numbered(root / _NODES, "")
    if reason is not None:
        skipped = () if reason == "unsupported" else (Skipped(f"/{_NODES}", f"cannot be listed: {reason}"),)
        return KfdTopology(skipped=skipped)
    nodes: list[KfdNode] = []
    others: list[Skipped] = []
    for number, _ in entries:
        node = read_node(root, number)
        if isinstance(node, Skipped):
            others.append(node)
        else:
            nodes.append(node)
    return KfdTopology(tuple(nodes), tuple(others), present=True)


def read_node(root: Path, number: int) -> KfdNode | Skipped:
    """One node if it is a GPU, else why not. Blocking."""
    directory = root / _NODES / str(number)
    where = f"/{_NODES}/{number}"
    text, reason = read(directory / "properties")
    if not text:
        # A container that may use some of the cards sees the nodes of the others as unreadable.
        return Skipped(where, f"its properties cannot be read: {reason or 'empty'}")
    properties = parse_properties(text)
    simds = parse_number(properties.get("simd_count", ""))
    if simds is None or not 0 <= simds <= _U32:
        return Skipped(where, f"simd_count is no number: {properties.get('simd_count')!r}")
    if simds == 0:
        return Skipped(where, "a processor: simd_count is 0")
    return _node(number, directory, properties, simds)


def parse_properties(text: str) -> dict[str, str]:
    """``key value`` lines. Keys that this version does not know, blank lines and lines of one word do no harm."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


class _Properties:
    """Numbers out of a properties file; one that cannot be costs its own field only."""

    def __init__(self, properties: Mapping[str, str], fields: SysfsReader) -> None:
        self._properties = properties
        self._fields = fields

    def number(self, key: str, name: str, low: int = 0, high: int = _U32) -> int | None:
        text = self._properties.get(key)
        if text is None:
            self._fields.missing(name, "unsupported")
            return None
        return self._fields.checked(name, parse_number(text), low, high)


def _node(number: int, directory: Path, properties: Mapping[str, str], simds: int) -> KfdNode:
    fields = SysfsReader()
    own = _Properties(properties, fields)
    per_unit = own.number("simd_per_cu", "compute_units", 1)
    # Not array_count * cu_per_simd_array: that counts units that are fused off, too.
    units = simds // per_unit if per_unit else None
    gfx = gfx_name(own.number("gfx_target_version", "gfx"))
    if gfx is None:
        fields.missing("gfx", "invalid" if "gfx_target_version" in properties else "unsupported")
    unique = own.number("unique_id", "uuid", 1, _U64)
    if properties.get("unique_id") == "0":
        fields.unavailable["uuid"] = "unsupported"  # consumer cards have none
    codename = fields.text("codename", directory / "name")
    address, partition = _location(own)
    minor = own.number("drm_render_minor", "render_minor", 128, 2**20)
    total, used, width, memory_clock = _banks(directory, fields)
    if total is None:
        # 0 in newer kernels, which tell the size in the banks only.
        total = own.number("local_mem_size", "memory_total_bytes", 0, _MOST_BYTES) or None
        if total is not None:
            fields.unavailable.pop("memory_total_bytes", None)
    return KfdNode(
        node=number,
        gpu_id=fields.number("gpu_id", directory / "gpu_id", 1, _U32),
        codename=None if codename == "ip discovery" else codename,
        cpu_cores=own.number("cpu_cores_count", "cpu_cores"),
        compute_units=units,
        gfx=gfx,
        uuid=None if unique is None else f"GPU-{unique:016x}",
        pci_address=address,
        partition=partition,
        device_id=own.number("device_id", "device_id", 1, 0xFFFF),
        render_minor=minor,
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_width_bits=width,
        memory_clock_mhz=memory_clock,
        max_clock_mhz=own.number("max_engine_clk_fcompute", "max_clock_mhz", 1, _MOST_MHZ),
        unavailable=fields.unavailable,
    )


def _location(own: _Properties) -> tuple[str | None, int | None]:
    """PCI address, and the partition where the kernel puts its number into the top four bits."""
    location = own.number("location_id", "pci_address", 1)
    if location is None:
        return None, None
    # Kernels before 5.6 have no key `domain`; they knew domain 0 only.
    domain = own.number("domain", "domain") or 0
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return f"{domain:08x}:{bus:02x}:{device:02x}.{function}", location >> 28 or None


def _banks(directory: Path, fields: SysfsReader) -> tuple[int | None, int | None, int | None, int | None]:
    """Total and used bytes, bus width and clock of the banks that are the device's own."""
    sizes: list[int] = []
    taken: list[int] = []
    width: int | None = None
    clock: int | None = None
    for _, bank in numbered(directory / "mem_banks", "")[0]:
        properties = parse_properties(read(bank / "properties")[0] or "")
        own = _Properties(properties, fields)
        if parse_number(properties.get("heap_type", "")) not in _DEVICE_HEAPS:
            continue
        size = own.number("size_in_bytes", "memory_total_bytes", 1, _MOST_BYTES)
        if size is None:
            # A sum without one of its terms would be a smaller card than there is.
            sizes.clear()
            break
        sizes.append(size)
        width = width or own.number("width", "memory_width_bits", 1, _U32)
        clock = clock or own.number("mem_clk_max", "memory_clock_mhz", 1, _MOST_MHZ)
        used_here = fields.number("memory_used_bytes", bank / "used_memory", 0, size)
        if used_here is not None:
            taken.append(used_here)
    total = sum(sizes) if sizes else None
    used = sum(taken) if taken and len(taken) == len(sizes) else None
    for name, value in (
        ("memory_total_bytes", total),
        ("memory_used_bytes", used),
        ("memory_width_bits", width),
        ("memory_clock_mhz", clock),
    ):
        if value is None:
            fields.missing(name, "unsupported")
        else:
            fields.unavailable.pop(name, None)
    return total, used, width, clock
