"""Prices that make the cheapest path keep the rules: steps along a subgradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpurt.placement.paths import PathRelaxation
from gpurt.placement.relaxation import Prices

_DAMPING = 0.6
"""Share of the last direction that is kept: it damps the zigzag of plain subgradients."""
_PATIENCE = 8
"""Steps without a better bound after which they become shorter."""


def improve(
    paths: PathRelaxation,
    prices: Prices,
    target: Callable[[], float],
    *,
    rounds: int,
    stop: Callable[[], bool],
    gap: float,
    scale: float = 1.0,
) -> tuple[Prices, float]:
    """Raise the bound. Returns the best prices and their bound.

    ``target`` is the value of the best plan so far (infinite while there is none). ``scale`` is the length of the first
    step: 1 would reach the target if the bound rose in a straight line.
    """
    limits = paths.limits
    current, best_prices, best = prices, prices, -np.inf
    since = 0
    use, home = np.zeros(len(limits)), np.zeros(len(prices.home))
    for _ in range(rounds):
        # As long as there is no plan there is nothing to compare with.
        found = paths.solve(current, tables=False, limit=target())
        if not np.isfinite(found.value):
            return current, np.inf
        if found.bound > best + 1e-12:
            best, best_prices, since = found.bound, current, 0
        else:
            since += 1
        goal = target()
        if not np.isfinite(goal):
            goal = abs(best) * 1.1 + 1e-9
        if goal - best <= gap * abs(goal) or stop():
            break
        if since >= _PATIENCE:
            scale, since = scale * 0.6, 0
            if scale < 1e-3:
                break
            current = best_prices
            use[:], home[:] = 0, 0
            continue
        excess = -limits
        for step in found.path:
            excess = excess + paths.uses[step.unit]
        free = current.use <= 0
        excess[free & (excess < 0)] = 0.0
        turn = np.zeros(len(home))
        if found.home >= 0:
            turn[found.path[0].unit] += 1
            turn[found.home] -= 1
        if not excess.any() and not turn.any():
            break
        use = _DAMPING * use + excess
        use[free & (use < 0)] = 0.0
        home = _DAMPING * home + turn
        norm = float(use @ use + home @ home)
        if norm == 0:
            use, home = excess, turn
            norm = float(use @ use + home @ home)
        length = scale * max(goal - found.bound, 1e-12) / norm
        current = Prices(np.maximum(0.0, current.use + length * use), current.home + length * home)
    return best_prices, best
