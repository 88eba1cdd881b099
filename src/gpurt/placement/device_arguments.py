"""The devices that a question is about: devices indeed, and each of them once."""

from __future__ import annotations

from gpurt.placement.arguments import all_of_kind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput


def given_devices(devices: object) -> tuple[PlacementDevice, ...]:
    """As :func:`~gpurt.placement.arguments.all_of_kind`, and no id twice.

    Raises:
        InvalidPlacementInput: they are no devices, or two are called the same.
    """
    found = all_of_kind(devices, PlacementDevice, "devices")
    if len({device.id for device in found}) < len(found):
        seen: set[str] = set()
        for place, device in enumerate(found):
            if device.id in seen:
                raise InvalidPlacementInput(f"{device.id!r} is there twice", field=f"devices.{place}.id")
            seen.add(device.id)
    return found
