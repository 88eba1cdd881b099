"""The exact stage for capacity and order: a mixed-integer programme solved by HiGHS.

One binary or integer per used arc; stages form one closed walk, since the way back closes it. Walks that fall apart are
cut off as they appear: first in the linear relaxation, by minimum cuts, then in integer solutions. Copies of a unit
share one node of the graph, so that nothing is tried under two names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

import numpy as np

from gpurt.placement.flows import FlowModel
from gpurt.placement.instance import Bools, Floats, Instance

_PAIRS: Final = 100
"""Units up to which every pair of last and first is a column."""
_MIP_COLUMNS: Final = 16_000
"""Columns up to which integers are tried; beyond, the relaxation gives its bound."""


@dataclass(slots=True)
class ExactResult:
    units: tuple[int, ...] | None
    """Order of the best plan found here, if better than what was there."""
    bound: float
    """No plan of more than one stage has a lower value."""
    proved: bool


def highs_available() -> bool:
    try:
        import highspy  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return False
    return True


def solve_highs(
    instance: Instance,
    best: float,
    start: tuple[Sequence[int], Sequence[int]] | None,
    arcs: Bools,
    *,
    deadline: float,
    stop: Callable[[], bool],
    gap: float,
    on_order: Callable[[tuple[int, ...]], float],
    on_use: Callable[[Floats], float],
) -> ExactResult:
    """``best`` is the value of the best plan known; ``deadline`` on the monotonic clock; ``on_order`` is told of every
    order found and ``on_use`` of how much the relaxation uses each unit; both say what the best value is then."""
    import highspy

    kinds = highspy.HighsModelStatus
    model = FlowModel(instance, arcs, split=instance.size > _PAIRS, stop=stop, kept=start[0] if start else ())
    if not model.end_count:
        return ExactResult(None, np.inf, True)
    bound, rounds = 0.0, 0
    while True:
        left = deadline - monotonic()
        if left <= 0 or stop():
            return ExactResult(None, bound, False)
        status = model.run(left)
        if status == kinds.kInfeasible:
            if model.there.all():
                return ExactResult(None, np.inf, True)
            model.complete(np.inf)
            continue
        if status != kinds.kOptimal:
            return ExactResult(None, bound, False)
        values, value = model.values(), float(model.highs.getInfo().objective_function_value)
        priced, missing = model.price()
        bound = max(bound, value + missing)
        if np.isfinite(best) and bound >= best * (1 - gap):
            return ExactResult(None, bound, True)
        if priced:
            continue
        cuts = model.cut(values)
        if rounds == 0 or not cuts:
            # Before the first cuts and after the last ones: what the relaxation uses is a good hint for a plan.
            best = min(best, on_use(values[model.use0 : model.layer0]))
        rounds += 1
        if not cuts:
            break
    slack = best - bound
    reduced = model.reduced()
    model.complete(slack)
    if model.columns > _MIP_COLUMNS:
        return ExactResult(None, bound, False)
    if np.isfinite(slack):
        dear = np.flatnonzero(reduced > slack)
        model.forbid(dear[(dear < model.use0) | (dear >= model.arc0)])
    model.integral()
    model.highs.setOptionValue("mip_rel_gap", gap / 2)
    model.highs.setOptionValue("mip_abs_gap", 0.0)
    while True:
        left = deadline - monotonic()
        if left <= 0 or stop():
            return ExactResult(None, bound, False)
        if start is not None:
            model.start(*start)
        status = model.run(left)
        if status == kinds.kInfeasible:
            return ExactResult(None, best if np.isfinite(best) else np.inf, True)
        info = model.highs.getInfo()
        if np.isfinite(info.mip_dual_bound):
            bound = max(bound, min(float(info.mip_dual_bound), best))
        if info.primal_solution_status != 2:
            return ExactResult(None, bound, False)
        values = model.values()
        order, whole = model.walk(values)
        best = min(best, on_order(order))
        if whole:
            return ExactResult(order, bound, status == kinds.kOptimal)
        if bound >= best * (1 - gap):
            return ExactResult(None, bound, True)
        if not model.cut(values) or status != kinds.kOptimal:
            return ExactResult(None, bound, False)


@dataclass(slots=True)
class LinearStart:
    """What the linear relaxation says before anything else is known."""

    prices: Floats
    """Of the limits: under them the cheapest path costs at least ``bound`` more than it gets back."""
    bound: float
    """No plan of more than one stage has a lower value."""
    use: Floats
    """``[u]``: how much of each unit is used."""
    through: Floats
    """``[u]``: no plan of more than one stage that uses u has a lower value."""


def linear_start(instance: Instance, *, deadline: float, stop: Callable[[], bool]) -> LinearStart | None:
    """The relaxation without cuts; None where the time is too short for it or where it has no solution."""
    import highspy

    model = FlowModel(instance, np.isfinite(instance.hop[0]), split=True, stop=stop)
    if not model.end_count:
        return None
    while True:
        left = deadline - monotonic()
        if left <= 0 or stop():
            return None
        status = model.run(left)
        if status == highspy.HighsModelStatus.kInfeasible and not model.there.all():
            model.complete(np.inf)
            continue
        if status != highspy.HighsModelStatus.kOptimal:
            return None
        priced, missing = model.price()
        if priced:
            continue
        bound = float(model.highs.getInfo().objective_function_value) + missing
        use = model.values()[model.use0 : model.layer0]
        return LinearStart(model.limit_prices(), bound, use, bound + model.detours())
