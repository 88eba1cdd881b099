"""The processor of a recorded host, as the ``cpu`` backend would show it, without touching this one."""

from __future__ import annotations

from pathlib import Path

from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice


def recorded_processor(root: Path) -> GPUDevice | None:
    """The record of the host whose files are below ``root``; None where they do not tell its memory. Blocking."""
    # Without it the readers would ask this machine's system in place of the recorded one's.
    if not (root / "proc/meminfo").is_file():
        return None
    from gpurt.sources.host_cpu import cpu_budget, cpu_info
    from gpurt.sources.host_identity import host_fingerprint
    from gpurt.sources.host_memory import memory_budget

    memory = memory_budget(root)
    cpu = cpu_info(root, lambda name: None) if (root / "proc/cpuinfo").is_file() else None
    known = (root / "etc/machine-id").is_file()
    key = f"host:{host_fingerprint(root)}" if known else "host:recorded"
    return GPUDevice(
        device_id="cpu:0",
        name=cpu.name if cpu else "processor",
        vendor=cpu.vendor if cpu else "unknown",
        backend="cpu",
        compute_capability=cpu.instruction_set if cpu else None,
        memory_bytes=memory.total_bytes,
        memory_available=memory.available_bytes,
        # Without this file the affinity of this process would count.
        compute_units=cpu_budget(root).count if (root / "proc/self/status").is_file() else None,
        tensor_core_count=0,
        max_threads_per_block=None,
        clock_rate_mhz=None,
        bandwidth_gbps=None,
        support_level="full",
        driver_version=None,
        backend_name="numpy",
        identity=DeviceIdentity(key=key, stable=known),
        kind=DeviceKind.CPU,
        memory_usable_bytes=memory.usable_bytes,
        memory_usable_source=memory.source,
        memory_pool_id=key,
        backends=("cpu",),
    )
