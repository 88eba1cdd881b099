"""What Vulkan lists, beside what the kernel shows of the cards that only Vulkan drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurt.discovery.line import ProbeLine, Sighting
from gpurt.discovery.sight_intel import intel_devices
from gpurt.discovery.sight_record import View, doing, sighted_device, sighted_line, skipped_notes
from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.sources.pci import VENDORS
from gpurt.sources.table import Absence
from gpurt.sources.vulkan_properties import VulkanDevice, VulkanInventory, read_vulkan
from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice


def look(view: View) -> Iterator[ProbeLine]:
    """The kernel's part first: it needs no driver that may crash."""
    cards, notes = intel_devices(view, "vulkan")
    if cards or notes:
        yield _line(cards, (), notes, None)
    yield doing("asking Vulkan")

    def ask() -> object:
        from gpurt.sources.vulkan_query import query_vulkan

        return query_vulkan()

    inventory = read_vulkan(view.table("vulkan", ask))
    listed = [(_record(view, device), Sighting(ordinals={"vulkan": device.index})) for device in inventory.devices]
    yield _line(cards, listed, [*notes, *skipped_notes(inventory.skipped)], _none(inventory, bool(cards)))


def _line(
    cards: Sequence[tuple[GPUDevice, Sighting]],
    listed: Sequence[tuple[GPUDevice, Sighting]],
    notes: Sequence[str],
    none: Absence | None,
) -> ProbeLine:
    # Vulkan's own record first: it has the name.
    both = (*listed, *cards)
    about = {device.device_id: sighting for device, sighting in both}
    return sighted_line([device for device, _ in both], about=about, notes=notes, none=none)


def _none(inventory: VulkanInventory, cards: bool) -> Absence | None:
    if inventory.absence is not None:
        return inventory.absence
    if any(device.selectable for device in inventory.devices):
        return None
    if inventory.devices:
        names = ", ".join(device.name or "one without a name" for device in inventory.devices)
        return Absence(ReasonCode.NO_DEVICE, f"Vulkan shows software adapters alone: {names}")
    return None if cards else Absence(ReasonCode.NO_DEVICE, "Vulkan shows no device")


def _record(view: View, device: VulkanDevice) -> GPUDevice:
    vendor = VENDORS.get(device.vendor_id or 0)
    return sighted_device(
        device_id=f"vulkan:{device.index}",
        name=device.inner_name or device.name,
        vendor=vendor,
        backend="vulkan",
        # Each driver counts the same cards anew.
        source=f"vulkan/{device.driver_name or device.driver_id}",
        identity=_identity(device),
        root=view.root,
        kind=device.kind,
        memory_bytes=device.memory_total_bytes,
        memory_available=device.memory_free_bytes,
        driver_version=device.driver_version,
        # The host's processor is no second pool beside the host's memory.
        unified_memory=device.kind is DeviceKind.INTEGRATED_GPU,
    )


def _identity(device: VulkanDevice) -> DeviceIdentity:
    fallback = f"vulkan:{device.name}:{device.index}"
    if device.inner_name is not None:
        # A translation layer makes its identifiers up; what it shows is known by the name inside its own.
        return device_identity(fallback=fallback)
    if device.vendor_uuid is not None:
        return device_identity(uuid=device.vendor_uuid, pci_address=device.pci_address, fallback=fallback)
    # Other vendors' UUIDs are Vulkan's own, derived from the place on the bus: they name a card across Vulkan's
    # drivers, and are no name for it elsewhere.
    if device.pci_address is not None:
        plain = device_identity(pci_address=device.pci_address, fallback=fallback)
        return plain.model_copy(update={"uuid": device.device_uuid})
    if device.luid is not None:
        return luid_identity(device.luid, fallback)
    if device.device_uuid is not None and device.kind is not DeviceKind.SOFTWARE:
        return DeviceIdentity(key=f"vulkan:{device.device_uuid}", uuid=device.device_uuid)
    return device_identity(fallback=fallback)


def luid_identity(luid: str, fallback: str) -> DeviceIdentity:
    """Of an adapter of Windows of which no more is told: the same for every interface, until the next boot."""
    return device_identity(fallback=fallback).model_copy(update={"key": f"luid:{luid}", "uuid": f"LUID-{luid}"})
