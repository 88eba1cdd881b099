"""Which nodes form the ring: a question to the solver, in which fewer nodes come first and preferences decide ties.

The solver minimises time around the ring. Here the way into a node costs one unit, more than any choice of devices can
save, so that the smallest ring wins; what is preferred among rings of one size is a small part of that unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import monotonic
from typing import Final

from gpurt.integrations.exo.inputs import ExoDevice, ExoNode, ExoRequest
from gpurt.placement.constraints import Constraints, StageLayers
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InfeasiblePlacement, PlacementTimeout
from gpurt.placement.plan import Plan
from gpurt.placement.solver import ConstraintSatisfactionPlacement
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Link, Topology

DEFAULT_BUDGET: Final = 0.04
"""Seconds for the search. With the rest of the call that stays within 50 ms, so a master's command loop may call it."""
PATIENCE: Final = 25.0
"""So many times the budget when the budget gave neither a plan nor a proof that there is none."""

_NOT_A_LEAF: Final = 0.04
_NOT_THERE: Final = 0.01
_LESS_ROOM: Final = 0.002
"""Parts of one unit, each smaller than what the one before decides among few nodes; sixteen of all stay below one."""
_INSIDE: Final = 1e-6
_FAST: Final = 1e12
"""Bytes/s where nothing is known: equal for all, so that it decides nothing."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Parts in order, with the layers that the solver gave them."""

    stages: tuple[tuple[ExoNode, ExoDevice, int, int], ...]

    @property
    def nodes(self) -> tuple[ExoNode, ...]:
        """In order, each once for every time the ring comes by."""
        return tuple(node for node, _ in groupby(stage[0] for stage in self.stages))

    def turned(self, model_bytes: int) -> Ring:
        """Begun at the first change of nodes, so that a ring that began in the middle of a node does so no more.

        A way around costs the same wherever it begins. Sizes of layers differ by a byte at most; where that byte is too
        much, the ring stays as it is.
        """
        first = self.stages[0][0]
        place = next((place for place, stage in enumerate(self.stages) if stage[0] is not first), 0)
        if self.stages[-1][0] is not first or not place:
            return self
        layers = sum(end - start for *_, start, end in self.stages)
        at = 0
        turned: list[tuple[ExoNode, ExoDevice, int, int]] = []
        for node, part, start, end in (*self.stages[place:], *self.stages[:place]):
            after = at + end - start
            if model_bytes * after // layers - model_bytes * at // layers > part.available_bytes:
                return self
            turned.append((node, part, at, after))
            at = after
        return Ring(tuple(turned))


def preference(request: ExoRequest, node: ExoNode) -> tuple[bool, float, float, int]:
    """Greater is better: a leaf of the network, then what it has downloaded, then speed, then room."""
    speed = max((part.memory_bandwidth or 0.0 for part in node.parts), default=0.0)
    return node.id in request.leaves, node.downloaded, speed, node.room


def smallest_ring(
    request: ExoRequest,
    nodes: Sequence[ExoNode],
    *,
    layers: int,
    size_bytes: int,
    counts: Sequence[int],
    single_layer: bool = False,
    budget: float = DEFAULT_BUDGET,
) -> Ring | None:
    """A ring over some of ``nodes``, of as few as possible of ``counts``; None where it is certain that there is none.

    Args:
        layers, size_bytes: of the model, as the solver is to see it.
        counts: how many nodes there may be, at least two each, ascending without gaps.
        single_layer: each part holds one layer at most.

    Raises:
        PlacementTimeout: neither a ring nor a proof.
    """
    counts = [count for count in counts if count <= len(nodes)]
    if not counts or not request.required <= {node.id for node in nodes}:
        return None
    question = _Question(request, nodes, layers, size_bytes, single_layer)
    # Where everybody reaches everybody the least number does it, and looking for that alone is quick. Elsewhere the
    # search over all of them finds the fewest by itself.
    attempts = [(counts[0], counts[0]), *([(counts[1], counts[-1])] if len(counts) > 1 else [])]
    until = monotonic() + budget
    open_ones: list[tuple[int, int]] = []
    for place, (low, high) in enumerate(attempts):
        try:
            return question.ask(low, high, max(budget / 8, (until - monotonic()) / (len(attempts) - place)))
        except InfeasiblePlacement:
            continue
        except PlacementTimeout:
            open_ones.append((low, high))
    for place, (low, high) in enumerate(open_ones, start=1):
        try:
            return question.ask(low, high, budget * PATIENCE / len(open_ones))
        except InfeasiblePlacement:
            continue
        except PlacementTimeout:
            if place == len(open_ones):
                raise
    return None


