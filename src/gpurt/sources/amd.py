"""AMD's GPUs from files of the kernel alone: compute topology (KFD) and graphics devices (DRM), joined.

No library of ROCm is loaded and no device node is opened. A card that sleeps is not woken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from gpurt.sources.amd_drm import VENDOR, AmdCard, AmdCardMemory, read_cards
from gpurt.sources.amd_kfd import KfdNode, KfdTopology, read_kfd
from gpurt.sources.amd_memory import AmdMemory, allocatable, is_integrated, pool_reasons, vram_of
from gpurt.sources.device_nodes import NodeAccess, check_node, may_open
from gpurt.sources.drm import unclaimed
from gpurt.sources.host import pci_numa_node
from gpurt.sources.sysfs import Skipped


@dataclass(frozen=True, slots=True)
class AmdDevice:
    """One GPU, or one partition of a GPU. Bytes, MHz; None is "not told", and ``unavailable`` says why.

    Visibility variables do not apply to it.
    """

    rocm_index: int | None
    """ROCm's number without any visibility variable; None where the compute driver does not show the GPU."""
    kfd_node: int | None
    name: str | None
    """What it is sold as."""
    codename: str | None
    gfx: str | None
    """The real instruction set, whatever an override says: see :func:`gpurt.sources.amd_gfx.effective_gfx`."""
    uuid: str | None
    """``GPU-`` and 16 hexadecimal digits; partitions of one card may share it."""
    serial: str | None
    pci_address: str | None
    partition: str | None
    """The number of the partition within the GPU, or None for a whole GPU."""
    device_id: int | None
    card: int | None
    """Number of ``/dev/dri/card<n>``."""
    render_minor: int | None
    compute_units: int | None
    max_clock_mhz: int | None
    memory_width_bits: int | None
    memory_clock_mhz: int | None
    memory: AmdMemory
    """The pool that allocations come from."""
    vram_total_bytes: int | None
    vram_used_bytes: int | None
    gtt_total_bytes: int | None
    """Host memory that the GPU may map. Never a part of a card's capacity."""
    gtt_used_bytes: int | None
    integrated: bool | None
    """Part of a processor; None where nothing tells."""
    compute_partition: str | None
    """How the GPU is cut: ``SPX`` (not at all), ``DPX``, ``CPX`` …"""
    memory_partition: str | None
    """``NPS1``, ``NPS4`` …"""
    driver_version: str | None
    numa_node: int | None
    suspended: bool
    """Powered down by the kernel until somebody uses it."""
    access: NodeAccess
    """Whether this process may use it: the first node that it may not open, else its render node."""
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def unified_memory(self) -> bool:
        """Allocations come out of the host's memory. A firmware's carve-out is not the host's any more."""
        return self.memory.source == "gtt"


