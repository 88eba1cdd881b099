"""What comes of placing a model on exo's nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpurt.integrations.exo.inputs import Engine, Sharding
from gpurt.placement.errors import InfeasiblePlacement


@dataclass(frozen=True, slots=True)
class NodeShard:
    """What one node gets."""

    node: str
    start: int
    end: int
    """Layers ``start`` to ``end`` (exclusive); all of them under tensor sharding."""
    devices: tuple[tuple[str, int, int], ...] = ()
    """Its devices with their own ranges, in order; empty where the node was placed on as a whole."""

    @property
    def layers(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ExoPlacement:
    """Where a model goes."""

    shards: tuple[NodeShard, ...]
    """In the order of the ring: rank 0 first."""
    sharding: Sharding
    engine: Engine
    downgraded: tuple[str, ...] = ()
    """What was asked for and is not given, in words: one node alone has nobody to share a layer with."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(shard.node for shard in self.shards)

    @property
    def layers(self) -> dict[str, int]:
        """How many layers each node has."""
        return {shard.node: shard.layers for shard in self.shards}


class ExoPlacementRefused(InfeasiblePlacement, ValueError):
    """No placement keeps the rules; a ``ValueError`` because that is what exo's callers expect.

    Attributes:
        constraint: ``memory`` (not enough room, or not in whole layers where nodes reach each other), ``backend`` (no
            node runs it), ``engine`` (the model runs on no backend of the engine), ``tensor``, ``rdma``, or ``time``
            (no plan was found in time, and nothing proves that there is none).
        report: figures: ``needed_bytes``, ``layers``, ``rooms`` (bytes by node), ``capacities`` (whole layers by node),
            ``excluded`` (reason by node).
    """

    def __init__(self, message: str, *, constraint: str, report: Any = None, **context: Any) -> None:
        super().__init__(message, constraint=constraint, report=report, **context)
