"""How many layers each node of a ring gets, where nothing tells which node is faster."""

from __future__ import annotations

from collections.abc import Sequence

from gpurt.integrations.exo.inputs import ExoModel


def proportional(layers: int, rooms: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """Layers in proportion to memory, by largest remainder; at least one each and never over a capacity.

    Remainders are compared as whole numbers, so that equal memory is equal whatever its size; of equal remainders the
    earlier one wins. What a capacity cuts off goes where the most room in proportion is left. Returns None where the
    capacities do not hold all layers, one of them is zero, or there are more members than layers.
    """
    count = len(rooms)
    if not count or layers < count or sum(capacities) < layers or min(capacities) < 1:
        return None
    total = sum(rooms)
    shares = [min(layers * room // total, capacity) for room, capacity in zip(rooms, capacities, strict=True)]
    by_remainder = sorted(range(count), key=lambda place: -(layers * rooms[place] % total))
    for place in by_remainder:
        if sum(shares) < layers and shares[place] < capacities[place]:
            shares[place] += 1
    for place in range(count):
        if not shares[place]:
            shares[place] = 1
    while sum(shares) > layers:
        shares[shares.index(max(shares))] -= 1
    while sum(shares) < layers:
        open_places = (place for place in range(count) if shares[place] < capacities[place])
        shares[max(open_places, key=lambda place: rooms[place] / (shares[place] + 1))] += 1
    return shares


def ranges(shares: Sequence[int]) -> list[tuple[int, int]]:
    """Contiguous ranges of so many layers, in order: start and end (exclusive)."""
    found: list[tuple[int, int]] = []
    start = 0
    for share in shares:
        found.append((start, start + share))
        start += share
    return found


def split_ring(model: ExoModel, rooms: Sequence[int]) -> list[tuple[int, int]] | None:
    """The layers of each node of a ring in its order, or None where they do not fit.

    A model that runs two pipelines does so on an even number of nodes: the second half of the ring is the mirror of the
    first, so that both ends are neighbours, and both have equal ranges.
    """
    if not (model.uses_cfg and len(rooms) % 2 == 0):
        capacities = [model.capacity(room) for room in rooms]
        shares = proportional(model.layers, rooms, capacities)
        return None if shares is None else ranges(shares)
    half = len(rooms) // 2
    pairs = [min(rooms[place], rooms[-1 - place]) for place in range(half)]
    shares = proportional(model.layers, pairs, [model.capacity(room) for room in pairs])
    return None if shares is None else [*ranges(shares), *reversed(ranges(shares))]
