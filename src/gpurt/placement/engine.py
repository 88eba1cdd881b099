"""The least cost over one instance: relaxation, beam, local search and exact stage, within a time."""

from __future__ import annotations

from time import monotonic
from typing import Final

import numpy as np

from gpurt.placement.elimination import useful_arcs
from gpurt.placement.every_order import any_plan
from gpurt.placement.exact_cpsat import PAIR_LIMIT, cpsat_available, solve_cpsat, stage_count
from gpurt.placement.exact_highs import highs_available, linear_start, solve_highs
from gpurt.placement.filling import Filling
from gpurt.placement.incumbent import PROVEN_GAP, Found
from gpurt.placement.instance import Floats
from gpurt.placement.packing import capacities, fullest, rounded
from gpurt.placement.paths import PathRelaxation
from gpurt.placement.proof import Proof
from gpurt.placement.relaxation import Prices, Step, no_prices
from gpurt.placement.search import LocalSearch

_WIDTHS: Final = (100, 1000, 8000)
_HURRIED: Final = 0.08
"""Seconds in which there is time for one relaxation, and none to look for its prices."""
_LAYER_SECONDS: Final = 3e-4
"""Of a relaxation of few units; where there is less time, a plan is enough."""
_MANY_STAGES: Final = 10
_FEW_UNITS: Final = 40
_SCARCE: Final = 1.5
"""Times the layers that the devices hold, up to which plans begin with the fullest use of every node."""
_ROUGH: Final = 0.01
"""Gap to be reached first where there are more units than the integer programme can take."""
_UNIT_LIMIT: Final = 600
"""Units up to which the integer programme is tried."""


