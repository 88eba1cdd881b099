"""Local search on the true links: the order of stages, and which units they are.

A neighbour is judged by its links and heads first, all at once; those that promise most are filled exactly. When no
neighbour is better, a part of the plan is torn out and put together again, from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gpurt.placement.filling import Filling
from gpurt.placement.instance import Floats, Instance
from gpurt.placement.relaxation import Step
from gpurt.placement.valuation import keeps_rules

_TRIED = 24
"""Neighbours filled exactly per round, the most promising first."""
_MANY = 20_000
"""Neighbours of one kind looked at per round; of more, a random share is."""


class LocalSearch:
    def __init__(self, instance: Instance, seed: int, stop: Callable[[], bool]) -> None:
        self.instance = instance
        self.filling = Filling(instance)
        self.random = np.random.default_rng(seed)
        self.stop = stop
        self.hop = instance.hop.max(axis=0) if len(instance.hop) > 1 else instance.hop[0]
        self.back = instance.back
        self.extra = instance.head if instance.movable else np.zeros(instance.size)
        self.groups = [number for number, unit in enumerate(instance.units) if unit.size > 1]
        self.single_of = {unit.classes[0]: number for number, unit in enumerate(instance.units) if unit.size == 1}

    def value(self, units: Sequence[int]) -> float:
        """Objective of the best split over this order; infinite where it breaks a rule or does not fit."""
        links = self.links_of(units)
        if not np.isfinite(links):
            return np.inf
        value, ends = self.filling.cost(units)
        if not np.isfinite(value) or not self.allowed(units):
            return np.inf
        if len(self.instance.hop) > 1:
            links = sum(
                float(self.instance.hop_at(at)[one, other])
                for at, one, other in zip(ends[:-1], units, units[1:], strict=False)
            )
            links += float(self.back[units[-1], units[0]]) if len(units) > 1 else 0.0
        return value + links

    def links_of(self, units: Sequence[int]) -> float:
        if len(units) == 1:
            return 0.0
        order = np.asarray(units)
        return float(self.hop[order[:-1], order[1:]].sum() + self.back[order[-1], order[0]])

    def allowed(self, units: Sequence[int]) -> bool:
        return keeps_rules(self.instance, tuple(Step(int(unit), 0, 0) for unit in units))

    def descend(self, units: tuple[int, ...], value: float) -> tuple[tuple[int, ...], float]:
        """To a plan that no single move makes better."""
        improved = True
        while improved and not self.stop():
            improved = False
            for moves in (self._orders, self._exchanges, self._inserts, self._drops):
                better = self._try(units, value, moves)
                if better is not None:
                    units, value = better
                    improved = True
                    break
            if not improved and (better := self._regroup(units, value)) is not None:
                units, value = better
                improved = True
        return units, value

    def _try(
        self,
        units: tuple[int, ...],
        value: float,
        moves: Callable[[np.ndarray], tuple[Floats, Callable[[int], tuple[int, ...]]]],
    ) -> tuple[tuple[int, ...], float] | None:
        guess, build = moves(np.array(units))
        if not len(guess):
            return None
        take = min(_TRIED, len(guess))
        places = np.argpartition(guess, take - 1)[:take]
        for place in places[np.argsort(guess[places])]:
            if guess[place] >= value * 1e-3 and place != places[0] and moves == self._orders:
                break
            if not np.isfinite(guess[place]):
                break
            other = build(int(place))
            found = self.value(other)
            if found < value * (1 - 1e-9):
                return other, found
        return None

    def _links(self, orders: np.ndarray) -> Floats:
        """Links, way back and head of many orders of equal length."""
        total = self.hop[orders[:, :-1], orders[:, 1:]].sum(axis=1)
        return total + self.back[orders[:, -1], orders[:, 0]] + self.extra[orders[:, -1]]

    def _orders(self, units: np.ndarray) -> tuple[Floats, Callable[[int], tuple[int, ...]]]:
        count = len(units)
        if count < 2:
            return np.empty(0), lambda _: ()
        plans = _orderings(count)
        if len(plans) > _MANY:
            plans = plans[self.random.choice(len(plans), _MANY, replace=False)]
        now = float(self._links(units[None, :])[0])
        orders = units[plans]
        gain = _less(self._links(orders), now)
        gain[gain >= -1e-15] = np.inf
        return gain, lambda place: tuple(orders[place].tolist())

    def _marginal(self, units: np.ndarray) -> tuple[Floats, Floats]:
        """What the stages of each unit are worth: (of every unit, of the present ones), at the price of a layer that
        the last partly filled stage sets."""
        instance = self.instance
        if not instance.movable:
            zero = np.zeros(instance.size)
            return zero, zero[units]
        high = np.array(self.filling.high[0])
        slope = instance.slope
        present = units[np.argsort(slope[units])]
        held = np.cumsum(high[present])
        place = min(int(np.searchsorted(held, instance.layers)), len(present) - 1)
        price = slope[present[place]]
        low = np.array(self.filling.low[0])
        worth = np.where(slope < price, (slope - price) * high, (slope - price) * low)
        return worth, worth[units]

    def _room(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        instance = self.instance
        growing = (instance.rows >= 0).all(axis=0)
        rows, limits = instance.rows[:, growing], instance.limits[growing]
        return rows, limits - rows[units].sum(axis=0)

    def _exchanges(self, units: np.ndarray) -> tuple[Floats, Callable[[int], tuple[int, ...]]]:
        count, size = len(units), self.instance.size
        rows, room = self._room(units)
        fits = (rows[None, :, :] <= (room + rows[units])[:, None, :]).all(axis=2)
        hop, back, extra = self.hop, self.back, self.extra
        gain = np.zeros((count, size))
        if count > 1:
            arrive = np.vstack([np.zeros((1, size)), hop[units[:-1]]])
            leave = np.vstack([hop[:, units[1:]].T, np.zeros((1, size))])
            arrive[0] = back[units[-1]]
            leave[-1] = back[:, units[0]]
            gain = arrive + leave
            own = gain[np.arange(count), units]
            gain = _less(gain, own[:, None])
        gain[-1] += extra - extra[units[-1]]
        worth, present = self._marginal(units)
        gain = gain + worth[None, :] - present[:, None]
        gain[~fits] = np.inf
        gain[np.arange(count), units] = np.inf

        def build(place: int) -> tuple[int, ...]:
            position, unit = divmod(place, size)
            other = units.copy()
            other[position] = unit
            return tuple(other.tolist())

        return gain.ravel(), build

    def _inserts(self, units: np.ndarray) -> tuple[Floats, Callable[[int], tuple[int, ...]]]:
        count, size = len(units), self.instance.size
        rows, room = self._room(units)
        fits = (rows <= room).all(axis=1)
        if not fits.any():
            return np.empty(0), lambda _: ()
        hop, back, extra = self.hop, self.back, self.extra
        gain = np.empty((count + 1, size))
        old = back[units[-1], units[0]] if count > 1 else 0.0
        gain[0] = _less(back[units[-1]] + hop[:, units[0]], old)
        gain[count] = _less(hop[units[-1]] + back[:, units[0]], old) + extra - extra[units[-1]]
        for place in range(1, count):
            before, after = units[place - 1], units[place]
            gain[place] = _less(hop[before] + hop[:, after], hop[before, after])
        gain += self._marginal(units)[0][None, :]
        gain[:, ~fits] = np.inf

        def build(place: int) -> tuple[int, ...]:
            position, unit = divmod(place, size)
            return tuple(np.insert(units, position, unit).tolist())

        return gain.ravel(), build

    def _drops(self, units: np.ndarray) -> tuple[Floats, Callable[[int], tuple[int, ...]]]:
        count = len(units)
        if count < 2:
            return np.empty(0), lambda _: ()
        hop, back = self.hop, self.back
        gain = -self._marginal(units)[1]
        for place in range(count):
            before, after = units[place - 1], units[(place + 1) % count]
            arrive = hop[before, units[place]] if place else back[before, units[place]]
            leave = hop[units[place], after] if place < count - 1 else back[units[place], after]
            direct = hop[before, after] if 0 < place < count - 1 else back[before, after]
            way = 0.0 if count == 2 else float(direct)
            gain[place] += way - (arrive + leave) if np.isfinite(way) else np.inf
        return gain, lambda place: tuple(np.delete(units, place).tolist())

    def _regroup(self, units: tuple[int, ...], value: float) -> tuple[tuple[int, ...], float] | None:
        """A group in place of the stages whose devices it needs, or single devices in place of a group."""
        instance = self.instance
        best: tuple[tuple[int, ...], float] | None = None
        rows, room = self._room(np.array(units))
        for unit in self.groups:
            short = np.flatnonzero(rows[unit] > room)
            if not len(short):
                continue
            left = rows[unit][short] - room[short]
            gone: list[int] = []
            for place, other in enumerate(units):
                if (left > 0).any() and (rows[other][short] > 0).any():
                    gone.append(place)
                    left = left - rows[other][short]
            if (left > 0).any():
                continue
            order = [other for place, other in enumerate(units) if place not in gone]
            order.insert(gone[0], unit)
            best = self._better(tuple(order), value, best)
        for place, unit in enumerate(units):
            parts = [self.single_of[kind] for kind in instance.units[unit].classes if kind in self.single_of]
            if len(parts) > 1:
                best = self._better((*units[:place], *parts, *units[place + 1 :]), value, best)
        return best

    def _better(
        self, order: tuple[int, ...], value: float, best: tuple[tuple[int, ...], float] | None
    ) -> tuple[tuple[int, ...], float] | None:
        found = self.value(order)
        return (order, found) if found < (best[1] if best else value * (1 - 1e-9)) else best

    def run(self, units: tuple[int, ...], value: float, *, rounds: int) -> tuple[tuple[int, ...], float]:
        """Descend, then tear and descend again ``rounds`` times."""
        units, value = self.descend(units, value)
        best, best_value = units, value
        for _ in range(rounds):
            if self.stop():
                break
            torn = self._tear(best)
            start = self.value(torn)
            if not np.isfinite(start):
                continue
            units, value = self.descend(torn, start)
            if value < best_value * (1 - 1e-9):
                best, best_value = units, value
        return best, best_value

    def _tear(self, units: tuple[int, ...]) -> tuple[int, ...]:
        count = len(units)
        order = np.array(units)
        kind = self.random.integers(3)
        if count >= 4 and kind < 2:
            # Two neighbouring segments change places (double bridge), near each other.
            a = int(self.random.integers(0, count - 2))
            b = int(self.random.integers(a + 1, min(a + 8, count - 1) + 1))
            c = int(self.random.integers(b, min(b + 8, count) + 1))
            return tuple(np.concatenate([order[:a], order[b:c], order[a:b], order[c:]]).tolist())
        rows, room = self._room(order)
        place = int(self.random.integers(count))
        fits = np.flatnonzero((rows <= room + rows[order[place]]).all(axis=1))
        if len(fits):
            order[place] = int(self.random.choice(fits))
        return tuple(order.tolist())


def _less(new: Floats, old: Floats | float) -> Floats:
    """``new - old``; infinite where there is no new way, whatever there was before."""
    return np.subtract(new, old, out=np.full(np.shape(new), np.inf), where=np.isfinite(new))


_PLANS: dict[int, np.ndarray] = {}


def _orderings(count: int) -> np.ndarray:
    """Index arrays of every order that moves one segment of up to three, reverses a stretch or swaps two."""
    if count not in _PLANS:
        base = list(range(count))
        found: dict[tuple[int, ...], None] = {}
        reach = count if count <= 40 else 24
        for start in range(count):
            for length in range(1, min(3, count - start) + 1):
                piece = base[start : start + length]
                rest = base[:start] + base[start + length :]
                for place in range(max(0, start - reach), min(len(rest), start + reach) + 1):
                    found[tuple(rest[:place] + piece + rest[place:])] = None
            for end in range(start + 2, min(count, start + reach) + 1):
                found[tuple(base[:start] + base[start:end][::-1] + base[end:])] = None
                other = list(base)
                other[start], other[end - 1] = other[end - 1], other[start]
                found[tuple(other)] = None
        found.pop(tuple(base), None)
        if len(_PLANS) > 64:
            _PLANS.clear()
        _PLANS[count] = np.array(list(found), dtype=np.intp).reshape(-1, count)
    return _PLANS[count]
