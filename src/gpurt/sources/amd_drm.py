"""AMD's graphics driver: what ``amdgpu`` shows of a card in its directory of ``/sys`` (amdgpu_pm.c, amdgpu_*_mgr.c)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpurt.sources.drm import DrmCard, drm_cards
from gpurt.sources.hwmon import labels
from gpurt.sources.pci import AMD
from gpurt.sources.sysfs import Skipped, SysfsReader, read

VENDOR: Final = int(AMD, 16)
_MOST_BYTES: Final = 2**50
_MOST_MHZ: Final = 100_000
_LEVEL: Final = re.compile(r"[0-9]{1,3}:\s*([0-9]{1,6})\s*mhz\s*(\*?)", re.IGNORECASE)
_UNIQUE_ID: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{16})")
_MARKETING_NAMES: Final = "usr/share/libdrm/amdgpu.ids"


@dataclass(frozen=True, slots=True)
class AmdCardMemory:
    """Bytes; a field that is None has its reason in the reader that was used."""

    vram_total_bytes: int | None = None
    vram_used_bytes: int | None = None
    gtt_total_bytes: int | None = None
    gtt_used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AmdCard:
    """One card of AMD; ``unavailable`` says why a field is None."""

    drm: DrmCard
    name: str | None
    uuid: str | None
    serial: str | None
    memory: AmdCardMemory
    max_clock_mhz: int | None
    compute_partition: str | None
    memory_partition: str | None
    driver_version: str | None
    voltages: frozenset[str]
    """Labels of its voltage sensors."""
    unavailable: Mapping[str, str]


def read_cards(root: Path) -> tuple[list[AmdCard], list[Skipped]]:
    """All cards of AMD below ``root`` by number. Blocking; wakes none."""
    cards, skipped = drm_cards(root, VENDOR)
    return [_card(root, card) for card in cards], skipped


def read_memory(fields: SysfsReader, device: Path) -> AmdCardMemory:
    """Memory of the whole card whose PCI directory is ``device``. Wakes nobody: the driver knows it by heart."""

    def size(name: str, file: str, low: int) -> int | None:
        return fields.number(name, device / file, low, _MOST_BYTES)

    return AmdCardMemory(
        # A driver that is coming up shows 0: that is no size.
        vram_total_bytes=size("vram_total_bytes", "mem_info_vram_total", 1),
        vram_used_bytes=size("vram_used_bytes", "mem_info_vram_used", 0),
        gtt_total_bytes=size("gtt_total_bytes", "mem_info_gtt_total", 1),
        gtt_used_bytes=size("gtt_used_bytes", "mem_info_gtt_used", 0),
    )


def present_clock(fields: SysfsReader, device: Path) -> int | None:
    """The engine's clock of this moment in MHz, from the table of levels."""
    text = fields.text("clock_mhz", device / "pp_dpm_sclk")
    if text is None:
        return None
    present = [mhz for mhz, now in _levels(text) if now]
    return fields.checked("clock_mhz", present[0] if present else None, 0, _MOST_MHZ)


def _card(root: Path, card: DrmCard) -> AmdCard:
    fields = SysfsReader()
    device = card.device
    unique = fields.text("uuid", device / "unique_id")
    match = _UNIQUE_ID.fullmatch(unique or "")
    if unique is not None and match is None:
        fields.missing("uuid", "invalid")
    return AmdCard(
        drm=card,
        name=fields.text("name", device / "product_name") or _marketing_name(root, card, fields),
        uuid=f"GPU-{match[1].lower()}" if match and int(match[1], 16) else None,
        serial=fields.text("serial", device / "serial_number"),
        memory=read_memory(fields, device),
        max_clock_mhz=None if card.suspended else _max_clock(fields, device),
        compute_partition=fields.text("compute_partition", device / "current_compute_partition"),
        memory_partition=fields.text("memory_partition", device / "current_memory_partition"),
        # Only drivers that were not built with the kernel have a version of their own.
        driver_version=fields.text("driver_version", root / "sys/module/amdgpu/version"),
        voltages=frozenset(labels(device, "in")),
        unavailable=fields.unavailable,
    )


def _max_clock(fields: SysfsReader, device: Path) -> int | None:
    text = fields.text("max_clock_mhz", device / "pp_dpm_sclk")
    if text is None:
        return None
    return fields.checked("max_clock_mhz", max((mhz for mhz, _ in _levels(text)), default=None), 1, _MOST_MHZ)


def _levels(text: str) -> list[tuple[int, bool]]:
    """``1: 1700Mhz *`` lines: MHz, and whether it is the present level."""
    matches = (_LEVEL.fullmatch(line.strip()) for line in text.splitlines())
    return [(int(m[1]), bool(m[2])) for m in matches if m]


def _marketing_name(root: Path, card: DrmCard, fields: SysfsReader) -> str | None:
    """The name that libdrm has for this device and revision, where it is installed."""
    text, _ = read(root / _MARKETING_NAMES)
    wanted = (card.device_id, card.revision)
    for line in (text or "").splitlines():
        device, _, rest = line.partition(",")
        revision, _, name = rest.partition(",")
        try:
            if (int(device, 16), int(revision, 16)) == wanted and name.strip():
                fields.unavailable.pop("name", None)
                return name.strip()
        except ValueError:
            continue  # a comment, or the version of the file
    return None
