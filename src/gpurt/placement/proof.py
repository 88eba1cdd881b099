"""The bound, raised until nothing better is left: paths that remember, and every beginning where these are few."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from gpurt.placement.beam import Beam
from gpurt.placement.elimination import through_units
from gpurt.placement.incumbent import PROVEN_GAP
from gpurt.placement.paths import PathRelaxation
from gpurt.placement.relaxation import Prices
from gpurt.placement.search_steps import SearchSteps
from gpurt.placement.visits import GROUP_STATES, remembering

_PROMISING: Final = 100
"""Units among which prices are looked for."""
_COUNTABLE: Final = 0.015
"""Share between bound and limit up to which the beginnings below the limit may be few enough to look at all."""
_HOPELESS: Final = 0.01
"""Gap from which on paths that remember have to show a rise of the bound, or are given up."""
_WIDTH: Final = 8000
"""Beginnings at a layer, at most."""


class Proof(SearchSteps):
    """Needs a relaxation and a plan to begin with."""

    def _remember(self, seconds: float) -> bool:
        """Raise the bound with paths that remember, and leave out units as it rises. Whether all is done."""
        over = self.clock.slice(seconds)
        scale, states = 0.5, GROUP_STATES
        # What is begun is finished, so nothing is begun that takes longer than there is time.
        while not over() and not self.done() and self.clock.left > self.took:
            relaxation = self.relaxation
            assert relaxation is not None
            before, gap = self.bound, self.value - self.bound
            prices, through = relaxation.prices, through_units(relaxation)
            visits = remembering(self.instance, through, states)
            # Prices are looked for among the promising units, where a step is cheap; then all units are asked.
            near = np.sort(np.argsort(through, kind="stable")[:_PROMISING])
            part = PathRelaxation(self.instance.of(near), visits.of(near)[0])
            found, _ = self._improve(part, prices.of(near), rounds=10, seconds=self.clock.left * 0.3, scale=scale)
            if self.clock.left < self.took:
                break
            home = prices.home.copy()
            home[near] = found.home
            self._relaxed(PathRelaxation(self.instance, visits), Prices(found.use, home))
            self._reduce()
            rise = self.bound - before
            if self._certify():
                return True
            if rise > 0.2 * gap:
                self._beam(24)
            elif rise < 0.05 * gap and self.gap() > _HOPELESS:
                # What is missing is not a matter of going to and fro.
                break
            elif rise < 0.1 * gap:
                # Shorter steps and a longer memory.
                scale, states = scale * 0.7, states * 2
                if scale < 0.05:
                    break
        return self.done()

    def _certify(self) -> bool:
        """Look at every beginning of a plan below a limit, as long as they are few. Whether all is done."""
        relaxation = self.relaxation
        assert relaxation is not None
        through = through_units(relaxation)
        shares = (0.5, 0.8, 1.0)
        if self.aim > PROVEN_GAP:
            # One step is all that is wanted, as soon as it is a small one.
            shares = (1.0,) if self.limit - self.bound < _COUNTABLE * self.value else ()
        for share in shares:
            limit = self.bound + share * (self.limit - self.bound)
            chosen = np.flatnonzero(through < limit)
            beam = Beam(self.instance.of(chosen), relaxation.of(chosen), width=_WIDTH, limit=limit, whole=True)
            found = beam.run(self.clock.over)
            for _, steps in found.plans[:4]:
                self.offer(tuple(replace(step, unit=int(chosen[step.unit])) for step in steps), "beam")
            if found.exhausted:
                self.raise_bound(min(limit, self.value), "labels")
            if not found.exhausted or self.done() or found.peak > _WIDTH // 8:
                break
        return self.done()
