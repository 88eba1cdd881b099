"""Which stages to use when their number is limited: those that hold most layers first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.field import FIRST, INNER, LAST, NEVER, Cells, Field, integers
from gpurt.placement.instance import Floats, Ints

Domain = tuple[NDArray[np.intp], int]
"""Number of the domain of each device (-1: none), and the most stages in one of them."""


@dataclass(frozen=True, slots=True)
class Choice:
    taken: list[Ints]
    """Stages of each cell."""
    high: int
    """No choice holds more, embedding and head left out of account."""
    exact: bool
    """No choice is better, whatever lies first and last: each stage is one device, and the limits lie within each
    other."""


@dataclass(slots=True)
class _Step:
    """So many more stages of a cell, and the layers that they add."""

    layers: int
    stages: int
    cells: int
    """Which of the lists of cells."""
    row: int
    order: tuple[float, int, int]


def choose_stages(
    cells: Sequence[Cells],
    field: Field,
    limit: int | None,
    domains: Sequence[Domain],
    required: Collection[int],
    required_nodes: Collection[int],
) -> Choice:
    """Stages with most layers under the limits; what is required comes first where it is a cell of its own."""
    if len(cells) == 1 and cells[0].table.shape[1] == 2 and not required_nodes:
        return _choose_devices(cells[0], limit, domains, required)
    first = None if domains or required or required_nodes else limit
    steps = sorted((step for index, found in enumerate(cells) for step in _steps(found, index, first)), key=_rank)
    forced = _forced(steps, cells, field, required, required_nodes)
    steps = [*forced, *(step for step in steps if step not in forced)] if forced else steps
    left = limit if limit is not None else sum(step.stages for step in steps)
    room: list[dict[int, int]] = [{} for _ in domains]
    inside = [[_domains(found, numbers) for numbers, _ in domains] for found in cells]
    taken = [np.zeros(len(found.members), dtype=np.int64) for found in cells]
    closed: set[tuple[int, int]] = set()
    held = 0
    for step in steps:
        if not left:
            break
        if step.stages > left or (step.cells, step.row) in closed:
            closed.add((step.cells, step.row))
            continue
        places = [
            (used, name, most)
            for used, rows, (_, most) in zip(room, inside[step.cells], domains, strict=True)
            for name in rows[step.row]
        ]
        if any(used.get(name, 0) + step.stages > most for used, name, most in places):
            closed.add((step.cells, step.row))
            continue
        for used, name, _ in places:
            used[name] = used.get(name, 0) + step.stages
        left -= step.stages
        held += step.layers
        taken[step.cells][step.row] += step.stages
    if all(found.table.shape[1] == 2 for found in cells) and _laminar(domains):
        return Choice(taken, held, all(_monotone(found) for found in cells))
    high = _at_most(steps, limit, None)
    for place, (_, most) in enumerate(domains):
        high = min(high, _at_most(steps, most, [[rows[place] for rows in each] for each in _by_row(inside, cells)]))
    return Choice(taken, max(high, held), exact=False)


def _choose_devices(cells: Cells, limit: int | None, domains: Sequence[Domain], required: Collection[int]) -> Choice:
    """As above, where every cell is one device."""
    one = cells.table[:, 1]
    members = cells.members[:, 0]
    wanted = np.isin(members, list(required)) if required else np.zeros(len(members), dtype=np.bool_)
    order = np.lexsort((-one[:, LAST], -one[:, FIRST], -one[:, INNER], ~wanted))
    order = order[one[order, INNER] > 0]
    taken = np.zeros(len(members), dtype=np.int64)
    if domains:
        left = len(order) if limit is None else limit
        room: list[dict[int, int]] = [{} for _ in domains]
        names = [integers(numbers[members[order]]) for numbers, _ in domains]
        for place, row in enumerate(integers(order)):
            if not left:
                break
            inside = [(used, each[place], most) for used, each, (_, most) in zip(room, names, domains, strict=True)]
            if any(name >= 0 and used.get(name, 0) >= most for used, name, most in inside):
                continue
            for used, name, _ in inside:
                used[name] = used.get(name, 0) + 1
            left -= 1
            taken[row] = 1
    else:
        taken[order[:limit]] = 1
    held = int(one[taken > 0, INNER].sum())
    if _laminar(domains):
        return Choice([taken], held, _monotone(cells))
    ranked = one[order, INNER]
    high = int(ranked[:limit].sum())
    for numbers, most in domains:
        place = numbers[members[order]]
        rank = np.zeros(len(place), dtype=np.int64)
        for name in np.unique(place[place >= 0]):
            inside = place == name
            rank[inside] = np.arange(int(inside.sum()))
        high = min(high, int(ranked[rank < most].sum()))
    return Choice([taken], max(high, held), exact=False)


def _rank(step: _Step) -> tuple[float, int, int]:
    return step.order


def _promising(cells: Cells, limit: int | None) -> list[int]:
    """Cells that can be among the first ``limit`` steps: those whose own first step is."""
    count = len(cells.members)
    if limit is None or limit >= count:
        return list(range(count))
    stages = np.arange(1, cells.table.shape[1], dtype=np.int64)
    rate: Floats = np.max(cells.table[:, 1:, INNER] / stages, axis=1)
    return integers(np.sort(np.argpartition(-rate, limit)[: limit + 1]))


def _steps(cells: Cells, index: int, first: int | None) -> list[_Step]:
    """The concave hull of each cell's table, as steps of falling worth; ``first``: so many steps are enough."""
    if cells.table.shape[1] == 2:
        one = cells.table[:, 1]
        values: list[list[int]] = one.tolist()
        return [
            _Step(row[INNER], 1, index, place, (-float(row[INNER]), -row[FIRST], -row[LAST]))
            for place, row in enumerate(values)
            if row[INNER] > 0
        ]
    found: list[_Step] = []
    places = _promising(cells, first)
    for place, row in zip(places, cells.table[places, :, INNER].tolist(), strict=True):
        at = 0
        while True:
            gains = [((row[k] - row[at]) / (k - at), k) for k in range(at + 1, len(row)) if row[k] > row[at]]
            if not gains:
                break
            rate, k = max(gains)
            found.append(_Step(row[k] - row[at], k - at, index, place, (-rate, 0, 0)))
            at = k
    return found


