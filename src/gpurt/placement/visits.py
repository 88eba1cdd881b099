"""What a path remembers: which devices of a group of near units it has used since it entered the group.

A path that remembers nothing goes to and fro between two near units. To remember every device is as hard as the problem
itself. Between the two: units are grouped, a path remembers its visits as long as it stays in a group, and forgets them
when it leaves. Going round then costs at least the way out of the group and back, and the number of things to tell
apart stays small. Whatever the groups are, every plan is such a path, so that a bound over them holds for plans.

The method is that of ng-routes (Baldacci, Mingozzi and Roberti, "New route relaxation and pricing strategies for the
vehicle routing problem", Operations Research 59, 2011), with neighbourhoods that form a partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.instance import Bools, Floats, Instance, Ints

_NEAR: Final = 8
"""Neighbours of a unit that may come into its group."""
_GROUPED: Final = 80
"""Most units that come into a group with others."""
GROUP_STATES: Final = 2048
"""Most states of one group to begin with, as if every set of devices could be remembered with every last unit."""
_STATES: Final = 24_000
"""Most states of all groups together."""


@dataclass(frozen=True, slots=True)
class Visits:
    """States of a path: its last unit, and what it remembers.

    ``S`` states over ``U`` units. Transitions lead from state to state within a group; everything else is a hop to the
    state in which a unit is alone.
    """

    unit: Ints
    """``[s]``: last unit."""
    alone: Ints
    """``[u]``: state of which only u is remembered."""
    group: Ints
    """``[u]``: -1 where the unit is in no group and nothing is remembered of it."""
    source: Ints
    """``[t]``: states before and after each transition, sorted by target."""
    target: Ints

    @property
    def size(self) -> int:
        return len(self.unit)

    def within(self) -> NDArray[np.bool_]:
        """``[u, v]``: a step from u to v stays in a group."""
        return (self.group[:, None] == self.group[None, :]) & (self.group >= 0)[:, None]

    def of(self, units: NDArray[np.intp]) -> tuple[Visits, NDArray[np.intp]]:
        """With these units only, and which states are left."""
        place = np.full(len(self.alone), -1, dtype=np.int64)
        place[units] = np.arange(len(units))
        kept = place[self.unit] >= 0
        states = np.flatnonzero(kept)
        number = np.cumsum(kept) - 1
        both = kept[self.source] & kept[self.target]
        return Visits(
            place[self.unit[states]],
            number[self.alone[units]],
            self.group[units],
            number[self.source[both]],
            number[self.target[both]],
        ), states

    def following(self) -> Ints:
        """``[s, v]``: state after a step to v; -1 where v's devices are used up."""
        table = np.broadcast_to(self.alone, (self.size, len(self.alone))).copy()
        table[self.within()[self.unit]] = -1
        table[self.source, self.unit[self.target]] = self.target
        return table


def forgetful(size: int) -> Visits:
    """Nothing is remembered."""
    number = np.arange(size, dtype=np.int64)
    nothing = np.empty(0, dtype=np.int64)
    return Visits(number, number, np.full(size, -1, dtype=np.int64), nothing, nothing)


def remembering(instance: Instance, through: Floats, most: int = GROUP_STATES) -> Visits:
    """Groups of units that are near each other or share devices, of up to ``most`` states.

    ``through`` is what a plan with each unit costs at least: the promising units are grouped, the others are alone.
    """
    need, limits = _resources(instance)
    return _visits(instance, _grouped(instance, through, need, limits, most), need, limits)


