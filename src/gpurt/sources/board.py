"""A board whose GPU is part of its processor: its name, and the temperature of that GPU, as Linux tells them.

NVIDIA's management library says next to nothing on a Jetson, and the kernel does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpurt.sources.sysfs import numbered, parse_number, read

_GPU_ZONES: Final = ("gpu-thermal", "GPU-therm", "tj-thermal")
"""Names of thermal zones on Tegra, the GPU's own before the hottest point of the chip."""


def board_name(root: Path) -> str | None:
    """Of the device tree, ``NVIDIA Jetson AGX Orin Developer Kit``; None on boards without one."""
    return read(root / "proc/device-tree/model")[0] or None


def gpu_zone_temperature_c(root: Path) -> float | None:
    """°C of the GPU's thermal zone, else of the chip's; None where there is no such zone, or it says what cannot be."""
    zones, _ = numbered(root / "sys/class/thermal", "thermal_zone")
    by_name = {read(zone / "type")[0]: zone for _, zone in reversed(zones)}
    for name in _GPU_ZONES:
        zone = by_name.get(name)
        text = read(zone / "temp")[0] if zone is not None else None
        millidegrees = parse_number(text) if text else None
        if millidegrees is not None and -50_000 <= millidegrees <= 250_000:
            return millidegrees / 1000
    return None
