"""What condemns a device, as data: everything here may be replaced by configuration.

====================  ==========================================================================================
variable              meaning
====================  ==========================================================================================
GPURT_HEALTH_XIDS     effects of Xids, over the default: ``109=degraded,31=lost,154=notice``; ``other=notice``
                      is for those not listed
GPURT_THERMAL_LIMIT   °C from which on a device gets no new work; default: where its own hardware slows down
====================  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from gpurt.errors import GPUError
from gpurt.printable import quoted

XIDS_VARIABLE: Final = "GPURT_HEALTH_XIDS"
THERMAL_VARIABLE: Final = "GPURT_THERMAL_LIMIT"


class XidEffect(StrEnum):
    """What an Xid says about the device."""

    APPLICATION = "application"
    """A program went wrong, the device did not."""
    NOTICE = "notice"
    """Worth telling people; the device can go on."""
    DEGRADED = "degraded"
    """No new work until the device has shown itself clean for a while."""
    LOST = "lost"
    """Nothing can be expected of the device until it answers again for a while."""


XID_MEANINGS: Final[Mapping[int, str]] = MappingProxyType(
    {
        13: "graphics engine exception",
        31: "GPU memory page fault",
        43: "a channel was stopped after a program's error",
        45: "channels were cleaned up after an earlier error or a killed program",
        48: "uncorrectable (double bit) ECC error",
        62: "the GPU's internal microcontroller halted",
        63: "a memory row was marked for remapping",
        64: "a memory row could not be marked for remapping",
        68: "video decoder exception",
        74: "NVLink error",
        79: "the GPU has fallen off the bus",
        92: "high rate of corrected ECC errors",
        94: "uncorrectable ECC error, contained to one program",
        95: "uncorrectable ECC error, not contained",
        109: "context switch timeout",
        119: "the GPU's system processor (GSP) does not answer",
        120: "error of the GPU's system processor (GSP)",
        140: "unrecovered ECC error",
        143: "GPU initialization failed",
        154: "the recovery action that the GPU needs has changed",
    }
)
"""In our words, after NVIDIA's list of Xid errors (https://docs.nvidia.com/deploy/xid-errors/)."""

DEFAULT_XIDS: Final[Mapping[int, XidEffect]] = MappingProxyType(
    {
        # Those that NVIDIA's own Kubernetes device plugin takes for errors of the application (internal/rm/health.go).
        **dict.fromkeys((13, 31, 43, 45, 68, 109), XidEffect.APPLICATION),
        # What they announce is judged by its own evidence: remapped rows, ECC counters, the recovery action.
        **dict.fromkeys((63, 92, 154), XidEffect.NOTICE),
        # Memory that has lost data, and processors of the GPU that have stopped: NVIDIA's list wants a reset for each.
        **dict.fromkeys((48, 62, 64, 74, 94, 95, 119, 120, 140, 143), XidEffect.DEGRADED),
        79: XidEffect.LOST,
    }
)


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """What is a defect, and how long it counts. Times are seconds.

    Raises:
        ValueError: a count below 1, a time or margin below 0, or what is no finite number.
    """

    xids: Mapping[int, XidEffect] = field(default_factory=lambda: DEFAULT_XIDS)
    other_xids: XidEffect = XidEffect.DEGRADED
    """Those not listed. The device plugin condemns them too; here the device gets its chance again."""
    xid_hold_s: float = 600.0
    """How long after the last of them an Xid counts at least. A decision of ours: NVIDIA gives no time."""
    thermal_threshold_c: float | None = None
    """From here on a device gets no new work. None: where its own hardware slows down, if it tells."""
    thermal_margin_c: float = 5.0
    """How far below it must come to be cool again, so that a device at the limit does not flap."""
    throttle_hold_s: float = 60.0
    """How long hardware must have slowed the device down without a break until that is a defect."""
    suspect_after: int = 2
    """Readings in a row that must fail: one alone says nothing about a device."""
    recover_after: int = 3
    """Readings in a row that must be better before the device is called better."""

    def __post_init__(self) -> None:
        if self.suspect_after < 1 or self.recover_after < 1:
            raise ValueError("suspect_after and recover_after must be at least 1")
        for what in ("xid_hold_s", "thermal_margin_c", "throttle_hold_s", "thermal_threshold_c"):
            value = getattr(self, what)
            # NaN compares as false with everything: such a bound would never be reached, and never say why.
            if not (is_finite_number(value) or (value is None and what == "thermal_threshold_c")):
                raise ValueError(f"{what} must be a finite number, not {value!r}")
        if min(self.xid_hold_s, self.thermal_margin_c, self.throttle_hold_s) < 0:
            raise ValueError("times and margins must not be negative")

    def effect(self, xid: int) -> XidEffect:
        return self.xids.get(xid, self.other_xids)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> HealthPolicy:
        """The default policy with what the environment changes in it.

        Raises:
            GPUError: a variable that cannot be understood, and how it is written.
        """
        xids, other = _xids(environ.get(XIDS_VARIABLE, ""))
        return cls(
            xids=MappingProxyType({**DEFAULT_XIDS, **xids}),
            other_xids=other or XidEffect.DEGRADED,
            thermal_threshold_c=_celsius(environ.get(THERMAL_VARIABLE, "")),
        )


def is_finite_number(value: object) -> bool:
    """Whether a bound can be reached: no text, no truth value, not NaN and not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _xids(text: str) -> tuple[dict[int, XidEffect], XidEffect | None]:
    xids: dict[int, XidEffect] = {}
    other: XidEffect | None = None
    for item in filter(None, (part.strip() for part in text.split(","))):
        number, equals, name = (part.strip() for part in item.partition("="))
        effect = next((effect for effect in XidEffect if effect == name.lower()), None)
        if equals and effect is not None and number.isascii() and number.isdigit() and len(number) <= 9:
            xids[int(number)] = effect
        elif effect is not None and number == "other":
            other = effect
        else:
            raise GPUError(
                f"{XIDS_VARIABLE}: {quoted(item)} gives no Xid an effect",
                hint=f"write 31=application,79=lost,other=notice; effects are {' '.join(XidEffect)}",
            )
    return xids, other


def _celsius(text: str) -> float | None:
    text = text.strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 250:
        raise GPUError(f"{THERMAL_VARIABLE}={quoted(text)} is no temperature", hint="write °C as a number, such as 85")
    return value
