"""What there is to place on: devices, links, and what is left out with its reason. JSON, to be kept and sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from pydantic import Field

from gpurt.placement.arguments import check_kind, check_share, check_view
from gpurt.placement.devices import DEFAULT_RESERVE, PlacementDevice, ResidentRange, devices_from_view
from gpurt.placement.record import MOST_BYTES, MOST_TOGETHER, PlacementRecord
from gpurt.placement.topology import Link, Topology
from gpurt.printable import shortened
from gpurt.types import DeviceKind, DeviceState, GPUDevice

if TYPE_CHECKING:
    from gpurt.registry.records import Link as MeasuredLink

SCHEMA: Final = 1


class Inventory(PlacementRecord):
    """The devices of a cluster at one moment. ``model_dump_json`` and ``model_validate_json`` are its file.

    A file may be written by hand: ``devices`` alone is enough, and links that it does not name are of a class.
    """

    schema_version: Literal[1] = SCHEMA
    devices: tuple[PlacementDevice, ...]
    topology: Topology = Topology()
    left_out: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Devices on which nothing may be placed at all: id → why."""
    simulated: frozenset[str] = frozenset()
    """Ids of devices that exist only in software. Never mistake them for hardware."""


def inventory_of(
    devices: Mapping[tuple[str, str], GPUDevice],
    *,
    away: Mapping[tuple[str, str], str] | None = None,
    links: Iterable[MeasuredLink] = (),
    resident: Mapping[tuple[str, str], tuple[ResidentRange, ...]] | None = None,
    reserve: float = DEFAULT_RESERVE,
) -> Inventory:
    """From records of devices, by (node, stable key).

    Args:
        devices: all that are known, those that cannot be used as well.
        away: of some of them why their node rules them out, whatever they say of themselves.
        links: measured between devices of one node (:mod:`gpurt.links`); those of other devices and those without
            figures are passed over.
        resident: layers that lie on devices already.
        reserve: share of the usable memory that is left free, from 0 to 1.

    Raises:
        InvalidPlacementInput: an argument is of another kind, or ``reserve`` is no such share.
    """
    check_view(devices, GPUDevice, "devices")
    check_kind(away, Mapping, "away", optional=True)
    check_kind(resident, Mapping, "resident", optional=True)
    check_share(reserve, "reserve")
    reasons = {place: (away or {}).get(place) or _unusable(device) for place, device in devices.items()}
    usable = {place: device for place, device in devices.items() if reasons[place] is None}
    kept, beyond = _countable(devices_from_view(usable, reserve=reserve, resident=resident))
    return Inventory(
        devices=kept,
        topology=Topology(links=tuple(_measured(links, kept))),
        left_out={f"{node}/{key}": why for (node, key), why in reasons.items() if why is not None} | beyond,
        simulated=frozenset(f"{node}/{key}" for (node, key), device in devices.items() if device.simulated),
    )


def _countable(devices: Sequence[PlacementDevice]) -> tuple[tuple[PlacementDevice, ...], dict[str, str]]:
    """Those whose sizes together can be counted, and why the others are left out: the largest, which no machine has."""
    sizes = {each.id: each.usable_bytes + each.reserve_bytes + each.overhead_bytes for each in devices}
    room, beyond = sum(sizes.values()), dict[str, str]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if room <= MOST_TOGETHER:
            break
        room -= sizes[name]
        beyond[name] = f"it says that it has {sizes[name]:,} bytes, and with it more than {MOST_TOGETHER:,} are there"
    return tuple(each for each in devices if each.id not in beyond), beyond


def _unusable(device: GPUDevice) -> str | None:
    """Why nothing may be placed on it, in words; None where something may."""
    if device.kind is DeviceKind.SOFTWARE:
        return "it computes on the processor, which is listed itself"
    if device.state is not DeviceState.HEALTHY or not device.usable:
        state = "not usable" if device.state is DeviceState.HEALTHY else device.state.value
        return f"{state}: {device.state_reason}" if device.state_reason else state
    if device.memory_usable_bytes is None and device.memory_available is None and device.memory_bytes is None:
        return "nobody tells how much memory it has"
    sizes = (device.memory_usable_bytes, device.memory_available, device.memory_bytes)
    usable = next(size for size in sizes if size is not None)
    if not 0 <= usable <= MOST_BYTES:
        return f"it says that it has {shortened(str(usable), 30)} bytes"
    return None


def _measured(links: Iterable[MeasuredLink], devices: Sequence[PlacementDevice]) -> Iterable[Link]:
    """In placement's units, for every node that has both ends: stable ids are unique among nodes of one host alone."""
    known = {device.id for device in devices}
    nodes = list(dict.fromkeys(device.node for device in devices))
    for link in links:
        if link.bandwidth_gbps is None or link.latency_us is None or link.src == link.dst:
            continue
        for node in nodes:
            source, target = f"{node}/{link.src}", f"{node}/{link.dst}"
            if source in known and target in known:
                yield Link(
                    source=source,
                    target=target,
                    latency_seconds=link.latency_us * 1e-6,
                    bandwidth=link.bandwidth_gbps * 1e9,
                    transport=link.link_type.value,
                )
