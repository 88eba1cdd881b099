"""What groups hold is worked out once, however many stages are asked for, and whatever is done with the answer."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.placement import Workload
from gpurt.placement.feasibility import _large_enough  # pyright: ignore[reportPrivateUsage]
from gpurt.placement.field import grouped_cells
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.reaching import Together
from gpurt.placement.synthetic import model_for, synthetic_cluster

pytestmark = pytest.mark.wide


@pytest.mark.parametrize("seed", range(5))
def test_fewer_stages_are_a_part_of_the_same_table(seed: int) -> None:
    random = np.random.default_rng(seed)
    devices, _ = synthetic_cluster("hetero", 8, seed)
    model = model_for(devices, 32, 0.6, tensor_parallel=(1, 2, 4))

    def fresh() -> LayerBytes:
        return LayerBytes(model, Workload(context_tokens=4096))

    budgets = -np.sort(-random.integers(0, 40 * model.layers[0].weight_bytes, (7, 6)), axis=1)
    members = np.arange(42).reshape(7, 6)
    warm = fresh()
    for stages in (None, 0, 1, 2, 5, 9):
        apart = grouped_cells(fresh(), budgets, members, (1, 2, 4), stages)
        again = grouped_cells(warm, budgets, members, (1, 2, 4), stages)
        np.testing.assert_array_equal(apart.table, again.table)
        assert again.table.shape[1] == (1 + min(6, max(1, stages)) if stages is not None else 7)
        again.table[:] = -1  # its own copy
    more = grouped_cells(warm, budgets + 1, members, (1, 2, 4), None)
    np.testing.assert_array_equal(more.table, grouped_cells(fresh(), budgets + 1, members, (1, 2, 4), None).table)


def test_sets_without_the_bytes_are_left_out() -> None:
    budgets = np.array([5, 6, -3, 7, 1])
    parts = [Together(np.array(members, dtype=np.intp), None, None) for members in ([0, 1], [2, 3], [4])]
    assert _large_enough(parts, budgets, 7) == parts[:2]
    assert _large_enough(parts, budgets, 8) == parts[:1]
    assert _large_enough(parts, budgets, 12) == []
    assert _large_enough([], budgets, 0) == []
