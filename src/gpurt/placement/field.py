"""Devices as arrays, and what those of one node hold together: the ground on which layers are counted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.instance import Ints
from gpurt.placement.layer_bytes import LayerBytes

NEVER: Final = -(1 << 40)
"""Layers of what cannot be: lower than any sum of what can."""
INNER, FIRST, LAST, BOTH = range(4)
"""What the stages of a cell have besides layers: nothing, the embedding, the head, or both on two of them."""


class Field:
    """Some devices as arrays."""

    def __init__(self, devices: Sequence[PlacementDevice]) -> None:
        self.devices = tuple(devices)
        self.raw = np.array(
            [device.usable_bytes - device.reserve_bytes - device.overhead_bytes for device in devices], dtype=np.int64
        )
        """Negative where reserve and overhead are more than there is."""
        self.place = {device.id: index for index, device in enumerate(devices)}
        self.node = _numbers([device.node for device in devices])
        self.cell = _numbers([(device.node, device.backend) for device in devices])
        self._domains: dict[str, NDArray[np.intp]] = {}

    @cached_property
    def node_names(self) -> dict[str, int]:
        """Number of each node."""
        return {device.node: int(number) for device, number in zip(self.devices, self.node, strict=True)}

    def plus(self, devices: tuple[PlacementDevice, ...]) -> Field:
        """With more devices behind these: ``devices`` are all of them. Each new one is on a node of its own."""
        wider = copy(self)
        for name in ("node_names", "pools"):
            wider.__dict__.pop(name, None)
        extra = devices[len(self.devices) :]
        wider.devices = devices
        budgets = [device.usable_bytes - device.reserve_bytes - device.overhead_bytes for device in extra]
        wider.raw = np.concatenate([self.raw, np.array(budgets, dtype=np.int64)])
        wider.place = self.place | {device.id: len(self.devices) + index for index, device in enumerate(extra)}
        number = np.arange(len(extra), dtype=np.intp)
        wider.node = np.concatenate([self.node, int(self.node.max()) + 1 + number])
        wider.cell = np.concatenate([self.cell, int(self.cell.max()) + 1 + number])
        wider._domains = {}
        return wider

    def domain(self, kind: str) -> NDArray[np.intp]:
        """Number of the failure domain of each device, -1 where it has none."""
        if kind not in self._domains:
            names = [device.domain(kind) for device in self.devices]
            numbers = {name: index for index, name in enumerate(dict.fromkeys(name for name in names if name))}
            self._domains[kind] = np.array([numbers[name] if name else -1 for name in names], dtype=np.intp)
        return self._domains[kind]

    @cached_property
    def pools(self) -> tuple[tuple[int, ...], ...]:
        """Devices that share their memory, where several do."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, device in enumerate(self.devices):
            if device.memory_pool_id is not None:
                found.setdefault((device.node, device.memory_pool_id), []).append(index)
        return tuple(tuple(members) for members in found.values() if len(members) > 1)


def integers(values: NDArray[np.integer[Any]]) -> list[int]:
    """A row of an array as numbers of Python."""
    found: list[int] = values.tolist()
    return found


def _numbers(names: Sequence[object]) -> NDArray[np.intp]:
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.intp)


@dataclass(slots=True)
class Cells:
    """Cells of so many devices each: what one can hold by the number of its stages.

    A cell is a set of devices that may form tensor-parallel groups; a device that cannot is a cell of its own.
    """

    table: Ints
    """``[c, k, state]``: most layers on exactly ``k`` stages."""
    members: NDArray[np.intp]
    """``[c, i]``: devices, the largest first."""

    @property
    def best(self) -> Ints:
        """``[c, state]`` with any number of stages."""
        return self.table.max(axis=1)


def single_cells(layers: LayerBytes, budgets: Ints, members: NDArray[np.intp], most: Ints, least: Ints) -> Cells:
    """Each device for itself; ``most`` and ``least``: layers that rules let it have."""
    table = np.full((len(members), 2, 4), NEVER, dtype=np.int64)
    table[:, 0, INNER] = 0
    for state, extra in ((INNER, 0), (FIRST, layers.ends[0]), (LAST, layers.ends[1])):
        fit = np.minimum(layers.fit(budgets, 1, extra), most)
        table[:, 1, state] = np.where((fit > 0) & (fit >= least), fit, NEVER)
    return Cells(table, members[:, None])


