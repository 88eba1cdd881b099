"""Who an OpenCL device is, and in which order devices are numbered: one answer for looking and for opening. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from gpurt.identity import device_identity
from gpurt.sources.opencl_properties import OpenClDevice, OpenClInventory
from gpurt.sources.pci import VENDORS
from gpurt.types import DeviceIdentity

_NAMES: Final[Mapping[str, str]] = {
    "nvidia": "nvidia",
    "advanced micro devices": "amd",
    "amd": "amd",
    "authenticamd": "amd",
    "intel": "intel",
    "genuineintel": "intel",
    "apple": "apple",
    "qualcomm": "qualcomm",
    "arm": "arm",
}
"""How CL_DEVICE_VENDOR begins, in lower case. Processors have the name that CPUID gives them."""


def vendor_of(device: OpenClDevice) -> str | None:
    """``nvidia amd intel …``, or None for a vendor that nobody here knows."""
    # Names before numbers: pocl gives Intel's number for every processor.
    text = (device.vendor or "").lower()
    named = next((vendor for name, vendor in _NAMES.items() if text.startswith(name)), None)
    return named or VENDORS.get(device.vendor_id or 0)


def identity_of(device: OpenClDevice) -> DeviceIdentity:
    """By PCI address where the platform tells it, else by names and numbers, which is flagged as not stable."""
    return device_identity(
        pci_address=device.pci_address,
        fallback=f"opencl:{device.platform}:{device.name}:{device.platform_index}.{device.index}",
    )


def backend_name_of(device: OpenClDevice) -> str:
    """The platform behind a device: each platform counts the same cards anew."""
    return f"opencl/{device.platform or device.platform_index}"


def usable_devices(inventory: OpenClInventory) -> list[OpenClDevice]:
    """What can be opened, in index order: GPUs, accelerators, then the host's processor. A card that two platforms
    show is the better-placed platform's alone."""
    last = [device for device in inventory.devices if not device.selectable and device.available is not False]
    return list(_once([*inventory.ranked(), *last]))


def _once(devices: Iterable[OpenClDevice]) -> Iterable[OpenClDevice]:
    seen: set[str] = set()
    for device in devices:
        if device.pci_address is None:
            yield device
        elif device.pci_address not in seen:
            seen.add(device.pci_address)
            yield device
