"""gpurt: an asyncio-native device runtime for distributed inference workers.

::

    import gpurt

    backend = await gpurt.create_backend()
    async with backend:
        device = (await backend.list_devices())[0]
        async with backend.allocation(device.device_id, 1 << 30) as handle:
            await backend.copy_to_device(data, handle)

The public names are imported on first use, so that ``import gpurt`` costs next to nothing and loads no vendor
library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurt.ambient import close_default_backends, default_backend
    from gpurt.backend import GPUBackend
    from gpurt.discovery.service import GPUDiscoveryService
    from gpurt.driver import API_VERSION, Driver
    from gpurt.errors import (
        BackendClosed,
        BackendUnavailable,
        CompileFailed,
        DeviceLost,
        DeviceNotFound,
        DeviceUnresponsive,
        GPUError,
        HandleInUse,
        InvalidHandle,
        OutOfMemory,
        OutOfRange,
        ReasonCode,
        TransferFailed,
        Unsupported,
        UntrustedFile,
        WrongLoop,
    )
    from gpurt.factory import (
        PLATFORM_BACKEND_PRIORITY,
        GPUBackendFactory,
        clear_backend_override,
        create_backend,
        detect_available_backends,
        get_gpu_backend_info,
        get_peak_flops,
        get_total_gpu_memory,
        set_backend_override,
    )
    from gpurt.memory.arrays import DeviceArray
    from gpurt.memory.manager import MemoryManager
    from gpurt.runtime.backend import DriverBackend
    from gpurt.tensors import get_memory_manager, to_device
    from gpurt.types import (
        BackendReport,
        Capabilities,
        DeviceIdentity,
        DeviceKind,
        DeviceSpeeds,
        DeviceState,
        GPUDevice,
        Kernel,
        MemoryHandle,
        MemoryInfo,
        Telemetry,
    )
    from gpurt.weights.peer import copy_shard_from_peer, update_shard_from_peer

    __version__: str

__all__ = [
    "API_VERSION",
    "PLATFORM_BACKEND_PRIORITY",
    "BackendClosed",
    "BackendReport",
    "BackendUnavailable",
    "Capabilities",
    "CompileFailed",
    "DeviceArray",
    "DeviceIdentity",
    "DeviceKind",
    "DeviceLost",
    "DeviceNotFound",
    "DeviceSpeeds",
    "DeviceState",
    "DeviceUnresponsive",
    "Driver",
    "DriverBackend",
    "GPUBackend",
    "GPUBackendFactory",
    "GPUDevice",
    "GPUDiscoveryService",
    "GPUError",
    "HandleInUse",
    "InvalidHandle",
    "Kernel",
    "MemoryHandle",
    "MemoryInfo",
    "MemoryManager",
    "OutOfMemory",
    "OutOfRange",
    "ReasonCode",
    "Telemetry",
    "TransferFailed",
    "Unsupported",
    "UntrustedFile",
    "WrongLoop",
    "__version__",
    "clear_backend_override",
    "close_default_backends",
    "copy_shard_from_peer",
    "create_backend",
    "default_backend",
    "detect_available_backends",
    "get_gpu_backend_info",
    "get_memory_manager",
    "get_peak_flops",
    "get_total_gpu_memory",
    "set_backend_override",
    "to_device",
    "update_shard_from_peer",
]

_HOMES = {
    "gpurt.ambient": ("close_default_backends", "default_backend"),
    "gpurt.backend": ("GPUBackend",),
    "gpurt.discovery.service": ("GPUDiscoveryService",),
    "gpurt.driver": ("API_VERSION", "Driver"),
    "gpurt.errors": (
        *("BackendClosed", "BackendUnavailable", "CompileFailed", "DeviceLost", "DeviceNotFound", "DeviceUnresponsive"),
        *("GPUError", "HandleInUse", "InvalidHandle", "OutOfMemory", "OutOfRange", "ReasonCode", "TransferFailed"),
        *("Unsupported", "UntrustedFile", "WrongLoop"),
    ),
    "gpurt.factory": (
        *("PLATFORM_BACKEND_PRIORITY", "GPUBackendFactory", "clear_backend_override", "create_backend"),
        *("detect_available_backends", "get_gpu_backend_info", "get_peak_flops", "get_total_gpu_memory"),
        "set_backend_override",
    ),
    "gpurt.memory.arrays": ("DeviceArray",),
    "gpurt.memory.manager": ("MemoryManager",),
    "gpurt.weights.peer": ("copy_shard_from_peer", "update_shard_from_peer"),
    "gpurt.runtime.backend": ("DriverBackend",),
    "gpurt.tensors": ("get_memory_manager", "to_device"),
    "gpurt.types": (
        *("BackendReport", "Capabilities", "DeviceIdentity", "DeviceKind", "DeviceSpeeds", "DeviceState", "GPUDevice"),
        *("Kernel", "MemoryHandle", "MemoryInfo", "Telemetry"),
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("gpurt")
    except metadata.PackageNotFoundError:
        return "0+source"  # a source tree on the path that was never installed
