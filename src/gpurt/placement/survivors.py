"""The best plans that keep what survives where it is: boundaries shift, spare units are put in between.

A path through the layers, as in :mod:`gpurt.placement.paths`, but the stages that survive come in their old order and
each keeps a part of the layers that it had. Between them any number of spare units may be put in. So few beginnings
are left at each layer that a device used twice is simply never allowed: each beginning knows what it has used. That
makes the programme a heuristic (a dearer beginning with other spares may have ended better), and a fast one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.instance import Floats, Instance, Ints
from gpurt.placement.paths import Step
from gpurt.placement.valuation import keeps_rules

_FINALS = 12
"""Complete plans of a run that are checked against the rules, the cheapest first."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A stage that survives: its unit in the instance, and the layers that it had."""

    unit: int
    start: int
    end: int


class Survivors:
    """``moved[u, l]``: bytes of the first ``l`` layers that unit u would have to load.

    ``skip``: so many survivors in a row may be left out.
    """

    def __init__(
        self, instance: Instance, kept: Sequence[Kept], spares: NDArray[np.intp], moved: Floats, *, skip: int
    ) -> None:
        self.instance = instance
        self.kept = list(kept)
        self.spares = spares
        self.moved = moved
        self.skip = skip
        self.layers = instance.layers
        self.width = instance.cost.inner.shape[2] - 1
        growing = (instance.rows >= 0).all(axis=0)
        self.rows = instance.rows[:, growing]
        self.most = instance.limits[growing]
        # A unit takes of few limits: only those are looked at.
        takes = [np.flatnonzero(row) for row in self.rows]
        deep = max((len(found) for found in takes), default=0)
        self.index = np.zeros((instance.size, deep), dtype=np.int64)
        self.need = np.full((instance.size, deep), np.iinfo(np.int64).min)
        for unit, found in enumerate(takes):
            self.index[unit, : len(found)] = found
            self.need[unit, : len(found)] = self.rows[unit, found]
        self.spare_index, self.spare_need = self.index[spares], self.need[spares]
        self.to_spares = np.ascontiguousarray(instance.hop[:, :, spares])
        slots, states = len(spares) + 1, len(self.kept) + 1
        shape = (self.layers + 1, states, slots)
        self.value = np.full(shape, np.inf)
        self.start = np.zeros(shape, dtype=np.int64)
        self.row = np.zeros(shape, dtype=np.int64)
        self.slot = np.full(shape, -1, dtype=np.int64)
        self.first = np.zeros(shape, dtype=np.int64)
        # Hardly ever touched beyond a few rows for each layer: memory is taken where something is written.
        self.used = np.zeros((*shape, self.rows.shape[1]), dtype=np.int16)
        self.live = np.zeros(shape[:2], dtype=np.bool_)
        self.limit = np.inf
        self.rest = np.zeros(self.layers + 1)

    def best(self, price: float, limit: float = np.inf) -> tuple[Step, ...] | None:
        """The cheapest plan where a byte that has to be loaded costs ``price``; None where none was found that costs
        less than ``limit``."""
        self.value.fill(np.inf)
        self.slot.fill(-1)
        self.live.fill(False)
        self.limit = limit
        self.rest = self._least(price)
        finals: list[tuple[float, int, int, int, int]] = []
        moved = self.moved * price
        self._begin(moved)
        for done in range(1, self.layers):
            for row in np.flatnonzero(self.live[done]):
                if self._open(done, int(row)):
                    self._onward(done, int(row), moved, finals)
        return self._cheapest(finals, moved)

    def _least(self, price: float) -> Floats:
        """``[done]``: what the layers that are left cost at least: the fastest unit's time, and loading what no unit
        has."""
        units = np.append(self.spares, [kept.unit for kept in self.kept]).astype(np.intp)
        if not len(units):
            return np.zeros(self.layers + 1)
        count = np.arange(1, self.width + 1, dtype=np.float64)
        cost = self.instance.cost
        table = np.minimum(cost.inner[units, :, 1:].min(axis=1), np.minimum(cost.first, cost.last)[units, 1:])
        whole = float(cost.whole[units].min()) / self.layers
        per: Floats = table / count
        each = min(float(per.min()), whole) if self.width else whole
        each = each if np.isfinite(each) else 0.0
        load = np.diff(self.moved[units], axis=1).min(axis=0) * price
        return np.concatenate([np.cumsum((load + each)[::-1])[::-1], [0.0]])

    def _open(self, done: int, row: int) -> bool:
        """Whether the survivors that follow can still have a part of their layers."""
        ahead = self.kept[row : row + 1 + self.skip]
        return len(self.kept) - row <= self.skip or any(done < kept.end for kept in ahead)

    def _begin(self, moved: Floats) -> None:
        cost, reach = self.instance.cost, min(self.width, self.layers - 1)
        spares, start = self.spares, np.array([-1])
        if len(spares) and reach:
            ends = slice(1, reach + 1)
            value = cost.first[spares, ends] + moved[spares, ends]
            self._put(ends, 0, np.arange(len(spares)), value.T, 0, 0, np.full(len(spares), -1))
        for number, kept in enumerate(self.kept[: self.skip + 1]):
            if kept.start < reach:
                ends = slice(kept.start + 1, reach + 1)
                value = cost.first[kept.unit, ends] + moved[kept.unit, ends]
                self._put(ends, number + 1, start, value[:, None], 0, 0, start)

    def _units(self, row: int) -> NDArray[np.intp]:
        return np.append(self.spares, self.kept[row - 1].unit if row else 0).astype(np.intp)

    def _onward(self, done: int, row: int, moved: Floats, finals: list[tuple[float, int, int, int, int]]) -> None:
        instance, layers = self.instance, self.layers
        units = self._units(row)
        values, used, first = self.value[done, row], self.used[done, row], self.first[done, row]
        self._inherit(done, row, units)
        # A first stage may take more than a limit has all by itself.
        alive = np.flatnonzero(np.isfinite(values) & (used <= self.most).all(axis=1))
        if not len(alive):
            return
        leaving, kind = units[alive], instance.boundary[done]
        room = self.most - used[alive]
        left = layers - done
        reach = min(self.width, left - 1)
        last_row = len(self.kept) - row <= self.skip
        inner = instance.cost.row(done)
        if len(self.spares):
            free = (room[:, self.spare_index] >= self.spare_need).all(axis=2)
            lead = np.where(free, values[alive, None] + self.to_spares[kind, leaving], np.inf)
            came = lead.argmin(axis=0)
            enter = lead[came, np.arange(len(self.spares))]
            live = np.flatnonzero(np.isfinite(enter))
            chosen, enter, came = self.spares[live], enter[live], alive[came[live]]
            if len(live) and reach > 0:
                ends = slice(done + 1, done + reach + 1)
                cost = enter[:, None] + inner[chosen, 1 : reach + 1] + moved[chosen, ends] - moved[chosen, done, None]
                self._put(ends, row, live, cost.T, done, row, came)
            if last_row and len(live) and left <= self.width:
                total = enter + instance.cost.last[chosen, left] + moved[chosen, -1] - moved[chosen, done]
                total = total + instance.back[chosen, first[came]]
                finals += [
                    (float(total[k]), done, row, int(came[k]), int(chosen[k])) for k in np.flatnonzero(total < np.inf)
                ]
        for number in range(row, min(len(self.kept), row + 1 + self.skip)):
            kept = self.kept[number]
            if done >= kept.end:
                continue
            unit = kept.unit
            free = (room[:, self.index[unit]] >= self.need[unit]).all(axis=1)
            lead = np.where(free, values[alive] + instance.hop[kind, leaving, unit], np.inf)
            place = int(lead.argmin())
            if not np.isfinite(lead[place]):
                continue
            came = alive[place : place + 1]
            begin = max(done, kept.start) + 1
            if reach > 0 and begin <= done + reach:
                ends = slice(begin, done + reach + 1)
                cost = lead[place] + inner[unit, begin - done : reach + 1] + moved[unit, ends] - moved[unit, done]
                self._put(ends, number + 1, np.array([-1]), cost[:, None], done, row, came)
            if len(self.kept) - number - 1 <= self.skip and left <= self.width:
                total = lead[place] + instance.cost.last[unit, left] + moved[unit, -1] - moved[unit, done]
                total = float(total + instance.back[unit, first[came[0]]])
                if np.isfinite(total):
                    finals.append((total, done, row, int(came[0]), unit))

    def _inherit(self, done: int, row: int, units: NDArray[np.intp]) -> None:
        """What the beginnings have used, and with which unit they began, from where they came."""
        came = self.slot[done, row]
        origin = self.start[done, row], self.row[done, row], np.maximum(came, 0)
        self.used[done, row] = self.rows[units] + np.where((came >= 0)[:, None], self.used[origin], 0)
        self.first[done, row] = np.where(came >= 0, self.first[origin], units)

    def _put(
        self, ends: slice, row: int, slots: NDArray[np.intp], cost: Floats, done: int, before: int, came: Ints
    ) -> None:
        """Keep what is cheaper than what was there. ``cost[n, slot]``."""
        there = self.value[ends, row]
        place, slot = np.nonzero((cost < there[:, slots]) & (cost + self.rest[ends, None] < self.limit))
        if not len(place):
            return
        target = slots[slot]
        there[place, target] = cost[place, slot]
        self.start[ends, row][place, target] = done
        self.row[ends, row][place, target] = before
        self.slot[ends, row][place, target] = came[slot]
        self.live[ends, row][place] = True

    def _cheapest(self, finals: list[tuple[float, int, int, int, int]], moved: Floats) -> tuple[Step, ...] | None:
        whole = self.instance.cost.whole
        own = [kept.unit for kept in self.kept] if len(self.kept) - 1 <= self.skip else []
        alone = list(map(int, self.spares)) if len(self.kept) <= self.skip else []
        single = [
            (float(whole[unit] + moved[unit, -1]), 0, 0, 0, unit) for unit in own + alone if np.isfinite(whole[unit])
        ]
        for _, done, row, slot, unit in sorted(finals + single)[:_FINALS]:
            steps = self._trace(done, row, slot, unit)
            if keeps_rules(self.instance, steps):
                return steps
        return None

    def _trace(self, done: int, row: int, slot: int, unit: int) -> tuple[Step, ...]:
        steps = [Step(unit, done, self.layers)]
        while done:
            unit = int(self._units(row)[slot])
            start, before, came = (int(table[done, row, slot]) for table in (self.start, self.row, self.slot))
            if came < 0:
                start = 0
            steps.append(Step(unit, start, done))
            done, row, slot = start, before, came
        return tuple(reversed(steps))