def grouped_cells(
    layers: LayerBytes, budgets: Ints, members: NDArray[np.intp], sizes: Sequence[int], stages: int | None
) -> Cells:
    """Cells with groups of these sizes: ``budgets[c, i]``, descending in each row. ``stages``: more are of no interest,
    0: their number is of none, and all are in the last column.

    A group holds what its smallest device lets it, so that the best groups are neighbours in this order: exchange a
    larger device for a smaller one and no group loses. The table is a dynamic programme along the row.
    """
    width = budgets.shape[1]
    key = budgets.shape, budgets.tobytes(), tuple(sizes), stages == 0
    if key not in layers.groups:
        layers.groups[key] = _group_table(layers, budgets, sizes, width if stages != 0 else 1, counted=stages != 0)
    most = width if stages is None else min(width, max(1, stages))
    return Cells(layers.groups[key][:, : most + 1].copy(), members)


def _group_table(layers: LayerBytes, budgets: Ints, sizes: Sequence[int], most: int, *, counted: bool) -> Ints:
    cells, width = budgets.shape
    rest = [np.full((cells, most + 1, 4), NEVER, dtype=np.int64) for _ in range(width + 1)]
    held: dict[int, list[Ints]] = {}
    for size in sizes:
        if size <= width:
            found = [layers.fit(budgets.ravel(), size, extra).reshape(budgets.shape) for extra in (0, *layers.ends)]
            held[size] = [np.where(fit > 0, fit, NEVER)[:, :, None, None] for fit in found]
    for place in range(width, -1, -1):
        now = rest[place]
        now[:, 0, INNER] = 0
        target = now[:, 1:, :]
        for size, (inner, first, last) in held.items():
            end = place + size
            if end > width:
                continue
            after = rest[end]
            after = after[:, :-1, :] if counted else after.max(axis=1, keepdims=True)
            np.maximum(target, inner[:, end - 1] + after, out=target)
            # With the embedding: nothing besides it, or the head behind it; and the other way round.
            into = target[:, :, FIRST::2]
            np.maximum(into, first[:, end - 1] + after[:, :, INNER::2], out=into)
            into = target[:, :, LAST:]
            np.maximum(into, last[:, end - 1] + after[:, :, :LAST], out=into)
        np.maximum(now, NEVER, out=now)
    return rest[0]


def cells_of(
    field: Field,
    layers: LayerBytes,
    chosen: NDArray[np.intp],
    budgets: Ints,
    sizes: Sequence[int],
    alone: Ints,
    most: Ints,
    least: Ints,
    stages: int | None,
) -> list[Cells]:
    """The cells of the chosen devices; ``budgets``, ``alone``, ``most`` and ``least`` are of all devices.

    Devices in ``alone`` join no group; ``stages`` as in :func:`grouped_cells`.
    """
    if max(sizes) == 1:
        return [single_cells(layers, budgets[chosen], chosen, most[chosen], least[chosen])]
    apart = np.isin(chosen, alone) if alone.size else np.zeros(len(chosen), dtype=np.bool_)
    found: list[Cells] = []
    if apart.any():
        found.append(
            single_cells(layers, budgets[chosen[apart]], chosen[apart], most[chosen[apart]], least[chosen[apart]])
        )
    grouped = chosen[~apart]
    order = grouped[np.lexsort((grouped, -budgets[grouped], field.cell[grouped]))]
    _, starts, counts = np.unique(field.cell[order], return_index=True, return_counts=True)
    for width in np.unique(counts):
        rows = np.asarray(starts[counts == width], dtype=np.intp)[:, None] + np.arange(int(width))[None, :]
        members = order[rows]
        found.append(grouped_cells(layers, budgets[members], members, sizes, stages))
    return found
