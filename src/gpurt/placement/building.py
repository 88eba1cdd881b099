"""From the inputs to arrays: filter devices, form units, price every stage and every hand-over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpurt.placement.constraints import Constraints
from gpurt.placement.costs import TOKEN_BYTES
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.grouping import classes_of, filter_devices, most_useful, units_of
from gpurt.placement.instance import Bools, Floats, Instance, Ints, Unit, Windows
from gpurt.placement.spec import ModelSpec
from gpurt.placement.stages import LayerSums, cut_to, stage_windows, widest
from gpurt.placement.topology import LinkMatrix, Topology


def build_instance(
    model: ModelSpec, devices: Sequence[PlacementDevice], topology: Topology, constraints: Constraints
) -> Instance:
    """Filter devices, form units, and price every stage and every hand-over."""
    kept, removed = filter_devices(model, devices, constraints)
    links = topology.dense(kept)
    members = classes_of(kept, links, constraints)
    chosen = most_useful(model, kept, members, constraints)
    if chosen is not None:
        kept = [kept[index] for index in chosen]
        links = links.of(chosen)
        members = classes_of(kept, links, constraints)
    layers = LayerSums(model, constraints, kept)
    units, complete = units_of(model, kept, members, constraints)
    complete = complete and chosen is None
    if units:
        cost, time, slope, head = stage_windows(model, constraints, kept, links, members, units, layers)
        alive = np.flatnonzero(
            np.isfinite(cost.inner).any(axis=(1, 2))
            | np.isfinite(cost.first).any(axis=1)
            | np.isfinite(cost.last).any(axis=1)
            | np.isfinite(cost.whole)
        )
        units = [units[index] for index in alive]
        cost, time, slope, head = cost.of(alive), time.of(alive), slope[alive], head[alive]
        width = max(1, widest(cost))
        cost, time = cut_to(cost, width), cut_to(time, width)
    else:
        nothing = Windows(np.empty((0, 1, 2)), np.empty((0, 2)), np.empty((0, 2)), np.empty(0))
        cost = time = nothing
        slope = head = np.empty(0)
    uses = np.zeros((len(units), len(members)), dtype=np.int64)
    for row, unit in enumerate(units):
        for kind in unit.classes:
            uses[row, kind] += 1
    available = np.array([len(group) for group in members], dtype=np.int64)
    payloads = [layer.activation_bytes_per_token * constraints.workload.batch for layer in model.layers]
    distinct = sorted(set(payloads[:-1])) or [0]
    hop = np.stack([_between(units, members, links, payload) for payload in distinct]) if units else np.empty((1, 0, 0))
    back = _between(units, members, links, TOKEN_BYTES * constraints.workload.batch) if units else np.empty((0, 0))
    # A unit cannot follow another one that needs the same devices, itself included, unless there are enough of them.
    if units:
        clash = _clash(uses, available)
        hop = np.where(clash[None], np.inf, hop)
        back = np.where(clash, np.inf, back)
    if constraints.max_link_seconds is not None:
        hop = np.where(hop <= constraints.max_link_seconds, hop, np.inf)
    boundary = np.zeros(len(payloads) + 1, dtype=np.intp)
    for start in range(1, len(payloads)):
        boundary[start] = distinct.index(payloads[start - 1])
    rows, limits = _limits(kept, members, units, uses, available, constraints)
    names = {name: number for number, name in enumerate(dict.fromkeys(unit.node for unit in units))}
    node = np.array([names[unit.node] for unit in units], dtype=np.intp)
    return Instance(
        model, constraints, tuple(kept), links, members, tuple(units), uses, available, rows, limits, node,
        slope, head, cost, time, hop, back, boundary, complete, tuple(removed),
    )  # fmt: skip


def _limits(
    devices: Sequence[PlacementDevice],
    members: tuple[tuple[int, ...], ...],
    units: Sequence[Unit],
    uses: Ints,
    available: Ints,
    constraints: Constraints,
) -> tuple[Ints, Ints]:
    """Every rule that is a sum over stages, as rows of ``sum <= limit``."""
    first = [devices[members[unit.classes[0]][0]] for unit in units]
    columns: list[Ints] = []
    limits: list[int] = []

    def at_most(takes: Sequence[bool], limit: int) -> None:
        columns.append(np.array(takes, dtype=np.int64))
        limits.append(limit)

    def at_least(takes: Sequence[bool], limit: int) -> None:
        columns.append(-np.array(takes, dtype=np.int64))
        limits.append(-limit)

    pools: dict[tuple[str, str], list[int]] = {}
    for kind, group in enumerate(members):
        device = devices[group[0]]
        if device.memory_pool_id is not None:
            pools.setdefault((device.node, device.memory_pool_id), []).append(kind)
    for kinds in pools.values():
        if sum(len(members[kind]) for kind in kinds) > 1:
            columns.append(uses[:, kinds].sum(axis=1))
            limits.append(1)
    everywhere = [True] * len(units)
    if constraints.max_stages is not None:
        at_most(everywhere, constraints.max_stages)
    if constraints.min_stages > 1:
        at_least(everywhere, constraints.min_stages)
    for limit in constraints.domain_limits:
        for value in sorted({name for device in devices if (name := device.domain(limit.domain)) is not None}):
            inside = [any(devices[members[k][0]].domain(limit.domain) == value for k in unit.classes) for unit in units]
            at_most(inside, limit.stages)
    for name in sorted(constraints.require_devices):
        at_least([any(devices[members[k][0]].id == name for k in unit.classes) for unit in units], 1)
    for name in sorted(constraints.require_nodes):
        at_least([device.node == name for device in first], 1)
    if not columns:
        return uses, available
    rows = np.concatenate([uses, np.stack(columns, axis=1).reshape(len(units), len(columns))], axis=1)
    return rows, np.concatenate([available, np.array(limits, dtype=np.int64)])


def _between(units: Sequence[Unit], members: tuple[tuple[int, ...], ...], links: LinkMatrix, payload: float) -> Floats:
    """``[u, v]``: every device of v gets it from the best device of u; the slowest of them counts."""
    # Of one device of each class: of all, a large cluster's tables take longer to make than to plan with.
    table = links.of([group[0] for group in members]).seconds(payload)
    for kind, group in enumerate(members):
        table[kind, kind] = float(links.of(group[:2]).seconds(payload)[0, 1]) if len(group) > 1 else 0.0
    kinds = [sorted(set(unit.classes)) for unit in units]
    # Most units are of one class: they are looked up together, and mixed groups one by one.
    first = np.array([found[0] for found in kinds], dtype=np.intp)
    mixed = [(number, found) for number, found in enumerate(kinds) if len(found) > 1]
    if not mixed:
        return table[np.ix_(first, first)]
    by_size: dict[int, list[int]] = {}
    for number, found in mixed:
        by_size.setdefault(len(found), []).append(number)
    groups = [(np.array(numbers), np.array([kinds[number] for number in numbers])) for numbers in by_size.values()]
    best = table[first]
    for numbers, members_of in groups:
        best[numbers] = _folded(np.minimum, table, members_of)
    # By rows of what they are reached from: a column of a large table takes far longer to read.
    reached = np.ascontiguousarray(best.T)
    ways = reached[first]
    for numbers, members_of in groups:
        ways[numbers] = _folded(np.maximum, reached, members_of)
    return ways.T


def _folded(fold: np.ufunc, table: Floats, members: Ints) -> Floats:
    """For each row of ``members``: those rows of the table in one."""
    folded = table[members[:, 0]]
    for column in members[:, 1:].T:
        fold(folded, table[column], out=folded)
    return folded


def _clash(uses: Ints, available: Ints) -> Bools:
    """``[u, v]``: there are not enough devices for both."""
    clash = np.zeros((len(uses), len(uses)), dtype=np.bool_)
    unit, kind = np.nonzero(uses)
    users = np.bincount(kind, minlength=uses.shape[1])
    alone = users[kind] == 1
    clash[unit[alone], unit[alone]] |= 2 * uses[unit, kind][alone] > available[kind[alone]]
    for shared in np.flatnonzero(users > 1):
        mine = unit[kind == shared]
        need = uses[mine, shared]
        clash[np.ix_(mine, mine)] |= need[:, None] + need[None, :] > available[shared]
    return clash
