"""The best plans that keep what survives where it is: boundaries shift, spare units are put in between.

A path through the layers, as in :mod:`gpurt.placement.paths`, but the stages that survive come in their old order and
each keeps a part of the layers that it had. Between them any number of spare units may be put in. So few beginnings
are left at each layer that a device used twice is simply never allowed: each beginning knows what it has used. That
makes the programme a heuristic (a dearer beginning with other spares may have ended better), and a fast one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
        self.units = np.zeros((states, slots), dtype=np.intp)
        """By state, which is how many survivors are behind, and slot: each spare unit, and the last survivor."""
        self.units[:, :-1] = spares
        self.units[1:, -1] = [kept.unit for kept in self.kept]
        shape = (states, slots, self.layers + 1)
        self.value = np.full(shape, np.inf)
        self.start = np.zeros(shape, dtype=np.int32)
        self.row = np.zeros(shape, dtype=np.int32)
        self.slot = np.full(shape, -1, dtype=np.int32)
        self.first = np.zeros(shape, dtype=np.intp)
        # Hardly ever touched beyond a few states for each layer: memory is taken where something is written.
        self.used = np.zeros((*shape, self.rows.shape[1]), dtype=np.int16)
        self.live = np.zeros((self.layers + 1, states), dtype=np.bool_)
        self.open = np.array([self._until(row) for row in range(states)])
        self.ceiling = np.full(self.layers + 1, np.inf)
        """``[done]``: what a beginning has to cost less than."""

    def best(self, price: float, limit: float = np.inf) -> tuple[Step, ...] | None:
        """The cheapest plan where a byte that has to be loaded costs ``price``; None where none was found that costs
        less than ``limit``."""
        self.value.fill(np.inf)
        self.slot.fill(-1)
        self.live.fill(False)
        self.ceiling = limit - self._least(price)
        finals: list[tuple[float, int, int, int, int]] = []
        moved = self.moved * price
        self._begin(moved)
        for done in range(1, self.layers):
            rows = (self.live[done] & (done < self.open)).nonzero()[0]
            if len(rows):
                self._onward(done, rows, moved, finals)
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

    def _until(self, row: int) -> int:
        """Layers done from which on none of the survivors that follow can have a part of its own any more."""
        if len(self.kept) - row <= self.skip:
            return self.layers
        return max(kept.end for kept in self.kept[row : row + 1 + self.skip])

    def _begin(self, moved: Floats) -> None:
        cost, reach = self.instance.cost, min(self.width, self.layers - 1)
        spares, start = self.spares, np.zeros(1, dtype=np.intp)
        if len(spares) and reach:
            ends = slice(1, reach + 1)
            value = cost.first[spares, ends] + moved[spares, ends]
            self._put(ends, start, slice(0, -1), value[None], 0, start, np.full((1, len(spares)), -1))
        for number, kept in enumerate(self.kept[: self.skip + 1]):
            if kept.start < reach:
                ends = slice(kept.start + 1, reach + 1)
                value = cost.first[kept.unit, ends] + moved[kept.unit, ends]
                self._put(ends, start + number + 1, slice(-1, None), value[None, None], 0, start, start[None] - 1)

    def _onward(
        self, done: int, rows: NDArray[np.intp], moved: Floats, finals: list[tuple[float, int, int, int, int]]
    ) -> None:
        """From all beginnings of ``done`` layers at once. ``rows``: their states."""
        instance, units = self.instance, self.units[rows]
        used, first = self._inherit(done, rows, units)
        values = self.value[rows, :, done]
        # A first stage may take more than a limit has all by itself.
        values[(used > self.most).any(axis=2)] = np.inf
        room = self.most - used
        left = self.layers - done
        reach = min(self.width, left - 1)
        hop, inner = instance.hop[instance.boundary[done]], instance.cost.row(done)
        if len(self.spares):
            spares = self.spares
            free = (room[:, :, self.spare_index] >= self.spare_need).all(axis=3)
            lead = np.where(free, values[:, :, None] + self.to_spares[instance.boundary[done]][units], np.inf)
            came = lead.argmin(axis=1)
            each, column = np.arange(len(rows))[:, None], np.arange(len(spares))
            enter = lead[each, came, column]
            enter[enter >= self.ceiling[done]] = np.inf
            if reach > 0:
                ends = slice(done + 1, done + reach + 1)
                run = inner[spares, 1 : reach + 1] + moved[spares, ends] - moved[spares, done, None]
                self._put(ends, rows, slice(0, -1), enter[:, :, None] + run, done, rows, came)
            if left <= self.width:
                total = enter + instance.cost.last[spares, left] + moved[spares, -1] - moved[spares, done]
                total = total + instance.back[spares, first[each, came]]
                total[len(self.kept) - rows > self.skip] = np.inf
                for place, slot in zip(*np.isfinite(total).nonzero(), strict=True):
                    origin = int(rows[place]), int(came[place, slot])
                    finals.append((float(total[place, slot]), done, *origin, int(spares[slot])))
        states: list[int] = rows.tolist()
        for number in range(states[0], min(len(self.kept), states[-1] + 1 + self.skip)):
            kept = self.kept[number]
            low, high = bisect_left(states, number - self.skip), bisect_right(states, number)
            if done >= kept.end or low == high:
                continue
            unit, near = kept.unit, slice(low, high)
            free = (room[near][:, :, self.index[unit]] >= self.need[unit]).all(axis=2)
            lead = np.where(free, values[near] + hop[units[near], unit], np.inf)
            place, slot = divmod(int(lead.argmin()), lead.shape[1])
            if not lead[place, slot] < self.ceiling[done]:
                continue
            begin = max(done, kept.start) + 1
            if reach > 0 and begin <= done + reach:
                ends = slice(begin, done + reach + 1)
                cost = lead[place, slot] + inner[unit, begin - done : reach + 1] + moved[unit, ends] - moved[unit, done]
                row = low + place
                target = np.array([number + 1], dtype=np.intp)
                before = rows[row : row + 1]
                self._put(ends, target, slice(-1, None), cost[None, None], done, before, np.array([[slot]]))
            if len(self.kept) - number - 1 <= self.skip and left <= self.width:
                total = lead + instance.cost.last[unit, left] + moved[unit, -1] - moved[unit, done]
                total = total + instance.back[unit, first[near]]
                for place, slot in enumerate(map(int, total.argmin(axis=1))):
                    if np.isfinite(total[place, slot]):
                        finals.append((float(total[place, slot]), done, states[low + place], slot, unit))

    def _inherit(self, done: int, rows: NDArray[np.intp], units: NDArray[np.intp]) -> tuple[Ints, Ints]:
        """What the beginnings have used, and with which unit they began, from where they came."""
        came = self.slot[rows, :, done]
        goes_on = came >= 0
        origin = self.row[rows, :, done], np.maximum(came, 0), self.start[rows, :, done]
        used = self.rows[units] + np.where(goes_on[:, :, None], self.used[origin], 0)
        first = np.where(goes_on, self.first[origin], units)
        self.used[rows, :, done] = used
        self.first[rows, :, done] = first
        return used, first

    def _put(self, ends: slice, rows: Ints, slots: slice, cost: Floats, done: int, before: Ints, came: Ints) -> None:
        """Keep what is cheaper than what was there. ``cost[row, slot, n]``, ``before[row]``, ``came[row, slot]``."""
        there = self.value[rows, slots, ends]
        row, slot, place = ((cost < there) & (cost < self.ceiling[ends])).nonzero()
        if not len(row):
            return
        state, layer = rows[row], place + ends.start
        target = state, slot if slots.start == 0 else slot - 1, layer
        self.value[target] = cost[row, slot, place]
        self.start[target] = done
        self.row[target] = before[row]
        self.slot[target] = came[row, slot]
        self.live[layer, state] = True

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
            unit = int(self.units[row, slot])
            start, before, came = (int(table[row, slot, done]) for table in (self.start, self.row, self.slot))
            if came < 0:
                start = 0
            steps.append(Step(unit, start, done))
            done, row, slot = start, before, came
        return tuple(reversed(steps))
