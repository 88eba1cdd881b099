"""Intel's GPUs from files of the kernel alone, for both drivers: i915 and xe.

No library is loaded and no device node is opened. A card that sleeps is not woken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, Literal

from gpurt.sources.device_nodes import NodeAccess, check_node, may_open
from gpurt.sources.drm import DrmCard, drm_card, drm_cards, unclaimed
from gpurt.sources.host import memory_budget, pci_numa_node
from gpurt.sources.hwmon import read_hwmon
from gpurt.sources.sysfs import Skipped, SysfsReader, numbered
from gpurt.types import Telemetry

VENDOR: Final = 0x8086
_MOST_BYTES: Final = 2**50
_MOST_MHZ: Final = 100_000

_PROCESSOR_GRAPHICS: Final = "00000000:00:02."
"""Where every GPU inside an Intel processor sits, its virtual functions included."""

_SENSORS: Final = ("temperature_c", "power_w", "clock_mhz", "utilization_percent")
_FIELDS: Final = (*_SENSORS, "memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")


@dataclass(frozen=True, slots=True)
class IntelDevice:
    """One GPU. Bytes, MHz; None is "not told", and ``unavailable`` says why. Visibility variables do not apply."""

    driver: str | None
    """``i915`` or ``xe``."""
    pci_address: str | None
    device_id: int | None
    revision: int | None
    card: int
    """Number of ``/dev/dri/card<n>``."""
    render_minor: int | None
    integrated: bool | None
    """Part of a processor; None where nothing tells."""
    tiles: int | None
    """Level Zero shows each tile as a device of its own, unless it is told otherwise."""
    memory_source: Literal["vram", "host"] | None
    memory_total_bytes: int | None
    """For VRAM the physical size: the driver keeps a few percent of it for itself."""
    memory_free_bytes: int | None
    """Of the host for an integrated GPU; no kernel file tells it for a card."""
    max_clock_mhz: int | None
    numa_node: int | None
    suspended: bool
    """Powered down by the kernel until somebody uses it."""
    access: NodeAccess
    """Whether this process may open its render node."""
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def unified_memory(self) -> bool:
        """Allocations come out of the host's memory."""
        return self.memory_source == "host"