def _forced(
    steps: Sequence[_Step], cells: Sequence[Cells], field: Field, required: Collection[int], nodes: Collection[int]
) -> list[_Step]:
    """The steps of required devices, and the best step of every required node that has none of them."""
    forced: list[_Step] = []
    missing = set(nodes)
    if required:
        forced = [step for step in steps if int(cells[step.cells].members[step.row, 0]) in required]
        missing -= {int(field.node[cells[step.cells].members[step.row, 0]]) for step in forced}
    for step in steps if missing else ():
        node = int(field.node[cells[step.cells].members[step.row, 0]])
        if node in missing:
            missing.remove(node)
            forced.append(step)
    return forced


def _domains(cells: Cells, numbers: NDArray[np.intp]) -> list[list[int]]:
    """The domains that each cell has devices in."""
    table = numbers[cells.members]
    return [sorted({name for name in row if name >= 0}) for row in table.tolist()]


def _by_row(inside: list[list[list[list[int]]]], cells: Sequence[Cells]) -> list[list[list[list[int]]]]:
    """``[cells][row][domain]``."""
    return [
        [[rows[row] for rows in each] for row in range(len(found.members))]
        for each, found in zip(inside, cells, strict=True)
    ]


def _at_most(steps: Sequence[_Step], limit: int | None, domains: list[list[list[int]]] | None) -> int:
    """Layers under one limit alone, steps taken in part: no choice of whole ones holds more."""
    if limit is None:
        return sum(step.layers for step in steps)
    left: dict[int, int] = {}
    held = 0.0
    for step in steps:
        names = [0] if domains is None else domains[step.cells][step.row]
        # A cell with devices in several domains, or in none, is not limited here.
        if len(names) != 1:
            held += step.layers
            continue
        room = left.setdefault(names[0], limit)
        part = min(room, step.stages)
        held += step.layers * part / step.stages
        left[names[0]] = room - part
    return int(held + 1e-6)


def _laminar(domains: Sequence[Domain]) -> bool:
    """Of any two kinds of domain, one divides the other."""
    own = [np.where(numbers < 0, len(numbers) + np.arange(len(numbers)), numbers) for numbers, _ in domains]
    return all(
        _divides(one, other) or _divides(other, one) for place, one in enumerate(own) for other in own[place + 1 :]
    )


def _divides(fine: NDArray[np.intp], coarse: NDArray[np.intp]) -> bool:
    pairs = np.unique(np.stack([fine, coarse], axis=1), axis=0)
    return len(pairs) == len(np.unique(fine))


def _monotone(cells: Cells) -> bool:
    """Devices are in the same order whatever else they hold."""
    one = cells.table[:, 1]
    order = np.lexsort((-one[:, LAST], -one[:, FIRST], -one[:, INNER]))
    states = np.maximum(one[order][:, [FIRST, LAST]], NEVER)
    return bool((np.diff(states, axis=0) <= 0).all())