def _resources(instance: Instance) -> tuple[Ints, Ints]:
    """``[u, r]`` what is used up of what, and how much of it there is: classes, or the unit itself where no other unit
    needs its classes."""
    takes = instance.uses > 0
    users = takes.sum(axis=0)
    own = ~(takes & (users > 1)).any(axis=1)
    shared = np.flatnonzero(takes[~own].any(axis=0))
    copies = np.where(takes, instance.available // np.maximum(instance.uses, 1), np.iinfo(np.int64).max).min(axis=1)
    alone = np.flatnonzero(own)
    need = np.zeros((instance.size, len(shared) + len(alone)), dtype=np.int64)
    need[:, : len(shared)] = instance.uses[:, shared]
    need[alone, len(shared) + np.arange(len(alone))] = 1
    return need, np.concatenate([instance.available[shared], copies[alone]])


def _grouped(instance: Instance, through: Floats, need: Ints, limits: Ints, most: int) -> list[list[int]]:
    """Units joined by their cheapest hops first, as long as there are not too many states."""
    size = instance.size
    groups = [[unit] for unit in range(size)]
    best = np.sort(np.argsort(through, kind="stable")[:_GROUPED])
    if len(best) < 2:
        return groups
    hop = instance.hop.min(axis=0)[np.ix_(best, best)]
    near = np.minimum(hop, hop.T)
    shared = (instance.uses[best] @ instance.uses[best].T) > 0
    near[shared] = 0.0
    np.fill_diagonal(near, np.inf)
    take = min(_NEAR, len(best) - 1)
    kept = shared.copy()
    kept[np.arange(len(best))[:, None], np.argpartition(near, take - 1, axis=1)[:, :take]] = True
    one, other = np.nonzero(np.triu((kept | kept.T) & np.isfinite(near), 1))
    order = np.argsort(near[one, other], kind="stable")
    leader = list(range(size))
    takes: list[list[int]] = [np.flatnonzero(uses).tolist() for uses in need]
    resources = [frozenset(found) for found in takes]
    copies: list[int] = limits.tolist()
    room = _STATES

    def lead(unit: int) -> int:
        while leader[unit] != unit:
            leader[unit] = leader[leader[unit]]
            unit = leader[unit]
        return unit

    for a, b in zip(best[one[order]].tolist(), best[other[order]].tolist(), strict=True):
        a, b = lead(a), lead(b)
        if a == b:
            continue
        both = resources[a] | resources[b]
        # As if every set of devices could be remembered with every last unit.
        states = prod(copies[kind] + 1 for kind in both) * (len(groups[a]) + len(groups[b]))
        if states > min(most, room):
            continue
        room -= states // 2
        leader[b] = a
        groups[a] = groups[a] + groups[b]
        resources[a] = both
    return [sorted(groups[unit]) for unit in range(size) if lead(unit) == unit]


def _visits(instance: Instance, groups: list[list[int]], need_of: Ints, limits_of: Ints) -> Visits:
    size = instance.size
    alone = np.zeros(size, dtype=np.int64)
    group = np.zeros(size, dtype=np.int64)
    there: Bools = np.asarray(np.any(np.isfinite(instance.hop), axis=0))
    # Most units are alone, and once: nothing is to be remembered of them but that.
    once: list[bool] = (np.any(2 * need_of > limits_of, axis=1) & np.all(need_of <= limits_of, axis=1)).tolist()
    last: list[Ints] = []
    sources: list[Ints] = []
    targets: list[Ints] = []
    count = 0
    for number, units in enumerate(groups):
        group[units] = number
        members = np.array(units, dtype=np.int64)
        if len(units) == 1 and once[units[0]]:
            last.append(members)
            alone[members] = count
            count += 1
            continue
        kinds = np.flatnonzero(need_of[members].any(axis=0))
        limits = limits_of[kinds]
        need = need_of[np.ix_(members, kinds)]
        radix = np.concatenate([[1], np.cumprod(limits + 1)])
        step = need @ radix[:-1]
        masks = int(radix[-1])
        digits = (np.arange(masks)[:, None] // radix[:-1]) % (limits + 1)
        held = digits[:, None, :] + need[None, :, :]
        fits: Bools = np.asarray(np.all(held <= limits, axis=2))
        # Masks that some set of units of the group makes up.
        made = np.zeros(masks, dtype=np.bool_)
        made[0] = True
        for mask in range(masks):
            if made[mask]:
                made[mask + step[fits[mask]]] = True
        before, place = np.nonzero(fits & made[:, None])
        number_of = np.full((masks, len(units)), -1, dtype=np.int64)
        number_of[before + step[place], place] = count + np.arange(len(before))
        last.append(members[place])
        alone[members] = number_of[step, np.arange(len(units))]
        mask, place = before + step[place], place
        can = there[np.ix_(members, members)]
        state, after = np.nonzero(fits[mask] & can[place])
        sources.append(count + state)
        targets.append(number_of[mask[state] + step[after], after])
        count += len(before)
    nothing = np.empty(0, dtype=np.int64)
    source, target = np.concatenate([nothing, *sources]), np.concatenate([nothing, *targets])
    order = np.lexsort((source, target))
    return Visits(np.concatenate(last), alone, group, source[order], target[order])
