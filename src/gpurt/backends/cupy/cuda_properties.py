"""A CUDA device's properties through the driver API.

CuPy's ``getDeviceProperties`` fills a structure of which little is needed here, 2 ms per GPU, and holds the GIL all the
while: a host with eight GPUs would stand still for one frame of a video. These calls take microseconds without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

# CUdevice_attribute, cuda.h; the keys are those of CuPy's dictionary.
_ATTRIBUTES: Final[Mapping[str, int]] = {
    "maxThreadsPerBlock": 1,
    "clockRate": 13,
    "multiProcessorCount": 16,
    "integrated": 18,
    "memoryClockRate": 36,
    "memoryBusWidth": 37,
    "major": 75,
    "minor": 76,
}
_NAME_BYTES: Final = 256


def read_properties(library: Any, index: int) -> dict[str, Any] | None:
    """What CuPy's ``getDeviceProperties`` calls it, of the ``index``-th visible device; None if a call fails.

    The UUID is that of the MIG compute instance where the device is one.

    Args:
        library: ``ctypes.CDLL`` of CUDA's driver, initialised.
    """
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    total = ctypes.c_size_t()
    uuid = (ctypes.c_ubyte * 16)()
    try:
        failed = (
            library.cuDeviceGet(ctypes.byref(device), index)
            or library.cuDeviceGetName(name, _NAME_BYTES, device)
            or library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
            or library.cuDeviceGetUuid_v2(uuid, device)
        )
        if failed:
            return None
        found: dict[str, Any] = {"name": name.value, "totalGlobalMem": total.value, "uuid": bytes(uuid)}
        value = ctypes.c_int()
        for key, attribute in _ATTRIBUTES.items():
            if library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                return None
            found[key] = value.value
    except AttributeError:  # a driver older than one of the calls
        return None
    return found
