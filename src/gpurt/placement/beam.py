"""Plans built stage by stage: of all beginnings of a path, the most promising ones are continued.

A beginning is judged by what it has cost and by what the relaxation says that the rest costs at least. Devices are used
once, and every rule is kept from the start, so that whatever reaches the last layer is a plan. Where no beginning had
to be left out for want of room, the best plan found is the best there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    """Continuations from one place to another."""

    start: int
    guess: Floats
    value: Floats
    parent: Ints
    state: Ints
    flexed: Bools


@dataclass(slots=True)
class BeamResult:
    plans: list[tuple[float, tuple[Step, ...]]]
    """Complete plans with their cost, the cheapest first."""
    exhausted: bool
    """Nothing better than ``plans[0]`` and than the limit given exists."""
    peak: int
    """Most beginnings at once."""


class Beam:
    """``limit``: only plans that are cheaper are of interest. ``whole``: a search that leaves a beginning out is of no
    use and ends at once."""

    def __init__(
        self, instance: Instance, relaxation: Relaxation, *, width: int, limit: float = np.inf, whole: bool = False
    ) -> None:
        self.instance = instance
        self.rest = relaxation.backward
        self.onward = relaxation.onward
        self.visits = relaxation.visits
        self.following = relaxation.visits.following()
        self.price = relaxation.unit_price
        self.prices = relaxation.prices
        self.whole = whole
        self.ceiling = limit + relaxation.refund if np.isfinite(limit) else np.inf
        self.width = width
        self.exhausted = True
        self.peak = 0
        # Limits that no unit takes anything of are not counted. Those that ask for at least so much are known to hold
        # only at the end.
        taken = instance.rows.any(axis=0) | (instance.limits < 0)
        self.rows, self.limits, self.paid = instance.rows[:, taken], instance.limits[taken], self.prices.use[taken]
        self.least = (self.rows < 0).any(axis=0)
        # A unit takes of few limits: only those are looked at.
        takes = [np.flatnonzero(row > 0) for row in self.rows]
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
        self.marks: Ints = np.asarray(self.rows @ random.integers(1, 1 << 40, self.rows.shape[1]), dtype=np.int64)
        self.layers = instance.layers
        self.span = instance.cost.inner.shape[2] - 1
        self.tables = (_extremes(instance.cost.inner[:, 0, :]), _extremes(instance.cost.first))

    def run(self, stop: Callable[[], bool]) -> BeamResult:
        instance, layers = self.instance, self.layers
        states: list[_States | None] = [None] * (layers + 1)
        offers: list[list[_Offers]] = [[] for _ in range(layers + 1)]
        found: list[tuple[float, tuple[Step, ...]]] = []
        self._whole(found)
        if instance.size:
            self._begin(offers)
        ends: list[tuple[float, int, int, int]] = []
        for start in range(1, layers):
            late = stop()
            self.exhausted &= not late
            if late or (self.whole and not self.exhausted):
                break
            state = self._pick(offers[start], states)
            offers[start] = []
            if state is None:
                continue
            states[start] = state
            # Units that a path to be looked at may enter here.
            live = np.unique(self.visits.unit[np.isfinite(self.onward[start])])
            if not len(live):
                continue
            hop = instance.hop_at(start)[np.ix_(state.unit, live)]
            enter = state.value[:, None] + hop + self.price[live]
            self._continue(offers, state, enter, live, start)
            if layers - start <= self.span:
                ends += self._finish(state, enter, live, start)
        for _, row, start, last in sorted(ends)[:64]:
            steps = self._trace(states, row, start, last)
            found.append((path_cost(instance, steps), steps))
        found.sort(key=lambda pair: pair[0])
        return BeamResult(found, self.exhausted, self.peak)

    def _free(self, state: _States, row: NDArray[np.intp], unit: Ints) -> Bools:
        """Whether the beginning in each row has room for the unit beside it."""
        room = self.limits - state.used
        free: Bools = np.asarray(np.all(room[row[:, None], self.index[unit]] >= self.need[unit], axis=1))
        if state.nodes is not None and self.node_limit is not None:
            full = state.nodes.sum(axis=1) >= self.node_limit
            free &= ~full[row] | state.nodes[row, self.instance.node[unit]]
        return free

    def _finish(self, state: _States, enter: Floats, live: Ints, start: int) -> list[tuple[float, int, int, int]]:
        """(cost, row, start, last unit) of the cheapest complete plans from here that keep every rule."""
        instance = self.instance
        total = enter + instance.cost.last[live, self.layers - start] + instance.back[np.ix_(live, state.first)].T
        row, place = np.nonzero(total < self.ceiling)
        last = live[place]
        good = self._free(state, row, last)
        row, place, last = row[good], place[good], last[good]
        used = state.used[:, self.least][row] + self.rows[:, self.least][last]
        good = np.all(used <= self.limits[self.least], axis=1)
        if state.nodes is not None:
            nodes = state.nodes[row]
            nodes[np.arange(len(row)), instance.node[last]] = True
            good &= nodes.sum(axis=1) >= instance.constraints.min_nodes
        row, place, last = row[good], place[good], last[good]
        # Prices led the search; what a plan costs is without them.
        paid = state.used @ self.paid
        cost = total[row, place] - paid[row] - self.price[last]
        order = np.argsort(cost, kind="stable")[:64]
        return [(float(cost[k]), int(row[k]), start, int(last[k])) for k in order]

    def _whole(self, found: list[tuple[float, tuple[Step, ...]]]) -> None:
        whole = self.instance.cost.whole
        for unit in np.flatnonzero(np.isfinite(whole)):
            steps = (Step(int(unit), 0, self.layers),)
            if keeps_rules(self.instance, steps):
                found.append((float(whole[unit]), steps))

    def _begin(self, offers: list[list[_Offers]]) -> None:
        own: Bools = np.all((self.rows <= self.limits) | self.least, axis=1)
        reach = min(self.span, self.layers - 1)
        value = np.where(own[:, None], self.instance.cost.first[:, 1 : reach + 1] + self.price[:, None], np.inf)
        alone = self.visits.alone
        guess = value + self.prices.home[:, None] + self.rest[1 : reach + 1, alone].T
        unit, place = np.nonzero(guess < self.ceiling)
        flexed = self._between(self.tables[1], unit, place + 1)
        parent = np.full(len(unit), -1)
        _offer(offers, 0, place + 1, guess[unit, place], value[unit, place], parent, alone[unit], flexed)

    def _continue(self, offers: list[list[_Offers]], state: _States, enter: Floats, live: Ints, start: int) -> None:
        reach = min(self.span, self.layers - 1 - start)
        if reach <= 0:
            return
        home = self.prices.home[state.first]
        after = self.following[np.ix_(state.state, live)]
        guess = enter + (self.onward[start][after] + (home[:, None] - self.price[live]))
        guess[after < 0] = np.inf
        row, place = np.nonzero(guess < self.ceiling)
        room = 3 * self.width
        if len(row) > 4 * room:
            # More than can be kept, whatever is free.
            self.exhausted = False
            keep = np.argpartition(guess[row, place], 4 * room)[: 4 * room]
            row, place = row[keep], place[keep]
        free = self._free(state, row, live[place])
        row, place = row[free], place[free]
        if len(row) > room:
            self.exhausted = False
            keep = np.argpartition(guess[row, place], room)[:room]
            row, place = row[keep], place[keep]
        after, unit = after[row, place], live[place]
        value = enter[row, place][:, None] + self.instance.cost.row(start)[unit, 1 : reach + 1]
        guess = value + home[row][:, None] + self.rest[start + 1 : start + reach + 1].T[after]
        pair, place = np.nonzero(guess < self.ceiling)
        flexed = self._between(self.tables[0], unit[pair], place + 1)
        twice = flexed & state.flexed[row[pair]]
        pair, place, flexed = pair[~twice], place[~twice], flexed[~twice]
        flexed = flexed | state.flexed[row[pair]]
        ends, best = start + place + 1, guess[pair, place]
        _offer(offers, start, ends, best, value[pair, place], row[pair], after[pair], flexed)

    def _between(self, table: tuple[Ints, Ints], unit: NDArray[np.intp], number: NDArray[np.intp]) -> Bools:
        if not self.instance.movable:
            return np.zeros(len(unit), dtype=np.bool_)
        return (number != table[0][unit]) & (number != table[1][unit])

    def _pick(self, offers: Sequence[_Offers], states: Sequence[_States | None]) -> _States | None:
        if not offers:
            return None
        guess = np.concatenate([offer.guess for offer in offers])
        value = np.concatenate([offer.value for offer in offers])
        parent = np.concatenate([offer.parent for offer in offers])
        after = np.concatenate([offer.state for offer in offers])
        flexed = np.concatenate([offer.flexed for offer in offers])
        start = np.repeat(
            np.array([offer.start for offer in offers], dtype=np.int64), [len(offer.guess) for offer in offers]
        )
        room = 8 * self.width
        if len(guess) > room:
            self.exhausted = False
            order = np.argpartition(guess, room)[:room]
            guess, value, parent, start = guess[order], value[order], parent[order], start[order]
            after, flexed = after[order], flexed[order]
        unit = self.visits.unit[after]
        mark, first = self.marks[unit].copy(), unit.copy()
        origins: list[int] = np.unique(start).tolist()
        sources = [(before, past) for before in origins if (past := states[before]) is not None]
        for before, past in sources:
            mine = np.flatnonzero(start == before)
            mark[mine] += past.mark[parent[mine]]
            first[mine] = past.first[parent[mine]]
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
        self.peak = max(self.peak, len(unique))
        used = self.rows[unit[unique]]
        nodes = None
        if self.track:
            nodes = np.zeros((len(unique), self.nodes), dtype=np.bool_)
            nodes[np.arange(len(unique)), self.instance.node[unit[unique]]] = True
        for before, past in sources:
            rows = np.flatnonzero(start[unique] == before)
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


def _offer(
    offers: list[list[_Offers]], start: int, end: Ints, guess: Floats, value: Floats, parent: Ints, state: Ints,
    flexed: Bools,
) -> None:  # fmt: skip
    """Put each continuation where it ends."""
    if not len(end):
        return
    order = np.argsort(end, kind="stable")
    bounds = [*np.flatnonzero(np.diff(end[order], prepend=-1)).tolist(), len(order)]
    for low, high in pairwise(bounds):
        mine = order[low:high]
        offers[end[mine[0]]].append(_Offers(start, guess[mine], value[mine], parent[mine], state[mine], flexed[mine]))


def _extremes(table: Floats) -> tuple[Ints, Ints]:
    """Least and greatest number of layers of each unit."""
    fits = np.isfinite(table)
    return fits.argmax(axis=1), table.shape[1] - 1 - fits[:, ::-1].argmax(axis=1)
