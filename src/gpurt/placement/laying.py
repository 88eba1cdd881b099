"""Layers laid down from the first to the last, stage by stage, wherever there is room: a plan, or nothing said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.field import Field, integers
from gpurt.placement.holding import Holding
from gpurt.placement.instance import Bools, Ints
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.number_rules import Rules
from gpurt.placement.reaching import Together

Order = Literal["largest", "smallest", "scarcest"]
Layout = list[tuple[NDArray[np.intp], int]]
_ORDERS: Final[tuple[Order, ...]] = ("scarcest", "largest", "smallest")


@dataclass(slots=True)
class _Units:
    """``members[u, i]``: devices of each unit."""

    share: int
    members: NDArray[np.intp]
    budget: Ints
    run: Ints
    """``[u, s]``: layers from ``s`` on that it may hold."""
    takes: Bools
    total: Ints
    """Layers that it may hold in all."""


class Layer:
    """Lays layers on the chosen devices of a part, along its links. Rules of numbers are kept."""

    def __init__(
        self,
        field: Field,
        layers: LayerBytes,
        rules: Rules,
        holding: Holding,
        chosen: NDArray[np.intp],
        budgets: Ints,
        part: Together,
    ) -> None:
        self.field, self.layers, self.rules, self.holding, self.part = field, layers, rules, holding, part
        self.position = np.zeros(len(field.devices), dtype=np.intp)
        self.position[part.members] = np.arange(len(part.members))
        self.chosen, self.budgets = chosen, budgets
        self.weights, self.kv = (np.concatenate([[0], np.cumsum(table)]) for table in (layers.weights, layers.kv))

    def laid(self) -> Layout | None:
        """A plan, stage by stage: the places of its devices, and the layer it ends before. None says nothing."""
        for share in sorted(self.rules.sizes):
            units = self._units(share)
            for order in _ORDERS if len(units.members) else ():
                layout = self._lay(units, order)
                if layout is not None:
                    return layout
        return None

    def _units(self, share: int) -> _Units:
        members = self.chosen[:, None]
        if share > 1:
            found: list[NDArray[np.intp]] = []
            order = self.chosen[np.lexsort((self.chosen, -self.budgets[self.chosen], self.field.cell[self.chosen]))]
            for cell in np.unique(self.field.cell[order]):
                inside = order[self.field.cell[order] == cell]
                inside = self._one_of_each_memory(inside)
                groups = [inside[at : at + share] for at in range(0, len(inside) - share + 1, share)]
                found += [group for group in groups if self._joined(group)]
            members = np.array(found, dtype=np.intp).reshape(-1, share)
        holds = np.asarray(self.holding.holds[members].all(axis=1), dtype=np.bool_)
        count = self.layers.count
        run = np.zeros((len(members), count + 1), dtype=np.int64)
        for start in range(count - 1, -1, -1):
            run[:, start] = np.where(holds[:, start], run[:, start + 1] + 1, 0)
        return _Units(
            share,
            members,
            self.budgets[members].min(axis=1) if len(members) else np.zeros(0, dtype=np.int64),
            run,
            np.asarray(self.holding.takes[members].all(axis=1), dtype=np.bool_),
            holds.sum(axis=1),
        )

    def _one_of_each_memory(self, devices: NDArray[np.intp]) -> NDArray[np.intp]:
        drop = [index for pool in self.field.pools for index in [each for each in devices if each in pool][1:]]
        return devices[~np.isin(devices, drop)]

    def _joined(self, group: NDArray[np.intp]) -> bool:
        """Its devices reach each other, so that they can sum up."""
        place = self.position[group]
        return self.part.back is None or bool(self.part.back[np.ix_(place, place)].all())

    def _fit(self, units: _Units, start: int, extra: int) -> Ints:
        """Most layers of each unit from ``start`` on."""
        share = units.share
        rest = slice(start + 1, None)
        table = (
            -(-(self.weights[rest] - self.weights[start] + extra) // share)
            + -(-(self.kv[rest] - self.kv[start]) // share)
            + np.maximum.accumulate(self.layers.workspace[start:])
        )
        fit = np.searchsorted(table, units.budget, side="right")
        most = self.rules.most[units.members].min(axis=1)
        fit = np.where(units.budget > 0, fit, 0)  # it takes no part, not even for layers without a byte
        return np.minimum(np.minimum(fit, units.run[:, start]), most)

    def _lay(self, units: _Units, order: Order) -> Layout | None:
        rules, count = self.rules, self.layers.count
        least = rules.least[units.members].max(axis=1)
        free = np.ones(len(units.members), dtype=np.bool_)
        used: list[int] = []
        ends: list[int] = []
        done = 0
        while done < count:
            allowed = free & self._allowed(units, used)
            if done:
                allowed &= units.takes[:, done] & self._reached(self.part.onward, units, units.members[used[-1]])
            embedding = self.layers.ends[0] if done == 0 else 0
            fit = self._fit(units, done, embedding)
            head = self.layers.both if done == 0 else self.layers.ends[1]
            finishing = allowed & (self._fit(units, done, head) >= count - done) & (least <= count - done)
            if used:
                finishing &= self._reaching(self.part.back, units, units.members[used[0]])
            fresh = self._fresh(units, used)
            if finishing.any():
                complete = [*used, self._pick(units, np.flatnonzero(finishing), fit, fresh, order)]
                if self._finished(units, complete):
                    return [(units.members[unit], end) for unit, end in zip(complete, [*ends, count], strict=True)]
            # A layer is left for each stage that there has to be, at least for the last one, which holds the head.
            fit = np.minimum(fit, count - done - max(1, self._missing(units, used) - 1))
            allowed &= (fit >= least) & (fit > 0)
            if not allowed.any():
                return None
            unit = self._pick(units, np.flatnonzero(allowed), fit, fresh, order)
            used.append(unit)
            free[unit] = False
            done += int(fit[unit])
            ends.append(done)
        return None

    def _reached(self, ways: Bools | None, units: _Units, sender: NDArray[np.intp]) -> Bools:
        """Units all of whose devices are reached by some device of the sender."""
        if ways is None:
            return np.ones(len(units.members), dtype=np.bool_)
        some = np.logical_or.reduce(ways[self.position[sender]], axis=0)
        return np.logical_and.reduce(some[self.position[units.members]], axis=1)

    def _reaching(self, ways: Bools | None, units: _Units, receiver: NDArray[np.intp]) -> Bools:
        """Units some device of which reaches each device of the receiver."""
        if ways is None:
            return np.ones(len(units.members), dtype=np.bool_)
        each = ways[:, self.position[receiver]][self.position[units.members]]
        return np.logical_and.reduce(np.logical_or.reduce(each, axis=1), axis=1)

    def _missing(self, units: _Units, used: list[int]) -> int:
        """Stages that the rules ask for besides those that are there."""
        rules = self.rules
        if rules.min_stages <= 1 and rules.min_nodes <= 1 and not rules.required.size:
            return 0
        taken = units.members[used]
        nodes = len(np.unique(self.field.node[taken[:, 0]])) if used else 0
        required = len(rules.required) - int(np.isin(rules.required, taken).sum())
        return max(rules.min_stages - len(used), rules.min_nodes - nodes, required)

    def _fresh(self, units: _Units, used: list[int]) -> Bools:
        """Units on further nodes, while more of them are asked for."""
        if self.rules.min_nodes <= 1:
            return np.zeros(len(units.members), dtype=np.bool_)
        nodes = np.unique(self.field.node[units.members[used, 0]])
        if len(nodes) >= self.rules.min_nodes:
            return np.zeros(len(units.members), dtype=np.bool_)
        return ~np.isin(self.field.node[units.members[:, 0]], nodes)

    def _pick(self, units: _Units, among: NDArray[np.intp], fit: Ints, fresh: Bools, order: Order) -> int:
        wanted = np.isin(units.members[among], self.rules.required).any(axis=1)
        wanted |= np.isin(self.field.node[units.members[among, 0]], list(self.rules.required_nodes))
        size = -units.budget[among] if order == "smallest" else units.budget[among]
        scarce = units.total[among] if order == "scarcest" else np.zeros(len(among), dtype=np.int64)
        return int(among[np.lexsort((among, -size, -fit[among], scarce, ~fresh[among], ~wanted))[0]])

    def _allowed(self, units: _Units, used: list[int]) -> Bools:
        rules, field = self.rules, self.field
        able = np.ones(len(units.members), dtype=np.bool_)
        if not used:
            return able
        taken = units.members[used]
        if rules.stages is not None and len(used) >= rules.stages:
            able[:] = False
        if rules.nodes is not None:
            nodes = np.unique(field.node[taken[:, 0]])
            if len(nodes) >= rules.nodes:
                able &= np.isin(field.node[units.members[:, 0]], nodes)
        for numbers, limit in rules.domains:
            names, times = np.unique(np.concatenate([np.unique(numbers[row]) for row in taken]), return_counts=True)
            full = names[(times >= limit) & (names >= 0)]
            able &= ~np.isin(numbers[units.members], full).any(axis=1)
        for pool in field.pools:
            if np.isin(taken, pool).any():
                able &= ~np.isin(units.members, pool).any(axis=1)
        return able

    def _finished(self, units: _Units, used: list[int]) -> bool:
        """The rules that ask for at least so much are kept."""
        rules, taken = self.rules, units.members[used]
        nodes = set(integers(self.field.node[taken[:, 0]]))
        return (
            len(used) >= rules.min_stages
            and len(nodes) >= rules.min_nodes
            and set(integers(rules.required)) <= set(taken.ravel().tolist())
            and rules.required_nodes <= nodes
        )