@dataclass(frozen=True, slots=True)
class AmdInventory:
    """Every AMD GPU that the kernel shows, and all that might have been one with the reason why it is not."""

    devices: tuple[AmdDevice, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    compute_driver: bool = False
    """The kernel shows a compute topology (KFD)."""


def read_amd(root: Path, may: Callable[[Path], bool] = may_open) -> AmdInventory:
    """GPUs of AMD below ``root``, those that the compute driver shows first. Blocking, a few milliseconds.

    Args:
        may: answers whether this process may open a device node.
    """
    topology = read_kfd(root)
    cards, skipped = read_cards(root)
    nodes = _with_partitions(topology, {card.drm.pci_address for card in cards})
    by_address = {card.drm.pci_address: card for card in cards if card.drm.pci_address}
    by_minor = {card.drm.render_minor: card for card in cards if card.drm.render_minor is not None}
    devices: list[AmdDevice] = []
    used: set[int] = set()
    for index, node in enumerate(nodes):
        card = by_address.get(node.pci_address or "") or by_minor.get(node.render_minor or 0)
        if card is not None:
            used.add(card.drm.number)
        devices.append(_device(root, index, node, card, may))
    devices.extend(_device(root, None, None, card, may) for card in cards if card.drm.number not in used)
    addresses = {device.pci_address for device in devices}
    return AmdInventory(
        tuple(devices),
        (*topology.skipped, *skipped, *unclaimed(root, VENDOR, addresses)),
        topology.present,
    )


def _with_partitions(topology: KfdTopology, on_bus: set[str | None]) -> list[KfdNode]:
    """Nodes with the address of their card, and partition numbers where a card has several nodes."""
    whole: list[KfdNode] = []
    known = on_bus | {node.pci_address for node in topology.nodes}
    for node in topology.nodes:
        address, number = node.pci_address, node.partition
        # Some kernels add the partition's number to the function of the address: there is no such device.
        if number is None and address is not None and address not in on_bus and f"{address[:-1]}0" in known:
            address, number = f"{address[:-1]}0", int(address[-1])
        whole.append(replace(node, pci_address=address, partition=number))
    return [replace(node, partition=_number(node, whole)) for node in whole]


def _number(node: KfdNode, nodes: Sequence[KfdNode]) -> int | None:
    """Number of a node's partition: None where the card is one node."""
    siblings = [other for other in nodes if node.pci_address is not None and other.pci_address == node.pci_address]
    if len(siblings) < 2:
        return None
    numbers = [other.partition or 0 for other in siblings]
    if len(set(numbers)) == len(numbers):
        return node.partition or 0
    return siblings.index(node)


def _device(
    root: Path, index: int | None, node: KfdNode | None, card: AmdCard | None, may: Callable[[Path], bool]
) -> AmdDevice:
    known = node or KfdNode(node=-1)
    drm = card.drm if card else None
    whole = card.memory if card else AmdCardMemory()
    unavailable = {**(card.unavailable if card else {}), **known.unavailable}
    vram = vram_of(known, whole, partitioned=known.partition is not None)
    gtt = (whole.gtt_total_bytes, whole.gtt_used_bytes)
    device_id = known.device_id or (drm.device_id if drm else None)
    integrated = is_integrated(
        gfx=known.gfx,
        device_id=device_id,
        cpu_cores=known.cpu_cores,
        voltages=card.voltages if card else (),
        vram=vram[0],
        gtt=gtt[0],
    )
    memory = allocatable(integrated, vram, gtt, pool_reasons(unavailable, partitioned=known.partition is not None))
    minor = known.render_minor or (drm.render_minor if drm else None)
    address = known.pci_address or (drm.pci_address if drm else None)
    found = AmdDevice(
        rocm_index=index,
        kfd_node=node.node if node else None,
        name=card.name if card else None,
        codename=known.codename,
        gfx=known.gfx,
        uuid=known.uuid or (card.uuid if card else None),
        serial=card.serial if card else None,
        pci_address=address,
        partition=None if known.partition is None else str(known.partition),
        device_id=device_id,
        card=drm.number if drm else None,
        render_minor=minor,
        compute_units=known.compute_units,
        max_clock_mhz=known.max_clock_mhz or (card.max_clock_mhz if card else None),
        memory_width_bits=known.memory_width_bits,
        memory_clock_mhz=known.memory_clock_mhz,
        memory=memory,
        vram_total_bytes=vram[0],
        vram_used_bytes=vram[1],
        gtt_total_bytes=gtt[0],
        gtt_used_bytes=gtt[1],
        integrated=integrated,
        compute_partition=card.compute_partition if card else None,
        memory_partition=card.memory_partition if card else None,
        driver_version=card.driver_version if card else None,
        numa_node=pci_numa_node(address, root) if address else None,
        suspended=drm.suspended if drm else False,
        access=_access(root, minor, may),
    )
    return replace(found, unavailable=_reasons(found, unavailable))


def _reasons(device: AmdDevice, told: Mapping[str, str]) -> dict[str, str]:
    """The reason of each field that stays empty, whichever of the sources did not tell it."""
    empty = [item.name for item in fields(device) if getattr(device, item.name) is None]
    # These three are no figures of a source: None is their own word for "not at all".
    names = [name for name in empty if name not in ("partition", "rocm_index", "kfd_node")]
    return {name: told.get(name, "unsupported") for name in names} | device.memory.unavailable


def _access(root: Path, minor: int | None, may: Callable[[Path], bool]) -> NodeAccess:
    """Compute needs both nodes; what stops it first is told."""
    compute = check_node(root, "dev/kfd", may)
    if compute.reason is not None or minor is None:
        return compute
    return check_node(root, f"dev/dri/renderD{minor}", may)
