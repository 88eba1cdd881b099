"""A device as visibility variables may name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpurt.types import DeviceKind, GPUDevice

_NO_GPU: Final = frozenset({DeviceKind.CPU, DeviceKind.SOFTWARE})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One device of the machine, or one partition of a device. The masks decide which candidates are visible.

    The order in which candidates are given is the vendor's own before any mask: NVML's (by PCI address) for NVIDIA,
    the compute driver's (by KFD node) for AMD.
    """

    device_id: str
    """How the caller names it; given back unchanged."""
    vendor: str
    """``nvidia amd intel``; other vendors have no variables of their own."""
    uuid: str | None = None
    """As the vendor prints it: ``GPU-…``, ``MIG-…``."""
    pci_address: str | None = None
    """Of the physical device, also for a partition: ``dddddddd:bb:dd.f``."""
    partition: str | None = None
    """``gi/ci`` of a MIG device; None for a whole one."""
    parent_uuid: str | None = None
    """``GPU-…`` of the physical device of a MIG device."""
    integrated: bool = False
    tiles: int = 1
    """Of an Intel GPU: each counts as a device unless ``ZE_FLAT_DEVICE_HIERARCHY`` is ``COMPOSITE``."""
    model: str | None = None
    """Equal for devices that CUDA cannot tell apart by speed: it counts those by PCI address."""
    numbered: bool = True
    """The candidates of its vendor are all here and in the vendor's own order, so that a number in a variable is
    theirs. Where another interface shows the device, its order is another, and only a name can mean it."""
    ordinals: Mapping[str, int] = field(default_factory=dict[str, int])
    """Numbers that interfaces give the device without any mask, by interface: ``vulkan``, ``amd_opencl``; ``cuda``
    where it is known, which is the fastest first."""


def candidate_of(
    device: GPUDevice,
    *,
    parent_uuid: str | None = None,
    tiles: int = 1,
    numbered: bool = True,
    ordinals: Mapping[str, int] | None = None,
) -> Candidate:
    """The candidate that a device record speaks of. The other arguments: see :class:`Candidate`."""
    identity = device.identity
    return Candidate(
        device_id=device.device_id,
        # The vendor's variables are about its GPUs: a processor of AMD's is none of them.
        vendor="unknown" if device.kind in _NO_GPU else device.vendor,
        uuid=identity.uuid if identity else None,
        pci_address=identity.pci_address if identity else None,
        partition=identity.partition if identity else None,
        parent_uuid=parent_uuid,
        integrated=device.kind is DeviceKind.INTEGRATED_GPU,
        tiles=tiles,
        model=f"{device.name}/{device.memory_bytes}",
        numbered=numbered,
        ordinals=ordinals or {},
    )
