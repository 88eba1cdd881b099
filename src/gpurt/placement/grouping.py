"""Which devices take part, which of them are alike, and what units they can form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, islice
from typing import Final

import numpy as np

from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.instance import Unit
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.topology import LinkMatrix

UNIT_LIMIT: Final = 6000
"""Above this many units, of unlike devices only neighbours in size make a group: see ``Instance.complete``. There are
tables of unit by unit."""


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
    groups: dict[tuple[object, ...], list[list[int]]] = {}
    for index, device in enumerate(devices):
        key = (
            device.id if device.id in named else None,
            device.node, device.zone, tuple(sorted(device.labels.items())), device.backend,
            device.budget_bytes, device.memory_bandwidth, device.compute_flops, device.launch_seconds,
            device.dtypes, device.unsupported_operations, device.max_allocation_bytes, device.resident,
            device.memory_pool_id,
        )  # fmt: skip
        for group in groups.setdefault(key, []):
            if _same_links(links, group, index):
                group.append(index)
                break
        else:
            groups[key].append([index])
    return tuple(tuple(group) for found in groups.values() for group in found)


def _same_links(links: LinkMatrix, group: list[int], index: int) -> bool:
    other = group[0]
    for table in (links.latency, links.bandwidth):
        inside = table[np.ix_([*group, index], [*group, index])]
        off = inside[~np.eye(len(group) + 1, dtype=np.bool_)]
        if (off != off[0]).any():
            return False
        outside = np.ones(len(table), dtype=np.bool_)
        outside[[*group, index]] = False
        if (table[other, outside] != table[index, outside]).any():
            return False
        if (table[outside, other] != table[outside, index]).any():
            return False
    return True


def units_of(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    members: tuple[tuple[int, ...], ...],
    constraints: Constraints,
) -> tuple[list[Unit], bool]:
    limit = constraints.tensor_parallel_max
    sizes = [size for size in model.tensor_parallel if size > 1 and (limit is None or size <= limit)]
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
