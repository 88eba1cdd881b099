"""What the operating system tells about this host: memory that may really be used, CPUs, NUMA nodes, identity.

Every reader takes ``root``, the directory under which ``proc``, ``sys`` and ``etc`` lie. Where there is no ``/proc``
(macOS, Windows) psutil and sysctl(3) answer instead. All functions read files and block; none caches. Bytes are bytes;
None is "not told"; what is there and cannot be understood is in ``skipped`` of the answer.
"""

from gpurt.sources.host_cpu import (
    CpuBudget,
    CpuFeatures,
    CpuInfo,
    cpu_budget,
    cpu_count,
    cpu_features,
    cpu_info,
    cpu_name,
    darwin_sysctl,
)
from gpurt.sources.host_identity import boot_id, host_fingerprint, pci_numa_node
from gpurt.sources.host_memory import HostMemory, memory_budget
from gpurt.sources.host_numa import (
    HugePagePool,
    HugePages,
    NumaInventory,
    NumaNode,
    device_nodes,
    huge_pages,
    numa_nodes,
)
from gpurt.sources.host_sensors import cpu_clock_mhz, cpu_temperature_c, resident_bytes

__all__ = [
    "CpuBudget",
    "CpuFeatures",
    "CpuInfo",
    "HostMemory",
    "HugePagePool",
    "HugePages",
    "NumaInventory",
    "NumaNode",
    "boot_id",
    "cpu_budget",
    "cpu_clock_mhz",
    "cpu_count",
    "cpu_features",
    "cpu_info",
    "cpu_name",
    "cpu_temperature_c",
    "darwin_sysctl",
    "device_nodes",
    "host_fingerprint",
    "huge_pages",
    "memory_budget",
    "numa_nodes",
    "pci_numa_node",
    "resident_bytes",
]
