"""Clusters and models made from a seed: for tests, benchmarks and demonstrations. Nothing in them is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import LinkClass, LinkTable, Locality, Topology

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    backend: str
    gib: float
    bandwidth: float
    flops: float
    per_node: int


_KINDS: Final = {
    "h100": _Kind("H100 80 GB", "cuda", 79, 3.35e12, 9.9e14, 8),
    "a100": _Kind("A100 80 GB", "cuda", 79, 2.0e12, 3.1e14, 8),
    "mi300": _Kind("MI300X", "rocm", 191, 5.3e12, 1.3e15, 8),
    "l40s": _Kind("L40S", "cuda", 47, 8.6e11, 3.6e14, 4),
    "4090": _Kind("RTX 4090", "cuda", 23.5, 1.0e12, 1.6e14, 2),
    "3090": _Kind("RTX 3090", "cuda", 23.5, 9.3e11, 7.1e13, 2),
    "4060": _Kind("RTX 4060", "cuda", 7.7, 2.7e11, 3.0e13, 1),
    "m2ultra": _Kind("M2 Ultra", "metal", 140, 8.0e11, 2.7e13, 1),
    "m3max": _Kind("M3 Max", "metal", 48, 4.0e11, 1.4e13, 1),
    "m1": _Kind("M1", "metal", 11, 6.8e10, 2.6e12, 1),
    "phone": _Kind("phone", "tflite", 5, 5.0e10, 1.5e12, 1),
}
_MIXES: Final = {
    "home": {"4090": 3, "3090": 3, "4060": 3, "m2ultra": 2, "m3max": 4, "m1": 3, "phone": 2},
    "hetero": {"h100": 4, "a100": 4, "mi300": 2, "l40s": 3, "4090": 3, "m2ultra": 2, "m3max": 2},
    "datacentre": {"h100": 1, "a100": 1},
}
_WAYS: Final = {
    # latency (s) and bandwidth (bytes/s) in a node, in a zone, between zones
    "home": ((15e-6, 20e9), (400e-6, 2.0e8), (4e-3, 6e7)),
    "hetero": ((8e-6, 60e9), (80e-6, 2.5e9), (1e-3, 4e8)),
    "datacentre": ((3e-6, 300e9), (8e-6, 40e9), (40e-6, 1.2e10)),
}

ClusterKind = Literal["home", "hetero", "datacentre"]


def synthetic_cluster(
    kind: ClusterKind, count: int, seed: int, *, noise: float = 0.4, memory_noise: float = 0.05
) -> tuple[tuple[PlacementDevice, ...], Topology]:
    """``count`` devices in nodes and zones, and a link table with log-normal noise that need not be hierarchical.

    Devices of one node are identical, except that every second node with several has one that is half full.
    """
    random = np.random.default_rng([seed, count, len(kind)])
    names, weights = list(_MIXES[kind]), np.array(list(_MIXES[kind].values()), dtype=np.float64)
    devices: list[PlacementDevice] = []
    nodes: list[str] = []
    zones: list[int] = []
    in_zone = 8 if kind == "home" else 32
    while len(devices) < count:
        chosen = _KINDS[str(random.choice(names, p=weights / weights.sum()))]
        node = f"n{len(nodes):04d}"
        zone = len(devices) // in_zone
        usable = int(chosen.gib * GIB * float(np.exp(random.normal(0, memory_noise))))
        speed = float(np.exp(random.normal(0, 0.05)))
        members = min(chosen.per_node, count - len(devices))
        half_full = members > 1 and random.random() < 0.5
        for position in range(members):
            mine = usable // 2 if half_full and position == members - 1 else usable
            devices.append(
                PlacementDevice(
                    id=f"{node}/d{position}",
                    node=node,
                    zone=f"z{zone}",
                    backend=chosen.backend,
                    name=chosen.name,
                    usable_bytes=mine,
                    reserve_bytes=mine // 10,
                    memory_bandwidth=chosen.bandwidth * 0.7 * speed,
                    compute_flops=chosen.flops * 0.5 * speed,
                    launch_seconds=5e-6,
                    labels={"power": f"p{zone % 2}"},
                )
            )
        nodes.append(node)
        zones.append(zone)
    within, near, far = _WAYS[kind]
    size = len(nodes)
    same_zone = np.equal.outer(zones, zones)
    latency = np.where(same_zone, near[0], far[0]) * np.exp(random.normal(0, noise, (size, size)))
    bandwidth = np.where(same_zone, near[1], far[1]) * np.exp(random.normal(0, noise, (size, size)))
    classes = {
        Locality.NODE: LinkClass(latency_seconds=within[0], bandwidth=within[1]),
        Locality.ZONE: LinkClass(latency_seconds=near[0], bandwidth=near[1]),
        Locality.WIDE: LinkClass(latency_seconds=far[0], bandwidth=far[1]),
    }
    table = LinkTable(names=tuple(nodes), latency_seconds=latency, bandwidth=bandwidth)
    return tuple(devices), Topology(table=table, classes=classes)


def synthetic_model(
    layers: int, size_bytes: int, *, name: str = "synthetic", tensor_parallel: tuple[int, ...] = (1,)
) -> ModelSpec:
    """A dense model with equal layers of ``size_bytes // layers``, a tenth of a layer's size in cache per 8,192 tokens,
    and an embedding and a head of half a layer each."""
    each = size_bytes // layers
    return ModelSpec.uniform(
        name,
        layers=layers,
        size_bytes=each * layers,
        kv_bytes_per_token=max(1, each // 10 // 8192),
        flops_per_token=float(each),
        activation_bytes_per_token=16384,
        embedding_bytes=each // 2,
        head_bytes=each // 2,
        head_flops_per_token=float(each // 2),
        tensor_parallel=tensor_parallel,
    )


def model_for(
    devices: tuple[PlacementDevice, ...], layers: int, fill: float, *, tensor_parallel: tuple[int, ...] = (1,)
) -> ModelSpec:
    """A model of so many layers that fills this share of what the devices can hold in whole layers.

    The size is found by bisection on the number of whole layers that fit, with a cache of 8,192 tokens, since rounding
    to layers takes its part.
    """
    budgets = np.array([device.budget_bytes for device in devices], dtype=np.float64)
    low, high = 1.0, float(budgets.sum())
    for _ in range(60):
        middle = (low + high) / 2
        held = np.floor(budgets / (1.1 * middle)).clip(0, layers).sum()
        if held * fill >= layers:
            low = middle
        else:
            high = middle
    return synthetic_model(layers, int(low) * layers, tensor_parallel=tensor_parallel)
