"""Most layers that some devices hold under rules of number, counted and not searched.

Two figures: no plan holds more than ``high``, and some plan holds ``low`` where every device reaches every other one.
They are equal wherever devices are taken one by one: a larger device is never worse than a smaller one at the same
place, so that the largest devices that the limits let in are the best choice (greedy on a laminar matroid).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.constraints import Constraints
from gpurt.placement.field import BOTH, FIRST, INNER, LAST, NEVER, Cells, Field, cells_of, integers
from gpurt.placement.instance import Ints
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.node_choice import best_nodes
from gpurt.placement.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Bound:
    """Layers, at most those of the model."""

    low: int
    high: int


class Rules:
    """Of the constraints what is a number of stages, nodes or layers; of the model how it may be split."""

    def __init__(self, model: ModelSpec, constraints: Constraints, field: Field) -> None:
        most = constraints.tensor_parallel_max
        self.sizes = tuple(size for size in model.tensor_parallel if most is None or size <= most)
        self.stages = constraints.max_stages
        self.min_stages = constraints.min_stages
        self.nodes = constraints.max_nodes
        self.min_nodes = constraints.min_nodes
        self.domains = [(field.domain(limit.domain), limit.stages) for limit in constraints.domain_limits]
        self.required = np.array(
            sorted(field.place[name] for name in constraints.require_devices if name in field.place), dtype=np.intp
        )
        self.lost = len(self.required) < len(constraints.require_devices)
        """A required device is not among these."""
        named = {device.node: index for device, index in zip(field.devices, field.node, strict=True)}
        self.required_nodes = {int(named[name]) for name in constraints.require_nodes if name in named}
        self.lost |= len(self.required_nodes) < len(constraints.require_nodes)
        self.most = np.full(len(field.devices), model.layer_count, dtype=np.int64)
        self.least = np.ones(len(field.devices), dtype=np.int64)
        special: list[int] = []
        for entry in constraints.stage_layers:
            if (index := field.place.get(entry.device)) is not None:
                special.append(index)
                self.least[index] = max(self.least[index], entry.minimum)
                if entry.maximum is not None:
                    self.most[index] = min(self.most[index], entry.maximum)
        self.alone = np.unique(np.array([*special, *self.required], dtype=np.intp))
        self.ruled = bool(self.alone.size or self.required_nodes)
        self.limited = self.stages is not None or bool(self.domains)

    def without_names(self) -> Rules:
        """Without the rules that ask for something: for a part of the layers."""
        rules = copy(self)
        rules.min_stages = rules.min_nodes = 1
        rules.required, rules.required_nodes = self.required[:0], set[int]()
        rules.lost = False
        rules.ruled = bool(self.alone.size)
        return rules


def count_layers(
    field: Field, layers: LayerBytes, rules: Rules, chosen: NDArray[np.intp], budgets: Ints, *, inner: bool = False
) -> Bound:
    """Bounds for the chosen devices; ``budgets`` are of all devices. ``inner``: embedding and head do not count."""
    counter = _Counter(field, layers, rules, budgets, inner=inner)
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
    def __init__(self, field: Field, layers: LayerBytes, rules: Rules, budgets: Ints, *, inner: bool) -> None:
        self.field, self.layers, self.rules, self.budgets, self.inner = field, layers, rules, budgets, inner

    def run(self, chosen: tuple[NDArray[np.intp], bool]) -> Bound:
        rules, count = self.rules, self.layers.count
        index, sure = chosen
        if not index.size or rules.lost or rules.min_stages > count:
            return Bound(0, 0)
        if self._cannot_reach_minimum(index):
            return Bound(0, 0)
        low = high = NEVER
        singles = self._cells(index, (1,), rules.alone)
        low, _ = self._value(singles)
        if max(rules.sizes) == 1:
            high = self._value(singles)[1]
        else:
            grouped = self._cells(index, rules.sizes, rules.alone)
            low = max(low, self._value(grouped)[0])
            free = grouped if not rules.alone.size else self._cells(index, rules.sizes, np.empty(0, dtype=np.intp))
            high = self._value(free, loose=True)[1]
        whole_low, whole_high = self._whole(index)
        low, high = max(low, whole_low, 0), max(high, whole_high, 0)
        if not sure:
            high = count
        return Bound(min(low, count), min(max(high, low), count))

    def _cells(self, index: NDArray[np.intp], sizes: Sequence[int], alone: NDArray[np.intp]) -> list[Cells]:
        rules = self.rules
        cells = cells_of(self.field, self.layers, index, self.budgets, sizes, alone, rules.most, rules.least)
        if self.inner:
            for found in cells:
                found.table[:] = found.table[:, :, INNER, None]
        return cells

    def _cannot_reach_minimum(self, index: NDArray[np.intp]) -> bool:
        rules = self.rules
        if rules.min_stages <= 1 and rules.min_nodes <= 1 and not rules.ruled:
            return False
        able = np.zeros(len(index), dtype=np.bool_)
        for size in rules.sizes:
            able |= self.layers.fit(self.budgets[index], size) > 0
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
        extra = 0 if self.inner else layers.both
        low = high = NEVER
        for size in rules.sizes:
            if len(rules.required) > size:
                continue
            need = int(layers.need(size, extra)[count])
            able = index[(self.budgets[index] >= need) & (rules.most[index] >= count)]
            cells = Counter(integers(self.field.cell[able]))
            if not any(number >= size for number in cells.values()):
                continue
            high = count
            if not rules.ruled:
                low = count
            elif size == 1:
                wanted = set(integers(rules.required))
                for device in integers(able):
                    if wanted <= {device} and rules.required_nodes <= {int(self.field.node[device])}:
                        low = count
        return low, high

    def _value(self, cells: list[Cells], *, loose: bool = False) -> tuple[int, int]:
        """Layers on several stages: what greedy choice gives, and what no choice exceeds. ``loose``: rules that name
        devices are left out."""
        rules, field = self.rules, self.field
        high = None
        if rules.nodes is not None:
            keep, value = best_nodes(cells, field, rules.nodes, set() if loose else self._forced_nodes())
            high = value
            cells = [
                Cells(found.table[inside], found.members[inside])
                for found in cells
                if (inside := np.isin(field.node[found.members[:, 0]], list(keep))).any()
            ]
            if not cells:
                return NEVER, NEVER
            if rules.limited:
                # Inside the nodes with most room the limits may leave less than elsewhere.
                low, _ = self._limited(cells, loose=loose)
                return low, value
        if not rules.limited:
            best = np.concatenate([found.best for found in cells])
            value = best_pair(best)
            low = value
            if rules.min_stages > 1 or rules.min_nodes > 1 or (rules.ruled and not loose):
                low = self._checked(cells, [found.table[:, :, INNER].argmax(axis=1) for found in cells], value)
            return low, value if high is None else min(value, high)
        return self._limited(cells, loose=loose)

    def _forced_nodes(self) -> set[int]:
        return self.rules.required_nodes | set(integers(self.field.node[self.rules.required]))

    def _checked(self, cells: list[Cells], taken: Sequence[NDArray[np.intp]], value: int) -> int:
        """``value`` if the stages taken keep the rules that ask for at least so much, else never."""
        rules, field = self.rules, self.field
        stages = sum(int(found.sum()) for found in taken)
        used = [found.members[number > 0] for found, number in zip(cells, taken, strict=True)]
        devices = {int(index) for members in used for index in members.ravel()}
        nodes = {int(field.node[index]) for index in devices}
        forced = len(set(integers(rules.required)) | rules.required_nodes)
        least = sum(int(rules.least[index]) for index in devices if index in set(integers(rules.alone)))
        good = (
            stages >= rules.min_stages
            and len(nodes) >= rules.min_nodes
            and set(integers(rules.required)) <= devices
            and rules.required_nodes <= nodes
            and max(rules.min_stages, rules.min_nodes) + forced + least <= self.layers.count
        )
        return value if good else NEVER

    def _limited(self, cells: list[Cells], *, loose: bool) -> tuple[int, int]:
        from gpurt.placement.greedy import choose_stages

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
        if choice.exact:
            high = best_pair(rows)
        else:
            loss = best_pair(np.concatenate([_least_losses(found) for found in cells]), base=0)
            high = choice.high + min(0, loss)
        return low, high


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
        top = int(first.argmax())
        for one in {top, int(np.argmax(np.where(np.arange(len(first)) == top, NEVER, first)))}:
            others = np.delete(last, one)
            value = max(value, int(first[one]) + int(others.max()))
    return base + value
