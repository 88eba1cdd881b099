"""Most layers that some devices hold under rules of number, counted and not searched.

Two figures: no plan holds more than ``high``, and some plan holds ``low`` where every device reaches every other one.
They are equal wherever devices are taken one by one: a larger device is never worse than a smaller one at the same
place, so that the largest devices that the limits let in are the best choice (greedy on a laminar matroid).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.field import BOTH, FIRST, INNER, LAST, NEVER, Cells, Field, cells_of, integers
from gpurt.placement.greedy import choose_stages
from gpurt.placement.instance import Ints
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.node_choice import best_nodes
from gpurt.placement.number_rules import Rules
from gpurt.placement.stage_table import most_on_stages


@dataclass(frozen=True, slots=True)
class Bound:
    """Layers, at most those of the model."""

    low: int
    high: int
    devices: tuple[int, ...] = ()
    """Some that hold ``low`` layers, where they are known."""


def count_layers(
    field: Field,
    layers: LayerBytes,
    rules: Rules,
    chosen: NDArray[np.intp],
    budgets: Ints,
    *,
    part: tuple[bool, bool] | None = None,
) -> Bound:
    """Bounds for the chosen devices; ``budgets`` are of all devices.

    ``part``: only some of the layers are meant, with or without the embedding and the head; then only ``high`` counts.
    """
    counter = _Counter(field, layers, rules, budgets, part)
    return counter.run(_without_shared_memory(field, rules, chosen, budgets))


def _without_shared_memory(
    field: Field, rules: Rules, chosen: NDArray[np.intp], budgets: Ints
) -> tuple[NDArray[np.intp], bool]:
    """One device of each memory, and whether nothing is lost by the choice."""
    if not field.pools:
        return chosen, True
    inside, required = set(integers(chosen)), set(integers(rules.required))
    drop: set[int] = set()
    sure = True
    for pool in field.pools:
        members = [index for index in pool if index in inside]
        if len(members) > 1:
            members.sort(key=lambda index: (index not in required, -int(budgets[index]), index))
            drop |= set(members[1:])
            same = len({field.cell[index] for index in members}) == 1 or max(rules.sizes) == 1
            sure &= same and int(budgets[members[0]]) == max(int(budgets[index]) for index in members)
            sure &= not rules.alone.size or not set(members) & set(integers(rules.alone))
    return np.array([index for index in integers(chosen) if index not in drop], dtype=np.intp), sure


class _Counter:
    def __init__(
        self, field: Field, layers: LayerBytes, rules: Rules, budgets: Ints, part: tuple[bool, bool] | None
    ) -> None:
        self.field, self.layers, self.rules, self.budgets, self.part = field, layers, rules, budgets, part
        self.best: tuple[int, tuple[int, ...]] = NEVER, ()
        """Most layers so far, and the devices that hold them."""

    def run(self, chosen: tuple[NDArray[np.intp], bool]) -> Bound:
        rules, count = self.rules, self.layers.count
        index, sure = chosen
        if not index.size or rules.lost or rules.min_stages > count:
            return Bound(0, 0)
        if self._cannot_reach_minimum(index):
            return Bound(0, 0)
        if count == 1 and self.part is None:
            # One layer is the first and the last at once.
            low, high = (max(0, held) for held in self._whole(index))
            return Bound(low, high if sure else 1, self.best[1] if low else ())
        low, high = self._value(self._cells(index, (1,), rules.alone))
        if max(rules.sizes) > 1 and low < count:
            grouped = self._cells(index, rules.sizes, rules.alone)
            more, high = self._value(grouped)
            low = max(low, more)
            if rules.ruled:
                free = self._cells(index, rules.sizes, rules.alone[:0])
                high = self._value(free, loose=True)[1]
        whole_low, whole_high = self._whole(index)
        low, high = max(low, whole_low, 0), max(high, whole_high, 0)
        if not sure:
            high = count
        devices = self.best[1] if self.best[0] >= min(low, count) else ()
        return Bound(min(low, count), min(max(high, low), count), devices)

    def _hold(self, low: int, cells: list[Cells], taken: Sequence[NDArray[np.intp]]) -> None:
        if low > self.best[0]:
            used = [found.members[number > 0].ravel() for found, number in zip(cells, taken, strict=True)]
            self.best = low, tuple(integers(np.concatenate(used)))

    def _cells(self, index: NDArray[np.intp], sizes: Sequence[int], alone: NDArray[np.intp]) -> list[Cells]:
        rules = self.rules
        stages = rules.stages if rules.limited else 0
        cells = cells_of(self.field, self.layers, index, self.budgets, sizes, alone, rules.most, rules.least, stages)
        if self.part is not None:
            for found in cells:
                _only(found.table, *self.part)
        return cells

    def _cannot_reach_minimum(self, index: NDArray[np.intp]) -> bool:
        rules = self.rules
        if rules.min_stages <= 1 and rules.min_nodes <= 1 and not rules.ruled:
            return False
        able = np.zeros(len(index), dtype=np.bool_)
        for size in rules.sizes:
            able |= self.layers.fit(self.budgets[index], size) >= rules.least[index]
        able &= rules.most[index] >= rules.least[index]
        index = index[able]
        if set(integers(rules.required)) - set(integers(index)):
            return True
        nodes = set(integers(self.field.node[index]))
        if rules.required_nodes - nodes or len(nodes) < rules.min_nodes:
            return True
        most = len(index)
        if rules.nodes is not None:
            per_node = sorted(Counter(integers(self.field.node[index])).values(), reverse=True)
            most = min(most, sum(per_node[: rules.nodes]))
        for domain, limit in rules.domains:
            inside = Counter(integers(domain[index]))
            free = inside.pop(-1, 0)
            most = min(most, free + sum(min(limit, number) for number in inside.values()))
        return most < rules.min_stages

    def _whole(self, index: NDArray[np.intp]) -> tuple[int, int]:
        """All layers on one device or group."""
        rules, count, layers = self.rules, self.layers.count, self.layers
        if rules.min_stages > 1 or rules.min_nodes > 1 or len(rules.required_nodes) > 1:
            return NEVER, NEVER
        extra = layers.both if self.part is None else 0
        low = high = NEVER
        for size in rules.sizes:
            if len(rules.required) > size:
                continue
            need = int(layers.need(size, extra)[count])
            able = index[(self.budgets[index] >= max(1, need)) & (rules.most[index] >= count)]
            if len(able) < size:
                continue
            cells = Counter(integers(self.field.cell[able]))
            if not any(number >= size for number in cells.values()):
                continue
            high = count
            if not rules.ruled:
                low = count
                self.best = count, tuple(integers(able))
            elif size == 1:
                wanted = set(integers(rules.required))
                for device in integers(able):
                    if wanted <= {device} and rules.required_nodes <= {int(self.field.node[device])}:
                        low = count
                        self.best = count, (device,)
        return low, high

    def _value(self, cells: list[Cells], *, loose: bool = False) -> tuple[int, int]:
        """Layers on several stages: what greedy choice gives, and what no choice exceeds. ``loose``: rules that name
        devices are left out."""
        rules = self.rules
        if rules.nodes is None:
            return self._anywhere(cells, loose=loose)
        forced = set[int]() if loose else self._forced_nodes()
        keep, high = best_nodes(cells, self.field, rules.nodes, forced)
        # Inside the nodes with most room the limits may leave less than elsewhere.
        low, _ = self._anywhere(self._inside(cells, keep), loose=loose)
        if low < self.layers.count and rules.min_stages > 1:
            low = max(low, self._anywhere(self._inside(cells, self._divided(cells, forced)), loose=loose)[0])
        return low, high

    def _inside(self, cells: list[Cells], nodes: set[int]) -> list[Cells]:
        return [
            Cells(found.table[inside], found.members[inside])
            for found in cells
            if (inside := np.isin(self.field.node[found.members[:, 0]], list(nodes))).any()
        ]

    def _divided(self, cells: list[Cells], forced: set[int]) -> set[int]:
        """The nodes that make most stages, behind those that best hold the embedding and the head; those that hold
        most layers first among equals."""
        best = np.concatenate([found.best for found in cells])
        node = np.concatenate([self.field.node[found.members[:, 0]] for found in cells])
        number = np.concatenate([(found.table[:, 1:, INNER] > 0).sum(axis=1) for found in cells])
        stages = np.bincount(node, weights=number)
        room = np.bincount(node, weights=np.maximum(best[:, INNER], 0))
        one = int(best[:, FIRST].argmax())
        other = int(np.where(np.arange(len(best)) == one, NEVER, best[:, LAST]).argmax())
        wanted = forced | {int(node[one]), int(node[other])}
        order = sorted(set(integers(node)), key=lambda name: (name not in wanted, -stages[name], -room[name], name))
        return set(order[: self.rules.nodes])

    def _anywhere(self, cells: list[Cells], *, loose: bool) -> tuple[int, int]:
        """As ``_value``, on any number of nodes."""
        rules = self.rules
        if not cells:
            return NEVER, NEVER
        if rules.limited:
            return self._limited(cells, loose=loose)
        best = np.concatenate([found.best for found in cells])
        value = low = best_pair(best)
        taken = [found.table[:, :, INNER].argmax(axis=1) for found in cells]
        if rules.min_stages > 1 or rules.min_nodes > 1 or (rules.ruled and not loose):
            low = self._checked(cells, taken, value)
        self._hold(low, cells, taken)
        return low, value

    def _forced_nodes(self) -> set[int]:
        return self.rules.required_nodes | set(integers(self.field.node[self.rules.required]))

    def _checked(self, cells: list[Cells], taken: Sequence[NDArray[np.intp]], value: int) -> int:
        """``value`` if the stages taken keep the rules that ask for at least so much, else never."""
        rules, field = self.rules, self.field
        stages = sum(int(found.sum()) for found in taken)
        used = [found.members[number > 0] for found, number in zip(cells, taken, strict=True)]
        devices = {int(index) for members in used for index in members.ravel()}
        nodes = {int(field.node[index]) for index in devices}
        required = set(integers(rules.required))
        with_required = set(integers(field.node[rules.required]))
        # The fewest layers of as few of these stages as keep the rules: more can follow, one layer each, until there
        # are enough. What holds the embedding and the head may be two further ones.
        elsewhere = rules.required_nodes - with_required
        least = sum(int(rules.least[index]) for index in devices & set(integers(rules.alone))) + len(elsewhere)
        ends = 2 if any(self.layers.ends) else 0
        least += max(
            rules.min_stages - len(required) - len(elsewhere),
            rules.min_nodes - len(with_required | elsewhere) + ends,
            ends,
        )
        good = (
            stages >= rules.min_stages
            and len(nodes) >= rules.min_nodes
            and required <= devices
            and rules.required_nodes <= nodes
            and least <= self.layers.count
        )
        return value if good else NEVER

    def _limited(self, cells: list[Cells], *, loose: bool) -> tuple[int, int]:
        rules = self.rules
        wanted = (set[int](), set[int]()) if loose else (set(integers(rules.required)), rules.required_nodes)
        choice = choose_stages(cells, self.field, rules.stages, rules.domains, *wanted)
        taken = [number for number in choice.taken]
        rows = np.concatenate(
            [found.table[np.arange(len(number)), number] for found, number in zip(cells, taken, strict=True)]
        )
        low = best_pair(rows)
        if low > 0 and (rules.min_stages > 1 or rules.min_nodes > 1 or rules.ruled):
            low = self._checked(cells, taken, low)
        self._hold(low, cells, taken)
        if choice.exact:
            high = best_pair(rows)
        else:
            loss = best_pair(np.concatenate([_least_losses(found) for found in cells]), base=0)
            high = choice.high + min(0, loss)
        if rules.stages is not None and low < self.layers.count <= high:
            most = most_on_stages(cells, rules.stages)
            high = min(high, most)
            if not (rules.domains or rules.ruled or rules.min_stages > 1 or rules.min_nodes > 1):
                low = max(low, most)
        return low, high


def _only(table: Ints, first: bool, last: bool) -> None:
    """Layers of a part of the model, which may begin with the embedding, and may end with the head."""
    if not first:
        table[:, :, FIRST] = table[:, :, INNER]
    if not last:
        table[:, :, LAST] = table[:, :, INNER]
    # One device may have both.
    table[:, :, BOTH] = np.minimum(table[:, :, FIRST], table[:, :, LAST])


def _least_losses(cells: Cells) -> Ints:
    """``[c, state]``: least that embedding and head take away, over the number of stages."""
    inner = cells.table[:, :, INNER, None]
    loss = np.where(inner > NEVER // 2, cells.table - inner, NEVER)
    found = loss.max(axis=1)
    found[:, INNER] = 0
    return found


def best_pair(best: Ints, base: int | None = None) -> int:
    """Most layers when one cell has the embedding and one, maybe the same, the head: ``best[c, state]``."""
    if base is None:
        base = int(np.maximum(best[:, INNER], 0).sum())
    inner = np.maximum(best[:, INNER], 0)
    first, last, both = (best[:, state] - inner for state in (FIRST, LAST, BOTH))
    value = int(both.max())
    if len(best) > 1:
        # Two candidates each are enough to avoid that one cell is taken for both.
        for one in np.argpartition(-first, 1)[:2]:
            for other in np.argpartition(-last, 1)[:2]:
                if one != other:
                    value = max(value, int(first[one] + last[other]))
    return base + value
