"""What is known of a device at one moment, and which defects that shows. Pure, without memory."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from gpurt.health.policy import HealthPolicy
from gpurt.sources.condition import DeviceCondition, RecoveryAction
from gpurt.types import DeviceState

SEVERITY: Final = (
    DeviceState.HEALTHY,
    DeviceState.SUSPECT,
    DeviceState.DEGRADED,
    DeviceState.UNRESPONSIVE,
    DeviceState.LOST,
    DeviceState.REMOVED,
)
"""From good to bad."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation. None is "not told"."""

    contact: DeviceState = DeviceState.HEALTHY
    """How the device answered: ``healthy``, ``suspect`` (with an error), ``unresponsive`` (not yet), ``lost``."""
    contact_reason: str | None = None
    temperature_c: float | None = None
    condition: DeviceCondition | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth a note."""

    code: str
    """Stays the same while the wording may change: ``ecc_uncorrected``, ``xid_79``."""
    state: DeviceState
    """What it makes of the device by itself; ``healthy`` is a note."""
    text: str


def findings(policy: HealthPolicy, evidence: Evidence, *, hot: bool = False) -> tuple[Finding, ...]:
    """Defects and notes, without those that need time to show (Xids, throttling, failing readings).

    Args:
        hot: the device was too hot before; it stays so until it is ``thermal_margin_c`` below the limit.
    """
    found: list[Finding] = []
    if evidence.contact in (DeviceState.UNRESPONSIVE, DeviceState.LOST, DeviceState.REMOVED):
        text = evidence.contact_reason or f"the device is {evidence.contact}"
        found.append(Finding(f"contact_{evidence.contact}", evidence.contact, text))
    condition = evidence.condition
    if condition is not None:
        found += _memory(condition)
        action = condition.recovery_action
        if action is not None and action is not RecoveryAction.NONE:
            todo = {
                RecoveryAction.RESET: "reset the GPU (`nvidia-smi --gpu-reset`)",
                RecoveryAction.REBOOT: "reboot the machine",
                RecoveryAction.DRAIN: "take the work off the GPU, then reset it",
            }[action]
            found.append(Finding(f"recovery_{action}", DeviceState.DEGRADED, f"the driver asks: {todo}"))
    found += _heat(policy, evidence, hot=hot)
    return tuple(found)


def _heat(policy: HealthPolicy, evidence: Evidence, *, hot: bool) -> list[Finding]:
    limit, celsius = policy.thermal_threshold_c, evidence.temperature_c
    if limit is None and evidence.condition is not None:
        limit = evidence.condition.slowdown_temperature_c
    if limit is None:
        return []
    cool = limit - policy.thermal_margin_c
    if celsius is None:
        # A sensor that stops telling does not cool anything.
        text = f"it was too hot, and does not tell its temperature now; no new work from {limit:g} °C on"
        return [Finding("too_hot", DeviceState.DEGRADED, text)] if hot else []
    if celsius < (cool if hot else limit):
        return []
    text = f"{celsius:g} °C; no new work from {limit:g} °C on, until below {cool:g} °C"
    return [Finding("too_hot", DeviceState.DEGRADED, text)]


def _memory(condition: DeviceCondition) -> list[Finding]:
    found: list[Finding] = []
    lost, replaced = condition.ecc_uncorrected or 0, condition.remapped_uncorrected or 0
    if condition.remap_failed:
        found.append(
            Finding("remap_failed", DeviceState.DEGRADED, "a memory row could not be remapped: replace the GPU")
        )
    if condition.remap_pending:
        text = "memory rows wait to be remapped: reset the GPU (`nvidia-smi --gpu-reset`)"
        found.append(Finding("remap_pending", DeviceState.DEGRADED, text))
    elif lost > replaced:
        # More errors than rows that were replaced for them: some memory that lost data is still in use.
        text = f"{lost} uncorrectable ECC errors since the last reset: reset the GPU, replace it if they come back"
        found.append(Finding("ecc_uncorrected", DeviceState.DEGRADED, text))
    if replaced and not condition.remap_pending:
        text = f"{replaced} memory rows were replaced after uncorrectable errors, in the GPU's lifetime"
        found.append(Finding("rows_remapped", DeviceState.HEALTHY, text))
    return found


def merged(old: DeviceCondition | None, new: DeviceCondition | None) -> DeviceCondition | None:
    """``new``, with what it cannot tell this time as ``old`` told it: a question that fails clears nobody."""
    if old is None or new is None:
        return new or old
    kept = {
        field.name: getattr(old, field.name)
        for field in fields(DeviceCondition)
        if field.name not in ("throttle", "unavailable") and getattr(new, field.name) is None
    }
    return replace(new, **kept)
