"""A plan for the case that there is hardly room for one: as much capacity as the devices give, then an order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.filling import Filling
from gpurt.placement.instance import Floats, Instance, Ints
from gpurt.placement.relaxation import Step
from gpurt.placement.valuation import keeps_rules

_SPARE = 8
"""Units tried beyond those that hold all layers if they lay in the middle."""
_ENDS = 8
"""First and last units tried where no turn of the shortest order will do."""
_ALWAYS = 4
"""Orders that are tried also where there is no time left: else a hurried search has no plan at all."""
_STATES = 4096
"""Ways to use up the devices of a node, up to which its best groups are found exactly."""


def capacities(instance: Instance) -> Ints:
    """Most layers of each unit at any place."""
    high = np.maximum.reduce(_rooms(instance))
    return np.where(np.isfinite(instance.cost.whole), instance.layers, high)


def _rooms(instance: Instance) -> tuple[Ints, Ints, Ints]:
    """Most layers of each unit between others, as the first one and as the last one."""
    number = np.arange(instance.cost.inner.shape[2], dtype=np.int64)
    inner, first, last = (
        np.where(np.isfinite(table), number, 0).max(axis=1)
        for table in (instance.cost.inner.min(axis=1), instance.cost.first, instance.cost.last)
    )
    return inner, first, last


def fullest(instance: Instance, high: Ints) -> tuple[int, list[int], bool]:
    """The greatest number of layers that disjoint units hold, those units, and whether no others hold more.

    Links and first and last places are left out of account.
    """
    chosen: list[int] = []
    exact = True
    useful = np.flatnonzero(high > 0)
    useful = useful[np.argsort(instance.node[useful], kind="stable")]
    count = np.bincount(instance.node[useful])
    count = count[count > 0]
    # A unit that has its node for itself is used as often as there are devices for it: most are that in a home.
    lone = useful[np.cumsum(count)[count == 1] - 1]
    uses = instance.uses[lone]
    copies = np.where(uses > 0, instance.available // np.maximum(uses, 1), np.iinfo(np.int64).max).min(axis=1)
    chosen += np.repeat(lone, copies).tolist()
    for units in np.split(useful, np.cumsum(count)[:-1]):
        if len(units) > 1:
            found, sure = _fullest_node(instance, high, units)
            chosen += found
            exact &= sure
    return int(high[chosen].sum()), chosen, exact


def _fullest_node(instance: Instance, high: Ints, units: NDArray[np.intp]) -> tuple[list[int], bool]:
    classes = np.flatnonzero(instance.uses[units].any(axis=0))
    room = instance.available[classes]
    uses_of = instance.uses[np.ix_(units, classes)]
    if len(units) == len(classes):
        return np.repeat(units, room[np.argmax(uses_of, axis=1)]).tolist(), True
    # As Python's integers: of sixty classes the product is beyond 64 bits.
    if math.prod(have + 1 for have in room.tolist()) > _STATES:
        rate = high[units] / uses_of.sum(axis=1)
        spare = room.copy()
        chosen: list[int] = []
        for place in np.argsort(-rate, kind="stable").tolist():
            needed = np.flatnonzero(uses_of[place])
            takes = uses_of[place, needed]
            times = int((spare[needed] // takes).min())
            spare[needed] -= times * takes
            chosen += [int(units[place])] * times
        return chosen, False
    need = [tuple(uses) for uses in uses_of.tolist()]
    # By what is free: the most layers that units hold in it, one kind of unit after the other, as often as it fits.
    best = np.zeros(room + 1, dtype=np.int64)
    for unit, uses in zip(units, need, strict=True):
        before = best[tuple(slice(0, have + 1 - take) for have, take in zip(room, uses, strict=True))]
        after = best[tuple(slice(take, have + 1) for have, take in zip(room, uses, strict=True))]
        for _ in range(min(have // take for have, take in zip(room.tolist(), uses, strict=True) if take)):
            more = before + high[unit]
            if (more <= after).all():
                break
            np.maximum(after, more, out=after)
    free, taken = tuple(room.tolist()), list[int]()
    while best[free] > 0:
        for unit, uses in zip(units, need, strict=True):
            left = tuple(have - take for have, take in zip(free, uses, strict=True))
            if min(left) >= 0 and best[left] + high[unit] == best[free]:
                free = left
                taken.append(int(unit))
                break
    return taken, True


def packed(instance: Instance, filling: Filling, stop: Callable[[], bool]) -> tuple[int, ...] | None:
    """An order of units that holds all layers and keeps the rules, or None."""
    high = capacities(instance)
    _, chosen, _ = fullest(instance, high)
    plans = [chosen]
    singles = np.flatnonzero((instance.uses.sum(axis=1) == 1) & (high > 0))
    plans.append([int(unit) for unit in singles for _ in range(int(instance.available[instance.uses[unit] > 0][0]))])
    for units in plans:
        for fewest in (True, False):
            order = _ordered(instance, filling, _within_rules(instance, high, units, fewest=fewest), stop)
            if order is not None:
                return order
    return None


def rounded(instance: Instance, filling: Filling, use: Floats, stop: Callable[[], bool]) -> tuple[int, ...] | None:
    """An order of the units that a relaxation uses most, as many as it takes."""
    high = capacities(instance)
    growing = np.all(instance.rows >= 0, axis=0)
    left = instance.limits[growing].copy()
    kept: list[int] = []
    held = spare = 0
    # A unit that is used one and a half times is first asked for once and then, later, for another half.
    wishes = [(use[unit] - copy, -unit) for unit in range(instance.size) for copy in range(int(use[unit]) + 1)]
    for _, unit in sorted(wishes, reverse=True):
        takes = instance.rows[-unit, growing]
        if (takes > left).any() or not high[-unit]:
            continue
        kept.append(-unit)
        left = left - takes
        held += int(high[-unit])
        if held < instance.layers:
            continue
        order = _ordered(instance, filling, kept, stop)
        if order is not None:
            return order
        spare += 1
        if spare > _SPARE or stop():
            return None
    return None


def _within_rules(instance: Instance, high: Ints, units: list[int], *, fewest: bool) -> list[int]:
    """The units with most room first, as far as the rules allow; ``fewest``: no more than needed."""
    growing = (instance.rows >= 0).all(axis=0)
    wanted: list[bool] = np.any(instance.rows < 0, axis=1).tolist()
    left = instance.limits[growing].copy()
    nodes: set[int] = set()
    rules = instance.constraints
    most = rules.max_nodes
    kept: list[int] = []
    held = 0
    for unit in sorted(units, key=lambda unit: (not wanted[unit], -int(high[unit]))):
        takes = instance.rows[unit, growing]
        node = int(instance.node[unit])
        if (takes > left).any() or (most is not None and node not in nodes and len(nodes) >= most):
            continue
        kept.append(unit)
        nodes.add(node)
        left = left - takes
        held += int(high[unit])
        # One unit to spare, since the first and the last one hold less; and none without a layer.
        enough = held - int(high[unit]) >= instance.layers and len(nodes) >= rules.min_nodes
        if (fewest and enough and len(kept) >= rules.min_stages) or len(kept) == instance.layers:
            break
    return kept


def _ordered(
    instance: Instance, filling: Filling, units: list[int], stop: Callable[[], bool]
) -> tuple[int, ...] | None:
    """Nearest neighbour next, then the best place to begin; where none will do, the ends that cost least room."""
    if not units:
        return None
    order = _nearest(instance, units)
    turns = ((*order[turn:], *order[:turn]) for turn in range(len(order)))
    found = _best(instance, filling, turns, stop)
    return found or _best(instance, filling, _by_their_ends(instance, units), stop)


def _nearest(instance: Instance, units: list[int]) -> list[int]:
    """From the first one always to the nearest of those that are left."""
    numbers = np.array(units)
    hop = instance.hop[0][np.ix_(numbers, numbers)]
    left = np.ones(len(units), dtype=np.bool_)
    place = 0
    order = [units[place]]
    for _ in units[1:]:
        left[place] = False
        rest = np.flatnonzero(left)
        place = int(rest[hop[place, rest].argmin()])
        order.append(units[place])
    return order


def _by_their_ends(instance: Instance, units: list[int]) -> Iterator[tuple[int, ...]]:
    """Orders whose first and last unit lose least room to the embedding and the head: what a unit has beside its last
    whole layer is enough for them on some, and not on others."""
    inner, first, last = (room[np.array(units)] for room in _rooms(instance))
    # The best pairs are among the best of each end.
    begins, ends = (np.argsort(inner - room, kind="stable")[: _ENDS + 1] for room in (first, last))
    pairs = sorted(
        (int(inner[one] - first[one] + inner[other] - last[other]), int(one), int(other))
        for one in begins
        for other in ends
        if one != other
    )
    for _, one, other in pairs[:_ENDS]:
        between = [unit for place, unit in enumerate(units) if place not in (one, other)]
        yield (*_nearest(instance, [units[one], *between]), units[other])


def _best(
    instance: Instance, filling: Filling, orders: Iterable[tuple[int, ...]], stop: Callable[[], bool]
) -> tuple[int, ...] | None:
    """The cheapest of the orders that hold all layers and keep the rules, as far as there is time."""
    hop = instance.hop[0]
    best: tuple[float, tuple[int, ...]] | None = None
    for place, units_now in enumerate(orders):
        if place >= _ALWAYS and stop():
            break
        if len(units_now) > 1:
            numbers = np.array(units_now)
            links = float(hop[numbers[:-1], numbers[1:]].sum() + instance.back[numbers[-1], numbers[0]])
        else:
            links = 0.0
        if not np.isfinite(links) or (best is not None and links >= best[0]):
            continue
        value, _ = filling.cost(units_now)
        if np.isfinite(value) and keeps_rules(instance, tuple(Step(unit, 0, 0) for unit in units_now)):
            total = value + links
            if best is None or total < best[0]:
                best = total, units_now
    return None if best is None else best[1]
