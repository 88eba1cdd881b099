"""The host's processor as device records, and its sensors as a reading."""

from __future__ import annotations

import platform
from pathlib import Path

from gpurt.sources import host
from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice, Telemetry


def cpu_devices(backend: str, count: int, limit: int | None, root: Path) -> tuple[GPUDevice, ...]:
    """The host, split into ``count`` equal devices that give out at most ``limit`` bytes each."""
    import numpy as np

    memory, cpu, clock = host.memory_budget(root), host.cpu_info(root), host.cpu_clock_mhz(highest=True)
    key = f"host:{host.host_fingerprint(root)}"
    usable, source = memory.usable_bytes // count, memory.source
    if limit is not None and limit < usable:
        usable, source = limit, "limit"
    return tuple(
        GPUDevice(
            device_id=f"{backend}:{index}",
            name=cpu.name,
            vendor=cpu.vendor,
            backend=backend,
            compute_capability=cpu.instruction_set,
            memory_bytes=memory.total_bytes // count,
            memory_available=memory.usable_bytes // count,
            compute_units=max(1, host.cpu_count(root) // count),
            tensor_core_count=0,
            max_threads_per_block=None,
            clock_rate_mhz=clock,
            bandwidth_gbps=None,
            support_level="full",
            driver_version=f"numpy {np.__version__}, {platform.system()} {platform.release()}",
            backend_name="numpy",
            identity=DeviceIdentity(key=key)
            if count == 1
            else DeviceIdentity(key=f"{key}/{index}", partition=str(index)),
            kind=DeviceKind.CPU,
            memory_usable_bytes=usable,
            memory_usable_source=source,
            memory_pool_id=key,
            backends=(backend,),
        )
        for index in range(count)
    )


def cpu_telemetry(total_bytes: int, free_bytes: int) -> Telemetry:
    """These figures with what the host's sensors say now."""
    clock, temperature = host.cpu_clock_mhz(), host.cpu_temperature_c()
    missing = {"memory_reserved_bytes", "power_w", "utilization_percent"}
    missing |= {name for name, value in (("clock_mhz", clock), ("temperature_c", temperature)) if value is None}
    return Telemetry(
        memory_total_bytes=total_bytes,
        memory_used_bytes=total_bytes - free_bytes,
        memory_free_bytes=free_bytes,
        temperature_c=temperature,
        clock_mhz=clock,
        unavailable=dict.fromkeys(sorted(missing), "unsupported"),
    )