class Engine(Proof):
    """``target_gap``: stop as soon as the plan is proved to be that close to the best."""

    def run(self) -> Found:
        self._solve()
        return self.found()

    def _solve(self) -> None:
        instance, clock = self.instance, self.clock
        held = self._held()
        if held < instance.layers:
            self.raise_bound(np.inf, "capacity")
            return
        exact = instance.movable and len(instance.hop) == 1 and highs_available()
        if clock.cancelled():
            return
        # To set up the programme alone takes a quarter of a second where there are a thousand devices.
        if exact and not clock.over() and self._linear():
            return
        if clock.left < _HURRIED:
            self._pack(LocalSearch(self.instance, self.seed, clock.over))
            if self.steps is not None and clock.left < _LAYER_SECONDS * instance.layers:
                return
        if self.relaxation is None or self.steps is None:
            # Other prices lead to other plans: where the linear ones led to none, these often do.
            paths = PathRelaxation(self.instance)
            prices = no_prices(self.instance)
            if clock.left > _HURRIED:
                prices, _ = self._improve(paths, prices, rounds=40, seconds=clock.left * 0.2)
            self._relaxed(paths, prices)
            assert self.relaxation is not None
            if not np.isfinite(self.relaxation.value):
                self.raise_bound(np.inf, "paths")
                return
            self._beam(16)
        search = LocalSearch(self.instance, self.seed, clock.slice(clock.left * 0.2))
        self._descend(search, rounds=0)
        if self.steps is None or (held < _SCARCE * instance.layers and self.gap() > 0.02):
            self._pack(search)
        if self.steps is None and any_plan(self.instance, clock.slice(clock.left * 0.2)) is False:
            self.raise_bound(np.inf, "every order")
            return
        if self.done():
            return
        # Many stages make a problem of order, and little room one of packing: there integer programming is ahead. Few
        # stages with room to choose are for the labels.
        few = self.instance.size <= _FEW_UNITS and held < _SCARCE * instance.layers
        if few and exact:
            if self._beam(_WIDTHS[0]):
                return
            self._descend(search, rounds=10)
        if exact and (self.steps is None or len(self.steps) > _MANY_STAGES or few):
            self._highs(clock.left * 0.6)
            if self.done():
                return
        if self.instance.size > _UNIT_LIMIT and self.gap() > _ROUGH:
            self._roughly()
        self._reduce()
        if self._remember(clock.left * 0.3):
            return
        if self.done() or self._beam(_WIDTHS[0]) or self.done():
            return
        search = LocalSearch(self.instance, self.seed, clock.slice(min(1.0, clock.left * 0.15)))
        self._descend(search, rounds=40)
        if self.done() or self._beam(_WIDTHS[1], clock.left * 0.3) or self.done():
            return
        if exact:
            self._highs(clock.left * 0.5)
        if self.done() or self._beam(_WIDTHS[2], clock.left * 0.5) or self.done():
            return
        if exact:
            self._highs(clock.left)
        elif cpsat_available():
            self._cpsat()
        if self.done():
            return
        search = LocalSearch(self.instance, self.seed + 1, clock.over)
        self._descend(search, rounds=400)

    def _held(self) -> float:
        """Layers that the devices hold at most; infinite where nobody knows."""
        if not self.instance.size:
            return 0
        held, _, exact = fullest(self.instance, capacities(self.instance))
        return held if exact and self.instance.complete else np.inf

    def _linear(self) -> bool:
        """Begin with the linear relaxation, which is soonest done where there are many units: prices, a plan, and fewer
        units. Whether all is done."""
        instance, clock = self.instance, self.clock
        start = linear_start(instance, deadline=monotonic() + clock.left * 0.5, stop=clock.over)
        if start is None:
            return False
        whole = instance.cost.whole
        self.raise_bound(min(start.bound, float(whole.min())), "linear programme")
        if np.isfinite(whole).any():
            self.offer((Step(int(whole.argmin()), 0, instance.layers),), "beam")
        search = LocalSearch(instance, self.seed, clock.slice(clock.left * 0.05))
        order = rounded(instance, search.filling, start.use, clock.over)
        if order is not None:
            units, _ = search.run(order, search.value(order), rounds=0)
            self.offer(search.filling.steps(units), "rounding")
        if self.done():
            return True
        if self.steps is not None:
            self.keep(np.minimum(start.through, whole) < self.limit)
        prices = Prices(start.prices, no_prices(self.instance).home)
        self._relaxed(PathRelaxation(self.instance), prices)
        if not np.isfinite(self.bound):
            return True
        self._reduce()
        self._beam(16)
        return self.done()

    def _roughly(self) -> None:
        """Prove what can be proved soon where there are very many units: that no plan is better by more than a little.
        Fewer units matter for that."""
        rough = Engine(self.instance, self.clock, seed=self.seed, target_gap=_ROUGH, floor=self.bound)
        rough.aim = 0.9 * _ROUGH
        rough.value, rough.steps, rough.relaxation, rough.took = self.value, self.steps, self.relaxation, self.took
        rough._reduce()
        rough._remember(self.clock.left)
        found = rough.found()
        self.offer(found.steps, "beam")
        self.raise_bound(found.bound, found.proof or "paths")

    def _highs(self, seconds: float) -> None:
        relaxation = self.relaxation
        assert relaxation is not None
        instance = self.instance
        arcs = useful_arcs(instance, relaxation, self.limit)
        if instance.size > _UNIT_LIMIT or seconds < 0.05:
            return
        filling = Filling(instance)
        search = LocalSearch(instance, self.seed, self.clock.over)
        start = None
        if self.steps is not None:
            start = tuple(step.unit for step in self.steps), tuple(step.end for step in self.steps)

        def on_order(order: tuple[int, ...]) -> float:
            value = search.value(order)
            if np.isfinite(value):
                better, _ = search.descend(order, value)
                self.offer(filling.steps(better), "highs")
            return self.value

        def on_use(use: Floats) -> float:
            order = rounded(instance, filling, use, self.clock.over)
            return self.value if order is None else on_order(order)

        result = solve_highs(
            instance,
            self.value,
            start,
            arcs,
            deadline=monotonic() + seconds,
            stop=self.clock.cancelled,
            gap=PROVEN_GAP,
            on_order=on_order,
            on_use=on_use,
        )
        whole = float(instance.cost.whole.min())
        self.raise_bound(min(result.bound, whole, max(self.limit, self.bound)), "highs")

    def _cpsat(self) -> None:
        instance = self.instance
        if stage_count(instance) > PAIR_LIMIT or instance.size > 64 or self.clock.left < 0.2:
            return
        result = solve_cpsat(
            instance, self.value, self.steps, deadline=self.clock.deadline, stop=self.clock.cancelled, gap=PROVEN_GAP
        )
        if result.units is not None:
            self.offer(Filling(instance).steps(result.units), "cp-sat")
        self.raise_bound(min(result.bound, max(self.limit, self.bound)), "cp-sat")