class _Question:
    def __init__(
        self, request: ExoRequest, nodes: Sequence[ExoNode], layers: int, size_bytes: int, single_layer: bool
    ) -> None:
        self.request = request
        self.size_bytes = size_bytes
        self.parts = {
            f"{place}.{number}": (node, part)
            for place, node in enumerate(nodes)
            for number, part in enumerate(node.parts)
        }
        self.devices = [
            PlacementDevice(
                id=name,
                node=f"node {node.id}",
                usable_bytes=part.available_bytes,
                memory_bandwidth=part.memory_bandwidth or _FAST,
                compute_flops=_FAST,
            )
            for name, (node, part) in self.parts.items()
        ]
        self.spec = ModelSpec.uniform(request.model.name or "model", layers=layers, size_bytes=size_bytes)
        self.topology = self._topology(nodes)
        self.stage_layers = tuple(StageLayers(device=name, maximum=1) for name in self.parts) if single_layer else ()

    def ask(self, low: int, high: int, seconds: float) -> Ring:
        rules = Constraints(
            min_nodes=low,
            max_nodes=high,
            require_nodes=frozenset(f"node {name}" for name in self.request.required),
            stage_layers=self.stage_layers,
        )
        plan: Plan = ConstraintSatisfactionPlacement().solve_placement(
            self.spec, self.devices, self.topology, rules, time_budget=seconds
        )
        ring = Ring(tuple((*self.parts[stage.devices[0]], stage.start, stage.end) for stage in plan.stages))
        return ring.turned(self.size_bytes)

    def _topology(self, nodes: Sequence[ExoNode]) -> Topology:
        """The way into each node costs a unit and its preference; between the devices of one node next to nothing."""
        speeds = [device.memory_bandwidth for device in self.devices]
        unit = self.size_bytes / min(speeds) - self.size_bytes / max(speeds) or 1.0
        scale = min(1.0, 16 / len(nodes))
        most = max(node.room for node in nodes) or 1

        def into(node: ExoNode) -> float:
            less = _LESS_ROOM * (1 - node.room / most)
            return unit * (
                1
                + scale
                * (_NOT_A_LEAF * (node.id not in self.request.leaves) + _NOT_THERE * (1 - node.downloaded) + less)
            )

        cost = {node.id: into(node) for node in nodes}
        links = [
            Link(source=f"node {source}", target=f"node {target}", latency_seconds=cost[target], bandwidth=1e30)
            for source, target in sorted(self.request.edges)
            if source in cost and target in cost and source != target
        ]
        inside = [
            Link(source=a, target=b, latency_seconds=unit * _INSIDE, bandwidth=1e30)
            for a, (one, _) in self.parts.items()
            for b, (other, _) in self.parts.items()
            if one is other and a != b
        ]
        return Topology.unconnected([*links, *inside])


def exchanged(request: ExoRequest, ring: Sequence[ExoNode], nodes: Sequence[ExoNode]) -> tuple[ExoNode, ...]:
    """A ring with each node exchanged for a preferred one as long as there is any: the search may have ended before it
    had compared all rings of one size. For pipelines over nodes that are equally fast and are placed on as a whole."""
    model = request.model
    members = list(ring)
    while True:
        for place, node in enumerate(members):
            before, after = members[place - 1].id, members[(place + 1) % len(members)].id
            others = sum(other.layers(model) for other in members) - node.layers(model)
            better = [
                other
                for other in nodes
                if other not in members
                and (before, other.id) in request.edges
                and (other.id, after) in request.edges
                and other.layers(model)
                and others + other.layers(model) >= model.layers
                and preference(request, other) > preference(request, node)
                and node.id not in request.required
            ]
            if better:
                members[place] = max(better, key=lambda other: preference(request, other))
                break
        else:
            return tuple(members)


def cliques(nodes: Sequence[str], edges: frozenset[tuple[str, str]], size: int) -> Iterator[tuple[str, ...]]:
    """Sets of ``size`` nodes each of which reaches each other; earlier nodes first."""
    near = {
        name: frozenset(other for other in nodes if (name, other) in edges and (other, name) in edges) for name in nodes
    }

    def grow(chosen: tuple[str, ...], rest: Sequence[str]) -> Iterator[tuple[str, ...]]:
        if len(chosen) == size:
            yield chosen
            return
        for place, name in enumerate(rest):
            if len(chosen) + len(rest) - place < size:
                return
            yield from grow((*chosen, name), [other for other in rest[place + 1 :] if other in near[name]])

    yield from grow((), list(nodes))
