"""The condition of one NVIDIA GPU, and the processes on it, through NVML.

Internal to :mod:`gpurt.sources.nvml`, which owns the library. A call that fails costs its field and leaves the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpurt.sources.condition import DeviceCondition, RecoveryAction, Throttle
from gpurt.sources.nvml_fields import FieldReader

# nvml.h: nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlTemperatureThresholds_t, nvmlEnableState_t, field ids
_CORRECTED, _UNCORRECTED, _VOLATILE, _AGGREGATE = 0, 1, 0, 1
_SLOWDOWN = 1
_FI_RECOVERY_ACTION = 230

# nvmlClocksEventReason* of nvml.h. Idle, application clocks, sync boost and display clocks are no throttling.
_THROTTLES: Final[Mapping[int, Throttle]] = {
    0x04: Throttle.POWER_CAP,
    0x08: Throttle.HARDWARE,
    0x20: Throttle.THERMAL,
    0x40: Throttle.HARDWARE_THERMAL,
    0x80: Throttle.POWER_BRAKE,
}
# nvmlDeviceGpuRecoveryAction_t
_RECOVERY: Final[Mapping[int, RecoveryAction]] = {
    0: RecoveryAction.NONE,
    1: RecoveryAction.RESET,
    2: RecoveryAction.REBOOT,
    3: RecoveryAction.DRAIN,
    4: RecoveryAction.RESET,
    5: RecoveryAction.DRAIN,
    6: RecoveryAction.RESET,
    7: RecoveryAction.REBOOT,
}
_COUNT_MAX, _ROWS_MAX = 2**53, 2**20
"""More errors, or rows, than can be: NVML marks "not available" by the largest number of the type."""


@dataclass(frozen=True, slots=True)
class NvmlProcess:
    """A process as the driver numbers it. In a container that is often the host's number: never look it up in the
    local ``/proc``, and do not conclude from its absence that a process uses nothing."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell, as on Windows."""


@dataclass(frozen=True, slots=True)
class NvmlProcesses:
    """Compute processes on one GPU; ``processes`` is None where they cannot be listed, and ``reason`` says why."""

    processes: tuple[NvmlProcess, ...] | None
    reason: str | None = None

    @property
    def used_bytes(self) -> int | None:
        """Sum over the processes whose use is known; None when there is none such, though there are processes."""
        known = [process.used_bytes for process in self.processes or () if process.used_bytes is not None]
        return sum(known) if known or self.processes == () else None

    @property
    def unknown_count(self) -> int:
        """Processes whose use is not told. More than 0: ``used_bytes`` is a part of the whole."""
        return sum(process.used_bytes is None for process in self.processes or ())


def read_condition(fields: FieldReader, handle: Any) -> DeviceCondition:
    """One look; ``fields.lost`` is set afterwards if the GPU turned out to be gone."""
    mode = fields.read("ecc_enabled", "nvmlDeviceGetEccMode", handle)
    corrected, uncorrected, pending, failed = _remapped_rows(fields, handle)
    return DeviceCondition(
        ecc_enabled=None if mode is None else mode[0] == 1,
        ecc_corrected=_ecc(fields, "ecc_corrected", handle, _CORRECTED, _VOLATILE),
        ecc_uncorrected=_ecc(fields, "ecc_uncorrected", handle, _UNCORRECTED, _VOLATILE),
        ecc_uncorrected_lifetime=_ecc(fields, "ecc_uncorrected_lifetime", handle, _UNCORRECTED, _AGGREGATE),
        remapped_corrected=corrected,
        remapped_uncorrected=uncorrected,
        remap_pending=pending,
        remap_failed=failed,
        recovery_action=_recovery_action(fields, handle),
        throttle=_throttle(fields, handle),
        slowdown_temperature_c=fields.number(
            "slowdown_temperature_c", 1, 250, "nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN
        ),
        pcie_generation=_pcie(fields, "pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_width=_pcie(fields, "pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_max_generation=_pcie(fields, "pcie_max_generation", "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_max_width=_pcie(fields, "pcie_max_width", "nvmlDeviceGetMaxPcieLinkWidth", handle),
        unavailable=fields.unavailable,
    )


def read_processes(fields: FieldReader, handle: Any) -> NvmlProcesses:
    """Compute processes by whichever version of the call this driver has."""
    for function in (
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "nvmlDeviceGetComputeRunningProcesses",
    ):
        found = fields.read("processes", function, handle)
        if found is not None:
            return NvmlProcesses(tuple(NvmlProcess(int(entry.pid), _used(entry)) for entry in found))
        if fields.lost is not None or fields.unavailable["processes"] != "unsupported":
            break
    return NvmlProcesses(None, fields.unavailable["processes"])


def _used(entry: Any) -> int | None:
    used = entry.usedGpuMemory
    # The binding turns NVML's mark into None since version 10 and leaves it alone before.
    return int(used) if used is not None and 0 <= used <= 2**62 else None


def _ecc(fields: FieldReader, name: str, handle: Any, error: int, counter: int) -> int | None:
    return fields.number(name, 0, _COUNT_MAX, "nvmlDeviceGetTotalEccErrors", handle, error, counter)


def _pcie(fields: FieldReader, name: str, function: str, handle: Any) -> int | None:
    return fields.number(name, 1, 64, function, handle)


def _remapped_rows(fields: FieldReader, handle: Any) -> tuple[int | None, int | None, bool | None, bool | None]:
    names = ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
    rows = fields.read("remapped_rows", "nvmlDeviceGetRemappedRows", handle)
    reason = fields.unavailable.pop("remapped_rows", None)
    if rows is None:
        fields.unavailable.update(dict.fromkeys(names, reason or "error"))
        return None, None, None, None
    corrected, uncorrected, pending, failed = rows
    return (
        fields.checked(names[0], corrected, 0, _ROWS_MAX),
        fields.checked(names[1], uncorrected, 0, _ROWS_MAX),
        _flag(fields, names[2], pending),
        _flag(fields, names[3], failed),
    )


def _flag(fields: FieldReader, name: str, value: int) -> bool | None:
    checked = fields.checked(name, value, 0, 1)
    return None if checked is None else bool(checked)


def _recovery_action(fields: FieldReader, handle: Any) -> RecoveryAction | None:
    name = "recovery_action"
    values = fields.read(name, "nvmlDeviceGetFieldValues", handle, [_FI_RECOVERY_ACTION])
    if values is None:
        return None
    if values[0].nvmlReturn != 0:
        fields.unavailable[name] = "unsupported"
        return None
    action = _RECOVERY.get(int(values[0].value.uiVal))
    if action is None:
        fields.unavailable[name] = "invalid"
    return action


def _throttle(fields: FieldReader, handle: Any) -> frozenset[Throttle] | None:
    # Drivers and bindings before 535 know the same bits by another name.
    reasons = fields.read("throttle", "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None and fields.unavailable["throttle"] == "unsupported":
        reasons = fields.read("throttle", "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if reasons is not None:
            del fields.unavailable["throttle"]
    reasons = fields.checked("throttle", reasons, 0, 2**32 - 1)
    if reasons is None:
        return None
    return frozenset(throttle for bit, throttle in _THROTTLES.items() if reasons & bit)
