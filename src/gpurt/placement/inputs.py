"""What must be true of the inputs together, before anything is solved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, cast

from gpurt.placement.arguments import HOW_TO_GET, all_of_kind, check_kind
from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.record import MOST_TOGETHER
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology, check_names
from gpurt.placement.words import listed
from gpurt.printable import shortened


def check_types(model: Any, devices: Any, topology: Any, constraints: Any) -> None:
    """Raise :class:`InvalidPlacementInput` where one of these is not what placement works on, with how to get it."""
    check_kind(model, ModelSpec, "model")
    if not isinstance(devices, Sequence):
        raise InvalidPlacementInput(
            f"it must be a sequence of PlacementDevice, not {type(devices).__name__}",
            field="devices",
            hint=HOW_TO_GET["PlacementDevice"],
        )
    all_of_kind(cast("object", devices), PlacementDevice, "devices")
    check_kind(topology, Topology, "topology")
    check_kind(constraints, Constraints, "constraints")


def is_amount(value: Any) -> bool:
    """A number from 0 that floating point can hold; true and false are none."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf
    except OverflowError:
        return False


def check_search(time_budget: Any, target_gap: Any, seed: Any, cancelled: Any = None) -> None:
    """Raise :class:`InvalidPlacementInput` for what no search can be told."""
    if not (time_budget == math.inf or (is_amount(time_budget) and time_budget > 0)):
        raise InvalidPlacementInput(
            f"it must be positive, in seconds, and is {shortened(repr(time_budget))}", field="time_budget"
        )
    if not is_amount(target_gap):
        raise InvalidPlacementInput(f"it must be 0 or more, and is {shortened(repr(target_gap))}", field="target_gap")
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise InvalidPlacementInput(f"it must be an integer from 0, and is {seed!r}", field="seed")
    if cancelled is not None and not callable(cancelled):
        raise InvalidPlacementInput(
            f"it must be a function that says whether to stop, not {type(cancelled).__name__}", field="cancelled"
        )


def check_devices(devices: Sequence[PlacementDevice], topology: Topology) -> None:
    """Raise :class:`InvalidPlacementInput` where there are none, or names of devices and links do not agree."""
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


def check_inputs(
    model: ModelSpec, devices: Sequence[PlacementDevice], topology: Topology, constraints: Constraints
) -> None:
    """Raise :class:`InvalidPlacementInput` for names that nobody has and for rules that contradict each other."""
    check_devices(devices, topology)
    ids = {device.id for device in devices}
    nodes = {device.node for device in devices}
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
            raise InvalidPlacementInput(
                f"unknown name {name!r}",
                field=f"constraints.{field}",
                hint=f"there {'is' if len(known) == 1 else 'are'} {listed(sorted(known))}",
            )
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
    _check_sizes(model, devices, constraints)


def _check_sizes(model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints) -> None:
    """Sums and products of what is allowed one by one: the search counts bytes in 64 bits."""
    work = constraints.workload
    room = sum(device.usable_bytes + device.reserve_bytes + device.overhead_bytes for device in devices)
    if room > MOST_TOGETHER:
        largest = max(devices, key=lambda device: device.usable_bytes)
        raise InvalidPlacementInput(
            f"they have {room:,} bytes together, and at most {MOST_TOGETHER:,} are counted; {largest.id} alone has "
            f"{largest.usable_bytes:,}",
            field="devices",
        )
    cache = work.batch * sum(layer.kv_bytes(work.context_tokens) for layer in model.layers)
    scratch = work.batch * work.prefill_tokens * max(layer.workspace_bytes_per_token for layer in model.layers)
    passed = work.batch * max(layer.activation_bytes_per_token for layer in model.layers)
    weights = model.weight_bytes
    for field, size in (
        ("constraints.workload.prefill_tokens", scratch),
        ("constraints.workload.context_tokens", cache),
        ("constraints.workload.batch", passed),
        ("model.layers", weights + cache + scratch),
    ):
        if size > MOST_TOGETHER:
            raise InvalidPlacementInput(
                f"the model takes {size:,} bytes with it, and at most {MOST_TOGETHER:,} are counted", field=field
            )


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
