"""Which devices take part, which of them are alike, and what units they can form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, combinations_with_replacement, islice
from typing import Final

import numpy as np

from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.instance import Unit
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.topology import LinkMatrix

UNIT_LIMIT: Final = 2000
"""Above this many units, of unlike devices only neighbours in size make a group: see ``Instance.complete``. There are
tables of unit by unit, and those of so many are made in a third of a second."""


def filter_devices(
    model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints
) -> tuple[list[PlacementDevice], list[tuple[str, str]]]:
    """The devices that some layer may be on, and (id, rule) of the others."""
    kept: list[PlacementDevice] = []
    removed: list[tuple[str, str]] = []
    for device in devices:
        if device.id in constraints.exclude_devices or device.node in constraints.exclude_nodes:
            removed.append((device.id, "excluded"))
        elif model.backends is not None and device.backend not in model.backends:
            removed.append((device.id, "backend"))
        elif not any(can_compute(device, layer, model) for layer in model.layers):
            removed.append((device.id, "capability"))
        elif device.budget_bytes == 0:
            removed.append((device.id, "memory"))
        else:
            kept.append(device)
    return kept, removed


def can_compute(device: PlacementDevice, layer: LayerSpec, model: ModelSpec) -> bool:
    """Data type, operations and largest single allocation."""
    dtype = layer.dtype or model.dtype
    if dtype is not None and device.dtypes is not None and dtype not in device.dtypes:
        return False
    if layer.operations & device.unsupported_operations:
        return False
    largest, limit = layer.largest_tensor_bytes, device.max_allocation_bytes
    return largest is None or limit is None or largest <= limit


def classes_of(
    devices: Sequence[PlacementDevice], links: LinkMatrix, constraints: Constraints
) -> tuple[tuple[int, ...], ...]:
    """Devices that nothing tells apart, together."""
    named = {pin_device for pin in constraints.pins for pin_device in pin.devices}
    named |= constraints.require_devices | {entry.device for entry in constraints.stage_layers}
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, device in enumerate(devices):
        key = (
            device.id if device.id in named else None,
            device.node, device.zone, tuple(sorted(device.labels.items())), device.backend,
            device.budget_bytes, device.memory_bandwidth, device.compute_flops, device.launch_seconds,
            device.dtypes, device.unsupported_operations, device.max_allocation_bytes, device.resident,
            device.memory_pool_id,
        )  # fmt: skip
        alike.setdefault(key, []).append(index)
    if len(alike) == len(devices):
        return tuple((index,) for index in range(len(devices)))
    prints = _LinkPrints(links)
    return tuple(tuple(group) for found in alike.values() for group in prints.groups(found))


def most_useful(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    members: tuple[tuple[int, ...], ...],
    constraints: Constraints,
) -> list[int] | None:
    """Indices of the devices to plan with where so many are unlike that their units would exceed ``UNIT_LIMIT``: those
    that a rule names, those that hold layers of the model already, and in turn the largest, the fastest to read and to
    compute, and the fastest of every node. None where all can be planned with."""
    room = UNIT_LIMIT // (1 + len(_group_sizes(model, constraints)))
    if len(members) <= room:
        return None
    firsts = [devices[group[0]] for group in members]
    named = {name for pin in constraints.pins for name in pin.devices}
    named |= constraints.require_devices | {entry.device for entry in constraints.stage_layers}

    def first(device: PlacementDevice) -> bool:
        return device.id in named or any(held.model == model.name for held in device.resident)

    place_in_node: Counter[str] = Counter()
    turn: dict[int, int] = {}
    for kind in sorted(range(len(firsts)), key=lambda kind: -firsts[kind].memory_bandwidth):
        turn[kind] = place_in_node[firsts[kind].node]
        place_in_node[firsts[kind].node] += 1
    kinds = range(len(firsts))
    orders = (
        sorted(kinds, key=lambda kind: -firsts[kind].budget_bytes),
        sorted(kinds, key=lambda kind: -firsts[kind].memory_bandwidth),
        sorted(kinds, key=lambda kind: -firsts[kind].compute_flops),
        sorted(kinds, key=lambda kind: (firsts[kind].node not in constraints.require_nodes, turn[kind])),
    )
    wanted = dict.fromkeys(kind for kind in kinds if first(firsts[kind]))
    wanted |= dict.fromkeys(chain.from_iterable(zip(*orders, strict=True)))
    return sorted(index for kind in islice(wanted, room) for index in members[kind])


def _group_sizes(model: ModelSpec, constraints: Constraints) -> list[int]:
    limit = constraints.tensor_parallel_max
    return [size for size in model.tensor_parallel if size > 1 and (limit is None or size <= limit)]


class _LinkPrints:
    """Finds devices with the same links to everybody, in a time that grows with the square of their number.

    Two devices are alike when their links to all others are the same, and those between the two are the same both ways.
    That is transitive, so each device is compared with one of each group. A fingerprint, which is a sum over all its
    links with a random weight for each device at their other ends, finds the group; the links themselves decide.
    """

    def __init__(self, links: LinkMatrix) -> None:
        size = len(links.latency)
        rows = [np.ascontiguousarray(table) for table in (links.latency, links.bandwidth)]
        # By rows in both directions: a column of a large table takes thirty times as long to read.
        columns = [np.ascontiguousarray(table.T) for table in rows if not np.array_equal(table, table.T)]
        self._tables = (*rows, *columns)
        draw = np.random.default_rng(0)
        self._weights = draw.integers(1, 1 << 63, size, dtype=np.uint64)
        factors = draw.integers(1, 1 << 63, len(self._tables), dtype=np.uint64)
        self._ways = tuple((table.view(np.uint64), factor) for table, factor in zip(self._tables, factors, strict=True))
        every, own = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.uint64)
        for way, factor in self._ways:
            every += factor * (way @ self._weights)
            own += factor * way.diagonal()
        self._others = every - self._weights * own

    def groups(self, indices: Sequence[int]) -> list[list[int]]:
        """The groups among these devices, in the order of their first members."""
        groups: list[list[int]] = []
        heads = np.empty(len(indices), dtype=np.intp)
        for index in indices:
            known = heads[: len(groups)]
            link = np.zeros(len(known), dtype=np.uint64)
            for way, factor in self._ways:
                link += factor * way[index, known]
            mine = self._others[index] + self._weights[index] * link
            theirs = self._others[known] + self._weights[known] * link
            # Without the link between the two, which each of them has at another place.
            place = next(
                (int(each) for each in np.flatnonzero(mine == theirs) if self._same(groups[each], index)), None
            )
            if place is None:
                heads[len(groups)] = index
                groups.append([index])
            else:
                groups[place].append(index)
        return groups

    def _same(self, group: list[int], index: int) -> bool:
        other = group[0]
        for table in self._tables:
            if table[other, index] != table[index, other]:
                return False
            unlike = table[other] != table[index]
            unlike[[other, index]] = False
            if unlike.any():
                return False
        return True


def units_of(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    members: tuple[tuple[int, ...], ...],
    constraints: Constraints,
) -> tuple[list[Unit], bool]:
    sizes = _group_sizes(model, constraints)
    of_node: dict[tuple[str, str], list[int]] = {}
    units: list[Unit] = []
    for kind, group in enumerate(members):
        device = devices[group[0]]
        units.append(Unit((kind,), device.node, device.backend))
        of_node.setdefault((device.node, device.backend), []).append(kind)
    for (node, backend), kinds in of_node.items():
        units += [Unit((kind,) * size, node, backend) for size in sizes for kind in kinds if size <= len(members[kind])]
    every = (
        Unit(chosen, node, backend)
        for (node, backend), kinds in of_node.items()
        for chosen in _mixed(kinds, members, sizes)
    )
    mixed = list(islice(every, max(0, UNIT_LIMIT - len(units)) + 1))
    if len(units) + len(mixed) <= UNIT_LIMIT:
        return units + mixed, True
    # A group is as slow and as small as the least of its devices, so that devices of a size belong together.
    for (node, backend), kinds in of_node.items():
        order = sorted(kinds, key=lambda kind: (devices[members[kind][0]].budget_bytes, kind))
        row = [kind for kind in order for _ in members[kind]]
        groups = {tuple(sorted(row[at : at + size])) for size in sizes for at in range(len(row) - size + 1)}
        units += [Unit(group, node, backend) for group in sorted(groups) if group[0] != group[-1]]
    return units, False


def _mixed(
    kinds: Sequence[int], members: tuple[tuple[int, ...], ...], sizes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Groups of unlike devices."""
    held = sum(len(members[kind]) for kind in kinds)
    for size in sizes:
        for chosen in combinations_with_replacement(kinds, size) if size <= held else ():
            if chosen[0] != chosen[-1] and all(chosen.count(kind) <= len(members[kind]) for kind in set(chosen)):
                yield chosen


def representatives(unit: Unit, members: tuple[tuple[int, ...], ...]) -> list[int]:
    """Some devices of the cluster that make this unit; which ones makes no difference."""
    return [members[kind][unit.classes[:place].count(kind)] for place, kind in enumerate(unit.classes)]
