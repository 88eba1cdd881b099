"""What of this machine and this process decides which devices can be used. Blocking readers of small files."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any, Final

from gpurt.recording.nodes import list_nodes
from gpurt.recording.place import container_of, os_release
from gpurt.sources.sysfs import read

_MODULES: Final = (
    "nvidia",
    "nvidia_uvm",
    "nvidia_drm",
    "nvidia_modeset",
    "nouveau",
    "nova_core",
    "amdgpu",
    "amdkfd",
    "radeon",
    "i915",
    "xe",
    "vfio_pci",
    "dxgkrnl",
)
"""Kernel drivers of accelerators, and those that take a card away from them."""


def system(root: Path = Path("/")) -> dict[str, Any]:
    """Platform, kernel, nodes, modules, limits: each with a value, or the reason why there is none."""
    return {
        "platform": {
            "sys": sys.platform,
            "machine": platform.machine(),
            "kernel": platform.release(),
            "version": platform.version(),
            "os": os_release(root),
            "hostname": platform.node(),
            "python": sys.version,
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "container": container_of(root),
        },
        "device_nodes": [node.model_dump(mode="json") for node in list_nodes(root)],
        "process": _process(),
        "nvidia_driver": _text(root / "proc/driver/nvidia/version"),
        "kernel_modules": _modules(root),
        "limits": {"cgroup": _cgroup(root), "ulimit": _ulimits()},
    }


def _process() -> dict[str, Any]:
    """Under whose rights device nodes are opened."""
    if not hasattr(os, "getuid"):
        return {}
    return {"uid": os.geteuid(), "gid": os.getegid(), "groups": sorted(os.getgroups())}


def _text(path: Path) -> dict[str, str | None]:
    text, reason = read(path)
    return {"text": text, "unavailable": reason}


def _modules(root: Path) -> dict[str, Any]:
    """Loaded modules of :data:`_MODULES`, with their versions; ``unavailable`` where nobody tells."""
    text, reason = read(root / "proc/modules")
    if text is None:
        return {"loaded": None, "unavailable": reason}
    loaded = {line.split(" ", 1)[0] for line in text.splitlines()}
    # Drivers that are built into the kernel are not in that list.
    loaded |= {name for name in _MODULES if (root / "sys/module" / name).is_dir()}
    return {
        "loaded": {
            name: read(root / "sys/module" / name / "version")[0] or read(root / "sys/module" / name / "srcversion")[0]
            for name in _MODULES
            if name in loaded
        }
    }


def _cgroup(root: Path) -> dict[str, Any]:
    from gpurt.sources.host_cgroup import cpu_quota, cpuset, memory_limits
    from gpurt.sources.host_files import HostFiles

    files = HostFiles(root)
    cpus = cpuset(root, files)
    return {
        "memory": [
            {
                "group": str(limit.path),
                "limit_bytes": limit.limit_bytes,
                "usage_bytes": limit.usage_bytes,
                "headroom_bytes": limit.headroom_bytes,
            }
            for limit in memory_limits(root, files)
        ],
        "cpu_quota": cpu_quota(root, files),
        "cpuset": None if cpus is None else sorted(cpus),
        "not_understood": {skipped.where: skipped.why for skipped in files.skipped},
    }


def _ulimits() -> dict[str, list[int | None]] | None:
    """Soft and hard limits, None for "unlimited"; None where the system has no such thing."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    names = ("AS", "CORE", "DATA", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")
    found: dict[str, list[int | None]] = {}
    for name in names:
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            limits = resource.getrlimit(number)
            found[name.lower()] = [None if limit == resource.RLIM_INFINITY else limit for limit in limits]
    return found
