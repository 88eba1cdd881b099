"""Which nodes to use when only so many may be: those that hold most layers together, embedding and head included."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import product
from typing import Final

import numpy as np

from gpurt.placement.field import BOTH, FIRST, INNER, LAST, NEVER, Cells, Field, integers
from gpurt.placement.instance import Ints

_FORCED: Final = 1 << 30
"""More layers than there are: a node that has to be in is preferred to any other."""


def best_nodes(cells: Sequence[Cells], field: Field, limit: int, forced: Collection[int]) -> tuple[set[int], int]:
    """At most ``limit`` nodes, ``forced`` ones among them, and the layers that they hold; nobody holds more.

    Only the nodes with embedding and head are not simply the largest, so few sets have to be compared.
    """
    best = np.concatenate([found.best for found in cells])
    node = np.concatenate([field.node[found.members[:, 0]] for found in cells])
    names, node = np.unique(node, return_inverse=True)
    if len(forced) > limit or not set(forced) <= set(integers(names)):
        return set(), NEVER
    values = _Nodes(best, node, len(names))
    for name in forced:
        values.inner[int(np.searchsorted(names, name))] += _FORCED
    value, chosen = values.choose(limit)
    return {int(names[index]) for index in chosen}, max(value - _FORCED * len(forced), NEVER)


class _Nodes:
    """``inner``: layers of each node; the others: what embedding and head add to that, which is never positive."""

    def __init__(self, best: Ints, node: Ints, count: int) -> None:
        self.best, self.node = best, node
        inner = np.maximum(best[:, INNER], 0)
        self.inner = np.zeros(count, dtype=np.int64)
        np.add.at(self.inner, node, inner)
        self.first, self.last, self.both = (np.full(count, NEVER, dtype=np.int64) for _ in range(3))
        np.maximum.at(self.first, node, best[:, FIRST] - inner)
        np.maximum.at(self.last, node, best[:, LAST] - inner)
        np.maximum.at(self.both, node, best[:, BOTH] - inner)
        several = np.bincount(node, minlength=count) > 1
        self.pair = np.where(several, np.maximum(self.both, np.maximum(self.first + self.last, NEVER)), self.both)
        """Of the embedding and the head on one node, at most."""

    def exact_pair(self, index: int) -> int:
        from gpurt.placement.counting import best_pair

        return max(best_pair(self.best[self.node == index], base=0), NEVER)

    def choose(self, limit: int) -> tuple[int, list[int]]:
        order = np.argsort(-self.inner, kind="stable")
        top, rest = integers(order[:limit]), order[limit:]
        outside = {
            name: integers(rest[np.argsort(-(self.inner + extra)[rest], kind="stable")[:2]])
            for name, extra in (("first", self.first), ("last", self.last))
        }
        found: list[tuple[int, list[int]]] = []

        def consider(extra: int, nodes: Sequence[int]) -> None:
            kept = list(dict.fromkeys(nodes))
            kept += [index for index in top if index not in kept][: limit - len(kept)]
            found.append((int(self.inner[kept].sum()) + extra, kept))

        self._together(top, rest, consider)
        if limit > 1 and len(order) > 1:
            firsts = _two(self.first, top) + outside["first"] + top[-2:]
            lasts = _two(self.last, top) + outside["last"] + top[-2:]
            for one, other in product(dict.fromkeys(firsts), dict.fromkeys(lasts)):
                if one != other:
                    consider(int(self.first[one] + self.last[other]), (one, other))
        return max(found, key=lambda pair: pair[0], default=(NEVER, list[int]()))

    def _together(self, top: list[int], rest: Ints, consider: Callable[[int, Sequence[int]], None]) -> None:
        """Embedding and head on one node: the best of those with most room, and of the others where that is better."""
        best = NEVER, -1
        for index in sorted(top, key=lambda index: -int(self.pair[index])):
            if int(self.pair[index]) <= best[0]:
                break
            best = max(best, (self.exact_pair(index), index))
        if best[0] > NEVER:
            consider(best[0], (best[1],))
        outer = NEVER, NEVER, -1
        for index in integers(rest[np.argsort(-(self.inner + self.pair)[rest], kind="stable")]):
            if int(self.inner[index] + self.pair[index]) <= outer[0]:
                break
            value = self.exact_pair(index)
            outer = max(outer, (int(self.inner[index]) + value, value, index))
        if outer[0] > NEVER:
            consider(outer[1], (outer[2],))


def _two(values: Ints, among: list[int]) -> list[int]:
    return sorted(among, key=lambda index: -int(values[index]))[:2]
