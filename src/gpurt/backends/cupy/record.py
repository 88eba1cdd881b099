"""The record of a device that is used through CuPy, from the runtime's properties and what the vendor's sources add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurt.sources.host import host_fingerprint
from gpurt.types import DeviceIdentity, DeviceKind, DeviceState, GPUDevice


@dataclass(frozen=True, slots=True)
class Answers:
    """What the runtime says of one device."""

    pci_address: str | None
    properties: Mapping[str, Any]
    """Those of CuPy's ``getDeviceProperties``; empty where it failed."""
    failure: str | None = None
    """Why the runtime cannot use the device. One device's failure is that device's: the others keep their index."""

    def text(self, key: str) -> str:
        """A property that is a C string: CuPy hands out the array it is in, older ones as bytes."""
        value = self.properties.get(key)
        return value.decode("utf-8", "replace").strip("\0 ") if isinstance(value, bytes) else (value or "")


def device_record(
    backend: str,
    index: int,
    answers: Answers,
    *,
    vendor: str,
    name: str,
    identity: DeviceIdentity,
    memory: tuple[int | None, int | None],
    driver_version: str | None,
    architecture: str | None,
    compute_units: int | None,
    clock_rate_mhz: int | None,
    integrated: bool,
    unified: bool,
    tensor_core_count: int | None = None,
    bandwidth_gbps: float | None = None,
    state: DeviceState = DeviceState.HEALTHY,
    state_reason: str | None = None,
    numa_node: int | None = None,
    support_level: str = "full",
    root: Path = Path("/"),
) -> GPUDevice:
    """The record of the ``index``-th device of ``backend``.

    Args:
        memory: total and free bytes.
        unified: works in the host's memory.
    """
    total, free = memory
    failure = answers.failure
    if failure and state is DeviceState.HEALTHY:
        state = DeviceState.DEGRADED
    return GPUDevice(
        device_id=f"{backend}:{index}",
        name=name,
        vendor=vendor,
        backend=backend,
        compute_capability=architecture,
        memory_bytes=total,
        memory_available=free,
        compute_units=compute_units,
        tensor_core_count=tensor_core_count,
        max_threads_per_block=answers.properties.get("maxThreadsPerBlock"),
        clock_rate_mhz=clock_rate_mhz,
        bandwidth_gbps=bandwidth_gbps,
        support_level=support_level,
        driver_version=driver_version,
        backend_name="cupy",
        identity=identity,
        kind=DeviceKind.INTEGRATED_GPU if integrated else DeviceKind.GPU,
        state=state,
        state_reason=failure or state_reason,
        usable=failure is None and state is not DeviceState.LOST,
        memory_usable_bytes=free,
        memory_usable_source=None if free is None else "driver",
        memory_pool_id=f"host:{host_fingerprint(root)}" if unified else None,
        unified_memory=unified,
        backends=(backend,),
        numa_node=numa_node,
    )
