"""What OpenCL lists."""

from __future__ import annotations

from collections.abc import Iterator

from gpurt.discovery.line import ProbeLine, Sighting
from gpurt.discovery.sight_record import View, doing, sighted_device, sighted_line, skipped_notes
from gpurt.errors import ReasonCode
from gpurt.sources.opencl_identity import backend_name_of, identity_of, usable_devices, vendor_of
from gpurt.sources.opencl_properties import OpenClDevice, OpenClInventory, read_opencl
from gpurt.sources.table import Absence
from gpurt.types import DeviceKind, GPUDevice


def look(view: View) -> Iterator[ProbeLine]:
    yield doing("asking OpenCL")

    def ask() -> object:
        from gpurt.sources.opencl_query import query_opencl

        return query_opencl()

    inventory = read_opencl(view.table("opencl", ask))
    numbers = {id(device): number for number, device in enumerate(_numbered(inventory))}
    amd = 0
    devices: list[GPUDevice] = []
    about: dict[str, Sighting] = {}
    for device in inventory.devices:  # in AMD's own order, which GPU_DEVICE_ORDINAL counts
        record = _record(view, numbers[id(device)], device)
        devices.append(record)
        if record.vendor == "amd" and record.kind is not DeviceKind.SOFTWARE:
            about[record.device_id] = Sighting(ordinals={"amd_opencl": amd})
            amd += 1
    yield sighted_line(devices, about=about, notes=skipped_notes(inventory.skipped), none=_none(inventory))


def _numbered(inventory: OpenClInventory) -> list[OpenClDevice]:
    """As the driver numbers them; what it does not open comes after."""
    opened = usable_devices(inventory)
    return opened + [device for device in inventory.devices if all(device is not other for other in opened)]


def _none(inventory: OpenClInventory) -> Absence | None:
    if inventory.absence is not None:
        return inventory.absence
    if any(device.selectable for device in inventory.devices):
        return None
    if inventory.devices:
        return Absence(ReasonCode.NO_DEVICE, "OpenCL shows the host's processor alone")
    return Absence(ReasonCode.NO_DEVICE, "OpenCL shows no device")


def _record(view: View, position: int, device: OpenClDevice) -> GPUDevice:
    reason = None
    if device.available is False:
        reason = f"{ReasonCode.UNSUPPORTED_DEVICE}: its driver says that it is not available now"
    unified = device.kind is DeviceKind.INTEGRATED_GPU
    return sighted_device(
        device_id=f"opencl:{position}",
        name=device.name,
        vendor=vendor_of(device),
        backend="opencl",
        source=backend_name_of(device),
        identity=identity_of(device),
        root=view.root,
        kind=device.kind,
        memory_bytes=device.memory_total_bytes,
        memory_available=device.memory_free_bytes,
        compute_units=device.compute_units,
        clock_rate_mhz=device.max_clock_mhz,
        driver_version=device.driver_version,
        state_reason=reason,
        unified_memory=unified,
    )
