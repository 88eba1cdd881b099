"""Which device may hold which layers, and what follows from that by counting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.constraints import Constraints
from gpurt.placement.counting import count_layers
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.field import Field
from gpurt.placement.grouping import can_compute
from gpurt.placement.instance import Bools, Ints
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.number_rules import Rules
from gpurt.placement.spec import LayerSpec, ModelSpec

_KINDS_LIMIT: Final = 6
"""Kinds of layers (by the devices that may hold them) of which every set is looked at; of more, single ones."""


class Holding:
    """``holds[d, l]``: device d may hold layer l; ``takes[d, l]``: it may begin with it, given what comes in."""

    def __init__(self, model: ModelSpec, constraints: Constraints, devices: Sequence[PlacementDevice]) -> None:
        count = model.layer_count
        kinds = list({id(layer): layer for layer in model.layers}.values())
        place = {id(layer): index for index, layer in enumerate(kinds)}
        self.kind = np.array([place[id(layer)] for layer in model.layers], dtype=np.intp)
        self.holds = np.ones((len(devices), count), dtype=np.bool_)
        self.takes = np.ones((len(devices), count), dtype=np.bool_)
        known: dict[tuple[object, ...], tuple[Bools, Bools]] = {}
        for row, device in enumerate(devices):
            key = device.dtypes, device.unsupported_operations, device.max_allocation_bytes
            if key not in known:
                known[key] = self._able(model, kinds, device)
            self.holds[row], self.takes[row] = known[key]
        for pin in constraints.pins:
            outside = [
                row
                for row, device in enumerate(devices)
                if device.id not in pin.devices and device.node not in pin.nodes
            ]
            self.holds[outside, pin.start : pin.end] = False

    def _able(self, model: ModelSpec, kinds: Sequence[LayerSpec], device: PlacementDevice) -> tuple[Bools, Bools]:
        able = np.array([can_compute(device, layer, model) for layer in kinds])[self.kind]
        takes = np.ones(len(able), dtype=np.bool_)
        if device.dtypes is not None:
            reads = np.array([(layer.dtype or model.dtype) in {None, *device.dtypes} for layer in kinds])
            takes[1:] = reads[self.kind[:-1]]
        return able, takes


def room_for_every_kind(
    field: Field,
    layers: LayerBytes,
    rules: Rules,
    holding: Holding,
    chosen: NDArray[np.intp],
    budgets: Ints,
) -> bool:
    """False where some layers find no room on the devices that may hold them, whatever the others do.

    Layers that the same devices may hold are of one kind; any kinds together need as much room as they have layers.
    """
    columns = np.ascontiguousarray(holding.holds[chosen].T)
    numbers: dict[bytes, int] = {}
    kind = np.array([numbers.setdefault(column.tobytes(), len(numbers)) for column in columns], dtype=np.intp)
    _, where = np.unique(kind, return_index=True)
    patterns = columns[where].T
    sizes = np.bincount(kind)
    number = len(numbers)
    free = rules.without_names()
    most = number if number <= _KINDS_LIMIT else 1
    for size in range(1, most + 1):
        for picked in combinations(range(number), size):
            able = patterns[:, picked].any(axis=1)
            wanted = int(sizes[list(picked)].sum())
            part = int(kind[0]) in picked, int(kind[-1]) in picked
            if not able.any():
                return False
            if able.all():
                continue
            if count_layers(field, layers, free, chosen[able], budgets, part=part).high < wanted:
                return False
    return True


def bytes_suffice(layers: LayerBytes, rules: Rules, chosen: NDArray[np.intp], budgets: Ints) -> bool:
    """False where all weights and caches are more than the devices, or the largest allowed ones, have together."""
    room = np.maximum(budgets[chosen], 0)
    if rules.stages is not None and max(rules.sizes) == 1:
        room = np.sort(room)[::-1][: rules.stages]
    return int(room.sum()) >= layers.least
