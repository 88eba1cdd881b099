"""The first stage of a probe: what the system and its management libraries show of a backend's devices.

One file per family makes device records of what its reader reads (:mod:`gpurt.sources`). None of the records is usable:
nobody has opened the device yet. They tell people that it is there, what it is, and what keeps it from being used.

Which family answers for which backend:

==========  ===================================================================================================
backend     sources
==========  ===================================================================================================
cuda        NVML
rocm        AMD's compute topology and graphics devices under ``/sys``
vulkan      Intel's graphics devices under ``/sys``; Vulkan's own list
opencl      OpenCL's own list
metal       macOS's tools, MLX
directml    DXGI
==========  ===================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gpurt.discovery.line import ProbeLine

_FAMILIES: Final[Mapping[str, str]] = {
    "cuda": "gpurt.discovery.sight_nvidia",
    "rocm": "gpurt.discovery.sight_amd",
    "vulkan": "gpurt.discovery.sight_vulkan",
    "opencl": "gpurt.discovery.sight_opencl",
    "metal": "gpurt.discovery.sight_apple",
    "directml": "gpurt.discovery.sight_windows",
}

LOADS_DRIVERS: Final = frozenset({"vulkan", "opencl", "metal", "directml"})
"""Looking for these loads drivers, which may crash or hang: only a process that may die should do it."""

TABLES: Final = ("nvml", "vulkan", "opencl", "dxgi", "apple")
"""Sources that answer with a table: ``<name>.json`` in a directory of recorded answers."""

_PATHS: Final[Mapping[str, tuple[str, ...]]] = {
    "nvml": (
        "dev/nvidia*",
        "proc/device-tree/model",
        "proc/driver/nvidia/version",
        "proc/meminfo",
        "sys/bus/pci/devices/*/numa_node",
        "sys/class/thermal/thermal_zone*/temp",
        "sys/class/thermal/thermal_zone*/type",
    ),
    "amd": (
        "dev/dri/*",
        "dev/kfd",
        "sys/bus/pci/devices/*/class",
        "sys/bus/pci/devices/*/device",
        "sys/bus/pci/devices/*/driver",
        "sys/bus/pci/devices/*/numa_node",
        "sys/bus/pci/devices/*/uevent",
        "sys/bus/pci/devices/*/vendor",
        "sys/class/drm/card*/device/current_compute_partition",
        "sys/class/drm/card*/device/current_memory_partition",
        "sys/class/drm/card*/device/device",
        "sys/class/drm/card*/device/driver",
        "sys/class/drm/card*/device/drm/*",
        "sys/class/drm/card*/device/gpu_busy_percent",
        "sys/class/drm/card*/device/hwmon/hwmon*/freq*",
        "sys/class/drm/card*/device/hwmon/hwmon*/in*_label",
        "sys/class/drm/card*/device/hwmon/hwmon*/power*",
        "sys/class/drm/card*/device/hwmon/hwmon*/temp*",
        "sys/class/drm/card*/device/mem_info_*",
        "sys/class/drm/card*/device/power/runtime_status",
        "sys/class/drm/card*/device/pp_dpm_sclk",
        "sys/class/drm/card*/device/product_name",
        "sys/class/drm/card*/device/revision",
        "sys/class/drm/card*/device/serial_number",
        "sys/class/drm/card*/device/uevent",
        "sys/class/drm/card*/device/unique_id",
        "sys/class/drm/card*/device/vendor",
        "sys/class/kfd/kfd/topology/nodes/*/gpu_id",
        "sys/class/kfd/kfd/topology/nodes/*/mem_banks/*/properties",
        "sys/class/kfd/kfd/topology/nodes/*/mem_banks/*/used_memory",
        "sys/class/kfd/kfd/topology/nodes/*/name",
        "sys/class/kfd/kfd/topology/nodes/*/properties",
        "sys/module/amdgpu/version",
        "usr/share/libdrm/amdgpu.ids",
    ),
    "intel": (
        "dev/dri/*",
        "proc/meminfo",
        "sys/bus/pci/devices/*/class",
        "sys/bus/pci/devices/*/driver",
        "sys/bus/pci/devices/*/numa_node",
        "sys/bus/pci/devices/*/uevent",
        "sys/bus/pci/devices/*/vendor",
        "sys/class/drm/card*/device/device",
        "sys/class/drm/card*/device/driver",
        "sys/class/drm/card*/device/drm/*",
        "sys/class/drm/card*/device/hwmon/hwmon*/power*",
        "sys/class/drm/card*/device/hwmon/hwmon*/temp*",
        "sys/class/drm/card*/device/lmem_total_bytes",
        "sys/class/drm/card*/device/power/runtime_status",
        "sys/class/drm/card*/device/revision",
        "sys/class/drm/card*/device/tile*/gt*/freq*/*_freq",
        "sys/class/drm/card*/device/tile*/physical_vram_size_bytes",
        "sys/class/drm/card*/device/uevent",
        "sys/class/drm/card*/device/vendor",
        "sys/class/drm/card*/gt/gt0/rps_*_freq_mhz",
        "sys/class/drm/card*/gt_*_freq_mhz",
        "sys/class/drm/card*/lmem_total_bytes",
    ),
    "host": (
        "etc/machine-id",
        "proc/cpuinfo",
        "proc/meminfo",
        "proc/self/cgroup",
        "proc/self/mountinfo",
        "proc/self/status",
        "proc/sys/kernel/random/boot_id",
        "proc/device-tree/model",
        "proc/driver/nvidia/gpus/*/numa_status",
        "sys/devices/system/cpu/online",
        "sys/devices/system/node/node*/cpulist",
        "sys/devices/system/node/node*/meminfo",
        "sys/fs/cgroup/**/cpu.cfs_period_us",
        "sys/fs/cgroup/**/cpu.cfs_quota_us",
        "sys/fs/cgroup/**/cpu.max",
        "sys/fs/cgroup/**/cpuset.cpus*",
        "sys/fs/cgroup/**/cpuset.effective_cpus",
        "sys/fs/cgroup/**/memory.current",
        "sys/fs/cgroup/**/memory.limit_in_bytes",
        "sys/fs/cgroup/**/memory.max",
        "sys/fs/cgroup/**/memory.stat",
        "sys/fs/cgroup/**/memory.usage_in_bytes",
        "sys/kernel/mm/hugepages/hugepages-*/*_hugepages",
        "sys/kernel/mm/transparent_hugepage/enabled",
    ),
}


def sight(
    name: str, *, environ: Mapping[str, str], root: Path = Path("/"), tables: Path | None = None
) -> ProbeLine | None:
    """What can be seen of backend ``name`` without its own library; None where there is no such source for it.

    Blocking, and raises nothing for what a source may raise. Loads drivers for the backends of :data:`LOADS_DRIVERS`.

    Args:
        environ: configuration of health; visibility variables are not applied here.
        root: the file tree (``/sys``, ``/proc``, ``/dev``, ``/etc``) to read.
        tables: a directory of recorded answers, one ``<source>.json`` for each of :data:`TABLES`. Where it is given no
            library and no tool is asked at all.
    """
    seen = [line for line in steps(name, environ=environ, root=root, tables=tables) if line.stage == "sighted"]
    return seen[-1] if seen else None


def steps(
    name: str, *, environ: Mapping[str, str], root: Path = Path("/"), tables: Path | None = None
) -> Iterator[ProbeLine]:
    """As :func:`sight`, step by step: what is done next, and what is seen as soon as it is. The last line that says
    ``sighted`` is the answer."""
    family = _FAMILIES.get(name)
    if family is None:
        return
    from gpurt.discovery.sight_record import View, failure_line

    lines: Iterator[ProbeLine] = import_module(family).look(View(environ, root, tables))
    try:
        yield from lines
    except Exception as exc:  # a reader's mistake costs what it would have shown, not the backend
        yield failure_line(exc)


def table_of(name: str) -> dict[str, Any] | None:
    """What this machine answers, as the content of ``<name>.json``; None for a source without a table.

    Blocking. Loads drivers, except for ``nvml``: for a process that may die. Raises nothing that a library may raise;
    where a source cannot be asked the table says why.

    Args:
        name: one of :data:`TABLES`.
    """
    match name:
        case "nvml":
            from gpurt.sources.nvml_table import query_nvml as query
        case "vulkan":
            from gpurt.sources.vulkan_query import query_vulkan as query
        case "opencl":
            from gpurt.sources.opencl_query import query_opencl as query
        case "dxgi":
            from gpurt.sources.dxgi_calls import query_dxgi as query
        case "apple":
            from gpurt.sources.apple_query import query_apple as query
        case _:
            return None
    return query()


def paths_of(name: str) -> tuple[str, ...]:
    """Files that a family reads, as patterns relative to the root of the tree; none for those that read no files.

    Links are part of what is read: a copy may have the files at the places where links lead to, or instead of links.

    Args:
        name: ``nvml amd intel host``, or one of :data:`TABLES`.
    """
    return _PATHS.get(name, ())
