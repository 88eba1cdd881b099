"""What to do about each reason why a backend is absent, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpurt.backends.advice import DRIVER, INSTALL, PERMISSION
from gpurt.errors import ReasonCode

_MORE_TIME: Final = "give it more time (probe_timeout, --timeout): 10 seconds are the default, 30 the first time"

NOT_MISSED: Final = frozenset({ReasonCode.NO_DRIVER, ReasonCode.NO_LIBRARY, ReasonCode.TIMEOUT})
"""What nobody needs to mend on a machine whose PCI bus shows no device of the backend's vendor."""

NOT_ON_BUS: Final = "the PCI bus shows no such device"
"""What is said of a driver or a library that nobody may miss."""

_VISIBILITY: Final[Mapping[str, str]] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES",
    "vulkan": "GGML_VK_VISIBLE_DEVICES, ZE_AFFINITY_MASK, VK_DRIVER_FILES or VK_ICD_FILENAMES, whichever is set",
    "opencl": "GPU_DEVICE_ORDINAL or OCL_ICD_VENDORS, whichever is set",
}


def remedy(reason: ReasonCode, backend: str, platform: str) -> str:
    """What a person can do about ``reason`` of ``backend`` on ``platform``. Never empty."""
    match reason:
        case ReasonCode.NO_LIBRARY:
            return INSTALL.get(backend, f"install the library that backend {backend} needs")
        case ReasonCode.NO_DRIVER:
            generic = f"install the driver that backend {backend} needs"
            return DRIVER.get(backend, {}).get(platform, generic)
        case ReasonCode.DRIVER_MISMATCH:
            return "reboot, or unload and reload the kernel module: the driver was upgraded while it was loaded"
        case ReasonCode.NO_PERMISSION:
            return PERMISSION.get(backend, "give this user access to the device nodes, or run in their group")
        case ReasonCode.HIDDEN_BY_ENVIRONMENT:
            return f"unset {_VISIBILITY.get(backend, 'the visibility variables')}, or name the devices to use in it"
        case ReasonCode.NO_DEVICE:
            return "nothing, if this machine has no such device; else check that it is powered, seated and passed on"
        case ReasonCode.TIMEOUT:
            if backend == "cpu":
                return _MORE_TIME
            return f"{_MORE_TIME}; if it hangs all the same, see the kernel log (dmesg): its driver needs a reset"
        case ReasonCode.CRASHED:
            return f"reinstall the library of backend {backend}; run python -m gpurt.discovery.probe_child {backend}"
        case ReasonCode.UNSUPPORTED_DEVICE:
            return "use another backend for this device, or a version of the library that supports it"
        case ReasonCode.WRONG_API:
            return f"upgrade the package that provides backend {backend}, or gpurt, so that their versions agree"
        case ReasonCode.WRONG_PLATFORM:
            return "nothing: this operating system does not have it"
        case ReasonCode.NOT_RECORDED:
            return "nothing: a recording is looked at, not used"
        case ReasonCode.ERROR:
            return f"read the message; for the whole story run python -m gpurt.discovery.probe_child {backend}"


def where_none_is_on_the_bus(reason: ReasonCode, hint: str) -> str:
    """``hint`` for a machine whose PCI bus shows no device of the backend's vendor."""
    if reason is ReasonCode.TIMEOUT:
        return _MORE_TIME
    return f"nothing, if this machine has no such device; else: {hint}"
