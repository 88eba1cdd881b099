"""What OpenCL lists."""

from __future__ import annotations

from collections.abc import Iterator

from gpurt.discovery.line import ProbeLine, Sighting
from gpurt.discovery.sight_record import View, doing, sighted_device, sighted_line, skipped_notes
from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.sources.opencl_properties import OpenClDevice, OpenClInventory, read_opencl
from gpurt.sources.pci import VENDORS
from gpurt.sources.table import Absence
from gpurt.types import DeviceKind, GPUDevice

_NAMES = {"nvidia": "nvidia", "advanced micro devices": "amd", "amd": "amd", "authenticamd": "amd"} | {
    "intel": "intel",
    "genuineintel": "intel",
    "apple": "apple",
    "qualcomm": "qualcomm",
    "arm": "arm",
}


def look(view: View) -> Iterator[ProbeLine]:
    yield doing("asking OpenCL")

    def ask() -> object:
        from gpurt.sources.opencl_query import query_opencl

        return query_opencl()

    inventory = read_opencl(view.table("opencl", ask))
    amd = 0
    devices: list[GPUDevice] = []
    about: dict[str, Sighting] = {}
    for position, device in enumerate(inventory.devices):
        record = _record(view, position, device)
        devices.append(record)
        if record.vendor == "amd" and record.kind is not DeviceKind.SOFTWARE:
            about[record.device_id] = Sighting(ordinals={"amd_opencl": amd})
            amd += 1
    yield sighted_line(devices, about=about, notes=skipped_notes(inventory.skipped), none=_none(inventory))


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
        vendor=_vendor(device),
        backend="opencl",
        # Each platform counts the same cards anew.
        source=f"opencl/{device.platform or device.platform_index}",
        identity=device_identity(
            pci_address=device.pci_address,
            fallback=f"opencl:{device.platform}:{device.name}:{device.platform_index}.{device.index}",
        ),
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


def _vendor(device: OpenClDevice) -> str | None:
    # Names before numbers: pocl gives Intel's number for every processor.
    text = (device.vendor or "").lower()
    named = next((vendor for name, vendor in _NAMES.items() if text.startswith(name)), None)
    return named or VENDORS.get(device.vendor_id or 0)
