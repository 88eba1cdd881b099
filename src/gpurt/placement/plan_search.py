"""Whether there is any plan, searched for: in every order of few stages, else by the engine for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.building import build_instance
from gpurt.placement.clock import Clock
from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.engine import Engine
from gpurt.placement.every_order import any_plan
from gpurt.placement.field import Field, integers
from gpurt.placement.instance import Ints
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology

FEW: Final = 64
"""Devices up to which all of them are searched; of more, the most promising ones."""
_SEARCHED: Final = 40


def search_plan(
    model: ModelSpec,
    topology: Topology,
    rules: Constraints,
    field: Field,
    sets: Iterable[NDArray[np.intp]],
    more_bytes: int | Ints,
    clock: Callable[[], Clock],
    *,
    engine: bool,
) -> bool | None:
    """``sets``: devices that a plan may lie on, each for itself; None: not known. ``clock``: for one of them. Without
    ``engine``, orders are tried and that is all."""
    budgets = field.raw + more_bytes
    more = np.broadcast_to(np.asarray(more_bytes, dtype=np.int64), len(field.devices))
    complete = True
    for chosen in sets:
        index = chosen
        if len(chosen) > FEW:
            complete, index = False, _promising(rules, field, chosen, budgets)
        picked = [with_bytes(field.devices[place], int(more[place])) for place in integers(index)]
        if not picked or not _names_there(rules, picked):
            continue
        mine = clock()
        instance = build_instance(model, picked, topology.within(picked), rules)
        tried = any_plan(instance, mine.over)
        if tried is None and engine:
            found = Engine(instance, mine, seed=0, target_gap=np.inf).run()
            tried = True if found.steps is not None else (False if np.isinf(found.bound) else None)
        if tried:
            return True
        complete &= tried is False and instance.complete
        if mine.cancelled():
            return None
    return False if complete else None


def _names_there(rules: Constraints, picked: Sequence[PlacementDevice]) -> bool:
    names, nodes = {device.id for device in picked}, {device.node for device in picked}
    return rules.require_devices <= names and rules.require_nodes <= nodes


def _promising(rules: Constraints, field: Field, chosen: NDArray[np.intp], budgets: Ints) -> NDArray[np.intp]:
    """The devices that rules name and the largest others."""
    names = rules.require_devices | {entry.device for entry in rules.stage_layers}
    nodes = set(rules.require_nodes)
    for pin in rules.pins:
        names |= pin.devices
        nodes |= pin.nodes
    named = np.array([device.id in names or device.node in nodes for device in field.devices])[chosen]
    order = np.lexsort((chosen, -budgets[chosen], ~named))
    return np.sort(chosen[order[: max(_SEARCHED, int(named.sum()))]])


def with_bytes(device: PlacementDevice, more: int) -> PlacementDevice:
    return device.model_copy(update={"usable_bytes": device.usable_bytes + more}) if more else device