@dataclass(frozen=True, slots=True)
class IntelInventory:
    """Every Intel GPU that the kernel shows, and all that might have been one with the reason why it is not."""

    devices: tuple[IntelDevice, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def read_intel(root: Path, may: Callable[[Path], bool] = may_open) -> IntelInventory:
    """GPUs of Intel below ``root`` by card number. Blocking, a few milliseconds.

    Args:
        may: answers whether this process may open a device node.
    """
    cards, skipped = drm_cards(root, VENDOR)
    devices = tuple(_device(root, card, may) for card in cards)
    addresses = {device.pci_address for device in devices}
    return IntelInventory(devices, (*skipped, *unclaimed(root, VENDOR, addresses)))


def read_intel_telemetry(root: Path, device: IntelDevice) -> Telemetry:
    """One reading of a device of :func:`read_intel`. Blocking, less than a millisecond.

    A card that sleeps is not woken for it: its sensors are ``unavailable`` as ``suspended``. The kernel shows no
    utilization, and energy instead of power on most cards: those are ``unsupported``. Where another card is now in the
    place of this one, or none, everything is ``unavailable`` as ``error``.
    """
    card = drm_card(root, VENDOR, device.card)
    if card is None or isinstance(card, Skipped) or card.pci_address != device.pci_address:
        return Telemetry(unavailable=dict.fromkeys(_FIELDS, "error"))
    reader = SysfsReader()
    source, total, free, _ = _memory(reader, root, card)
    temperature = power = clock = None
    if card.suspended:
        reader.unavailable |= dict.fromkeys(_SENSORS, "suspended")
    else:
        sensed = read_hwmon(card.device, "pkg")
        temperature, power = sensed.temperature_c, sensed.power_w
        clock = _clock(reader, card, "clock_mhz", _PRESENT_CLOCKS, 0)
        reader.unavailable |= {name: why for name, why in sensed.unavailable.items() if name != "clock_mhz"}
        reader.missing("utilization_percent", "unsupported")
    for name in ("memory_used_bytes", "memory_reserved_bytes"):
        reader.missing(name, "unsupported")
    used = total - free if source == "host" and total is not None and free is not None else None
    if used is not None:
        del reader.unavailable["memory_used_bytes"]
    return Telemetry(
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_free_bytes=free,
        temperature_c=temperature,
        power_w=power,
        clock_mhz=clock,
        unavailable=reader.unavailable,
    )


def _device(root: Path, card: DrmCard, may: Callable[[Path], bool]) -> IntelDevice:
    reader = SysfsReader()
    source, total, free, tiles = _memory(reader, root, card)
    found = IntelDevice(
        driver=card.driver,
        pci_address=card.pci_address,
        device_id=card.device_id,
        revision=card.revision,
        card=card.number,
        render_minor=card.render_minor,
        integrated=None if source is None and _inside(card) else source == "host",
        tiles=tiles,
        memory_source=source,
        memory_total_bytes=total,
        memory_free_bytes=free,
        max_clock_mhz=None if card.suspended else _clock(reader, card, "max_clock_mhz", _HIGHEST_CLOCKS, 1),
        numa_node=pci_numa_node(card.pci_address, root) if card.pci_address else None,
        suspended=card.suspended,
        access=_access(root, card, may),
    )
    empty = [item.name for item in fields(found) if getattr(found, item.name) is None]
    return replace(found, unavailable={name: reader.unavailable.get(name, "unsupported") for name in empty})


def _memory(
    reader: SysfsReader, root: Path, card: DrmCard
) -> tuple[Literal["vram", "host"] | None, int | None, int | None, int | None]:
    """Source, total and free bytes, and the number of tiles."""
    name = "memory_total_bytes"
    tiles = [path for _, path in numbered(card.device, "tile")[0]]
    # xe tells the size by tile; i915 as it comes with Intel's own packages tells it in one of two places.
    sizes = [reader.number(name, tile / "physical_vram_size_bytes", 0, _MOST_BYTES) for tile in tiles]
    total = sum(size for size in sizes if size) if sizes and None not in sizes else 0
    for directory in (card.card, card.device):
        # 0 is how a driver says that there is none of it: another source may know better.
        total = total or reader.number(name, directory / "lmem_total_bytes", 0, _MOST_BYTES) or 0
    count = len(tiles) or None
    if total:
        reader.unavailable.pop(name, None)
        reader.missing("memory_free_bytes", "unsupported")
        return "vram", total, None, count
    if _inside(card) and reader.unavailable.get(name, "unsupported") == "unsupported":
        reader.unavailable.pop(name, None)
        host = memory_budget(root)
        return "host", host.total_bytes, host.usable_bytes, count
    reader.missing(name, "unsupported")
    reader.missing("memory_free_bytes", reader.unavailable[name])
    return None, None, None, count


def _inside(card: DrmCard) -> bool:
    """Whether the card is where processors have their GPUs. In a virtual machine a card may be there as well."""
    return card.pci_address is not None and card.pci_address.startswith(_PROCESSOR_GRAPHICS)


# Below the card's directory for i915, below the device's for xe. MHz.
_PRESENT_CLOCKS: Final = ("gt/gt0/rps_act_freq_mhz", "gt_act_freq_mhz", "device/tile0/gt0/freq0/act_freq")
_HIGHEST_CLOCKS: Final = ("gt/gt0/rps_RP0_freq_mhz", "gt_RP0_freq_mhz", "device/tile0/gt0/freq0/rp0_freq")


def _clock(reader: SysfsReader, card: DrmCard, name: str, files: tuple[str, ...], low: int) -> int | None:
    for file in files:
        value = reader.number(name, card.card / file, low, _MOST_MHZ)
        if value is not None:
            return value
    return None


def _access(root: Path, card: DrmCard, may: Callable[[Path], bool]) -> NodeAccess:
    node = f"renderD{card.render_minor}" if card.render_minor is not None else f"card{card.number}"
    return check_node(root, f"dev/dri/{node}", may)
