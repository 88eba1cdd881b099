"""What a device's management library tells about its condition: errors of its memory, throttling, its bus.

Vendor-neutral values; each vendor's reader fills what its library tells. Judging them is :mod:`gpurt.health`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Throttle(StrEnum):
    """Why clocks are held below what was asked for."""

    POWER_CAP = "power_cap"
    """The configured power limit: normal for a busy GPU."""
    POWER_BRAKE = "power_brake"
    """The power supply asked for it."""
    THERMAL = "thermal"
    """Software, to stay below the highest operating temperature."""
    HARDWARE_THERMAL = "hardware_thermal"
    """Hardware, because the software limit did not do."""
    HARDWARE = "hardware"
    """Hardware, for power, temperature or a fault, where the driver does not tell which."""


ABNORMAL_THROTTLES: Final = frozenset(Throttle) - {Throttle.POWER_CAP}
"""What counts as throttled: a GPU at its power limit does what it was made for."""


class RecoveryAction(StrEnum):
    """What the driver says must be done before the device is whole again."""

    NONE = "none"
    RESET = "reset"
    REBOOT = "reboot"
    DRAIN = "drain"
    """Move the work away; some of it can go on for now."""


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """One look at a device. None is "not told", and ``unavailable`` says why: ``unsupported no_permission error
    invalid``. Counts of "since the last reset" unless they say otherwise.
    """

    ecc_enabled: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_lifetime: int | None = None
    remapped_corrected: int | None = None
    """Rows replaced in the device's lifetime because of errors that were corrected."""
    remapped_uncorrected: int | None = None
    remap_pending: bool | None = None
    """Rows wait for a reset to be replaced."""
    remap_failed: bool | None = None
    recovery_action: RecoveryAction | None = None
    throttle: frozenset[Throttle] | None = None
    slowdown_temperature_c: int | None = None
    """Where the hardware begins to slow down, °C. Differs by model and never changes."""
    pcie_generation: int | None = None
    """Of the moment: idle devices lower it to save power."""
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    """What device and slot can do together."""
    pcie_max_width: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])
