"""One device, two names: its vendor's UUID may be told one day and not the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from gpurt.types import GPUDevice

_Place: TypeAlias = tuple[str, str, str | None, str]


def recognised(devices: Sequence[GPUDevice], known: Iterable[GPUDevice]) -> tuple[GPUDevice, ...]:
    """``devices``, those that have lost their UUID under the identity by which they are known. Pure.

    A management library that is missing or broken today makes no new devices: what has the vendor, the name and the
    place on the bus of one device that is known by UUID is that device, unless that UUID is among ``devices``.
    """
    told = {device.identity.uuid for device in devices if device.identity is not None}
    by_place: dict[_Place, list[GPUDevice]] = {}
    for device in known:
        place = _place(device)
        if place is not None and device.identity is not None and device.identity.uuid not in (None, *told):
            by_place.setdefault(place, []).append(device)
    return tuple(_under_its_name(device, by_place) for device in devices)


def _under_its_name(device: GPUDevice, by_place: dict[_Place, list[GPUDevice]]) -> GPUDevice:
    place = _place(device)
    if place is None or (device.identity is not None and device.identity.uuid is not None):
        return device
    alike = by_place.get(place, [])
    return device.model_copy(update={"identity": alike[0].identity}) if len(alike) == 1 else device


def _place(device: GPUDevice) -> _Place | None:
    identity = device.identity
    if identity is None or identity.pci_address is None:
        return None
    return device.vendor, identity.pci_address, identity.partition, device.name
