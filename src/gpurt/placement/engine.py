"""The least cost over one instance: relaxation, beam, local search and exact stage, within a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

import numpy as np

from gpurt.placement.beam import Beam, keeps_rules, path_cost
from gpurt.placement.exact_cpsat import PAIR_LIMIT, cpsat_available, solve_cpsat, stage_count
from gpurt.placement.exact_highs import highs_available, solve_highs
from gpurt.placement.filling import Filling
from gpurt.placement.instance import Floats, Instance
from gpurt.placement.packing import capacities, fullest, packed, rounded
from gpurt.placement.paths import PathRelaxation, Relaxation, Step, useful_arcs, useful_units
from gpurt.placement.search import LocalSearch

PROVEN_GAP: Final = 1e-4
"""A plan within this share of its bound counts as optimal."""
_WIDTHS: Final = (100, 1000, 8000)
_MANY_STAGES: Final = 10
_MANY_UNITS: Final = 100
_UNIT_LIMIT: Final = 600
"""Units up to which the integer programme is tried."""


class Clock:
    """How long there is, and whether anybody still wants the answer."""

    def __init__(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.begin = monotonic()
        # What is left over is for the plan itself, its check, and for engines that look at the clock only now and then.
        self.deadline = self.begin + seconds * 0.96
        self.cancelled = cancelled

    @property
    def left(self) -> float:
        return self.deadline - monotonic()

    @property
    def spent(self) -> float:
        return monotonic() - self.begin

    def over(self) -> bool:
        return monotonic() >= self.deadline or self.cancelled()

    def slice(self, seconds: float) -> Callable[[], bool]:
        """True once so many seconds are gone, or the whole time is."""
        until = min(self.deadline, monotonic() + seconds)
        return lambda: monotonic() >= until or self.cancelled()


@dataclass(slots=True)
class Found:
    """``steps`` is None where no plan was found; ``bound`` infinite where there is none."""

    value: float
    steps: tuple[Step, ...] | None
    bound: float
    engines: tuple[str, ...]
    proof: str | None

    @property
    def gap(self) -> float:
        if self.steps is None:
            return np.inf
        return max(0.0, (self.value - self.bound) / self.value) if self.value > 0 else 0.0


class Engine:
    """``target_gap``: stop as soon as the plan is proved to be that close to the best."""

    def __init__(
        self, instance: Instance, clock: Clock, *, seed: int, target_gap: float = PROVEN_GAP, floor: float = 0.0
    ) -> None:
        self.whole = instance
        self.instance = instance
        self.numbers = np.arange(instance.size)
        self.clock = clock
        self.seed = seed
        self.target = target_gap
        self.value = np.inf
        self.steps: tuple[Step, ...] | None = None
        """In the numbers of the present, reduced instance."""
        self.bound = floor
        self.engines: list[str] = []
        self.proof: str | None = None
        self.relaxation: Relaxation | None = None

    @property
    def limit(self) -> float:
        """Only plans below this are of interest."""
        return self.value * (1 - PROVEN_GAP / 2) if np.isfinite(self.value) else np.inf

    def done(self) -> bool:
        if self.clock.over():
            return True
        return self.steps is not None and self.value - self.bound <= self.target * self.value

    def offer(self, steps: tuple[Step, ...] | None, engine: str) -> None:
        if steps is None or not keeps_rules(self.instance, steps):
            return
        value = path_cost(self.instance, steps)
        if value < self.value:
            self.value, self.steps = value, steps
            if engine not in self.engines:
                self.engines.append(engine)

    def raise_bound(self, bound: float, proof: str) -> None:
        if bound > self.bound:
            self.bound, self.proof = bound, proof

    def run(self) -> Found:
        self._solve()
        steps = self.steps
        if steps is not None:
            steps = tuple(Step(int(self.numbers[step.unit]), step.start, step.end) for step in steps)
        return Found(self.value, steps, min(self.bound, self.value), tuple(self.engines), self.proof)

    def _solve(self) -> None:
        instance, clock = self.instance, self.clock
        if not instance.size or self._too_small():
            self.raise_bound(np.inf, "capacity")
            return
        paths = PathRelaxation(instance)
        prices, bound = paths.improve(
            lambda: self.value, rounds=40, stop=clock.slice(clock.left * 0.2), gap=self.target
        )
        self._relaxed(paths, prices)
        if not np.isfinite(bound):
            self.raise_bound(np.inf, "paths")
            return
        self._beam(16)
        search = LocalSearch(self.instance, self.seed, clock.slice(clock.left * 0.2))
        self._descend(search, rounds=0)
        if self.steps is None or self._gap() > 0.02:
            order = packed(self.instance, search.filling) if self.instance.movable else None
            if order is not None:
                units, _ = search.run(order, search.value(order), rounds=0)
                self.offer(search.filling.steps(units), "packing")
        if self.done():
            return
        # Many stages make a problem of order, in which integer programming is ahead; few make one of choice, in which
        # the labels are.
        exact = instance.movable and len(instance.hop) == 1 and highs_available()
        large = self.instance.size > _MANY_UNITS and self._gap() > 0.02
        if exact and (self.steps is None or len(self.steps) > _MANY_STAGES or large):
            self._highs(clock.left * 0.6)
            if self.done():
                return
        prices, _ = paths.improve(
            lambda: self.value, rounds=160, stop=clock.slice(clock.left * 0.25), prices=prices, gap=self.target
        )
        self._relaxed(paths, prices)
        self._reduce(paths)
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

    def _gap(self) -> float:
        if not np.isfinite(self.value):
            return np.inf
        return (self.value - self.bound) / self.value if self.value > 0 else 0.0

    def _too_small(self) -> bool:
        """Even the fullest use of every node does not hold all layers."""
        held, _, exact = fullest(self.instance, capacities(self.instance))
        return exact and self.instance.complete and held < self.instance.layers

    def _relaxed(self, paths: PathRelaxation, prices: Floats) -> None:
        self.relaxation = paths.solve(prices)
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

    def _reduce(self, paths: PathRelaxation) -> None:
        """Leave out the units that no better plan uses."""
        relaxation, steps = self.relaxation, self.steps
        if relaxation is None or steps is None:
            return
        keep = useful_units(relaxation, self.limit)
        keep[[step.unit for step in steps]] = True
        if keep.all():
            return
        chosen = np.flatnonzero(keep)
        place = np.full(len(keep), -1)
        place[chosen] = np.arange(len(chosen))
        self.instance = self.instance.of(chosen)
        self.numbers = self.numbers[chosen]
        self.steps = tuple(Step(int(place[step.unit]), step.start, step.end) for step in steps)
        self.relaxation = Relaxation(
            relaxation.value,
            relaxation.bound,
            (),
            relaxation.forward[:, chosen],
            relaxation.backward[:, chosen],
            relaxation.onward[:, chosen],
            relaxation.unit_price[chosen],
            relaxation.prices,
        )

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
            order = rounded(instance, filling, use)
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
