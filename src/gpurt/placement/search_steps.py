"""Single steps of a search: bounds under prices, a beam, packing, local search, units left out."""

from __future__ import annotations

from time import monotonic

import numpy as np

from gpurt.placement.beam import Beam
from gpurt.placement.elimination import through_units
from gpurt.placement.incumbent import Incumbent
from gpurt.placement.packing import packed
from gpurt.placement.paths import PathRelaxation
from gpurt.placement.prices import improve
from gpurt.placement.relaxation import Prices
from gpurt.placement.search import LocalSearch


class SearchSteps(Incumbent):
    """Each leaves what it found in the incumbent."""

    def _pack(self, search: LocalSearch) -> None:
        order = packed(self.instance, search.filling, self.clock.over) if self.instance.movable else None
        if order is not None:
            units, _ = search.run(order, search.value(order), rounds=0)
            self.offer(search.filling.steps(units), "packing")

    def _improve(
        self, paths: PathRelaxation, prices: Prices, *, rounds: int, seconds: float, scale: float = 1.0
    ) -> tuple[Prices, float]:
        stop = self.clock.slice(seconds)
        return improve(paths, prices, lambda: self.limit, rounds=rounds, stop=stop, gap=self.target / 2, scale=scale)

    def _relaxed(self, paths: PathRelaxation, prices: Prices) -> None:
        begin = monotonic()
        self.relaxation = paths.solve(prices, limit=self.limit)
        self.took = monotonic() - begin
        self.raise_bound(self.relaxation.bound, "paths")

    def _beam(self, width: int, seconds: float = np.inf) -> bool:
        """Whether the search was complete, so that the best plan is the best there is."""
        relaxation = self.relaxation
        assert relaxation is not None
        beam = Beam(self.instance, relaxation, width=width, limit=self.limit)
        before = self.limit
        found = beam.run(self.clock.slice(min(seconds, self.clock.left)))
        for _, steps in found.plans[:4]:
            self.offer(steps, "beam")
        if found.exhausted:
            self.raise_bound(min(before, self.value), "labels")
        return found.exhausted

    def _descend(self, search: LocalSearch, *, rounds: int) -> None:
        if self.steps is None:
            return
        units = tuple(step.unit for step in self.steps)
        units, _ = search.run(units, search.value(units), rounds=rounds)
        self.offer(search.filling.steps(units), "local search")

    def _reduce(self) -> None:
        """Leave out the units that no better plan uses."""
        relaxation = self.relaxation
        if relaxation is None or self.steps is None:
            return
        self.keep(through_units(relaxation) < self.limit)
