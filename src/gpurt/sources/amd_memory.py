"""Which memory of an AMD GPU an allocation comes from, and how much of it there is. Pure.

A card has its own memory (VRAM). A GPU inside a processor has a part of the host's memory that the firmware set aside
(also called VRAM) and may map as much of the rest as the driver allows (GTT). The compute driver takes allocations
from GTT where that is the larger of the two, else from VRAM (``apu_prefer_gtt`` in amdgpu), never from both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from gpurt.sources.amd_drm import AmdCardMemory
from gpurt.sources.amd_gfx import APUS, CARDS
from gpurt.sources.amd_kfd import KfdNode

_GTT_PER_VRAM: Final = 8
"""A GPU whose GTT is this many times its VRAM, and of which nothing else is known, is taken for a processor's."""

# PCI device ids of MI300A: the processor whose instruction set is that of a card, gfx942 (amdgpu.ids of libdrm).
_MI300A: Final = frozenset({0x74A0, 0x74A8})


@dataclass(frozen=True, slots=True)
class AmdMemory:
    """Bytes; None is "not told", with an entry in ``unavailable``."""

    source: Literal["vram", "gtt"] | None = None
    """What ``total_bytes`` speaks of."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    unavailable: dict[str, str] = field(default_factory=dict[str, str])


def is_integrated(
    *,
    gfx: str | None,
    device_id: int | None,
    cpu_cores: int | None,
    voltages: Collection[str],
    vram: int | None,
    gtt: int | None,
) -> bool | None:
    """Whether the GPU is part of a processor; None where nothing tells.

    Args:
        cpu_cores: of its KFD node, which older APUs share with the processor.
        voltages: labels of its voltage sensors; amdgpu shows ``vddnb`` for APUs only.
        vram, gtt: bytes. A small card in a large host has a large GTT, too: they count only when the chip is unknown.
    """
    if cpu_cores or gfx in APUS or device_id in _MI300A or "vddnb" in voltages:
        return True
    if gfx in CARDS or gfx == "gfx942":
        return False
    return gtt >= _GTT_PER_VRAM * vram if vram and gtt else None


def vram_of(node: KfdNode, card: AmdCardMemory, *, partitioned: bool) -> tuple[int | None, int | None]:
    """Total and used bytes of the device's own memory: the graphics driver's figures are of the whole card."""
    if partitioned or card.vram_total_bytes is None:
        return node.memory_total_bytes, node.memory_used_bytes
    used = card.vram_used_bytes
    return card.vram_total_bytes, node.memory_used_bytes if used is None else used


def pool_reasons(told: Mapping[str, str], *, partitioned: bool) -> dict[str, str]:
    """``told`` by both drivers as the reasons that :func:`allocatable` takes: those of the source that was asked."""
    reasons = dict(told)
    for figure in ("total", "used"):
        compute = told.get(f"memory_{figure}_bytes")
        if compute is not None and (partitioned or reasons.get(f"vram_{figure}_bytes") in (None, "unsupported")):
            reasons[f"vram_{figure}_bytes"] = compute
    return reasons


def allocatable(
    integrated: bool | None,
    vram: tuple[int | None, int | None],
    gtt: tuple[int | None, int | None],
    reasons: Mapping[str, str],
) -> AmdMemory:
    """The pool that allocations come from. ``vram`` and ``gtt`` are total and used bytes.

    Args:
        reasons: why a figure is missing, under ``vram_total_bytes gtt_total_bytes vram_used_bytes gtt_used_bytes``.
    """
    from_gtt = bool(integrated) and gtt[0] is not None and gtt[0] > (vram[0] or 0)
    source: Literal["vram", "gtt"] = "gtt" if from_gtt else "vram"
    total, used = gtt if from_gtt else vram
    unavailable: dict[str, str] = {}
    if total is None:
        unavailable["memory_total_bytes"] = reasons.get(f"{source}_total_bytes", "unsupported")
    if used is not None and total is not None and used > total:
        used = None
        unavailable["memory_used_bytes"] = "invalid"
    elif used is None:
        unavailable["memory_used_bytes"] = reasons.get(f"{source}_used_bytes", "unsupported")
    free = total - used if total is not None and used is not None else None
    if free is None:
        unavailable["memory_free_bytes"] = unavailable.get("memory_used_bytes") or unavailable["memory_total_bytes"]
    return AmdMemory(None if total is None else source, total, used, free, unavailable)
