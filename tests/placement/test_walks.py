"""Minimum cuts against all sets of units."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.placement.walks import minimum_cut

pytestmark = pytest.mark.wide
SIZE = 5
FLOWS = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(
    flow=st.lists(FLOWS, min_size=SIZE * SIZE, max_size=SIZE * SIZE),
    entry=st.lists(FLOWS, min_size=SIZE, max_size=SIZE),
    target=st.integers(0, SIZE - 1),
    below=st.sampled_from([0.1, 0.5, 1.0, 3.0]),
)
def test_both_sides_of_a_minimum_cut(flow: list[float], entry: list[float], target: int, below: float) -> None:
    edges = [(a, b, flow[a * SIZE + b]) for a in range(SIZE) for b in range(SIZE) if a != b and flow[a * SIZE + b] > 0]
    into = {
        inside: sum(entry[unit] for unit in inside) + sum(f for a, b, f in edges if a not in inside and b in inside)
        for count in range(SIZE)
        for others in combinations([unit for unit in range(SIZE) if unit != target], count)
        for inside in [frozenset((target, *others))]
    }
    least = min(into.values())
    found = minimum_cut(SIZE, edges, np.array(entry), target, below)
    assert (found is None) == (least >= below)
    if found is not None:
        largest, smallest = found
        best = [inside for inside, value in into.items() if value == least]
        assert largest == frozenset().union(*best)
        assert smallest == frozenset(range(SIZE)).intersection(*best)
