"""Words that masking leaves alone: they tell nobody whose machine it is, and discovery decides by them."""

from __future__ import annotations

from typing import Final

from gpurt.errors import ReasonCode
from gpurt.platforms import PLATFORM_BACKEND_PRIORITY
from gpurt.types import BackendReport, DeviceIdentity, DeviceKind, DeviceState, GPUDevice, Telemetry
from gpurt.visibility.variables import VARIABLES

PUBLIC_NAMES: Final = frozenset(
    {
        *("root", "localhost", "shared", "public", "nobody", "user", "users", "admin", "host", "node", "home", ""),
        *(word for code in ReasonCode for word in code.split("_")),
        *DeviceState,
        *DeviceKind,
        *(name for model in (GPUDevice, DeviceIdentity, BackendReport, Telemetry) for name in model.model_fields),
        *("devices", "device", "reports", "error", "errors", "driver", "system", "packages", "registry", "python"),
        *PLATFORM_BACKEND_PRIORITY,
        *(backend for backends in PLATFORM_BACKEND_PRIORITY.values() for backend in backends),
        *("nvidia", "amd", "intel", "apple", "microsoft", "qualcomm", "nvml", "dxgi", "amdgpu", "macos", "gpurt"),
        *("ubuntu", "debian", "fedora", "arch", "alpine", "docker", "podman", "kubernetes", "wsl"),
        *("worker", "master", "failed", "verification", "verified", "usable", "memory", "adapter", "none", "all"),
    }
)
"""Names of hosts and users that come with images, or that are words of our own."""

PUBLIC_ADDRESSES: Final = frozenset({"127.0.0.1", "0.0.0.0", "::1", "::"})

PUBLIC_PARTS: Final = frozenset(
    {"sys", "fs", "proc", "cgroup", "unified", "systemd", "memory", "cpu", "cpuacct", "cpuset", "pids", "io", "blkio"}
)
"""Directories of control groups that have the kernel's own names."""

_OUR_KEYS: Final = frozenset(
    {
        *("schema", "platform", "gpurt", "python", "kernel", "container", "version", "driver_version", "mode", "group"),
        *("backend", "backends", "backend_name", "vendor", "kind", "state", "reason", "stage", "status", "topic"),
        *("support_level", "device_id", "device_ids", "compute_capability", "memory_usable_source", "source"),
        *("discovery_status", "sys", "machine", "implementation"),
    }
)
_OUR_VARIABLES: Final = ("GPURT_", "AITBC_", "NVIDIA_")


def is_ours(key: str | None) -> bool:
    """Whether a value of this name is a word or a version that decides something, and not what people wrote."""
    return key is not None and (
        key in _OUR_KEYS or key.endswith("_version") or key in VARIABLES or key.startswith(_OUR_VARIABLES)
    )
