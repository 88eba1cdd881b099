"""One reading of an AMD GPU from files of the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpurt.sources.amd import AmdDevice
from gpurt.sources.amd_drm import VENDOR, AmdCardMemory, present_clock, read_memory
from gpurt.sources.amd_kfd import KfdNode, read_node
from gpurt.sources.amd_memory import allocatable, pool_reasons, vram_of
from gpurt.sources.drm import DrmCard, drm_card
from gpurt.sources.hwmon import read_hwmon
from gpurt.sources.sysfs import Skipped, SysfsReader
from gpurt.types import Telemetry

_SENSORS: Final = ("temperature_c", "power_w", "clock_mhz", "utilization_percent")
_FIELDS: Final = (*_SENSORS, "memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")


def read_amd_telemetry(root: Path, device: AmdDevice) -> Telemetry:
    """One reading of a device of :func:`gpurt.sources.amd.read_amd`. Blocking, less than a millisecond.

    A card that sleeps is not woken for it: its sensors are ``unavailable`` as ``suspended``. Temperature, power and
    clock of a partition are those of its GPU; utilization is not told for a partition. Where another card is now in
    the place of this one, or none, everything is ``unavailable`` as ``error``.
    """
    card = _card(root, device)
    node = _node(root, device)
    if card is None and node is None:
        return Telemetry(unavailable=dict.fromkeys(_FIELDS, "error"))
    fields = SysfsReader()
    whole = read_memory(fields, card.device) if card else AmdCardMemory()
    known = node or KfdNode(node=-1)
    partitioned = device.partition is not None
    told = {**fields.unavailable, **known.unavailable}
    memory = allocatable(
        device.integrated,
        vram_of(known, whole, partitioned=partitioned),
        (whole.gtt_total_bytes, whole.gtt_used_bytes),
        pool_reasons(told, partitioned=partitioned),
    )
    sensed = _sensed(card, partitioned=partitioned)
    return sensed.model_copy(
        update={
            "memory_total_bytes": memory.total_bytes,
            "memory_used_bytes": memory.used_bytes,
            "memory_free_bytes": memory.free_bytes,
            "unavailable": {**sensed.unavailable, **memory.unavailable, "memory_reserved_bytes": "unsupported"},
        }
    )


def _card(root: Path, device: AmdDevice) -> DrmCard | None:
    if device.card is None:
        return None
    card = drm_card(root, VENDOR, device.card)
    # Numbers are given out again when a card is plugged in.
    return None if card is None or isinstance(card, Skipped) or card.pci_address != device.pci_address else card


def _node(root: Path, device: AmdDevice) -> KfdNode | None:
    if device.kfd_node is None:
        return None
    node = read_node(root, device.kfd_node)
    if isinstance(node, Skipped) or node.render_minor not in (None, device.render_minor):
        return None
    return None if device.uuid is not None and node.uuid not in (None, device.uuid) else node


def _sensed(card: DrmCard | None, *, partitioned: bool) -> Telemetry:
    if card is None or card.suspended:
        return Telemetry(unavailable=dict.fromkeys(_SENSORS, "suspended" if card else "unsupported"))
    fields = SysfsReader()
    sensed = read_hwmon(card.device, "edge")
    fields.unavailable |= sensed.unavailable
    clock = sensed.clock_mhz if sensed.clock_mhz is not None else present_clock(fields, card.device)
    utilization: int | None = None
    if partitioned:
        fields.missing("utilization_percent", "unsupported")
    else:
        utilization = fields.number("utilization_percent", card.device / "gpu_busy_percent", 0, 100)
    return Telemetry(
        temperature_c=sensed.temperature_c,
        power_w=sensed.power_w,
        clock_mhz=clock,
        utilization_percent=utilization,
        unavailable=fields.unavailable,
    )
