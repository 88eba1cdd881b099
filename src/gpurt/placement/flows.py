"""The flow of a pipeline through its units as a linear programme, with rows and columns added as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from gpurt.placement.filling import Filling
from gpurt.placement.instance import Bools, Floats, Instance
from gpurt.placement.quiet_highs import quiet_highs
from gpurt.placement.walks import EPS, minimum_cut, walked

DENSE: Final = 72
"""Units up to which every arc is a column from the start."""
_NEAR: Final = 8
"""Arcs from and to each unit to begin with where not all are."""


class FlowModel:
    """Columns: ways back, uses and layers of each unit, then arcs.

    A way back is a pair (last, first) at its true price. With ``split`` it is two columns, at least as cheap as any
    pair: fewer columns, still a bound. Arcs outside ``arcs`` do not exist; of those inside, only some are columns at
    first, and :meth:`price` brings in the others where they pay.
    """

    def __init__(
        self, instance: Instance, arcs: Bools, *, split: bool, stop: Callable[[], bool], kept: Sequence[int] = ()
    ) -> None:
        import highspy

        self.instance = instance
        filling = Filling(instance)
        size = self.size = instance.size
        inner, first, last = (np.array(high) for high in filling.high)
        low = np.array(filling.low[0])
        self.hop = np.where(arcs, instance.hop[0], np.inf)
        back = np.where((last > 0)[:, None] & (first > 0)[None, :], instance.back, np.inf)
        if split:
            leave = back.min(axis=1)
            begins, finishes = np.flatnonzero(np.isfinite(back).any(axis=0)), np.flatnonzero(np.isfinite(leave))
            self.end_first = np.concatenate([begins, np.full(len(finishes), -1)])
            self.end_last = np.concatenate([np.full(len(begins), -1), finishes])
            end_cost = np.concatenate([np.zeros(len(begins)), leave[finishes] + instance.head[finishes]])
        else:
            self.end_last, self.end_first = np.nonzero(np.isfinite(back))
            end_cost = back[self.end_last, self.end_first] + instance.head[self.end_last]
        self.end_count = len(end_cost)
        self.use0 = self.end_count
        self.layer0 = self.use0 + size
        self.arc0 = self.layer0 + size
        takes = [uses > 0 for uses in instance.uses]
        self.copies = np.array([
            int((instance.available[mine] // uses[mine]).min())
            for mine, uses in zip(takes, instance.uses, strict=True)
        ], dtype=np.int64)  # fmt: skip
        self.highs: Any = quiet_highs()
        # The number of threads is one for the whole process: to ask for another than its host did is an error.

        def interrupt(event: Any) -> None:
            if stop():
                event.interrupt()

        # Asked between nodes of the search tree; the linear programmes are short and are not asked at every pivot.
        self.highs.cbMipInterrupt += interrupt
        self.inf = highspy.kHighsInf
        # No upper bounds: the limits imply them, and then the limits carry all prices.
        self.highs.addVars(self.arc0, np.zeros(self.arc0), np.full(self.arc0, self.inf))
        cost = np.concatenate([end_cost, np.zeros(size), instance.slope])
        self.highs.changeColsCost(self.arc0, np.arange(self.arc0, dtype=np.int32), cost)
        begin: list[list[int]] = [[] for _ in range(size)]
        finish: list[list[int]] = [[] for _ in range(size)]
        for column in range(self.end_count):
            first_unit, last_unit = int(self.end_first[column]), int(self.end_last[column])
            if first_unit >= 0:
                begin[first_unit].append(column)
            if last_unit >= 0:
                finish[last_unit].append(column)
        rows: list[tuple[float, float, np.ndarray, np.ndarray]] = []
        # Row u: into unit u; row size + u: out of it.
        rows += [_row(0, 0, begin[unit], [self.use0 + unit]) for unit in range(size)]
        rows += [_row(0, 0, finish[unit], [self.use0 + unit]) for unit in range(size)]
        for unit in range(size):
            use, layer = self.use0 + unit, self.layer0 + unit
            index = [layer, use, *begin[unit], *finish[unit]]
            value = [1.0, -float(inner[unit])]
            value += [float(inner[unit] - first[unit])] * len(begin[unit])
            value += [float(inner[unit] - last[unit])] * len(finish[unit])
            rows.append(_merged(-self.inf, 0.0, index, value))
            rows.append((0.0, self.inf, np.array([layer, use]), np.array([1.0, -float(low[unit])])))
            if inner[unit] == 0:
                rows.append(_row(-self.inf, 0.0, [use], [*begin[unit], *finish[unit]]))
        for ends in (self.end_first, self.end_last):
            mine = np.flatnonzero(ends >= 0)
            rows.append((1.0, 1.0, mine, np.ones(len(mine))))
        every = float(instance.layers)
        rows.append((every, every, np.arange(self.layer0, self.arc0), np.ones(size)))
        self.limit0 = len(rows)
        """Row of the first limit."""
        for limit, column in zip(instance.limits, instance.rows.T, strict=True):
            used = np.flatnonzero(column)
            rows.append((-self.inf, float(limit), self.use0 + used, column[used].astype(np.float64)))
        self.row_count = 0
        self.cuts: list[tuple[int, Bools]] = []
        self._add(rows)
        self.tail = self.head = np.empty(0, dtype=np.int64)
        self.there = ~np.isfinite(self.hop)
        self._add_arcs(self._nearest(kept))

    @property
    def columns(self) -> int:
        return self.arc0 + len(self.tail)

    def _nearest(self, kept: Sequence[int]) -> Bools:
        """The arcs to begin with: the cheapest from and to each unit, and those of a plan."""
        if self.size <= DENSE:
            return np.isfinite(self.hop)
        near = _least_of_rows(self.hop, _NEAR)
        near |= _least_of_rows(np.ascontiguousarray(self.hop.T), _NEAR).T
        near[list(kept[:-1]), list(kept[1:])] = True
        return near & np.isfinite(self.hop)

    def _add_arcs(self, wanted: Bools) -> None:
        tail, head = np.nonzero(wanted & ~self.there)
        count = len(tail)
        if not count:
            return
        self.there |= wanted
        index = [np.stack([head, self.size + tail], axis=1)]
        width = [np.full(count, 2)]
        crossing = [(row, ~member[tail] & member[head]) for row, member in self.cuts]
        if crossing:
            cut_rows = [[row for row, crosses in crossing if crosses[arc]] for arc in range(count)]
            width.append(np.array([len(found) for found in cut_rows]))
            flat = [[int(head[arc]), int(self.size + tail[arc]), *cut_rows[arc]] for arc in range(count)]
            entries = np.array([row for found in flat for row in found], dtype=np.int32)
        else:
            entries = index[0].ravel().astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(sum(width))])[:-1].astype(np.int32)
        upper = np.full(count, self.inf)
        self.highs.addCols(
            count, self.hop[tail, head], np.zeros(count), upper, len(entries), starts, entries, np.ones(len(entries))
        )
        self.tail, self.head = np.concatenate([self.tail, tail]), np.concatenate([self.head, head])

    def price(self) -> tuple[int, float]:
        """Bring in arcs that pay. Returns how many, and how much less all missing arcs could make of the optimum."""
        if self.size <= DENSE:
            return 0, 0.0
        reduced = self._missing()
        best = reduced.min(axis=0)
        missing = float((self.copies * np.minimum(best, 0.0))[np.isfinite(best)].sum())
        pays = reduced < -1e-9
        count = int(pays.sum())
        if count > 4 * self.size:
            worst = np.partition(reduced[pays], 4 * self.size)[4 * self.size]
            pays &= reduced <= worst
        self._add_arcs(pays)
        return count, missing

    def complete(self, slack: float) -> None:
        """Make columns of all arcs that may be in a plan that is up to ``slack`` above the relaxation."""
        if np.isfinite(slack):
            self._add_arcs(self._missing() <= slack)
        else:
            self._add_arcs(np.isfinite(self.hop))

    def _missing(self) -> Floats:
        """Reduced cost of the arcs that are no columns; infinite for the others."""
        dual = np.array(self.highs.getSolution().row_dual)
        reduced = self.hop - dual[self.size : 2 * self.size][:, None] - dual[: self.size][None, :]
        for row, member in self.cuts:
            if dual[row]:
                reduced[np.ix_(~member, member)] -= dual[row]
        reduced[self.there] = np.inf
        return reduced

    def _add(self, rows: Sequence[tuple[float, float, np.ndarray, np.ndarray]]) -> None:
        if not rows:
            return
        starts = np.cumsum([0, *(len(index) for _, _, index, _ in rows)])[:-1]
        index = np.concatenate([row[2] for row in rows]).astype(np.int32)
        value = np.concatenate([row[3] for row in rows]).astype(np.float64)
        lower = np.array([row[0] for row in rows], dtype=np.float64)
        upper = np.array([row[1] for row in rows], dtype=np.float64)
        self.row_count += len(rows)
        self.highs.addRows(len(rows), lower, upper, len(index), starts.astype(np.int32), index, value)

    def run(self, seconds: float) -> Any:
        """Model status. ``run`` lets go of the GIL."""
        self.highs.setOptionValue("time_limit", max(0.01, self.highs.getRunTime() + seconds))
        self.highs.run()
        return self.highs.getModelStatus()

    def values(self) -> Floats:
        return np.array(self.highs.getSolution().col_value)

    def limit_prices(self) -> Floats:
        """What one more of each limit would be worth."""
        dual = np.array(self.highs.getSolution().row_dual)
        return np.maximum(0.0, -dual[self.limit0 : self.limit0 + len(self.instance.limits)])

    def detours(self) -> Floats:
        """``[u]``: how much more than the relaxation a plan costs at least that uses u."""
        column = np.maximum(0.0, self.reduced())
        arcs = self._missing()
        arcs[self.tail, self.head] = column[self.arc0 :]
        into, out = arcs.min(axis=0), arcs.min(axis=1)
        begins, finishes = self.end_first >= 0, self.end_last >= 0
        np.minimum.at(into, self.end_first[begins], column[: self.end_count][begins])
        np.minimum.at(out, self.end_last[finishes], column[: self.end_count][finishes])
        return np.maximum(0.0, into) + np.maximum(0.0, out) + column[self.use0 : self.layer0]

    def reduced(self) -> Floats:
        return np.array(self.highs.getSolution().col_dual)

    def cut(self, values: Floats) -> int:
        """Add a row for every set of units that the walk does not enter often enough. Returns how many."""
        use = values[self.use0 : self.layer0] / self.copies
        flow = values[self.arc0 :]
        live = np.flatnonzero((flow > EPS) & (self.tail != self.head))
        entry = np.zeros(self.size)
        begins = self.end_first >= 0
        np.add.at(entry, self.end_first[begins], values[: self.end_count][begins])
        edges = [(int(self.tail[arc]), int(self.head[arc]), float(flow[arc])) for arc in live]
        sets: set[frozenset[int]] = set()
        for unit in np.argsort(-use):
            if use[unit] < 0.05:
                break
            if any(int(unit) in found for found in sets):
                continue
            inside = minimum_cut(self.size, edges, entry, int(unit), float(use[unit]) - 1e-4)
            if inside is not None:
                sets.update(inside)
        for inside in sets:
            member = np.zeros(self.size, dtype=np.bool_)
            member[list(inside)] = True
            self.cuts.append((self.row_count, member))
            self._add([self._entering(member, max(inside, key=lambda unit: use[unit]))])
        return len(sets)

    def _entering(self, member: Bools, often: int) -> tuple[float, float, np.ndarray, np.ndarray]:
        arcs = self.arc0 + np.flatnonzero(~member[self.tail] & member[self.head])
        begins = np.flatnonzero((self.end_first >= 0) & member[self.end_first])
        index = np.concatenate([arcs, begins, [self.use0 + often]])
        value = np.concatenate([np.ones(len(arcs) + len(begins)), [-1.0 / self.copies[often]]])
        return 0.0, self.inf, index, value

    def forbid(self, columns: np.ndarray) -> None:
        """Columns that no better plan uses."""
        count = len(columns)
        if count:
            self.highs.changeColsBounds(count, columns.astype(np.int32), np.zeros(count), np.zeros(count))

    def integral(self) -> None:
        import highspy

        whole = np.concatenate([np.arange(self.layer0), np.arange(self.arc0, self.columns)]).astype(np.int32)
        self.highs.changeColsIntegrality(len(whole), whole, np.full(len(whole), highspy.HighsVarType.kInteger))

    def start(self, units: Sequence[int], ends: Sequence[int]) -> None:
        """Give a plan to begin with."""
        value = np.zeros(self.columns)
        arcs = {(int(a), int(b)): arc for arc, (a, b) in enumerate(zip(self.tail, self.head, strict=True))}
        backs = {
            (int(a), int(b)): place for place, (a, b) in enumerate(zip(self.end_last, self.end_first, strict=True))
        }
        begin = 0
        for place, (unit, end) in enumerate(zip(units, ends, strict=True)):
            value[self.use0 + unit] += 1
            value[self.layer0 + unit] += end - begin
            begin = end
            if place:
                arc = arcs.get((units[place - 1], unit))
                if arc is None:
                    return
                value[self.arc0 + arc] += 1
        back = backs.get((units[-1], units[0]))
        if back is None:
            return
        value[back] = 1
        index = np.arange(self.columns, dtype=np.int32)
        self.highs.setSolution(self.columns, index, value)

    def walk(self, values: Floats) -> tuple[tuple[int, ...], bool]:
        """The order of units, and whether it is one walk; walks apart from the first are put behind it."""
        number = np.rint(values).astype(np.int64)
        nexts: list[list[int]] = [[] for _ in range(self.size)]
        for arc in np.flatnonzero(number[self.arc0 :]):
            nexts[self.tail[arc]] += [int(self.head[arc])] * int(number[self.arc0 + arc])
        chosen = np.flatnonzero(number[: self.end_count])
        first, last = int(self.end_first[chosen].max()), int(self.end_last[chosen].max())
        order = walked(nexts, first)
        whole = len(order) == int(number[self.use0 : self.layer0].sum()) and order[-1] == last
        for unit in range(self.size):
            while nexts[unit]:
                # A circle: it ends where it began, and is entered once.
                order[-1:-1] = walked(nexts, unit)[:-1]
        return tuple(order), whole


def _row(lower: float, upper: float, plus: list[int], minus: list[int]) -> tuple[float, float, np.ndarray, np.ndarray]:
    return _merged(lower, upper, [*plus, *minus], [1.0] * len(plus) + [-1.0] * len(minus))


def _merged(
    lower: float, upper: float, index: list[int], value: list[float]
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """A row whose columns are named once: a way back from a unit to another copy of itself is in both lists."""
    total: dict[int, float] = {}
    for column, factor in zip(index, value, strict=True):
        total[column] = total.get(column, 0.0) + factor
    return lower, upper, np.array(list(total), dtype=np.int64), np.array(list(total.values()))


def _least_of_rows(table: Floats, count: int) -> Bools:
    """The ``count`` least of each row. One after the other, because to partition rows of many equal values, which links
    of one kind are, takes ten times as long."""
    left, least = table.copy(), np.zeros(table.shape, dtype=np.bool_)
    rows = np.arange(len(table))
    for _ in range(count):
        place = left.argmin(axis=1)
        least[rows, place] = True
        left[rows, place] = np.inf
    return least
