"""exo's question to the solver: model card, node memory, topology, sharding, least number of nodes.

What exo prefers is kept here and not in the solver: nodes with an accelerator before nodes without, the smallest ring,
rings at the edge of the network, nodes that have the model already, room. Layers go in proportion to memory where
nothing tells which node is faster; else the solver's own split holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from gpurt.integrations.exo.answer import ExoPlacement, ExoPlacementRefused, NodeShard
from gpurt.integrations.exo.inputs import (
    CPU_BACKEND,
    ENGINE_BACKENDS,
    Engine,
    ExoModel,
    ExoNode,
    ExoRequest,
    Sharding,
)
from gpurt.integrations.exo.refusals import names_of, no_room, no_time, refused, room
from gpurt.integrations.exo.rings import DEFAULT_BUDGET, PATIENCE, Ring, cliques, exchanged, preference, smallest_ring
from gpurt.integrations.exo.speeds import equally_fast, timed
from gpurt.integrations.exo.split import split_ring
from gpurt.placement.errors import PlacementTimeout


def place(request: ExoRequest, *, time_budget: float = DEFAULT_BUDGET) -> ExoPlacement:
    """Where the model goes. Pure and synchronous; takes about ``time_budget`` seconds.

    Where that finds neither a placement nor a proof that there is none, the search goes on for up to twenty-five
    times as long before it is given up.

    Raises:
        ExoPlacementRefused: nothing keeps the rules; it names the rule and has the figures.
    """
    needed = ENGINE_BACKENDS[request.engine] & request.model.backends
    if not needed:
        raise refused(
            request,
            request.nodes,
            "engine",
            f"{request.model.name} runs on {names_of(request.model.backends)}, but {request.engine} needs one of "
            f"{names_of(ENGINE_BACKENDS[request.engine])}",
        )
    able = [node for node in request.nodes if node.backends & needed]
    tiers = [[node for node in able if node.backends & needed - {CPU_BACKEND}], able]
    refusal: ExoPlacementRefused | None = None
    for tier in tiers if len(tiers[0]) < len(able) else tiers[1:]:
        try:
            return _place(request, timed(tier, needed), time_budget)
        except ExoPlacementRefused as error:
            refusal = error
    assert refusal is not None
    if len(able) < len(request.nodes) and refusal.constraint == "memory":
        everybody = sum(node.room for node in request.nodes)
        if everybody >= request.model.size_bytes and room(able) < request.model.size_bytes:
            raise refused(
                request,
                able,
                "backend",
                f"{request.model.name} needs {request.model.size_bytes} bytes; the nodes that run it on one of "
                f"{names_of(needed)} have {room(able)} together",
            ) from refusal
    raise refusal


def _place(request: ExoRequest, nodes: Sequence[ExoNode], budget: float) -> ExoPlacement:
    alone = _alone(request, nodes)
    if alone is not None:
        return alone
    if request.sharding is Sharding.TENSOR and not request.model.supports_tensor:
        raise refused(request, nodes, "tensor", f"{request.model.name} cannot be divided within its layers")
    counts = _counts(request, nodes)
    if request.engine is Engine.JACCL:
        return _all_to_all(request, nodes, counts, budget)
    if request.sharding is Sharding.TENSOR:
        return _tensor_ring(request, nodes, counts, budget)
    return _pipeline_ring(request, nodes, counts, budget)


def _alone(request: ExoRequest, nodes: Sequence[ExoNode]) -> ExoPlacement | None:
    """One node that holds everything, by exo's preference."""
    if request.min_nodes > 1 or len(request.required) > 1:
        return None
    whole = [node for node in nodes if node.layers(request.model) >= request.model.layers]
    fit = [node for node in whole if request.required <= {node.id}]
    if not fit:
        return None
    best = max(fit, key=lambda node: preference(request, node))
    asked: list[str] = []
    if request.engine is Engine.JACCL:
        asked.append(f"{Engine.JACCL} needs two nodes: {Engine.RING} instead")
    if request.sharding is Sharding.TENSOR:
        asked.append("tensor sharding needs two nodes: pipeline instead")
    shard = NodeShard(best.id, 0, request.model.layers, _within(request.model, best, 0, request.model.layers))
    return ExoPlacement((shard,), Sharding.PIPELINE, Engine.RING, tuple(asked))


def _counts(request: ExoRequest, nodes: Sequence[ExoNode]) -> list[int]:
    """How many nodes there may be, ascending."""
    model = request.model
    counts = range(max(2, request.min_nodes, len(request.required)), len(nodes) + 1)
    if request.sharding is Sharding.PIPELINE:
        capacities = sorted((node.layers(model) for node in nodes), reverse=True)
        # Two pipelines side by side hold every layer twice.
        copies = {count: 2 if model.uses_cfg and count % 2 == 0 else 1 for count in counts}
        return [
            count
            for count in counts
            if sum(capacities[:count]) >= model.layers * copies[count] and count <= model.layers * copies[count]
        ]
    divisible = [
        count
        for count in counts
        if model.hidden_size % count == 0 and (model.kv_heads is None or model.kv_heads % count == 0)
    ]
    if not counts:
        raise no_room(request, nodes)
    if not divisible:
        heads = "" if model.kv_heads is None else f" and {model.kv_heads} key-value heads"
        raise refused(
            request,
            nodes,
            "tensor",
            f"{model.name} has a hidden size of {model.hidden_size}{heads}, which no number of nodes from "
            f"{max(2, request.min_nodes)} to {len(nodes)} divides",
        )
    return divisible


