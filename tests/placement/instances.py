"""Small random problems in which everything may differ: speeds, sizes, links, layers, rules."""

from __future__ import annotations

import random
from typing import NamedTuple

from gpurt.placement import (
    Constraints,
    DomainLimit,
    LayerSpec,
    Link,
    ModelSpec,
    Pin,
    PlacementDevice,
    ResidentRange,
    StageLayers,
    Topology,
    Workload,
)


class Problem(NamedTuple):
    model: ModelSpec
    devices: tuple[PlacementDevice, ...]
    topology: Topology
    constraints: Constraints


def problem(seed: int, *, devices: int, layers: int, rules: bool = False, varied: bool = False) -> Problem:
    """``rules``: with side constraints; ``varied``: layers differ, some data types too."""
    dice = random.Random(f"{seed} {devices} {layers} {rules} {varied}")
    each = dice.randint(50, 200)
    parallel = dice.choice([(1,), (1, 2), (1, 2, 4)])
    common = {
        "activation_bytes_per_token": dice.choice([0, 8, 4000]),
        "kv_bytes_per_token": dice.choice([0, 1]),
        "workspace_bytes_per_token": dice.choice([0, 5]),
    }
    if varied:
        built = tuple(
            LayerSpec(
                weight_bytes=each + dice.choice([0, 0, 60]),
                flops_per_token=float(dice.choice([10, 2000])),
                kv_tokens_max=dice.choice([None, 4]),
                dtype=dice.choice([None, None, "int8"]),
                operations=dice.choice([frozenset[str](), frozenset[str](), frozenset({"scan"})]),
                **common,
            )
            for _ in range(layers)
        )
    else:
        built = (LayerSpec(weight_bytes=each, flops_per_token=float(dice.choice([10, 2000])), **common),) * layers
    embedding = dice.choice([0, each // 2])
    model = ModelSpec(
        name="m",
        layers=built,
        embedding_bytes=embedding,
        head_bytes=embedding,
        tied_bytes=dice.choice([0, embedding]),
        tensor_parallel=parallel,
        dtype="float16",
    )
    nodes = [f"n{dice.randrange(max(1, devices // 2))}" for _ in range(devices)]
    kinds = [
        (dice.randint(1, 3 * layers // devices + 2) * each + dice.randint(0, each), dice.choice([100.0, 250.0, 1000.0]))
        for _ in range(max(2, devices - 1))
    ]
    found: list[PlacementDevice] = []
    for index in range(devices):
        usable, speed = dice.choice(kinds)
        found.append(
            PlacementDevice(
                id=f"d{index}",
                node=nodes[index],
                zone=f"z{nodes[index][-1] in '02'}",
                backend=dice.choice(["cuda", "cuda", "metal"]) if rules else "cuda",
                usable_bytes=usable,
                memory_bandwidth=speed,
                compute_flops=speed * dice.choice([1.0, 20.0]),
                launch_seconds=dice.choice([0.0, 0.01]),
                dtypes=dice.choice([None, frozenset({"float16"}), frozenset({"float16", "int8"})]) if varied else None,
                unsupported_operations=frozenset({"scan"}) if varied and dice.random() < 0.3 else frozenset(),
                labels={"power": dice.choice("ab")},
                memory_pool_id=dice.choice(["p", None, None, None]) if rules else None,
                resident=(ResidentRange(model="m", start=dice.randrange(layers), end=layers),)
                if rules and dice.random() < 0.5
                else (),
            )
        )
    links = [
        Link(
            source=f"d{one}",
            target=f"d{other}",
            latency_seconds=dice.choice([0.001, 0.05, 0.4]) * dice.uniform(0.5, 2),
            bandwidth=dice.choice([1e4, 1e6]),
        )
        for one in range(devices)
        for other in range(devices)
        if one != other and (dice.random() < 0.8 or nodes[one] == nodes[other])
    ]
    # Identical devices with identical links are part of every cluster, and what symmetry breaking is for.
    if dice.random() < 0.5:
        links = []
    topology = Topology(links=tuple(links))
    if rules and dice.random() < 0.3:
        topology = Topology.unconnected(links)
    work = Workload(context_tokens=dice.choice([0, 10]), batch=dice.choice([1, 2]))
    return Problem(
        model, tuple(found), topology, _rules(dice, found, layers, work) if rules else Constraints(workload=work)
    )


def _rules(dice: random.Random, devices: list[PlacementDevice], layers: int, work: Workload) -> Constraints:
    names = [device.id for device in devices]
    nodes = sorted({device.node for device in devices})
    options: dict[str, object] = {}
    for name, value in (
        ("max_stages", dice.randint(1, 4)),
        ("min_stages", 2),
        ("max_nodes", 1),
        ("min_nodes", 2),
        ("exclude_devices", frozenset({names[-1]})),
        ("require_devices", frozenset({names[0]})),
        ("require_nodes", frozenset({nodes[0]})),
        ("domain_limits", (DomainLimit(domain=dice.choice(["node", "zone", "power"]), stages=dice.randint(1, 2)),)),
        ("pins", (Pin(start=0, end=dice.randint(1, 2), devices=frozenset(dice.sample(names, 2))),)),
        ("stage_layers", (StageLayers(device=names[1], minimum=1, maximum=dice.randint(1, 3)),)),
        ("max_link_seconds", dice.choice([0.05, 0.5])),
        ("tensor_parallel_max", dice.choice([1, 2])),
        ("same_backend", True),
        ("movement_seconds_per_byte", 1e-4),
    ):
        if dice.random() < 0.2:
            options[name] = value
    if options.get("min_stages", 1) > options.get("max_stages", 99):  # type: ignore[operator]
        del options["min_stages"]
    if "min_nodes" in options and "max_nodes" in options:
        del options["min_nodes"]
    return Constraints(workload=work, **options)
