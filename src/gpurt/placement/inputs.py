"""What must be true of the inputs together, before anything is solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpurt.placement.constraints import Constraints, Pin
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology, check_names


def check_inputs(
    model: ModelSpec, devices: Sequence[PlacementDevice], topology: Topology, constraints: Constraints
) -> None:
    """Raise :class:`InvalidPlacementInput` for names that nobody has and for rules that contradict each other."""
    if not devices:
        raise InvalidPlacementInput("there is no device", field="devices")
    for name, times in Counter(device.id for device in devices).items():
        if times > 1:
            raise InvalidPlacementInput(f"{times} devices are called {name!r}", field="devices")
    ids = {device.id for device in devices}
    nodes = {device.node for device in devices}
    both = ids & nodes
    if both - {device.id for device in devices if device.id == device.node}:
        raise InvalidPlacementInput(f"{sorted(both)[0]!r} is a device of another node", field="devices")
    check_names(topology, devices)
    for field, names, known in (
        ("exclude_devices", constraints.exclude_devices, ids),
        ("require_devices", constraints.require_devices, ids),
        ("exclude_nodes", constraints.exclude_nodes, nodes),
        ("require_nodes", constraints.require_nodes, nodes),
        ("stage_layers", frozenset(entry.device for entry in constraints.stage_layers), ids),
        *((f"pins.{place}.devices", pin.devices, ids) for place, pin in enumerate(constraints.pins)),
        *((f"pins.{place}.nodes", pin.nodes, nodes) for place, pin in enumerate(constraints.pins)),
    ):
        for name in sorted(names - known):
            raise InvalidPlacementInput(f"unknown name {name!r}", field=f"constraints.{field}")
    for name in sorted(constraints.require_devices & constraints.exclude_devices):
        raise InvalidPlacementInput(f"{name!r} is excluded as well", field="constraints.require_devices")
    for name in sorted(constraints.require_nodes & constraints.exclude_nodes):
        raise InvalidPlacementInput(f"{name!r} is excluded as well", field="constraints.require_nodes")
    for entry in constraints.stage_layers:
        if entry.maximum is not None and entry.maximum < entry.minimum:
            raise InvalidPlacementInput("maximum is below minimum", field="constraints.stage_layers")
    _check_pins(model, constraints)


def _check_pins(model: ModelSpec, constraints: Constraints) -> None:
    count = model.layer_count
    for place, pin in enumerate(constraints.pins):
        if pin.end > count:
            raise InvalidPlacementInput(f"the model has {count} layers", field=f"constraints.pins.{place}.end")
    # A device has one range. Pins to one device that have a pin to other devices between them would need it twice.
    alone = [(pin, next(iter(pin.devices)), place) for place, pin in enumerate(constraints.pins) if _single(pin)]
    for first, device, _ in alone:
        for second, other, place in alone:
            if device != other or second.start < first.end:
                continue
            for between in constraints.pins:
                inside = between.start < second.start and between.end > first.end
                if inside and device not in between.devices and not between.nodes:
                    raise InvalidPlacementInput(
                        f"cyclic: {device} would have to come before and after others",
                        field=f"constraints.pins.{place}",
                    )


def _single(pin: Pin) -> bool:
    return len(pin.devices) == 1 and not pin.nodes