def _pipeline_ring(request: ExoRequest, nodes: Sequence[ExoNode], counts: Sequence[int], budget: float) -> ExoPlacement:
    model = request.model
    for attempt in _attempts(nodes):
        for group, copies in _by_copies(model, counts):
            ring = _ring(
                request,
                attempt,
                layers=model.layers * copies,
                size_bytes=model.size_bytes * copies,
                counts=group,
                budget=budget,
            )
            shards = None if ring is None else _shards(request, attempt, ring, mirrored=copies > 1)
            if shards is not None:
                return ExoPlacement(shards, request.sharding, request.engine)
    raise no_room(request, nodes)


def _tensor_ring(request: ExoRequest, nodes: Sequence[ExoNode], counts: Sequence[int], budget: float) -> ExoPlacement:
    """Every node holds one slice of as many as there are nodes."""
    whole = [replace(node, devices=(), available_bytes=node.largest) for node in nodes]
    for count in counts:
        size = request.model.size_bytes
        fit = [node for node in whole if node.available_bytes * count >= size]
        ring = _ring(
            request, fit, layers=count, size_bytes=-(-size // count) * count, counts=[count], budget=budget,
            single_layer=True,
        )  # fmt: skip
        if ring is not None:
            return ExoPlacement(_everything(request.model, ring.nodes), request.sharding, request.engine)
    raise no_room(request, nodes)


def _all_to_all(request: ExoRequest, nodes: Sequence[ExoNode], counts: Sequence[int], budget: float) -> ExoPlacement:
    """Nodes each of which reaches each other over RDMA, by preference; as few as possible."""
    ready = [node for node in nodes if node.rdma]
    by_name = {node.id: node for node in sorted(ready, key=lambda node: preference(request, node), reverse=True)}
    until = monotonic() + budget * PATIENCE
    connected = False
    for count in counts:
        for names in cliques(tuple(by_name), request.rdma_edges, count):
            if monotonic() > until:
                raise no_time(request, nodes, budget * PATIENCE)
            if not request.required <= set(names):
                continue
            connected = True
            chosen = [by_name[name] for name in names]
            if request.sharding is Sharding.TENSOR:
                if all(node.largest * count >= request.model.size_bytes for node in chosen):
                    return ExoPlacement(_everything(request.model, chosen), request.sharding, request.engine)
                continue
            cut = split_ring(request.model, [node.largest for node in chosen])
            if cut is not None:
                shards = tuple(NodeShard(node.id, *part) for node, part in zip(chosen, cut, strict=True))
                return ExoPlacement(shards, request.sharding, request.engine)
    if not connected and counts:
        raise refused(
            request,
            nodes,
            "rdma",
            f"no {counts[0]} nodes reach each other over RDMA; it is known to be switched on at "
            f"{names_of(node.id for node in ready)}",
        )
    raise no_room(request, nodes)


def _ring(request: ExoRequest, nodes: Sequence[ExoNode], *, budget: float, **question: Any) -> Ring | None:
    try:
        return smallest_ring(request, nodes, budget=budget, **question)
    except PlacementTimeout as error:
        raise no_time(request, nodes, budget * PATIENCE) from error


def _attempts(nodes: Sequence[ExoNode]) -> list[list[ExoNode]]:
    """Nodes with all their devices; then with their largest alone: a node has one range, and a ring that comes by
    twice has none for it."""
    whole = [replace(node, devices=_best_device(node)) for node in nodes]
    return [list(nodes), whole] if any(len(node.devices) > 1 for node in nodes) else [list(nodes)]


def _by_copies(model: ExoModel, counts: Sequence[int]) -> list[tuple[list[int], int]]:
    """Numbers of nodes with how often the model is there; smaller numbers first."""
    if not model.uses_cfg:
        return [(list(counts), 1)]
    return [([count], 2 if count % 2 == 0 else 1) for count in counts]


def _shards(
    request: ExoRequest, nodes: Sequence[ExoNode], ring: Ring, *, mirrored: bool
) -> tuple[NodeShard, ...] | None:
    """The ring's shards; None where a node would have two ranges, or two pipelines do not fit side by side."""
    model, members = request.model, ring.nodes
    if len(set(members)) != len(members):
        return None
    if mirrored or (equally_fast(nodes) and not any(len(node.devices) > 1 for node in nodes)):
        members = members if mirrored else exchanged(request, members, nodes)
        cut = split_ring(model, [node.largest for node in members])
        if cut is not None:
            return tuple(
                NodeShard(node.id, *part, _within(model, node, *part)) for node, part in zip(members, cut, strict=True)
            )
        if mirrored:
            return None
    found: list[NodeShard] = []
    for node in members:
        own = [(part.id, start, end) for owner, part, start, end in ring.stages if owner is node]
        found.append(NodeShard(node.id, own[0][1], own[-1][2], tuple(own) if node.devices else ()))
    return tuple(found)


def _everything(model: ExoModel, nodes: Sequence[ExoNode]) -> tuple[NodeShard, ...]:
    return tuple(NodeShard(node.id, 0, model.layers) for node in nodes)


def _within(model: ExoModel, node: ExoNode, start: int, end: int) -> tuple[tuple[str, int, int], ...]:
    """The devices of a node that hold its range, largest first; empty where the node has none of its own."""
    held: list[tuple[str, int, int]] = []
    for device in sorted(node.devices, key=lambda device: device.available_bytes, reverse=True):
        if start < end:
            stop = min(end, start + model.capacity(device.available_bytes))
            held.append((device.id, start, stop))
            start = stop
    return tuple(each for each in held if each[1] < each[2])


def _best_device(node: ExoNode) -> tuple[Any, ...]:
    return (max(node.devices, key=lambda device: device.available_bytes),) if node.devices else ()


__all__ = ["ExoPlacement", "ExoPlacementRefused", "place"]
