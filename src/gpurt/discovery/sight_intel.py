"""Intel's GPUs as the kernel shows them. There is no backend of Intel's own: Vulkan is what drives them."""

from __future__ import annotations

from collections.abc import Sequence

from gpurt.discovery.line import Sighting
from gpurt.discovery.sight_names import DRM
from gpurt.discovery.sight_record import View, sighted_device, skipped_notes
from gpurt.identity import device_identity
from gpurt.sources.intel import IntelDevice, read_intel
from gpurt.types import DeviceKind, GPUDevice


def intel_devices(view: View, backend: str) -> tuple[Sequence[tuple[GPUDevice, Sighting]], Sequence[str]]:
    """Records for ``backend``, and what might have been a device and is none. Reads files alone."""
    inventory = read_intel(view.root)
    records = [
        (
            _record(view, backend, device),
            Sighting(numbered=True, tiles=device.tiles or 1),
        )
        for device in inventory.devices
    ]
    return records, skipped_notes(inventory.skipped)


def _record(view: View, backend: str, device: IntelDevice) -> GPUDevice:
    reason = device.access.reason
    model = "" if device.device_id is None else f" {device.device_id:04x}"
    return sighted_device(
        device_id=f"{DRM}:{device.card}",
        # The kernel knows no names; whichever interface knows one shows the same card.
        name=f"Intel GPU{model}",
        vendor="intel",
        backend=backend,
        source=DRM,
        identity=device_identity(pci_address=device.pci_address, fallback=f"{DRM}:intel{model}:{device.card}"),
        root=view.root,
        kind=DeviceKind.INTEGRATED_GPU if device.integrated else DeviceKind.GPU,
        memory_bytes=device.memory_total_bytes,
        memory_available=device.memory_free_bytes,
        clock_rate_mhz=device.max_clock_mhz,
        driver_version=device.driver,
        state_reason=None if reason is None else f"{reason}: inaccessible: {device.access.message}",
        unified_memory=device.unified_memory,
        numa_node=device.numa_node,
    )
