"""The devices that a repair looks at: those that the plan uses, and the spare ones that promise most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

import numpy as np

from gpurt.placement.constraints import Constraints, DomainLimit
from gpurt.placement.costs import TOKEN_BYTES
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InfeasiblePlacement
from gpurt.placement.grouping import filter_devices
from gpurt.placement.plan import Plan
from gpurt.placement.rule_words import pin_words
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology

SPARES: Final = 48
"""Spare devices looked at, in whole nodes; more hardly ever change the plan and always take time."""


def limits_there(constraints: Constraints, devices: Sequence[PlacementDevice]) -> tuple[DomainLimit, ...]:
    """The limits of domains in which one of the devices lies."""
    return tuple(
        limit
        for limit in constraints.domain_limits
        if any(device.domain(limit.domain) is not None for device in devices)
    )


def present_constraints(constraints: Constraints, devices: Sequence[PlacementDevice]) -> Constraints:
    """The rules for those devices and nodes that are there: names of others are taken out.

    Raises: InfeasiblePlacement where a rule names only what has left.
    """
    ids = {device.id for device in devices}
    nodes = {device.node for device in devices}
    for kind, gone in (
        ("require_devices", constraints.require_devices - ids),
        ("require_nodes", constraints.require_nodes - nodes),
    ):
        for name in sorted(gone):
            raise InfeasiblePlacement(
                f"{name} is required and has left",
                constraint=kind,
                hint="bring it back, or take it out of the constraints",
            )
    pins = tuple(
        pin.model_copy(update={"devices": pin.devices & ids, "nodes": pin.nodes & nodes}) for pin in constraints.pins
    )
    for pin, now in zip(constraints.pins, pins, strict=True):
        if not now.devices and not now.nodes:
            raise InfeasiblePlacement(
                f"{pin_words(pin)} cannot be kept: nothing that it names is left",
                constraint="pins",
                hint="bring it back, or pin the layers to other devices",
            )
    return constraints.model_copy(
        update={
            "exclude_devices": constraints.exclude_devices & ids,
            "exclude_nodes": constraints.exclude_nodes & nodes,
            "stage_layers": tuple(entry for entry in constraints.stage_layers if entry.device in ids),
            "pins": pins,
            "domain_limits": limits_there(constraints, devices),
        }
    )


def neighbourhood(
    plan: Plan,
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    topology: Topology,
    constraints: Constraints,
    *,
    spares: int = SPARES,
) -> list[PlacementDevice]:
    """The plan's devices that are there, in the order of stages and ranks, and then spare ones, best nodes first.

    Spares are taken by whole nodes, so that every group of theirs is there too: by turns the one that adds least time
    for each byte it takes, and the one that takes most. Devices that rules name are always among them.
    """
    kept, _ = filter_devices(model, devices, constraints)
    by_id = {device.id: device for device in kept}
    if constraints.same_backend:
        # Survivors of one backend go on with it; where none is left, the solver chooses.
        known = {by_id[name].backend for name in plan.devices if name in by_id}
        kept = [device for device in kept if not known or device.backend in known]
    used = [by_id[name] for name in plan.devices if name in by_id]
    names = {device.id for device in used}
    free: dict[tuple[str, str], list[PlacementDevice]] = {}
    for device in kept:
        if device.id not in names:
            free.setdefault((device.node, device.backend), []).append(device)
    wanted = set(constraints.require_devices).union(*(pin.devices for pin in constraints.pins))
    wanted_nodes = set(constraints.require_nodes).union(*(pin.nodes for pin in constraints.pins))
    chosen: dict[tuple[str, str], None] = {
        key: None
        for key, found in free.items()
        if key[0] in wanted_nodes or any(device.id in wanted for device in found)
    }
    slow, small = _rankings(plan, model, kept, by_id, free, topology, constraints)
    count = sum(len(free[key]) for key in chosen)
    for key in (key for pair in zip_longest(slow, small) for key in pair if key is not None):
        if count >= spares:
            break
        if key not in chosen:
            chosen[key] = None
            count += len(free[key])
    return used + sorted((device for key in chosen for device in free[key]), key=lambda device: device.id)


def _rankings(
    plan: Plan,
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    by_id: Mapping[str, PlacementDevice],
    free: Mapping[tuple[str, str], Sequence[PlacementDevice]],
    topology: Topology,
    constraints: Constraints,
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Nodes with free devices: by time per byte where the gaps are, and by what they can take."""
    payload = max(layer.activation_bytes_per_token for layer in model.layers) * constraints.workload.batch
    links = topology.dense(devices)
    place = {device.id: index for index, device in enumerate(devices)}
    before, after, need = _gaps(plan, model, by_id)
    forth = links.seconds(payload) if len(plan.stages) > 1 else np.zeros_like(links.latency)
    back = links.seconds(TOKEN_BYTES * constraints.workload.batch)
    entering = forth[[place[name] for name in before]].min(axis=0) if before else np.zeros(len(devices))
    leaving = forth[:, [place[name] for name in after]].min(axis=1) if after else np.zeros(len(devices))
    # A unit that stands alone at one end still pays one hand-over and the way back.
    alone = back.mean(axis=0) if not before and not after and len(plan.stages) > 1 else np.zeros(len(devices))
    sizes = [
        size
        for size in model.tensor_parallel
        if constraints.tensor_parallel_max is None or size <= constraints.tensor_parallel_max
    ]
    cost: dict[tuple[str, str], float] = {}
    room: dict[tuple[str, str], float] = {}
    for key, found in free.items():
        ways = min(float(entering[place[d.id]] + leaving[place[d.id]] + alone[place[d.id]]) for d in found)
        ordered = sorted(found, key=lambda device: -device.memory_bandwidth)
        options: list[float] = []
        for size in sizes:
            if size > len(ordered):
                continue
            group = ordered[:size]
            takes = min(need, size * min(device.budget_bytes for device in group))
            speed = size * min(device.memory_bandwidth for device in group)
            options.append(1 / speed + ways / max(1.0, takes))
        cost[key] = min(options)
        room[key] = sum(device.budget_bytes for device in found)
    slow = sorted((key for key in free if cost[key] < np.inf), key=lambda key: (cost[key], key))
    small = sorted((key for key in free if cost[key] < np.inf), key=lambda key: (-room[key], key))
    return slow, small


def _gaps(plan: Plan, model: ModelSpec, by_id: Mapping[str, PlacementDevice]) -> tuple[list[str], list[str], float]:
    """Devices before and after the stages that are gone, and the bytes that those held."""
    alive = [all(name in by_id for name in stage.devices) for stage in plan.stages]
    before: list[str] = []
    after: list[str] = []
    need = 0.0
    for number, stage in enumerate(plan.stages):
        if alive[number]:
            continue
        need += sum(layer.weight_bytes for layer in model.layers[stage.start : stage.end])
        if number > 0 and alive[number - 1]:
            before += plan.stages[number - 1].devices
        if number + 1 < len(plan.stages) and alive[number + 1]:
            after += plan.stages[number + 1].devices
    return before, after, need or float(model.weight_bytes)
