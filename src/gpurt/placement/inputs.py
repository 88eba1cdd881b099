"""What must be true of the inputs together, before anything is solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpurt.placement.constraints import Constraints
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
    for place, limit in enumerate(constraints.domain_limits):
        if all(device.domain(limit.domain) is None for device in devices):
            raise InvalidPlacementInput(
                f"no device has a domain {limit.domain!r}", field=f"constraints.domain_limits.{place}.domain"
            )
    for name, times in Counter(entry.device for entry in constraints.stage_layers).items():
        if times > 1:
            raise InvalidPlacementInput(f"{name!r} has {times} entries", field="constraints.stage_layers")
    for entry in constraints.stage_layers:
        if entry.maximum is not None and entry.maximum < entry.minimum:
            raise InvalidPlacementInput("maximum is below minimum", field="constraints.stage_layers")
    _check_pins(model, devices, constraints)


def _check_pins(model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints) -> None:
    count = model.layer_count
    for place, pin in enumerate(constraints.pins):
        if pin.end > count:
            raise InvalidPlacementInput(f"the model has {count} layers", field=f"constraints.pins.{place}.end")
    # A device has one range. Pins to one device that have a pin to other devices between them would need it twice.
    places = [
        {device.id for device in devices if device.id in pin.devices or device.node in pin.nodes}
        for pin in constraints.pins
    ]
    alone = [(pin, place) for place, pin in enumerate(constraints.pins) if len(places[place]) == 1]
    for first, one in alone:
        for second, other in alone:
            if places[one] != places[other] or second.start < first.end:
                continue
            for number, between in enumerate(constraints.pins):
                inside = between.start < second.start and between.end > first.end
                if inside and not places[one] & places[number]:
                    name = next(iter(places[one]))
                    raise InvalidPlacementInput(
                        f"cyclic: {name} would have to come before and after others",
                        field=f"constraints.pins.{other}",
                    )
