"""Calibrations in the registry file, read and written off the event loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from gpurt.errors import GPUError
from gpurt.registry.measured import MeasuredFile
from gpurt.registry.records import CalibrationRecord
from gpurt.runtime.lane import off_loop

_log = logging.getLogger("gpurt.calibration")


async def kept_calibrations(registry_path: str | os.PathLike[str] | None = None) -> tuple[CalibrationRecord, ...]:
    """Everything that was measured on this host, the newest first; that of simulated devices comes last.

    Also of devices and drivers that are not there any more. Empty also where the file cannot be read, which is logged.
    """
    return await off_loop("calibration", lambda: MeasuredFile(registry_path).calibrations())


async def keep_calibrations(
    records: Iterable[CalibrationRecord], registry_path: str | os.PathLike[str] | None = None
) -> bool:
    """Write records to the registry file; each replaces the last one of its device and backend.

    False where that is not possible, which is logged and no error. Cancelled, it returns at once and is done or not.
    """
    measured = tuple(records)
    if not measured:
        return True
    try:
        await off_loop("calibration", lambda: MeasuredFile(registry_path).keep_calibrations(measured))
    except (OSError, GPUError) as exc:
        _log.warning("the calibration is not kept: %s", exc)
        return False
    return True
