"""How many layers find room where not all do: with the embedding and the head as long as these fit anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.counting import count_layers
from gpurt.placement.field import Field
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.number_rules import Rules


@dataclass(frozen=True, slots=True)
class RoomFigures:
    layers: int
    """Most that the devices hold under the rules of number."""
    unplaced: tuple[str, ...] = ()
    """What of the embedding and the head fits on no device beside one layer; then ``layers`` are without them."""


def room_figures(field: Field, layers: LayerBytes, rules: Rules, kept: NDArray[np.intp]) -> RoomFigures:
    if not len(kept):
        return RoomFigures(0)
    found = count_layers(field, layers, rules, kept, field.raw).high
    # What has to be used is no limit of room, and where it cannot be used nothing at all is counted.
    free = rules.without_names()
    found = found or count_layers(field, layers, free, kept, field.raw).high
    found = found or _with_both(field, layers, rules, kept)
    if found or not any(layers.ends):
        return RoomFigures(found)
    inner = count_layers(field, layers, free, kept, field.raw, part=(False, False)).high
    if not inner:
        return RoomFigures(0)
    budgets = largest_groups(field, kept, rules.sizes)
    names = [
        name
        for name, extra in zip(("embedding", "head"), layers.ends, strict=True)
        if not any(layers.fit(np.array([room]), size, extra)[0] for size, room in budgets.items())
    ]
    return RoomFigures(inner, tuple(names) or ("embedding and head",))


def _with_both(field: Field, layers: LayerBytes, rules: Rules, kept: NDArray[np.intp]) -> int:
    """On one device or group that has the embedding and the head, and that is all."""
    held = [
        int(layers.fit(np.array([room]), size, layers.both)[0])
        for size, room in largest_groups(field, kept, rules.sizes).items()
    ]
    return min(max(held, default=0), int(rules.most[kept].max()))


def largest_groups(field: Field, kept: NDArray[np.intp], sizes: tuple[int, ...]) -> dict[int, int]:
    """By its number of devices, the most that the smallest one of a group has."""
    order = kept[np.lexsort((-field.raw[kept], field.cell[kept]))]
    cell = field.cell[order]
    found: dict[int, int] = {}
    for size in sizes:
        last = order[size - 1 :][cell[size - 1 :] == cell[: max(0, len(cell) - size + 1)]]
        if len(last):
            found[size] = int(field.raw[last].max())
    return found
