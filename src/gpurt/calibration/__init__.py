"""Calibration: what each device really does, measured in about two seconds and kept for placement.

::

    from gpurt.calibration import calibrate

    for found in await calibrate(backend):
        print(found.device.device_id, found.speeds or found.failure)

Figures are kept in the registry with their date, backend and driver version, and measured anew when the driver has
changed. Discovery puts them into the devices' records (``GPUDevice.speeds``), which is how a master learns of them.
"""

from gpurt.calibration.keep import keep_calibrations, kept_calibrations
from gpurt.calibration.run import REVISION, Calibration, calibrate
from gpurt.types import DeviceSpeeds

__all__ = ["REVISION", "Calibration", "DeviceSpeeds", "calibrate", "keep_calibrations", "kept_calibrations"]
