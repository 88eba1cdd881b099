"""How fast nodes are, where anything tells that they are not equally fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gpurt.integrations.exo.inputs import CPU_BACKEND, ExoNode
from gpurt.placement.devices import BANDWIDTH_EFFICIENCY, FALLBACK_SPEEDS
from gpurt.types import DeviceKind

_KINDS: Final = {CPU_BACKEND: DeviceKind.CPU, "MlxMetal": DeviceKind.INTEGRATED_GPU}
"""The kind whose speed is assumed where nobody measured; of any other backend it is that of a GPU."""


def timed(nodes: Sequence[ExoNode], needed: frozenset[str]) -> list[ExoNode]:
    """With a speed for each where at least one is known or they differ in kind; else as they are."""
    kinds = {node.id: _kind(node, needed) for node in nodes}
    told = any(part.memory_bandwidth for node in nodes for part in node.parts)
    if len(set(kinds.values())) < 2 and not told:
        return list(nodes)

    def fast(node: ExoNode) -> ExoNode:
        assumed = FALLBACK_SPEEDS[kinds[node.id]][0] * BANDWIDTH_EFFICIENCY
        devices = tuple(replace(device, memory_bandwidth=device.memory_bandwidth or assumed) for device in node.devices)
        return replace(node, memory_bandwidth=node.memory_bandwidth or assumed, devices=devices)

    return [fast(node) for node in nodes]


def _kind(node: ExoNode, needed: frozenset[str]) -> DeviceKind:
    usable = sorted(node.backends & needed, key=lambda name: name == CPU_BACKEND)
    return _KINDS.get(usable[0], DeviceKind.GPU)


def equally_fast(nodes: Sequence[ExoNode]) -> bool:
    return len({part.memory_bandwidth for node in nodes for part in node.parts}) < 2
