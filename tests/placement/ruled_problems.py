"""Small random problems under many rules at once, and whether they have a plan: by trying all orders of all groups."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from gpurt.placement import (
    Constraints,
    DomainLimit,
    LayerSpec,
    Link,
    ModelSpec,
    Pin,
    PlacementDevice,
    StageLayers,
    Topology,
    Workload,
)
from gpurt.placement.feasibility import Problem
from tests.placement.brute import Brute

MIB = 1 << 20


def has_plan(case: Problem) -> bool:
    """By every order of disjoint groups: layers before which its next stage may begin, the first group's to the end."""
    brute = Brute(*case)
    count, rules = case.model.layer_count, case.constraints
    work = rules.workload
    limit = rules.max_link_seconds or float("inf")
    payload = [layer.activation_bytes_per_token * work.batch for layer in case.model.layers]

    def beyond(path: list[tuple[int, ...]], starts: set[int]) -> bool:
        group = path[-1]
        ends = {
            end
            for start in starts
            for end in range(start + 1, count + 1)
            if brute.stage(group, start, end)[0] < float("inf")
        }
        if count in ends and brute.allowed(path):
            back = brute.way(group, path[0], 4 * work.batch) if len(path) > 1 else 0.0
            if back < float("inf"):
                return True
        used = {index for each in path for index in each}
        for other in brute.groups:
            if used & set(other):
                continue
            ways = {end: brute.way(group, other, payload[end - 1]) for end in ends - {count}}
            reached = {end for end, seconds in ways.items() if seconds <= limit and seconds < float("inf")}
            if reached and beyond([*path, other], reached):
                return True
        return False

    return any(beyond([group], {0}) for group in brute.groups)


@dataclass(frozen=True)
class Size:
    devices: int
    layers: int


def ruled_problem(seed: int, *, most: Size = Size(5, 8)) -> Problem:
    """From the seed alone. About half of them have no plan."""
    dice = random.Random(f"ruled {seed}")
    count, length = dice.randint(1, most.devices), dice.randint(1, most.layers)
    each = dice.randint(20, 200) * MIB
    model = _model(dice, length, each)
    nodes = [f"n{dice.randrange(max(1, count - 1))}" for _ in range(count)]
    devices = tuple(_device(dice, place, node, model, count, each) for place, node in enumerate(nodes))
    work = Workload(
        context_tokens=dice.choice([0, 0, 700, 2000]), batch=dice.choice([1, 1, 2, 4]),
        prefill_tokens=dice.choice([1, 1, 600]),
    )  # fmt: skip
    return Problem(model, devices, _topology(dice, devices), _rules(dice, devices, length, work))


def _model(dice: random.Random, length: int, each: int) -> ModelSpec:
    common: dict[str, Any] = {
        "kv_bytes_per_token": dice.choice([0, 0, 1 << 13]),
        "workspace_bytes_per_token": dice.choice([0, 0, 1 << 13]),
        "flops_per_token": 10.0,
    }
    varied = dice.random() < 0.3
    layers = tuple(
        LayerSpec(
            weight_bytes=each + (dice.choice([0, 0, 7, 60]) * MIB if varied else 0),
            activation_bytes_per_token=dice.choice([8, 4000]) if varied else 8,
            operations=frozenset({"scan"}) if varied and dice.random() < 0.2 else frozenset(),
            **common,
        )
        for _ in range(length)
    )
    if not varied:
        layers = layers[:1] * length
    ends = dice.choice([0, 0, each // 2, 2 * each])
    head = dice.choice([ends, each // 3])
    return ModelSpec(
        name="m", layers=layers, embedding_bytes=ends, head_bytes=head,
        tied_bytes=dice.choice([0, min(ends, head)]), tensor_parallel=dice.choice([(1,), (1,), (1, 2), (1, 2, 4)]),
        dtype=dice.choice([None, "float16"]),
    )  # fmt: skip


def _device(dice: random.Random, place: int, node: str, model: ModelSpec, count: int, each: int) -> PlacementDevice:
    room = dice.uniform(0.3, 3.0) * model.weight_bytes / count + dice.choice([0, 0, each])
    return PlacementDevice(
        id=f"d{place}", node=node, zone=dice.choice(["z0", "z1"]), labels={"power": dice.choice("ab")},
        backend=dice.choice(["cuda", "cuda", "metal"]), usable_bytes=int(room), memory_bandwidth=1e9,
        compute_flops=1e12, unsupported_operations=dice.choice([frozenset[str](), frozenset(), frozenset({"scan"})]),
        memory_pool_id=dice.choice(["p", None, None, None, None]),
    )  # fmt: skip


def _topology(dice: random.Random, devices: tuple[PlacementDevice, ...]) -> Topology:
    kind = dice.random()
    if kind < 0.6:
        return Topology()
    names = [device.id for device in devices]
    links = tuple(
        Link(source=one, target=other, latency_seconds=dice.choice([0.001, 0.05, 0.4]), bandwidth=1e6)
        for one in names
        for other in names
        if one != other and dice.random() < 0.7
    )
    return Topology.unconnected(links) if kind < 0.8 else Topology(links=links)


def _rules(dice: random.Random, devices: tuple[PlacementDevice, ...], length: int, work: Workload) -> Constraints:
    names = [device.id for device in devices]
    nodes = sorted({device.node for device in devices})
    often = dice.choice([0.05, 0.15, 0.3, 0.5])

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if dice.random() < often else otherwise

    def some(of: list[str]) -> frozenset[str]:
        return frozenset(dice.sample(of, dice.randint(1, min(2, len(of)))))

    def pin() -> Pin:
        start = dice.randrange(length)
        names_of = {"devices": some(names)} if dice.random() < 0.7 else {"nodes": some(nodes)}
        return Pin(start=start, end=dice.randint(start + 1, length), **names_of)

    def span(top: int) -> tuple[int, int | None]:
        least, greatest = maybe(dice.randint(1, top), 1), maybe(dice.randint(1, top), None)
        return (min(least, greatest), max(least, greatest)) if greatest is not None else (least, None)

    exclude, exclude_nodes = maybe(some(names), frozenset()), maybe(some(nodes), frozenset())
    stages, spread = span(5), span(4)
    kinds = ["node", "zone", "power"]
    return Constraints(
        workload=work,
        pins=tuple(pin() for _ in range(maybe(dice.randint(1, 2), 0))),
        exclude_devices=exclude,
        exclude_nodes=exclude_nodes if dice.random() < 0.3 else frozenset(),
        require_devices=maybe(some(names), frozenset()) - exclude,
        require_nodes=maybe(some(nodes), frozenset()) - exclude_nodes,
        stage_layers=tuple(_stage_layers(dice, name, length) for name in maybe(sorted(some(names)), [])),
        min_stages=stages[0], max_stages=stages[1], min_nodes=spread[0], max_nodes=spread[1],
        domain_limits=tuple(
            DomainLimit(domain=kind, stages=dice.randint(1, 2))
            for kind in maybe(dice.sample(kinds, dice.randint(1, 2)), [])
        ),
        max_link_seconds=maybe(dice.choice([0.0005, 0.05, 0.5]), None),
        tensor_parallel_max=maybe(dice.choice([1, 2]), None),
        same_backend=maybe(True, False),
    )  # fmt: skip


def _stage_layers(dice: random.Random, name: str, length: int) -> StageLayers:
    least = dice.randint(1, length)
    return StageLayers(device=name, minimum=least, maximum=dice.choice([None, dice.randint(least, length)]))
