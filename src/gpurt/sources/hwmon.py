"""Sensors of one device through the kernel's hwmon interface (Documentation/hwmon/sysfs-interface)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpurt.sources.sysfs import SysfsReader, numbered, read

_HOTTEST_MC: Final = 250_000
_COLDEST_MC: Final = -50_000
_MOST_UW: Final = 10_000_000_000
"""10 kW: more than any board draws, less than a counter's all-ones."""
_FASTEST_HZ: Final = 100_000_000_000


@dataclass(frozen=True, slots=True)
class HwmonReading:
    """°C, W and MHz; None with an entry in ``unavailable`` under the names of :class:`gpurt.types.Telemetry`."""

    temperature_c: float | None = None
    power_w: float | None = None
    clock_mhz: int | None = None
    unavailable: dict[str, str] = field(default_factory=dict[str, str])


def hwmon_directories(device: Path) -> list[Path]:
    """The hwmon directories of a device: usually one."""
    return [path for _, path in numbered(device / "hwmon", "hwmon")[0]]


def read_hwmon(device: Path, temperature_label: str) -> HwmonReading:
    """One reading. ``temperature_label`` is the sensor that means the chip as a whole (``edge``, ``pkg``).

    Where no sensor has that label, the first one is taken.
    """
    sensors = SysfsReader()
    temperature: int | None = None
    power: int | None = None
    clock: int | None = None
    for directory in hwmon_directories(device):
        if temperature is None:
            temperature = _temperature(sensors, directory, temperature_label)
        for name in ("power1_average", "power1_input"):
            if power is None:
                power = sensors.number("power_w", directory / name, 0, _MOST_UW)
        if clock is None:
            clock = sensors.number("clock_mhz", directory / "freq1_input", 0, _FASTEST_HZ)
    for name, value in (("temperature_c", temperature), ("power_w", power), ("clock_mhz", clock)):
        if value is None:
            sensors.missing(name, "unsupported")
    return HwmonReading(
        temperature_c=None if temperature is None else temperature / 1000,
        power_w=None if power is None else power / 1_000_000,
        clock_mhz=None if clock is None else round(clock / 1_000_000),
        unavailable=sensors.unavailable,
    )


def labels(device: Path, kind: str) -> set[str]:
    """The labels of all its sensors of a kind: ``in`` (voltages), ``temp``."""
    return {label for directory in hwmon_directories(device) for label in _labelled(directory, kind).values()}


def _labelled(directory: Path, kind: str) -> dict[int, str]:
    """Labels by the numbers of sensors that have one."""
    pattern = re.compile(f"{kind}([0-9]{{1,3}})_label")
    try:
        numbers = sorted(int(match[1]) for name in os.listdir(directory) if (match := pattern.fullmatch(name)))
    except OSError:
        return {}  # gone meanwhile; its values will say so
    texts = ((number, read(directory / f"{kind}{number}_label")[0]) for number in numbers)
    return {number: text for number, text in texts if text}


def _temperature(sensors: SysfsReader, directory: Path, label: str) -> int | None:
    labelled = [number for number, text in _labelled(directory, "temp").items() if text == label]
    for number in (*labelled, *range(1, 9)):
        path = directory / f"temp{number}_input"
        value = sensors.number("temperature_c", path, _COLDEST_MC, _HOTTEST_MC)
        # A sensor that is there and gives nonsense is not replaced by another one: that would be another place.
        if value is not None or path.exists():
            return value
    return None
