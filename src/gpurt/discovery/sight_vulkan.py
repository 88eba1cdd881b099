"""What Vulkan lists, beside what the kernel shows of the cards that only Vulkan drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurt.backends.vulkan.record import in_order, vulkan_identity
from gpurt.discovery.line import ProbeLine, Sighting
from gpurt.discovery.sight_intel import intel_devices
from gpurt.discovery.sight_record import View, doing, sighted_device, sighted_line, skipped_notes
from gpurt.errors import ReasonCode
from gpurt.sources.pci import VENDORS
from gpurt.sources.table import Absence
from gpurt.sources.vulkan_properties import VulkanDevice, VulkanInventory, read_vulkan
from gpurt.types import DeviceKind, GPUDevice


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
    # Numbers are those of the driver: best first. What several drivers show has one of them; its twins come last.
    order = in_order(inventory)
    order = (*order, *(device for device in inventory.devices if device not in order))
    listed = [
        (_record(view, device, place), Sighting(ordinals={"vulkan": device.index}))
        for place, device in enumerate(order)
    ]
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


def _record(view: View, device: VulkanDevice, place: int) -> GPUDevice:
    vendor = VENDORS.get(device.vendor_id or 0)
    return sighted_device(
        device_id=f"vulkan:{place}",
        name=device.inner_name or device.name,
        vendor=vendor,
        backend="vulkan",
        # Each driver counts the same cards anew.
        source=f"vulkan/{device.driver_name or device.driver_id}",
        identity=vulkan_identity(device),
        root=view.root,
        kind=device.kind,
        memory_bytes=device.memory_total_bytes,
        memory_available=device.memory_free_bytes,
        driver_version=device.driver_version,
        # The host's processor is no second pool beside the host's memory.
        unified_memory=device.kind is DeviceKind.INTEGRATED_GPU,
    )
