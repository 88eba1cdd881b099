"""Walks along the arcs of a flow: put together where they hold together, and cut off where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpurt.placement.instance import Floats

EPS: Final = 1e-6
"""A flow below this is none."""


def walked(nexts: list[list[int]], begin: int) -> list[int]:
    """A walk that uses every arc that can be reached, consuming them (Hierholzer)."""
    stack, order = [begin], list[int]()
    while stack:
        if nexts[stack[-1]]:
            stack.append(nexts[stack[-1]].pop())
        else:
            order.append(stack.pop())
    order.reverse()
    return order


def minimum_cut(
    size: int, edges: Sequence[tuple[int, int, float]], entry: Floats, target: int, below: float
) -> tuple[frozenset[int], frozenset[int]] | None:
    """The units on the target's side of a minimum cut from outside, where less than ``below`` goes through it: as many
    as possible, and as few."""
    source = size
    capacity: list[dict[int, float]] = [{} for _ in range(size + 1)]
    for tail, head, flow in edges:
        capacity[tail][head] = capacity[tail].get(head, 0.0) + flow
        capacity[head].setdefault(tail, 0.0)
    for unit in np.flatnonzero(entry > EPS):
        capacity[source][int(unit)] = float(entry[unit])
        capacity[int(unit)][source] = 0.0
    total = 0.0
    while True:
        parent = {source: source}
        queue = [source]
        for node in queue:
            if node == target:
                break
            for other, room in capacity[node].items():
                if room > EPS and other not in parent:
                    parent[other] = node
                    queue.append(other)
        if target not in parent:
            if total >= below:
                return None
            return frozenset(range(size)).difference(parent), _reaching(capacity, target)
        room, node = np.inf, target
        while node != source:
            room = min(room, capacity[parent[node]][node])
            node = parent[node]
        node = target
        while node != source:
            capacity[parent[node]][node] -= room
            capacity[node][parent[node]] += room
            node = parent[node]
        total += room
        if total >= below:
            return None


def _reaching(capacity: list[dict[int, float]], target: int) -> frozenset[int]:
    """Nodes from which there is a way to the target."""
    found, queue = {target}, [target]
    for node in queue:
        for other in capacity[node]:
            # Every arc has its opposite.
            if other not in found and capacity[other][node] > EPS:
                found.add(other)
                queue.append(other)
    return frozenset(found)
