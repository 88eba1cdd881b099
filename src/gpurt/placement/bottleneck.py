"""The slowest stage or link: as fast as possible, alone or together with the latency.

Leave out every stage and link slower than a limit, and what remains is a latency problem. A limit under which the
devices cannot hold the model is a lower bound; the least limit under which there is a plan is the answer.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.clock import Clock
from gpurt.placement.engine import Engine
from gpurt.placement.incumbent import PROVEN_GAP, Found
from gpurt.placement.instance import Bools, Floats, Instance
from gpurt.placement.packing import capacities
from gpurt.placement.proportional import proportional
from gpurt.placement.valuation import path_bottleneck, path_cost


def limits_of(instance: Instance) -> Floats:
    """Every time that a stage or a link can take, ascending: only these can be the slowest."""
    parts = [table.ravel() for table in (instance.time.inner, instance.time.first, instance.time.last)]
    parts += [instance.time.whole, instance.hop.ravel(), instance.back.ravel()]
    values = np.unique(np.concatenate(parts))
    values = values[np.isfinite(values)]
    # What takes no time is within every limit. Only where nothing takes any is that a limit, too.
    return values[values > 0] if (values > 0).any() else values


def may_hold(instance: Instance, limit: float) -> bool:
    """False where no plan has every stage and link within the limit: the devices that reach each other within it do not
    hold all layers, even if each gives the most that any group lets it give."""
    narrow = instance.restricted(limit)
    if np.isfinite(narrow.cost.whole).any():
        return True
    high = capacities(narrow)
    live = high > 0
    if not live.any():
        return False
    near = (narrow.hop.min(axis=0) <= limit) | (narrow.back <= limit)
    for together in _components(near, live):
        share = np.where(
            (instance.uses[together] > 0) & instance.complete,
            (high[together] / instance.uses[together].sum(axis=1))[:, None],
            np.where(instance.uses[together] > 0, np.inf, 0.0),
        ).max(axis=0)
        if (share * instance.available).sum() >= instance.layers:
            return True
    return False


def _components(near: Bools, live: Bools) -> list[NDArray[np.intp]]:
    """Sets of units that can all reach each other both ways: a pipeline with its way back is within one of them."""
    left = live.copy()
    found: list[NDArray[np.intp]] = []
    while left.any():
        start = int(np.flatnonzero(left)[0])
        both = _reached(near, start, left) & _reached(near.T, start, left)
        found.append(np.flatnonzero(both))
        left &= ~both
    return found


def _reached(near: Bools, start: int, inside: Bools) -> Bools:
    seen = np.zeros(len(near), dtype=np.bool_)
    seen[start] = True
    fresh = seen.copy()
    while fresh.any():
        fresh = near[fresh].any(axis=0) & inside & ~seen
        seen |= fresh
    return seen


def least_bottleneck(instance: Instance, clock: Clock, *, seed: int, target_gap: float) -> Found:
    """The plan with the fastest slowest part; among those, of low latency."""
    values = limits_of(instance)
    low, high = 0, len(values)
    while low < high and not clock.over():
        middle = (low + high) // 2
        if may_hold(instance, float(values[middle])):
            high = middle
        else:
            low = middle + 1
    if low == len(values):
        return Found(np.inf, None, np.inf, (), "capacity")
    floor = low
    """No plan has a limit below ``values[floor]``."""
    engines: dict[str, None] = {}
    upper = len(values) - 1
    """Some plan has ``values[upper]``, where there is one."""
    best = proportional(instance)
    if best is not None:
        upper = _place(values, path_bottleneck(instance, best))
        engines["proportional"] = None

    def attempt(place: int, seconds: float) -> None:
        """Look for a plan within the limit: what is found lowers ``upper``, what is refuted raises ``floor``."""
        nonlocal best, upper, floor
        within = instance.restricted(float(values[place]))
        time = Clock(min(seconds, max(0.01, clock.left)), clock.cancelled)
        found = Engine(within, time, seed=seed, target_gap=np.inf).run()
        if found.steps is not None:
            best = found.steps
            engines.update(dict.fromkeys(found.engines))
            upper = _place(values, path_bottleneck(instance, best))
        elif np.isinf(found.bound):
            # Whatever fits within less fits within this.
            floor = max(floor, place + 1)

    share = clock.left
    for part in (0.12, 0.3, 0.6):
        # Limits up to here were looked at without an answer.
        bottom = floor
        # The bound itself first: where links are fast it is reached at once.
        probe = floor
        while bottom < upper or best is None:
            attempt(probe, max(0.05, share * (part if best is not None else 0.3)))
            if clock.over() or (best is None and probe >= upper):
                break
            bottom = max(bottom, floor, probe + 1 if upper > probe else bottom)
            if best is None:
                # No plan yet: widen quickly, a loose plan is easy to find.
                probe = min(upper, probe + max(1, (upper - probe + 1) // 2))
            elif values[upper] - values[min(bottom, upper)] <= PROVEN_GAP / 2 * values[upper]:
                break
            else:
                probe = (bottom + upper - 1) // 2
        near = best is not None and values[upper] - values[min(floor, upper)] <= PROVEN_GAP / 2 * values[upper]
        if near or floor > upper or clock.over():
            break
    if best is None:
        bound = np.inf if floor >= len(values) else float(values[floor])
        return Found(np.inf, None, bound, (), None)
    value = path_bottleneck(instance, best)
    # Among plans with this bottleneck: the one of least latency that the rest of the time gives.
    if not clock.over():
        rest = Clock(min(clock.left, max(0.2, share * 0.2)), clock.cancelled)
        tie = Engine(instance.restricted(value * (1 + 1e-12)), rest, seed=seed, target_gap=target_gap)
        tie.offer(best, next(iter(engines), "beam"))
        found = tie.run()
        if found.steps is not None and path_cost(instance, found.steps) <= path_cost(instance, best):
            best = found.steps
            engines.update(dict.fromkeys(found.engines))
            value = path_bottleneck(instance, best)
    bound = float(values[min(floor, len(values) - 1)])
    return Found(value, best, min(bound, value), tuple(engines), "limits")


def _place(values: Floats, value: float) -> int:
    """Of a value among all."""
    return int(np.searchsorted(values, value * (1 - 1e-12)))


def least_sum(instance: Instance, priced: Instance, clock: Clock, *, seed: int, target_gap: float) -> Found:
    """Least cost of ``priced`` + slowest part: branch and bound on the slowest part."""
    values = limits_of(instance)
    best: Found | None = None
    best_value = np.inf
    engines: dict[str, None] = {}
    # An interval of limits (low, high]: a plan whose slowest part lies in it costs at least cost(high) + low.
    queue: list[tuple[float, int, int]] = [(0.0, -1, len(values) - 1)]
    bound = 0.0
    if not len(values):
        return Found(np.inf, None, np.inf, (), "capacity")
    share = clock.left / 6
    while queue:
        bound, low, high = heapq.heappop(queue)
        if bound >= best_value * (1 - PROVEN_GAP / 2) or (best is not None and clock.over()):
            break
        if best is not None and best_value - bound <= target_gap * best_value:
            break
        engine = Engine(
            priced.restricted(float(values[high]), instance),
            Clock(min(max(0.02, clock.left), max(0.05, share)), clock.cancelled),
            seed=seed,
            target_gap=min(target_gap, PROVEN_GAP),
        )
        found = engine.run()
        at_least = float(values[low + 1]) if low + 1 < len(values) else np.inf
        if found.steps is None:
            if not np.isinf(found.bound):
                if clock.over():
                    heapq.heappush(queue, (bound, low, high))
                    break
                found = replace(found, bound=max(found.bound, 0.0))
            else:
                continue
        else:
            slowest = path_bottleneck(instance, found.steps)
            value = found.value + slowest
            if value < best_value:
                best, best_value = found, value
                engines.update(dict.fromkeys(found.engines))
            # Plans between here and the top of the interval have the same latency bound and a slower part.
            top = int(np.searchsorted(values, slowest * (1 - 1e-12)))
            if top < high:
                upper_part = found.bound + float(values[top])
                if upper_part < best_value * (1 - PROVEN_GAP / 2):
                    heapq.heappush(queue, (upper_part, top - 1, high)) if top - 1 > low else None
                high = top
        if high - low <= 1:
            # One limit left in the interval: its bound is final.
            final = found.bound + at_least
            if final < best_value * (1 - PROVEN_GAP / 2):
                best_bound = min(final, best_value)
                return Found(best_value, None if best is None else best.steps, best_bound, tuple(engines), "limits")
            continue
        middle = (low + high) // 2
        lower = found.bound + at_least
        heapq.heappush(queue, (max(bound, lower), low, middle))
        heapq.heappush(queue, (max(bound, found.bound + float(values[middle + 1])), middle, high - 1))
    else:
        bound = best_value
    if best is None:
        return Found(np.inf, None, np.inf if not queue else 0.0, (), None)
    return Found(best_value, best.steps, min(bound, best_value), tuple(engines), "limits")
