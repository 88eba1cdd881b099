"""What one layer, one head and one sum cost on a device or a group: the cost model, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import Final

import numpy as np

from gpurt.placement.constraints import Workload
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.instance import Bools
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.topology import LinkMatrix

TOKEN_BYTES: Final = 4
"""What goes back from the last stage to the first, per sequence."""


def resident_layers(model: ModelSpec, device: PlacementDevice) -> Bools:
    """Which layers of the model lie on the device already."""
    there = np.zeros(model.layer_count, dtype=np.bool_)
    for piece in device.resident:
        if piece.model == model.name:
            there[piece.start : piece.end] = True
    return there


def layer_seconds(
    layer: LayerSpec, device: PlacementDevice, batch: int, context: int, share: int, weight: float | None = None
) -> float:
    """One layer, one step, on one of ``share`` devices that split it; without launch and without their sums.

    ``weight`` replaces the layer's bytes.
    """
    read = layer.weight_bytes if weight is None else weight
    if layer.read_bytes_per_token is not None:
        read = min(read, layer.read_bytes_per_token * batch)
    memory = read / device.memory_bandwidth
    compute = layer.flops_per_token * batch / device.compute_flops
    return (max(memory, compute) + layer.kv_bytes(context) * batch / device.memory_bandwidth) / share


def head_seconds(model: ModelSpec, device: PlacementDevice, share: int, batch: int) -> float:
    memory = model.head_bytes / device.memory_bandwidth
    return max(memory, model.head_flops_per_token * batch / device.compute_flops) / share


def allreduce_seconds(links: LinkMatrix, group: Sequence[int], payload_bytes: float) -> float:
    """A sum over a group: its slowest link, a tree for latency and a ring for bytes."""
    size = len(group)
    inside = np.ix_(group, group)
    off = ~np.eye(size, dtype=np.bool_)
    latency = float(links.latency[inside][off].max())
    slowest = float(links.bandwidth[inside][off].min())
    return ceil(log2(size)) * latency + 2 * (size - 1) / size * payload_bytes / slowest


def group_layer_seconds(
    layer: LayerSpec,
    group: Sequence[int],
    devices: Sequence[PlacementDevice],
    links: LinkMatrix,
    work: Workload,
    weight: float | None = None,
) -> float:
    """One layer, one step, on a group of devices: as slow as its slowest member, and two sums over the group."""
    size = len(group)
    found = [devices[index] for index in group]
    seconds = max(layer_seconds(layer, device, work.batch, work.context_tokens, size, weight) for device in found)
    seconds += max(device.launch_seconds for device in found)
    if size > 1:
        seconds += 2 * allreduce_seconds(links, group, layer.activation_bytes_per_token * work.batch)
    return seconds
