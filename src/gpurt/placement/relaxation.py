"""What a relaxation is asked with, and what it answers: prices in, a bound and its tables out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.instance import Floats, Instance
from gpurt.placement.visits import Visits


@dataclass(frozen=True, slots=True)
class Step:
    """A stage by numbers."""

    unit: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prices:
    use: Floats
    """``[r]``: per use of each limit, never negative."""
    home: Floats
    """``[u]``: paid by a path that begins with u, taken off a way back that leads there."""

    def of(self, units: NDArray[np.intp]) -> Prices:
        return Prices(self.use, self.home[units])


@dataclass(slots=True)
class Relaxation:
    """Tables of one set of prices."""

    value: float
    """Of the cheapest path, prices included; infinite where there is none."""
    bound: float
    refund: float
    """What prices may make of a plan on top of its cost."""
    path: tuple[Step, ...]
    home: int
    """Where the way back of the path leads; -1 where there is none."""
    forward: Floats
    """``[e, s]``: cheapest way to have ``e`` layers done in state s."""
    backward: Floats
    """``[e, s]``: cheapest way to do the rest after that."""
    onward: Floats
    """``[b, s]``: cheapest way to do the rest from ``b`` when s is next, without the way to it."""
    unit_price: Floats
    prices: Prices
    visits: Visits

    def of(self, units: NDArray[np.intp]) -> Relaxation:
        """With these units only."""
        visits, states = self.visits.of(units)
        return replace(
            self,
            path=(),
            home=-1,
            forward=self.forward[:, states],
            backward=self.backward[:, states],
            onward=self.onward[:, states],
            unit_price=self.unit_price[units],
            prices=self.prices.of(units),
            visits=visits,
        )


def no_prices(instance: Instance) -> Prices:
    """To begin with. A way back costs nothing but where it leads, or nothing but where it comes from: the larger one on
    the whole costs the path less knowledge."""
    home = np.zeros(instance.size)
    if instance.size:
        leave, reach = instance.back.min(axis=1), instance.back.min(axis=0)
        if _mean(leave) < _mean(reach):
            home = np.where(np.isfinite(reach), reach, 0.0)
    return Prices(np.zeros(len(instance.limits)), home)


def _mean(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else 0.0
