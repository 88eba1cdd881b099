"""NVML's view of NVIDIA's cards as device records: seen, but not usable through NVML alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpurt.identity import device_identity
from gpurt.types import DeviceKind, GPUDevice

if TYPE_CHECKING:
    from gpurt.sources.nvml import NvmlDevice

NVML: Final = "nvml"
"""``backend_name`` of records that only the management library shows."""


def sighted_devices(record: NvmlDevice, driver_version: str | None) -> tuple[GPUDevice, ...]:
    """The records of a card that NVML shows: the card, or its partitions where it is cut into some.

    None of them is usable: nobody has opened it yet.
    """
    card = GPUDevice(
        # NVML counts in PCI order, CUDA by its own rules: "cuda:0" would be a guess.
        device_id=f"{NVML}:{record.index}",
        name=record.name or "NVIDIA device",
        vendor="nvidia",
        backend="cuda",
        compute_capability=record.compute_capability,
        memory_bytes=record.memory_total_bytes,
        memory_available=record.memory_free_bytes,
        compute_units=record.multiprocessor_count,
        tensor_core_count=None,
        max_threads_per_block=None,
        clock_rate_mhz=record.max_clock_mhz,
        bandwidth_gbps=record.memory_bandwidth_gbps,
        support_level="experimental",
        driver_version=driver_version,
        backend_name=NVML,
        identity=device_identity(
            uuid=record.uuid, pci_address=record.pci_address, fallback=f"{NVML}:{record.name}:{record.index}"
        ),
        kind=DeviceKind.INTEGRATED_GPU if record.unified_memory else DeviceKind.GPU,
        state=record.state,
        state_reason=record.reason,
        usable=False,
        unified_memory=record.unified_memory,
        numa_node=record.numa_node,
        backends=("cuda",),
    )
    return tuple(
        card.model_copy(
            update={
                "device_id": f"{card.device_id}/{part.partition or position}",
                "name": part.name or card.name,
                "memory_bytes": part.memory_total_bytes,
                "memory_available": part.memory_free_bytes,
                "compute_units": part.multiprocessor_count,
                "identity": device_identity(
                    uuid=part.uuid,
                    pci_address=record.pci_address,
                    partition=part.partition or str(position),
                    fallback=f"{NVML}:{record.name}:{record.index}",
                ),
            }
        )
        for position, part in enumerate(record.partitions)
    ) or (card,)
