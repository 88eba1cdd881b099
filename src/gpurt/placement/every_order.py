"""Whether few units have any plan at all: every order of them is tried, and no cost is looked at.

From the beginning of a plan what matters is its first and its last stage, what it has used up, and after which layers
it may end. So beginnings that agree in all but the last are one, and where none of them went on before, none does
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from gpurt.placement.field import integers
from gpurt.placement.instance import Bools, Instance

MOST_UNITS: Final = 48
_MOST_BEGINNINGS: Final = 3000
"""Looked at before the answer is that nobody knows: some tenths of a second."""

_Key = tuple[int, int, int, tuple[int, ...]]
"""First unit, last unit, nodes, and what is used of each limit."""


class _TooMany(Exception):
    pass


def any_plan(instance: Instance, stop: Callable[[], bool]) -> bool | None:
    """Whether some path keeps every rule; None where that takes too long to tell."""
    if not instance.size:
        return False
    if instance.size > MOST_UNITS:
        return None
    try:
        return _Orders(instance, stop).run()
    except _TooMany:
        return None


class _Orders:
    """Sets of layers are bits of a number: bit ``s`` is the place before layer ``s``."""

    def __init__(self, instance: Instance, stop: Callable[[], bool]) -> None:
        self.instance, self.stop = instance, stop
        count, cost = instance.layers, instance.cost
        self.inside = (1 << count) - 2
        """All places between two layers."""
        width = cost.inner.shape[2]
        self.first = [_bits(row) & self.inside for row in np.isfinite(cost.first)]
        lengths = [_bits(row) & ~1 for row in np.isfinite(cost.last)]
        self.last = [sum(1 << (count - n) for n in range(1, min(width, count)) if bits >> n & 1) for bits in lengths]
        self.whole = np.isfinite(cost.whole).tolist()
        self.inner = [[_bits(row) & ~1 for row in unit] for unit in np.isfinite(cost.inner)]
        kinds = [
            sum(1 << start for start in range(1, count) if instance.boundary[start] == kind)
            for kind in range(len(instance.hop))
        ]
        there = np.isfinite(instance.hop)
        self.ways = [
            [
                sum(bits for bits, open_ in zip(kinds, there[:, one, other], strict=True) if open_)
                for other in self.units
            ]
            for one in self.units
        ]
        self.back = np.isfinite(instance.back).tolist()
        self.rows: list[tuple[int, ...]] = [tuple(integers(row)) for row in instance.rows]
        self.limits = integers(instance.limits)
        self.growing = [row for row in range(len(self.limits)) if (instance.rows[:, row] >= 0).all()]
        self.fruitless: dict[_Key, int] = {}
        """Places from which no such beginning leads to a plan."""
        self.seen = 0

    @property
    def units(self) -> range:
        return range(self.instance.size)

    def run(self) -> bool:
        for unit in self.units:
            used, nodes = self.rows[unit], 1 << int(self.instance.node[unit])
            if self._over(used, nodes):
                continue
            if self.whole[unit] and self._finished(used, nodes):
                return True
            if self.first[unit] and self._goes_on((unit, unit, nodes, used), self.first[unit]):
                return True
        return False

    def _goes_on(self, key: _Key, ends: int) -> bool:
        """Whether a beginning that may end at these places is one of a plan."""
        ends &= ~self.fruitless.get(key, 0)
        if not ends:
            return False
        self.seen += 1
        if self.seen > _MOST_BEGINNINGS or self.stop():
            raise _TooMany
        first, unit, nodes, used = key
        for other in self.units:
            starts = ends & self.ways[unit][other]
            if not starts:
                continue
            more = tuple(map(int.__add__, used, self.rows[other]))
            there = nodes | 1 << int(self.instance.node[other])
            if self._over(more, there):
                continue
            if starts & self.last[other] and self.back[other][first] and self._finished(more, there):
                return True
            if self._goes_on((first, other, there, more), self._ends(other, starts)):
                return True
        self.fruitless[key] = self.fruitless.get(key, 0) | ends
        return False

    def _ends(self, unit: int, starts: int) -> int:
        rows, found = self.inner[unit], 0
        while starts:
            low = starts & -starts
            starts ^= low
            start = low.bit_length() - 1
            found |= rows[start if len(rows) > 1 else 0] << start
        return found & self.inside

    def _over(self, used: tuple[int, ...], nodes: int) -> bool:
        """It uses more than there is, whatever follows."""
        most = self.instance.constraints.max_nodes
        return any(used[row] > self.limits[row] for row in self.growing) or (
            most is not None and nodes.bit_count() > most
        )

    def _finished(self, used: tuple[int, ...], nodes: int) -> bool:
        """The rules that ask for at least so much are kept as well."""
        return nodes.bit_count() >= self.instance.constraints.min_nodes and all(
            have <= limit for have, limit in zip(used, self.limits, strict=True)
        )


def _bits(row: Bools) -> int:
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")
