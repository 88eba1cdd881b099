"""One path through the layers: the relaxation that gives bounds.

A plan is a path: units one after the other, each with its layers, and the way back. Drop the rule that a device is used
once, but for what :class:`gpurt.placement.visits.Visits` remembers, and the best path is found by dynamic programming
over (layers done, state), with every true link, every capacity and every position. A price on each limit
(``Prices.use``), paid per use and refunded once per device, pushes the paths to keep the rule; whatever the prices are,
the cheapest path less the refund is a lower bound on every plan.

The way back depends on first and last unit, which a path that forgets its start cannot know. A path pays
``Prices.home`` of its first unit, and at its end the cheapest of all ways back less the price of where it leads: for a
plan that is at most its own way back, and good prices make it no less.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.instance import Floats, Instance, Ints
from gpurt.placement.relaxation import Prices, Relaxation, Step
from gpurt.placement.visits import Visits, forgetful

_BLOCK: Final = 128
"""Rows of the table of hops looked at together: they stay in the cache."""
_FIRST: Final = 16
"""Rows looked at first, to see which others matter."""


_SMALL: Final = 20_000
"""Entries of a table that is sooner gone through than searched."""
_COARSE: Final = 400
"""Units from which on hops are looked up in single precision, rounded down: half the memory to go through."""
_SINGLE: Final = 2.0**-23

Table = NDArray[np.floating[Any]]


class PathRelaxation:
    """The dynamic programme over one instance."""

    def __init__(self, instance: Instance, visits: Visits | None = None) -> None:
        self.instance = instance
        self.visits = visits = visits or forgetful(instance.size)
        self.layers = instance.layers
        cost = instance.cost
        self.width = cost.inner.shape[2] - 1
        self.uses = instance.rows.astype(np.float64)
        self.limits = instance.limits.astype(np.float64)
        hop = instance.hop
        if (visits.group >= 0).any():
            hop = np.where(visits.within()[None], np.inf, hop)
        coarse = instance.size > _COARSE
        self._from: Table = _below(hop) if coarse else np.ascontiguousarray(hop)
        self._to: Table = np.ascontiguousarray(self._from.transpose(0, 2, 1))
        self._inner = np.ascontiguousarray(cost.inner.transpose(1, 2, 0)[:, :, visits.unit])
        """``[b, n, s]``"""
        self._nearest, self._nearest_to = self._from.min(axis=2), self._to.min(axis=2)
        self._reach = instance.hop.min(axis=(0, 1))[visits.unit]
        """``[s]``: the cheapest way to its unit."""
        self._narrow, self._wide = _split(self._inner)
        self._more = np.ascontiguousarray(self._inner[:, self._narrow + 1 :, self._wide])
        """``[b, n, w]``: stages of more layers than most states hold."""
        self._last = np.ascontiguousarray(cost.last.T[:, visits.unit])
        self._ways = instance.hop[:, visits.unit[visits.source], visits.unit[visits.target]]
        self._plain = np.array_equal(visits.unit, np.arange(instance.size))
        self._by_unit = np.argsort(visits.unit, kind="stable")
        self._unit_starts = np.searchsorted(visits.unit[self._by_unit], np.arange(instance.size))
        self._target, self._target_starts = np.unique(visits.target, return_index=True)
        self._by_source = np.argsort(visits.source, kind="stable")
        self._source, self._source_starts = np.unique(visits.source[self._by_source], return_index=True)

    def _leave(self, prices: Prices) -> tuple[Floats, Ints]:
        """``[u]``: what the way back of a path that ends with u costs at least, and where it leads."""
        ways = self.instance.back - prices.home[None, :]
        home = ways.argmin(axis=1)
        return ways[np.arange(len(ways)), home], home

    def _units(self, state: Floats) -> Floats:
        """``[u]``: least over the states of each unit."""
        if self._plain:
            return state
        return np.minimum.reduceat(state[self._by_unit], self._unit_starts)

    def _floors(self, prices: Prices, price: Floats, leave: Floats) -> tuple[Floats, Floats]:
        """What a path costs at least: ``[e]`` once ``e`` layers are done, every layer at the rate of the cheapest stage
        per layer with the way to it, and the cheapest end; ``[s]`` how much more it is where s comes next, without the
        way to s and its price."""
        number: Floats = np.arange(1, self.width + 1, dtype=np.float64)[:, None]
        inner: Floats = self._inner.min(axis=0)[1:] + price
        rate = float(np.min((inner + self._reach) / number))
        end: Floats = self._last[1:] + (price + leave)
        if not np.isfinite(rate):
            rate = 0.0
        end = end - rate * number
        offset = float(np.min(end + self._reach))
        floor = rate * np.arange(self.layers, -1, -1, dtype=np.float64) + offset
        if not np.isfinite(offset):
            return floor, np.zeros_like(price)
        inner = inner - rate * number
        more: Floats = np.minimum(inner.min(axis=0), end.min(axis=0) - offset)
        return floor, more - price

    def _extend(self, block: Floats, more: Floats, enter: Floats, start: int) -> None:
        """``block[n - 1]``: the least of what is there and of a stage of ``n`` layers; ``more`` likewise of the states
        that hold more than most, from one layer more on."""
        kind = 0 if self._inner.shape[0] == 1 else start
        live = np.flatnonzero(enter < np.inf)
        if 4 * len(live) < len(enter):
            inner = self._inner[kind, 1 : len(block) + 1]
            block[:, live] = np.minimum(block[:, live], enter[live] + inner[:, live])
            return
        inner = self._inner[kind, 1 : self._narrow + 1]
        near = block[: self._narrow]
        np.minimum(near, enter + inner[: len(near)], out=near)
        if more.size:
            np.minimum(more, enter[self._wide] + self._more[kind, : len(more)], out=more)

    def forward(self, prices: Prices, ceiling: float) -> tuple[Floats, Floats]:
        """``[e, s]`` as in :class:`Relaxation`, and the entry costs ``[b, s]``."""
        instance, layers, width, visits = self.instance, self.layers, self.width, self.visits
        unit_price = self.uses @ prices.use
        price = unit_price[visits.unit]
        leave = self._leave(prices)[0][visits.unit]
        done = np.full((layers + 1, visits.size), np.inf)
        entry = np.full((layers + 1, visits.size), np.inf)
        floor, more = self._floors(prices, price, leave)
        wide = np.full((layers + 1, len(self._wide)), np.inf)
        top = min(width, layers - 1)
        begin = unit_price + np.where(np.isfinite(instance.back).any(axis=0), prices.home, np.inf)
        done[1 : top + 1, visits.alone] = (instance.cost.first[:, 1 : top + 1] + begin[:, None]).T
        for start in range(1, layers):
            state = done[start]
            if wide.size:
                state[self._wide] = np.minimum(state[self._wide], wide[start])
            state[state + floor[start] >= ceiling] = np.inf
            lead = self._units(state)
            if not (lead < np.inf).any():
                continue
            kind = instance.boundary[start]
            enter = entry[start]
            most = _room(ceiling, floor[start] + more + price)
            alone = visits.alone
            enter[alone] = _cheapest(self._from[kind], self._nearest[kind], self._nearest_to[kind], lead, most[alone])
            if len(self._target):
                ways = state[visits.source] + self._ways[kind]
                near = np.minimum.reduceat(ways, self._target_starts)
                enter[self._target] = np.minimum(enter[self._target], near)
            enter[enter >= most] = np.inf
            enter += price
            reach = min(width, layers - 1 - start)
            if reach > 0:
                end = start + reach + 1
                self._extend(done[start + 1 : end], wide[start + 1 + self._narrow : end], enter, start)
            rest = layers - start
            if rest <= width:
                np.minimum(done[layers], enter + self._last[rest] + leave, out=done[layers])
        done[layers, visits.alone] = np.minimum(done[layers, visits.alone], instance.cost.whole + unit_price)
        return done, entry

    def backward(self, prices: Prices, ceiling: float, done: Floats, entry: Floats) -> tuple[Floats, Floats]:
        """``[e, s]`` and ``[b, s]``, infinite where a path through is not below the ceiling."""
        instance, layers, width, visits = self.instance, self.layers, self.width, self.visits
        price = (self.uses @ prices.use)[visits.unit]
        leave = self._leave(prices)[0][visits.unit]
        rest = np.full((layers + 1, visits.size), np.inf)
        rest[layers] = 0.0
        wide = np.full((layers + 1, len(self._wide)), np.inf)
        onward = np.full((layers + 1, visits.size), np.inf)
        fixed = self._inner.shape[0] == 1
        for start in range(layers - 1, 0, -1):
            reach = min(width, layers - 1 - start)
            take = onward[start]
            live = np.flatnonzero(entry[start] < np.inf)
            if not len(live):
                continue
            most_live = 4 * len(live) > visits.size
            if most_live:
                live = slice(None)
            if reach > 0:
                row, end = 0 if fixed else start, start + reach + 1
                near = min(reach, self._narrow) if most_live else reach
                inner = self._inner[row, 1 : near + 1][:, live]
                take[live] = (inner + rest[start + 1 : start + near + 1, live]).min(axis=0, initial=np.inf)
                if most_live and near < reach and wide.size:
                    more = self._more[row, : reach - near] + wide[start + near + 1 : end]
                    take[self._wide] = np.minimum(take[self._wide], more.min(axis=0))
            if layers - start <= width:
                take[live] = np.minimum(take[live], (self._last[layers - start] + leave)[live])
            take += price
            take[entry[start] + take - price >= ceiling] = np.inf
            kind = instance.boundary[start]
            most = _room(ceiling, self._units(done[start]))
            after = _cheapest(self._to[kind], self._nearest_to[kind], self._nearest[kind], take[visits.alone], most)
            rest[start] = after[visits.unit]
            if len(self._source):
                ways = (take[visits.target] + self._ways[kind])[self._by_source]
                near = np.minimum.reduceat(ways, self._source_starts)
                rest[start, self._source] = np.minimum(rest[start, self._source], near)
            if wide.size:
                wide[start] = rest[start, self._wide]
        return rest, onward

    def trace(self, done: Floats, entry: Floats, prices: Prices) -> tuple[tuple[Step, ...], int]:
        """The cheapest path, and where its way back leads."""
        instance, layers, visits = self.instance, self.layers, self.visits
        unit_price = self.uses @ prices.use
        leave, home = self._leave(prices)
        state, end = int(done[layers].argmin()), layers
        last = int(visits.unit[state])
        steps: list[Step] = []
        while True:
            unit = int(visits.unit[state])
            target = done[end, state]
            lead = np.inf
            if state == visits.alone[unit]:
                if end == layers:
                    lead = instance.cost.whole[unit] + unit_price[unit]
                elif end <= self.width:
                    lead = instance.cost.first[unit, end] + unit_price[unit] + prices.home[unit]
            begin, best = 0, abs(lead - target) if np.isfinite(lead) else np.inf
            starts = np.arange(max(1, end - self.width), end)
            if len(starts):
                number = end - starts
                if end == layers:
                    step = instance.cost.last[unit, number] + leave[unit]
                elif self._inner.shape[0] == 1:
                    step = self._inner[0, number, state]
                else:
                    step = self._inner[starts, number, state]
                miss = np.abs(entry[starts, state] + step - target)
                miss[np.isnan(miss)] = np.inf
                place = int(miss.argmin())
                if miss[place] < best:
                    begin = int(starts[place])
            steps.append(Step(unit, begin, end))
            if begin == 0:
                return tuple(reversed(steps)), int(home[last]) if len(steps) > 1 else -1
            state, end = self._before(done[begin], state, begin), begin

    def _before(self, state: Floats, after: int, start: int) -> int:
        """The state from which ``after`` is entered most cheaply."""
        visits, kind = self.visits, self.instance.boundary[start]
        unit = int(visits.unit[after])
        best, value = -1, np.inf
        low, high = np.searchsorted(visits.target, [after, after + 1])
        if low < high:
            ways = state[visits.source[low:high]] + self._ways[kind, low:high]
            place = int(ways.argmin())
            best, value = int(visits.source[low + place]), ways[place]
        if after == visits.alone[unit]:
            ways = state + self._to[kind, unit][visits.unit]
            place = int(ways.argmin())
            if ways[place] < value:
                best = place
        return best

    def solve(self, prices: Prices, *, tables: bool = True, limit: float = np.inf) -> Relaxation:
        """Bound under these prices; ``tables`` False leaves the backward table out.

        Only plans below ``limit`` are looked at: what cannot be part of one is infinite in the tables, and the bound is
        no higher than the limit.
        """
        refund = float(prices.use @ self.limits)
        ceiling = limit + refund
        unit_price = self.uses @ prices.use
        if self.instance.size:
            done, entry = self.forward(prices, ceiling)
            value = float(done[self.layers].min())
        else:
            done = entry = np.full((self.layers + 1, 0), np.inf)
            value = np.inf
        path, home = self.trace(done, entry, prices) if value < np.inf else ((), -1)
        backward, onward = self.backward(prices, ceiling, done, entry) if tables and value < np.inf else (done, done)
        value = min(value, ceiling)
        return Relaxation(
            value, value - refund, refund, path, home, done, backward, onward, unit_price, prices, self.visits
        )


def _room(ceiling: float, cost: Floats) -> Floats:
    """What may come on top of a cost."""
    return ceiling - cost if ceiling < np.inf else np.full_like(cost, np.inf)


def _below(values: Floats) -> NDArray[np.float32]:
    """In single precision, never more."""
    with np.errstate(over="ignore"):  # what is infinite now is made the largest number below
        near = values.astype(np.float32)
    return np.where(near > values, np.nextafter(near, np.float32(-np.inf)), near)


def _cheapest(table: Table, least: Table, least_to: Table, lead: Floats, most: Floats) -> Floats:
    """``min over i of lead[i] + table[i, :]``, infinite where that is not below ``most``.

    ``least`` and ``least_to`` are the least of each row and each column of the table. With a table in single precision
    the answer is rounded down.
    """
    if table.size <= _SMALL:
        found = (table + lead[:, None]).min(axis=0)
        found[found >= most] = np.inf
        return found
    found = np.full(len(least_to), np.inf)
    wanted = np.flatnonzero(lead.min() + least_to < most)
    if not len(wanted):
        return found
    few = 2 * len(wanted) < len(found)
    best = most[wanted] if few else most.copy()
    coarse = table.dtype == np.float32
    early: Table = _below(lead) if coarse else lead

    def look(rows: NDArray[np.intp]) -> None:
        part = table[np.ix_(rows, wanted)] if few else table[rows]
        least_here: Floats = (part + early[rows][:, None]).min(axis=0).astype(np.float64)
        if coarse:
            least_here -= np.abs(least_here, where=least_here < np.inf, out=np.zeros_like(least_here)) * _SINGLE
        np.minimum(best, least_here, out=best)

    first = min(_FIRST, len(lead))
    look(np.argpartition(lead, first - 1)[:first])
    # Rows that begin so late that they cannot be the cheapest anywhere are left out.
    latest = best.max() if few else best[wanted].max()
    live = np.flatnonzero(lead + least < latest)
    for begin in range(0, len(live), _BLOCK):
        look(live[begin : begin + _BLOCK])
    below = best < (most[wanted] if few else most)
    found[wanted if few else slice(None)] = np.where(below, best, np.inf)
    return found


def _split(inner: Floats) -> tuple[int, Ints]:
    """A number of layers that holds most states, and the states that hold more."""
    number = np.arange(inner.shape[1], dtype=np.int64)[:, None]
    most: Ints = np.max(np.where(np.any(np.isfinite(inner), axis=0), number, 0), axis=0, initial=0)
    width = inner.shape[1] - 1
    # A layer of the few costs several times as much as one of all, since they do not lie together.
    cost = [len(most) * narrow + 6 * int((most - narrow).clip(0).sum()) for narrow in range(width + 1)]
    narrow = int(np.argmin(cost))
    return narrow, np.flatnonzero(most > narrow)
