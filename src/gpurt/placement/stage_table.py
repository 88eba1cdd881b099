"""Most layers on so many stages at most, exactly: for the few cases that greedy choice and its bound leave open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpurt.placement.field import BOTH, FIRST, INNER, LAST, NEVER, Cells
from gpurt.placement.instance import Ints


def most_on_stages(cells: Sequence[Cells], limit: int) -> int:
    """Dynamic programme over cells; those that are among the best for no number of stages are left out.

    At most ``limit`` cells are used, so that a cell in use which is not among the ``limit`` best ones at what it does
    can be exchanged for one of them that is not in use.
    """
    tables = [table for found in cells for table in _useful(found.table, limit)]
    done = np.full((limit + 1, 4), NEVER, dtype=np.int64)
    done[:, INNER] = 0
    for table in tables:
        before = done
        done = done.copy()
        for stages in range(1, min(limit, len(table) - 1) + 1):
            both = before[: limit + 1 - stages, :, None] + table[stages][None, None, :]
            into = done[stages:]
            for state, ways in (
                (INNER, ((INNER, INNER),)),
                (FIRST, ((INNER, FIRST), (FIRST, INNER))),
                (LAST, ((INNER, LAST), (LAST, INNER))),
                (BOTH, ((INNER, BOTH), (BOTH, INNER), (FIRST, LAST), (LAST, FIRST))),
            ):
                for one, other in ways:
                    np.maximum(into[:, state], both[:, one, other], out=into[:, state])
        np.maximum(done, NEVER, out=done)
    return int(done[limit, BOTH])


def _useful(table: Ints, limit: int) -> list[Ints]:
    if len(table) <= limit:
        return list(table)
    most = min(limit, table.shape[1] - 1)
    ranked = np.argsort(-table[:, 1 : most + 1], axis=0, kind="stable")[:limit]
    return [table[index] for index in np.unique(ranked)]
