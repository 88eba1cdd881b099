"""AMD's GPUs as the kernel shows them: what they are, whether this process may use them, and how ROCm counts them."""

from __future__ import annotations

from collections.abc import Iterator

from gpurt.discovery.line import ProbeLine, Sighting
from gpurt.discovery.sight_names import AMDGPU
from gpurt.discovery.sight_record import View, doing, sighted_device, sighted_line, skipped_notes
from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.sources.amd import AmdDevice, AmdInventory, read_amd
from gpurt.sources.amd_gfx import OVERRIDE, effective_gfx
from gpurt.sources.table import Absence
from gpurt.types import DeviceKind, GPUDevice


def look(view: View) -> Iterator[ProbeLine]:
    if not (view.root / "sys").is_dir():
        return  # not Linux, or a container that shows nothing
    yield doing("reading AMD's devices under /sys")
    inventory = read_amd(view.root)
    if not inventory.devices and (view.root / "dev/dxg").exists():
        return  # WSL: the GPU is Windows', and no file here tells of it
    seen = [(device, _record(view, position, device)) for position, device in enumerate(inventory.devices)]
    # A processor's node is a node of the topology, and nothing that anybody misses.
    lost = [each for each in inventory.skipped if not each.why.startswith("a processor")]
    notes = [note for device, record in seen for note in _notes(view, device, record)]
    yield sighted_line(
        [record for _, record in seen],
        about={record.device_id: _sighting(device) for device, record in seen},
        notes=[*notes, *skipped_notes(lost)],
        none=_none(inventory, lost=bool(lost)),
    )


def _none(inventory: AmdInventory, *, lost: bool) -> Absence | None:
    """Why there is nothing to use, whatever the library says."""
    if not inventory.devices:
        if lost:
            return Absence(ReasonCode.NO_DRIVER, "amdgpu, the kernel's driver, drives none of AMD's devices here")
        return Absence(ReasonCode.NO_DEVICE, "the kernel shows no AMD device")
    if any(device.access.reason is None for device in inventory.devices):
        return None
    first = inventory.devices[0].access
    return Absence(first.reason or ReasonCode.ERROR, first.message)


def _record(view: View, position: int, device: AmdDevice) -> GPUDevice:
    reason = device.access.reason
    return sighted_device(
        device_id=f"{AMDGPU}:{position}",
        name=device.name or _codename(device),
        vendor="amd",
        backend="rocm",
        source=AMDGPU,
        identity=device_identity(
            uuid=device.uuid,
            pci_address=device.pci_address,
            partition=device.partition,
            serial=device.serial,
            fallback=f"{AMDGPU}:{device.name or device.codename}:{position}",
        ),
        root=view.root,
        kind=DeviceKind.INTEGRATED_GPU if device.integrated else DeviceKind.GPU,
        architecture=device.gfx,
        memory_bytes=device.memory.total_bytes,
        memory_available=device.memory.free_bytes,
        compute_units=device.compute_units,
        clock_rate_mhz=device.max_clock_mhz,
        driver_version=device.driver_version,
        state_reason=None if reason is None else f"{reason}: inaccessible: {device.access.message}",
        unified_memory=device.unified_memory,
        numa_node=device.numa_node,
    )


def _codename(device: AmdDevice) -> str:
    return " ".join(filter(None, ("AMD GPU", device.codename or device.gfx)))


def _sighting(device: AmdDevice) -> Sighting:
    if device.rocm_index is None:
        # The compute driver does not show it, so no number of ROCm's is its.
        return Sighting()
    return Sighting(numbered=True, ordinals={"rocm": device.rocm_index})


def _notes(view: View, device: AmdDevice, record: GPUDevice) -> Iterator[str]:
    taken_for = effective_gfx(device.gfx, view.environ, device.kfd_node)
    if taken_for != device.gfx:
        yield f"{record.device_id} is {device.gfx}, and ROCm takes it for {taken_for} because of {OVERRIDE}"
    if device.rocm_index is None:
        yield f"{record.device_id}: the kernel's compute driver does not show it, so ROCm cannot use it"
