"""What the processor and this process are doing at the moment, as psutil reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_CPU_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")
"""Kernel drivers that read the processor itself, not its surroundings."""


def cpu_clock_mhz(*, highest: bool = False) -> int | None:
    """Present clock of the processor, or the highest it can reach, in MHz; None where the system does not tell."""
    import psutil

    try:
        frequency = psutil.cpu_freq()
    except (OSError, RuntimeError, NotImplementedError):  # psutil, by platform, where there is no such sensor
        return None
    value = (frequency.max or frequency.current) if frequency and highest else frequency.current if frequency else 0
    return round(value) or None


def cpu_temperature_c() -> float | None:
    """The hottest of the processor's sensors, in °C; None where there is none, as in most virtual machines."""
    import psutil

    # psutil has this function on Linux and FreeBSD only.
    read: Callable[[], dict[str, list[Any]]] | None = getattr(psutil, "sensors_temperatures", None)
    try:
        sensors = read() if read else {}
    except (OSError, RuntimeError):
        return None
    values = [entry.current for driver in _CPU_SENSORS for entry in sensors.get(driver, ())]
    return max((float(value) for value in values if value is not None and -50 < value < 250), default=None)


def resident_bytes() -> int:
    """Physical memory that this process occupies."""
    import psutil

    return psutil.Process().memory_info().rss
