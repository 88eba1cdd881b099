"""The peak arithmetic rate of a device that nobody has measured, by what its vendor publishes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gpurt.aggregates import get_peak_flops
from gpurt.types import DeviceKind, GPUDevice

DATA_SHEETS: Final[Mapping[str, float]] = {
    "a10": 31.2e12,
    "a100": 19.5e12,
    "h100": 67e12,
    "h100 nvl": 60e12,
    "h100 pcie": 51e12,
    "h200": 67e12,
    "l4": 30.3e12,
    "l40s": 91.6e12,
    "t4": 8.1e12,
    "geforce rtx 3090": 35.6e12,
    "geforce rtx 4090": 82.6e12,
    "geforce rtx 5090": 104.8e12,
    "instinct mi210": 22.6e12,
    "instinct mi300x": 163.4e12,
    "radeon rx 7900 xtx": 61.4e12,
    "apple m1": 2.6e12,
    "apple m1 pro": 5.2e12,
    "apple m1 max": 10.4e12,
    "apple m1 ultra": 21e12,
    "apple m2": 3.6e12,
    "apple m2 pro": 6.8e12,
    "apple m2 max": 13.6e12,
    "apple m2 ultra": 27.2e12,
}
"""FLOP/s in float32 without matrix units, from NVIDIA's and AMD's data sheets and Apple's announcements, by the words
of a name. Of a chip that is sold with fewer cores, too, the figure is that of the larger one."""
_OTHER_MODEL: Final = frozenset({"laptop", "mobile", "q", "ti", "super", "d"})
"""Words that make another, slower or newer, model of a name in the table."""


def vendor_peak_flops(device: GPUDevice) -> float | None:
    """FLOP/s in float32, or None where nobody tells.

    Units times clock where the record has both (:func:`gpurt.aggregates.get_peak_flops`); drivers that tell neither
    (Vulkan, Metal, DirectML) tell a name, for which there is :data:`DATA_SHEETS`. Matrix units do more in half
    precision: the rate is never too high for what a layer can get.
    """
    told = get_peak_flops(device)
    if told is not None:
        return told
    if device.kind not in (DeviceKind.GPU, DeviceKind.INTEGRATED_GPU):
        return None  # the processor of a chip has its name as well
    words = re.findall(r"[a-z0-9]+", device.name.lower())
    if not _OTHER_MODEL.isdisjoint(words):
        return None
    text = f" {' '.join(words)} "
    found = [name for name in DATA_SHEETS if f" {name} " in text]
    return DATA_SHEETS[max(found, key=len)] if found else None
