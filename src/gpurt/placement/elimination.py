"""What a unit or an arc costs a plan at least, by the tables of a relaxation: what no better plan uses is left out."""

from __future__ import annotations

import numpy as np

from gpurt.placement.instance import Bools, Floats, Instance
from gpurt.placement.relaxation import Relaxation


def through_units(relaxation: Relaxation) -> Floats:
    """``[u]``: what a plan with u costs at least."""
    through = (relaxation.forward + relaxation.backward).min(axis=0)
    best = np.full(len(relaxation.unit_price), np.inf)
    np.minimum.at(best, relaxation.visits.unit, through)
    return best - relaxation.refund


def useful_arcs(instance: Instance, relaxation: Relaxation, limit: float) -> Bools:
    """``[u, v]``: a plan cheaper than ``limit`` may go from u to v."""
    visits = relaxation.visits
    size = instance.size
    order = np.argsort(visits.unit, kind="stable")
    starts = np.searchsorted(visits.unit[order], np.arange(size))
    best = np.full((size, size), np.inf)
    near = np.full(len(visits.source), np.inf)
    one, other = visits.unit[visits.source], visits.unit[visits.target]
    for start in range(1, instance.layers):
        lead, onward = relaxation.forward[start], relaxation.onward[start]
        if not np.isfinite(lead).any():
            continue
        hop = instance.hop_at(start)
        units = np.minimum.reduceat(lead[order], starts)
        np.minimum(best, units[:, None] + hop + onward[visits.alone][None, :], out=best)
        if len(near):
            np.minimum(near, lead[visits.source] + hop[one, other] + onward[visits.target], out=near)
    best[visits.within()] = np.inf
    np.minimum.at(best, (one, other), near)
    return best < limit + relaxation.refund
