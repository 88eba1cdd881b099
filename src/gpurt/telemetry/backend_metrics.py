"""What backends of this process are doing, as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from gpurt.backend import GPUBackend
from gpurt.errors import GPUError
from gpurt.runtime.protocols import PoolStatistics, ReportsActivity, ReportsMemory, Usage
from gpurt.telemetry.metrics import Family


def backend_families(backends: Iterable[GPUBackend]) -> list[Family]:
    """Lanes, copies and memory. A backend that does not tell has no samples, and neither has one that is closed.

    Devices have their stable ids, as everywhere in metrics. On the loop of the backends.
    """
    calls = Family("gpurt_lane_calls", "gauge", "Calls that the lane has and has not done, the running one included.")
    held = Family("gpurt_lane_held_calls", "gauge", "Calls that wait for a place in the lane.")
    running = Family(
        "gpurt_lane_call_seconds",
        "gauge",
        "How long the present call has been in the driver; 0 between calls.",
        "seconds",
    )
    copied = Family("gpurt_copied_bytes", "counter", "Bytes of copies that were completed.", "bytes")
    live = Family("gpurt_allocated_bytes", "gauge", "Memory that this process has allocated and not freed.", "bytes")
    cached = Family("gpurt_pool_cached_bytes", "gauge", "Freed memory that is kept for the next allocation.", "bytes")
    for backend in {backend.name: backend for backend in backends}.values():
        name = backend.name
        keys = {device.device_id: device.stable_id for device in backend.devices}
        if isinstance(backend, ReportsActivity):
            for lane in backend.lanes():
                calls.add(lane.calls, backend=name, lane=lane.name)
                held.add(lane.held, backend=name, lane=lane.name)
                running.add(lane.running_s or 0.0, backend=name, lane=lane.name)
            for (device_id, direction), nbytes in backend.copied_bytes().items():
                copied.add(nbytes, backend=name, device=keys.get(device_id, device_id), direction=direction)
        for device_id, key in keys.items():
            if (told := _memory(backend, device_id)) is not None:
                usage, pool = told
                live.add(usage.current_bytes, backend=name, device=key)
                cached.add(pool.cached_bytes, backend=name, device=key)
    return [calls, held, running, copied, live, cached]


def _memory(backend: GPUBackend, device_id: str) -> tuple[Usage, PoolStatistics] | None:
    if not isinstance(backend, ReportsMemory):
        return None
    try:
        return backend.memory_usage(device_id), backend.pool_statistics(device_id)
    except GPUError:  # the device is lost, or the backend is being closed: nothing is known
        return None
