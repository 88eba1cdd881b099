"""Vulkan's devices as gpurt's: in which order, which of them are one, who they are, and what hides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpurt.errors import ReasonCode
from gpurt.identity import device_identity, luid_identity
from gpurt.sources import host
from gpurt.sources.host_identity import host_fingerprint, pci_numa_node
from gpurt.sources.pci import VENDORS
from gpurt.sources.ranking import rank
from gpurt.sources.vulkan_properties import VulkanDevice, VulkanInventory
from gpurt.types import DeviceIdentity, DeviceKind, DeviceState, GPUDevice
from gpurt.usable_memory import Figures, usable_memory
from gpurt.visibility.variables import VARIABLES

NAME: Final = "vulkan"


def in_order(inventory: VulkanInventory) -> tuple[VulkanDevice, ...]:
    """Every device, discrete before integrated before virtual, those that are software last; one that several drivers
    show, once. The place in it is the number in ``vulkan:0``."""
    ordered = sorted(
        inventory.devices, key=lambda d: (*rank(d.kind, virtual=d.virtual, memory_bytes=d.memory_total_bytes), d.index)
    )
    chosen: list[VulkanDevice] = []
    drivers: dict[str, tuple[int | None, str | None]] = {}
    for device in ordered:
        driver = device.driver_id, device.driver_name
        # Within one driver every record is a device of its own, whatever its identifiers say.
        if drivers.setdefault(vulkan_identity(device).key, driver) == driver:
            chosen.append(device)
    return tuple(chosen)


def vulkan_identity(device: VulkanDevice) -> DeviceIdentity:
    """Who the device is, whatever else shows it."""
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


def record_of(device: VulkanDevice, index: int, *, threads_per_block: int | None, unfit: str | None) -> GPUDevice:
    """The record of what was opened.

    Args:
        threads_per_block: the largest work group.
        unfit: why nothing can be allocated on it, or None.
    """
    integrated = device.kind is DeviceKind.INTEGRATED_GPU
    software = device.kind is DeviceKind.SOFTWARE
    # It works in the host's memory, which must not be counted once more beside it.
    pool = f"host:{host_fingerprint()}" if device.unified_memory else None
    total, free = device.memory_total_bytes, device.memory_free_bytes
    usable = usable_memory(
        Figures(total, free, device.unified_memory, budget_bytes=total),
        host=host.memory_budget() if device.unified_memory else None,
        host_pool=pool,
    )
    return GPUDevice(
        device_id=f"{NAME}:{index}",
        name=device.inner_name or device.name or "Vulkan device",
        vendor=VENDORS.get(device.vendor_id or 0, "unknown"),
        backend=NAME,
        compute_capability=None,
        memory_bytes=total,
        memory_available=free,
        compute_units=None,
        tensor_core_count=None,
        max_threads_per_block=threads_per_block,
        clock_rate_mhz=None,
        bandwidth_gbps=None,
        support_level="experimental" if software else "partial",
        driver_version=device.driver_version,
        # Each driver counts the same cards anew.
        backend_name=f"{NAME}/{device.driver_name or device.driver_id}",
        identity=vulkan_identity(device),
        kind=device.kind,
        state=DeviceState.HEALTHY,
        state_reason=unfit,
        usable=unfit is None,
        memory_usable_bytes=usable.usable_bytes,
        memory_usable_source=None if usable.usable_bytes is None else usable.source,
        memory_pool_id=pool,
        unified_memory=integrated,
        backends=(NAME,),
        numa_node=None if device.pci_address is None else pci_numa_node(device.pci_address),
    )


def masked(
    records: Sequence[GPUDevice], order: Sequence[VulkanDevice], inventory: VulkanInventory, environ: Mapping[str, str]
) -> tuple[GPUDevice, ...]:
    """``records``, those that a visibility variable in ``environ`` hides as not usable, with the reason.

    They stay in the list: a variable must not change which device ``vulkan:1`` is. Numbers in the variables of other
    interfaces are in an order that Vulkan does not know: only names count there.
    """
    if not any(variable in environ for variable in VARIABLES):
        return tuple(records)
    from gpurt.visibility.candidates import Candidate, candidate_of
    from gpurt.visibility.resolver import resolve

    shown = {device.index for device in order}
    candidates = [
        candidate_of(record, numbered=False, ordinals={NAME: device.index})
        for record, device in zip(records, order, strict=True)
    ]
    # Of a device that several drivers show each has a number of its own.
    candidates += [
        Candidate(f"twin:{device.index}", "unknown", numbered=False, ordinals={NAME: device.index})
        for device in inventory.devices
        if device.index not in shown
    ]
    seen = resolve(environ, candidates)
    why: dict[str, str] = {**seen.hidden_from.get(NAME, {}), **seen.hidden}
    return tuple(_hidden(record, why[record.device_id]) if record.device_id in why else record for record in records)


def _hidden(record: GPUDevice, why: str) -> GPUDevice:
    change: dict[str, Any] = {"usable": False, "state_reason": f"{ReasonCode.HIDDEN_BY_ENVIRONMENT}: {why}"}
    return record.model_copy(update=change)
