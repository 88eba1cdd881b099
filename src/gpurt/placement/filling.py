"""The best split of the layers over units in a given order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gpurt.placement.instance import Instance
from gpurt.placement.relaxation import Step


class Filling:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        cost = instance.cost
        self.layers = instance.layers
        self.single = cost.whole.tolist()
        if instance.movable:
            inner = np.isfinite(cost.inner[:, 0, :])
            first, last = np.isfinite(cost.first), np.isfinite(cost.last)
            self.high = [_highest(table).tolist() for table in (inner, first, last)]
            self.low = [_lowest(table).tolist() for table in (inner, first, last)]
            self.slope = instance.slope.tolist()
            self.head = instance.head.tolist()

    def cost(self, units: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """Cost of the stages without the links, and where each stage ends; infinite where they cannot hold it."""
        if len(units) == 1:
            return self.single[units[0]], (self.layers,)
        return self._greedy(units) if self.instance.movable else self._ordered(units)

    def steps(self, units: Sequence[int]) -> tuple[Step, ...] | None:
        value, ends = self.cost(units)
        if not np.isfinite(value):
            return None
        starts = (0, *ends[:-1])
        return tuple(Step(unit, start, end) for unit, start, end in zip(units, starts, ends, strict=True))

    def _greedy(self, units: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """Each layer costs the same wherever it lies, so the fastest units are filled first."""
        count = len(units)
        inner_low, inner_high = self.low[0], self.high[0]
        low = [inner_low[unit] for unit in units]
        high = [inner_high[unit] for unit in units]
        low[0], high[0] = self.low[1][units[0]], self.high[1][units[0]]
        low[-1], high[-1] = self.low[2][units[-1]], self.high[2][units[-1]]
        left = self.layers - sum(low)
        if left < 0 or left > sum(high) - sum(low) or min(high) <= 0:
            return np.inf, ()
        number = low
        slope = self.slope
        if left:
            for place in sorted(range(count), key=lambda place: slope[units[place]]):
                more = high[place] - number[place]
                if more >= left:
                    number[place] += left
                    break
                number[place] += more
                left -= more
        total = self.head[units[-1]]
        ends: list[int] = []
        end = 0
        for place, unit in enumerate(units):
            total += slope[unit] * number[place]
            end += number[place]
            ends.append(end)
        return total, tuple(ends)

    def _ordered(self, units: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """Positions and boundaries matter: dynamic programming over (stage, layers done), hand-overs included.

        The hand-overs are taken off the value again, so that both ways of filling answer the same question.
        """
        instance, layers = self.instance, self.layers
        cost = instance.cost
        span = cost.inner.shape[2] - 1
        done = np.full(layers + 1, np.inf)
        top = min(span, layers - 1)
        done[1 : top + 1] = cost.first[units[0], 1 : top + 1]
        choice: list[np.ndarray] = []
        for before, unit in pairwise(units[:-1]):
            after = np.full(layers + 1, np.inf)
            number = np.zeros(layers + 1, dtype=np.int64)
            lead = done + instance.hop[instance.boundary, before, unit]
            for n in range(1, top + 1):
                value = lead[1 : layers - n] + cost.inner[unit, 1 : layers - n, n]
                block = after[1 + n : layers]
                better = value < block
                block[better] = value[better]
                number[1 + n : layers][better] = n
            choice.append(number)
            done = after
        before, unit = units[-2], units[-1]
        lead = done + instance.hop[instance.boundary, before, unit]
        starts = np.arange(max(1, layers - span), layers)
        value = lead[starts] + cost.last[unit, layers - starts]
        place = int(value.argmin())
        if not np.isfinite(value[place]):
            return np.inf, ()
        end = int(starts[place])
        ends = [layers, end]
        for number in reversed(choice):
            end -= int(number[end])
            ends.append(end)
        ends.reverse()
        links = sum(
            float(instance.hop_at(at)[one, other]) for at, one, other in zip(ends[:-1], units, units[1:], strict=False)
        )
        return float(value[place]) - links, tuple(ends)


def _highest(table: np.ndarray) -> np.ndarray:
    width = table.shape[1] - 1
    return np.where(table.any(axis=1), width - table[:, ::-1].argmax(axis=1), 0)


def _lowest(table: np.ndarray) -> np.ndarray:
    return np.where(table.any(axis=1), table.argmax(axis=1), 1)
