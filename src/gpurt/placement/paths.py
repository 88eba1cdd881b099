"""One path through the layers: the relaxation that gives bounds.

A plan is a path: units one after the other, each with its layers, and the way back. Drop the rule that a device is used
once, and the best path is found by dynamic programming over (layers done, last unit), with every true link, every
capacity and every position. A price on each class of devices (``prices``), paid per use and refunded once per device,
pushes the paths to keep the rule; whatever the prices are, the cheapest path less the refund is a lower bound on every
plan. The way back depends on first and last unit, which a path that forgets its start cannot know: it pays at least
the cheapest way back of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.instance import Floats, Instance, Ints


@dataclass(frozen=True, slots=True)
class Step:
    """A stage by numbers."""

    unit: int
    start: int
    end: int


@dataclass(slots=True)
class Relaxation:
    """Tables of one set of prices."""

    value: float
    """Of the cheapest path, prices included; infinite where there is none."""
    bound: float
    path: tuple[Step, ...]
    forward: Floats
    """``[e, u]``: cheapest way to have ``e`` layers done with u last."""
    backward: Floats
    """``[e, u]``: cheapest way to do the rest after that."""
    onward: Floats
    """``[s, u]``: cheapest way to do the rest from ``s`` when u is next, without the way to it."""
    unit_price: Floats
    prices: Floats


class PathRelaxation:
    """The dynamic programme over one instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.layers = instance.layers
        cost = instance.cost
        self.width = cost.inner.shape[2] - 1
        self.uses = instance.rows.astype(np.float64)
        self.limits = instance.limits.astype(np.float64)
        if instance.size:
            back = np.where(np.isfinite(instance.back), instance.back, np.inf)
            leave, reach = back.min(axis=1), back.min(axis=0)
            # Two valid underestimates of the way back; the larger one on the whole costs the path less knowledge.
            if _mean(leave) >= _mean(reach):
                self.leave, self.reach = leave, np.zeros_like(reach)
            else:
                self.leave, self.reach = np.zeros_like(leave), reach
        else:
            self.leave = self.reach = np.zeros(0)
        self._to = np.ascontiguousarray(instance.hop.transpose(0, 2, 1))
        self._from = np.ascontiguousarray(instance.hop)
        self._inner = np.ascontiguousarray(cost.inner.transpose(1, 2, 0))
        """``[s, n, u]``"""

    def forward(self, unit_price: Floats) -> tuple[Floats, Ints, Floats]:
        """``[e, u]`` as in :class:`Relaxation`, the unit before each (``[s, u]``), and the entry costs ``[s, u]``."""
        instance, layers, width = self.instance, self.layers, self.width
        size = instance.size
        done = np.full((layers + 1, size), np.inf)
        entry = np.full((layers + 1, size), np.inf)
        before = np.zeros((layers + 1, size), dtype=np.int64)
        top = min(width, layers - 1)
        done[1 : top + 1] = (instance.cost.first[:, 1 : top + 1] + (unit_price + self.reach)[:, None]).T
        rows = np.arange(size)
        fixed = self._inner.shape[0] == 1
        last = instance.cost.last.T
        for start in range(1, layers):
            state = done[start]
            if not np.isfinite(state).any():
                continue
            table = self._to[instance.boundary[start]] + state
            found = table.argmin(axis=1)
            before[start] = found
            enter = table[rows, found] + unit_price
            entry[start] = enter
            reach = min(width, layers - 1 - start)
            if reach > 0:
                block = done[start + 1 : start + reach + 1]
                np.minimum(block, enter + self._inner[0 if fixed else start, 1 : reach + 1], out=block)
            rest = layers - start
            if rest <= width:
                np.minimum(done[layers], enter + last[rest] + self.leave, out=done[layers])
        np.minimum(done[layers], instance.cost.whole + unit_price, out=done[layers])
        return done, before, entry

    def backward(self, unit_price: Floats) -> tuple[Floats, Floats]:
        instance, layers, width = self.instance, self.layers, self.width
        size = instance.size
        rest = np.full((layers + 1, size), np.inf)
        rest[layers] = 0.0
        onward = np.full((layers + 1, size), np.inf)
        fixed = self._inner.shape[0] == 1
        last = instance.cost.last.T
        for start in range(layers - 1, 0, -1):
            reach = min(width, layers - 1 - start)
            take = np.full(size, np.inf)
            if reach > 0:
                inner = self._inner[0 if fixed else start, 1 : reach + 1]
                take = (inner + rest[start + 1 : start + reach + 1]).min(axis=0)
            if layers - start <= width:
                take = np.minimum(take, last[layers - start] + self.leave)
            take = take + unit_price
            onward[start] = take
            rest[start] = (self._from[instance.boundary[start]] + take).min(axis=1)
        return rest, onward

    def trace(self, done: Floats, before: Ints, entry: Floats, unit_price: Floats) -> tuple[Step, ...]:
        """The cheapest path."""
        instance, layers = self.instance, self.layers
        unit, end = int(done[layers].argmin()), layers
        steps: list[Step] = []
        while True:
            target = done[end, unit]
            lead = (
                instance.cost.whole[unit] + unit_price[unit]
                if end == layers
                else (
                    instance.cost.first[unit, end] + unit_price[unit] + self.reach[unit]
                    if end <= self.width
                    else np.inf
                )
            )
            best_start, best = 0, abs(lead - target) if np.isfinite(lead) else np.inf
            starts = np.arange(max(1, end - self.width), end)
            if len(starts):
                number = end - starts
                if end == layers:
                    step = instance.cost.last[unit, number] + self.leave[unit]
                elif self._inner.shape[0] == 1:
                    step = self._inner[0, number, unit]
                else:
                    step = self._inner[starts, number, unit]
                miss = np.abs(entry[starts, unit] + step - target)
                miss[np.isnan(miss)] = np.inf
                place = int(miss.argmin())
                if miss[place] < best:
                    best_start = int(starts[place])
            steps.append(Step(unit, best_start, end))
            if best_start == 0:
                return tuple(reversed(steps))
            unit, end = int(before[best_start, unit]), best_start

    def solve(self, prices: Floats, *, tables: bool = True) -> Relaxation:
        """Bound under these prices of the classes; ``tables`` False leaves the backward table out."""
        unit_price = self.uses @ prices
        if not self.instance.size:
            empty = np.full((self.layers + 1, 0), np.inf)
            return Relaxation(np.inf, np.inf, (), empty, empty, empty, unit_price, prices)
        done, before, entry = self.forward(unit_price)
        value = float(done[self.layers].min())
        if not np.isfinite(value):
            return Relaxation(np.inf, np.inf, (), done, done, done, unit_price, prices)
        path = self.trace(done, before, entry, unit_price)
        backward, onward = self.backward(unit_price) if tables else (done, done)
        return Relaxation(value, value - float(prices @ self.limits), path, done, backward, onward, unit_price, prices)

    def improve(
        self,
        target: Callable[[], float],
        *,
        rounds: int,
        stop: Callable[[], bool],
        prices: Floats | None = None,
        gap: float = 1e-4,
        on_path: Callable[[Relaxation], None] | None = None,
    ) -> tuple[Floats, float]:
        """Raise the bound by subgradient steps. Returns the best prices and their bound.

        ``target`` is the value of the best plan so far (infinite while there is none).
        """
        classes = len(self.limits)
        current = np.zeros(classes) if prices is None else prices.copy()
        best_prices, best = current.copy(), -np.inf
        scale, since = 1.0, 0
        direction = np.zeros(classes)
        for _ in range(rounds):
            found = self.solve(current, tables=False)
            if not np.isfinite(found.value):
                return current, np.inf
            if on_path is not None:
                on_path(found)
            if found.bound > best + 1e-12:
                best, best_prices, since = found.bound, current.copy(), 0
            else:
                since += 1
            goal = target()
            if not np.isfinite(goal):
                goal = abs(best) * 1.1 + 1e-9
            if goal - best <= gap * abs(goal) or stop():
                break
            used = np.zeros(classes)
            for step in found.path:
                used += self.uses[step.unit]
            excess = used - self.limits
            excess[(current <= 0) & (excess < 0)] = 0.0
            if not excess.any():
                break
            # A share of the last direction damps the zigzag of plain subgradients.
            direction = 0.6 * direction + excess
            direction[(current <= 0) & (direction < 0)] = 0.0
            norm = float(direction @ direction)
            if norm == 0:
                direction = excess
                norm = float(excess @ excess)
            if since >= 8:
                scale, since = scale * 0.6, 0
                current = best_prices.copy()
                direction[:] = 0
                if scale < 1e-3:
                    break
                continue
            current = np.maximum(0.0, current + direction * (scale * max(goal - found.bound, 1e-12) / norm))
        return best_prices, best


def useful_units(relaxation: Relaxation, limit: float) -> NDArray[np.bool_]:
    """Units that some plan cheaper than ``limit`` may use: the others are left out safely."""
    through = (relaxation.forward + relaxation.backward).min(axis=0)
    return through < limit + relaxation.value - relaxation.bound


def useful_arcs(instance: Instance, relaxation: Relaxation, limit: float) -> NDArray[np.bool_]:
    """``[u, v]``: a plan cheaper than ``limit`` may go from u to v."""
    best = np.full((instance.size, instance.size), np.inf)
    for start in range(1, instance.layers):
        lead = relaxation.forward[start]
        if np.isfinite(lead).any():
            np.minimum(best, lead[:, None] + instance.hop_at(start) + relaxation.onward[start][None, :], out=best)
    return best < limit + relaxation.value - relaxation.bound


def _mean(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else 0.0
