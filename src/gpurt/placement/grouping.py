"""Which devices take part, which of them are alike, and what units they can form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Final

import numpy as np

from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.instance import Unit
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.topology import LinkMatrix

UNIT_LIMIT: Final = 6000
"""Above this many units, groups of unlike devices are left out: see ``Instance.complete``."""


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
    complete = True
    for mixed in (False, True):
        for (node, backend), kinds in of_node.items():
            for size in sizes:
                if size > sum(len(members[kind]) for kind in kinds):
                    continue
                for chosen in combinations_with_replacement(kinds, size):
                    alike = chosen[0] == chosen[-1]
                    if alike == mixed or any(chosen.count(kind) > len(members[kind]) for kind in set(chosen)):
                        continue
                    if mixed and len(units) >= UNIT_LIMIT:
                        complete = False
                        break
                    units.append(Unit(chosen, node, backend))
    return units, complete


def representatives(unit: Unit, members: tuple[tuple[int, ...], ...]) -> list[int]:
    """Some devices of the cluster that make this unit; which ones makes no difference."""
    return [members[kind][unit.classes[:place].count(kind)] for place, kind in enumerate(unit.classes)]
