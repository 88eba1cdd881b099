"""Plans built stage by stage: of all beginnings of a path, the most promising ones are continued.

A beginning is judged by what it has cost and by what the relaxation says that the rest costs at least. Devices are used
once, and every rule is kept from the start, so that whatever reaches the last layer is a plan. Where no beginning had
to be left out for want of room, the best plan found is the best there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.instance import Bools, Floats, Instance, Ints
from gpurt.placement.relaxation import Relaxation, Step
from gpurt.placement.valuation import keeps_rules, path_cost


@dataclass(slots=True)
class _States:
    """Beginnings that have the same layers done, one per row."""

    value: Floats
    parent: Ints
    """Row among the beginnings with ``start`` layers done."""
    start: Ints
    unit: Ints
    state: Ints
    """Of the relaxation: unit and what is remembered."""
    first: Ints
    flexed: Bools
    """One stage has a number of layers between its least and its most; a second one is never needed."""
    used: Ints
    mark: Ints
    """Stands for ``used`` where beginnings are compared."""
    nodes: Bools | None


@dataclass(slots=True)
class _Offers:
    """Continuations from one place, sorted by where they end."""

    end: Ints
    guess: Floats
    value: Floats
    parent: Ints
    state: Ints
    flexed: Bools

    def ending(self, end: int) -> slice:
        low, high = np.searchsorted(self.end, [end, end + 1])
        return slice(int(low), int(high))


@dataclass(slots=True)
class BeamResult:
    plans: list[tuple[float, tuple[Step, ...]]]
    """Complete plans with their cost, the cheapest first."""
    exhausted: bool
    """Nothing better than ``plans[0]`` and than the limit given exists."""


class Beam:
    """``limit``: only plans that are cheaper are of interest."""

    def __init__(self, instance: Instance, relaxation: Relaxation, *, width: int, limit: float = np.inf) -> None:
        self.instance = instance
        self.rest = relaxation.backward
        self.onward = relaxation.onward
        self.visits = relaxation.visits
        self.following = relaxation.visits.following()
        self.price = relaxation.unit_price
        self.prices = relaxation.prices
        self.limit = limit
        self.ceiling = limit + relaxation.refund if np.isfinite(limit) else np.inf
        self.width = width
        self.exhausted = True
        self.growing = (instance.rows >= 0).all(axis=0)
        self.rows = instance.rows[:, self.growing]
        self.most = instance.limits[self.growing]
        # A unit takes of few limits: only those are looked at.
        takes = [np.flatnonzero(row) for row in self.rows]
        deep = max((len(found) for found in takes), default=0)
        self.index = np.zeros((instance.size, deep), dtype=np.int64)
        self.need = np.full((instance.size, deep), np.iinfo(np.int64).min)
        for unit, found in enumerate(takes):
            self.index[unit, : len(found)] = found
            self.need[unit, : len(found)] = self.rows[unit, found]
        constraints = instance.constraints
        self.node_limit = constraints.max_nodes
        self.track = constraints.max_nodes is not None or constraints.min_nodes > 1
        self.nodes = int(instance.node.max()) + 1 if instance.size else 0
        random = np.random.default_rng(20)
        self.marks: Ints = np.asarray(
            instance.rows @ random.integers(1, 1 << 40, instance.rows.shape[1]), dtype=np.int64
        )
        self.layers = instance.layers
        self.span = instance.cost.inner.shape[2] - 1
        self.tables = (_extremes(instance.cost.inner[:, 0, :]), _extremes(instance.cost.first))

    def run(self, stop: Callable[[], bool]) -> BeamResult:
        instance, layers = self.instance, self.layers
        states: list[_States | None] = [None] * (layers + 1)
        offers: list[_Offers | None] = [None] * (layers + 1)
        found: list[tuple[float, tuple[Step, ...]]] = []
        self._whole(found)
        if instance.size:
            offers[0] = self._begin()
        ends: list[tuple[float, int, int, int]] = []
        for start in range(1, layers):
            if stop():
                self.exhausted = False
                break
            state = self._pick(offers, states, start)
            if state is None:
                continue
            states[start] = state
            room = self.most - state.used[:, self.growing]
            free = (room[:, self.index] >= self.need).all(axis=2)
            if state.nodes is not None and self.node_limit is not None:
                full = state.nodes.sum(axis=1) >= self.node_limit
                free &= ~full[:, None] | state.nodes[:, instance.node]
            enter = state.value[:, None] + instance.hop_at(start)[state.unit] + self.price[None, :]
            enter[~free] = np.inf
            offers[start] = self._continue(state, enter, start)
            if layers - start <= self.span:
                ends += self._finish(state, enter, start)
        for _, row, start, last in sorted(ends)[:64]:
            steps = self._trace(states, row, start, last)
            found.append((path_cost(instance, steps), steps))
        found.sort(key=lambda pair: pair[0])
        return BeamResult(found, self.exhausted)

    def _finish(self, state: _States, enter: Floats, start: int) -> list[tuple[float, int, int, int]]:
        """(cost, row, start, last unit) of the cheapest complete plans from here that keep every rule."""
        instance = self.instance
        total = enter + instance.cost.last[:, self.layers - start] + instance.back[:, state.first].T
        row, last = np.nonzero(total < self.ceiling)
        # What may not be exceeded was looked at when the unit was entered; what must be reached is known only now.
        least = ~self.growing
        used = state.used[:, least][row] + instance.rows[:, least][last]
        good = np.all(used <= instance.limits[least], axis=1)
        if state.nodes is not None:
            nodes = state.nodes[row]
            nodes[np.arange(len(row)), instance.node[last]] = True
            good &= nodes.sum(axis=1) >= instance.constraints.min_nodes
        row, last = row[good], last[good]
        # Prices led the search; what a plan costs is without them.
        paid = state.used @ self.prices.use
        cost = total[row, last] - paid[row] - self.price[last]
        order = np.argsort(cost, kind="stable")[:64]
        return [(float(cost[k]), int(row[k]), start, int(last[k])) for k in order]

    def _whole(self, found: list[tuple[float, tuple[Step, ...]]]) -> None:
        whole = self.instance.cost.whole
        for unit in np.flatnonzero(np.isfinite(whole)):
            steps = (Step(int(unit), 0, self.layers),)
            if keeps_rules(self.instance, steps):
                found.append((float(whole[unit]), steps))

    def _begin(self) -> _Offers:
        own: Bools = np.all(self.rows <= self.most, axis=1)
        reach = min(self.span, self.layers - 1)
        value = np.where(own[:, None], self.instance.cost.first[:, 1 : reach + 1] + self.price[:, None], np.inf)
        alone = self.visits.alone
        guess = value + self.prices.home[:, None] + self.rest[1 : reach + 1, alone].T
        unit, place = np.nonzero(guess < self.ceiling)
        flexed = self._between(self.tables[1], unit, place + 1)
        parent = np.full(len(unit), -1)
        return _offers(place + 1, guess[unit, place], value[unit, place], parent, alone[unit], flexed)

    def _continue(self, state: _States, enter: Floats, start: int) -> _Offers | None:
        reach = min(self.span, self.layers - 1 - start)
        if reach <= 0:
            return None
        home = self.prices.home[state.first]
        after = self.following[state.state]
        guess = enter + (self.onward[start][after] + (home[:, None] - self.price[None, :]))
        guess[after < 0] = np.inf
        row, unit = np.nonzero(guess < self.ceiling)
        room = 3 * self.width
        if len(row) > room:
            self.exhausted = False
            keep = np.argpartition(guess[row, unit], room)[:room]
            row, unit = row[keep], unit[keep]
        after = after[row, unit]
        value = enter[row, unit][:, None] + self.instance.cost.row(start)[unit, 1 : reach + 1]
        guess = value + home[row][:, None] + self.rest[start + 1 : start + reach + 1].T[after]
        pair, place = np.nonzero(guess < self.ceiling)
        flexed = self._between(self.tables[0], unit[pair], place + 1)
        twice = flexed & state.flexed[row[pair]]
        pair, place, flexed = pair[~twice], place[~twice], flexed[~twice]
        flexed = flexed | state.flexed[row[pair]]
        return _offers(start + place + 1, guess[pair, place], value[pair, place], row[pair], after[pair], flexed)

    def _between(self, table: tuple[Ints, Ints], unit: NDArray[np.intp], number: NDArray[np.intp]) -> Bools:
        if not self.instance.movable:
            return np.zeros(len(unit), dtype=np.bool_)
        return (number != table[0][unit]) & (number != table[1][unit])

    def _pick(self, offers: Sequence[_Offers | None], states: Sequence[_States | None], end: int) -> _States | None:
        parts: list[tuple[Floats, Floats, Ints, Ints, Ints, Bools]] = []
        for start in range(max(0, end - self.span), end):
            offer = offers[start]
            if offer is None:
                continue
            mine = offer.ending(end)
            if mine.start < mine.stop:
                count = int(mine.stop) - int(mine.start)
                origin = np.array([start], dtype=np.int64).repeat(count)
                parts.append((
                    offer.guess[mine], offer.value[mine], offer.parent[mine], origin,
                    offer.state[mine], offer.flexed[mine],
                ))  # fmt: skip
        if not parts:
            return None
        guess, value, parent, start, after, flexed = (np.concatenate(column) for column in zip(*parts, strict=True))
        room = 8 * self.width
        if len(guess) > room:
            self.exhausted = False
            order = np.argpartition(guess, room)[:room]
            guess, value, parent, start = guess[order], value[order], parent[order], start[order]
            after, flexed = after[order], flexed[order]
        unit = self.visits.unit[after]
        mark, first = self.marks[unit].copy(), unit.copy()
        sources: list[tuple[_States, NDArray[np.intp]]] = []
        for before in sorted(set(map(int, start))):
            past = states[before]
            if past is None:
                continue
            mine = np.flatnonzero(start == before)
            mark[mine] += past.mark[parent[mine]]
            first[mine] = past.first[parent[mine]]
            sources.append((past, mine))
        # The same devices with the same two ends: only the cheapest can be part of the best plan.
        key = mark + unit * 7919 + first * 1_000_003 + flexed
        order = np.lexsort((value, key))
        kept = np.ones(len(order), dtype=np.bool_)
        kept[1:] = key[order[1:]] != key[order[:-1]]
        unique = order[kept]
        unique = unique[np.lexsort((unique, guess[unique]))]
        if len(unique) > self.width:
            self.exhausted = False
            unique = unique[: self.width]
        used = self.instance.rows[unit[unique]]
        nodes = None
        if self.track:
            nodes = np.zeros((len(unique), self.nodes), dtype=np.bool_)
            nodes[np.arange(len(unique)), self.instance.node[unit[unique]]] = True
        for past, mine in sources:
            rows = np.flatnonzero(np.isin(unique, mine))
            source = parent[unique[rows]]
            used[rows] += past.used[source]
            if nodes is not None and past.nodes is not None:
                nodes[rows] |= past.nodes[source]
        return _States(
            value[unique], parent[unique], start[unique], unit[unique], after[unique], first[unique], flexed[unique],
            used, mark[unique], nodes,
        )  # fmt: skip

    def _trace(self, states: Sequence[_States | None], row: int, start: int, last: int) -> tuple[Step, ...]:
        steps = [Step(last, start, self.layers)]
        while start:
            state = states[start]
            assert state is not None
            before = int(state.start[row])
            steps.append(Step(int(state.unit[row]), before, start))
            row, start = int(state.parent[row]), before
        return tuple(reversed(steps))


def _offers(end: Ints, guess: Floats, value: Floats, parent: Ints, state: Ints, flexed: Bools) -> _Offers:
    order = np.argsort(end, kind="stable")
    return _Offers(end[order], guess[order], value[order], parent[order], state[order], flexed[order])


def _extremes(table: Floats) -> tuple[Ints, Ints]:
    """Least and greatest number of layers of each unit."""
    fits = np.isfinite(table)
    return fits.argmax(axis=1), table.shape[1] - 1 - fits[:, ::-1].argmax(axis=1)
