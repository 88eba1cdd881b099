"""What a search knows so far: the best plan, the bound, and the units that a better plan may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from gpurt.placement.clock import Clock
from gpurt.placement.instance import Bools, Instance
from gpurt.placement.relaxation import Relaxation, Step
from gpurt.placement.valuation import keeps_rules, path_cost

PROVEN_GAP: Final = 1e-4
"""A plan within this share of its bound counts as optimal."""


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


class Incumbent:
    """``floor``: no plan has a lower value."""

    def __init__(
        self, instance: Instance, clock: Clock, *, seed: int, target_gap: float = PROVEN_GAP, floor: float = 0.0
    ) -> None:
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
        self.took = 0.0
        """Seconds of the last relaxation."""
        self.aim = PROVEN_GAP / 2
        """Plans that are not better by this share are of no interest."""

    @property
    def limit(self) -> float:
        """Only plans below this are of interest."""
        return self.value * (1 - self.aim) if np.isfinite(self.value) else np.inf

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

    def found(self) -> Found:
        """What is known, in the numbers of the whole instance."""
        steps = self.steps
        if steps is not None:
            steps = tuple(Step(int(self.numbers[step.unit]), step.start, step.end) for step in steps)
        return Found(self.value, steps, min(self.bound, self.value), tuple(self.engines), self.proof)

    def gap(self) -> float:
        if not np.isfinite(self.value):
            return np.inf
        return (self.value - self.bound) / self.value if self.value > 0 else 0.0

    def keep(self, keep: Bools) -> None:
        """Leave out the other units: no plan below the limit uses them."""
        steps, relaxation = self.steps, self.relaxation
        assert steps is not None
        keep[[step.unit for step in steps]] = True
        chosen = np.flatnonzero(keep)
        if len(chosen) == len(keep):
            return
        place = np.full(len(keep), -1)
        place[chosen] = np.arange(len(chosen))
        self.instance = self.instance.of(chosen)
        self.numbers = self.numbers[chosen]
        self.steps = tuple(Step(int(place[step.unit]), step.start, step.end) for step in steps)
        if relaxation is not None:
            self.relaxation = relaxation.of(chosen)
