"""What exo knows when it places a model, without exo's types: plain frozen records. Sizes are bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from gpurt.placement.errors import InvalidPlacementInput


class Sharding(StrEnum):
    """How a model is divided over nodes; equal to exo's values."""

    PIPELINE = "Pipeline"
    """Each node has a contiguous range of layers."""
    TENSOR = "Tensor"
    """Each node has an equal share of every layer."""


class Engine(StrEnum):
    """How nodes talk to each other; equal to the values of exo's ``InstanceMeta``."""

    RING = "MlxRing"
    """Each node to its two neighbours."""
    JACCL = "MlxJaccl"
    """All to all, over RDMA."""


ENGINE_BACKENDS: dict[Engine, frozenset[str]] = {
    Engine.RING: frozenset({"MlxMetal", "MlxCuda", "MlxCpu"}),
    Engine.JACCL: frozenset({"MlxMetal"}),
}
"""The values of exo's ``Backend`` that each engine runs on."""

CPU_BACKEND = "MlxCpu"


@dataclass(frozen=True, slots=True)
class ExoModel:
    """A model card."""

    name: str
    size_bytes: int
    """Of all weights together; divided over the layers exactly."""
    layers: int
    hidden_size: int = 1
    backends: frozenset[str] = frozenset({"MlxMetal"})
    supports_tensor: bool = False
    kv_heads: int | None = None
    """None: not told, not checked."""
    uses_cfg: bool = False
    """With an even number of nodes two pipelines run side by side, the second one mirrored."""

    def __post_init__(self) -> None:
        for name in ("size_bytes", "layers", "hidden_size"):
            if getattr(self, name) < 1:
                raise InvalidPlacementInput("it must be positive", field=f"model.{name}")

    def capacity(self, available_bytes: int) -> int:
        """Whole layers that fit into so many bytes wherever in the model they are: no layer's size is rounded."""
        return min(self.layers, available_bytes * self.layers // self.size_bytes)


@dataclass(frozen=True, slots=True)
class ExoDevice:
    """One device of a node that exo's engines can compute on."""

    id: str
    available_bytes: int
    memory_bandwidth: float | None = None
    """Bytes/s; None: not known."""


@dataclass(frozen=True, slots=True)
class ExoNode:
    """One node."""

    id: str
    available_bytes: int
    """Of ``MemoryUsage``; counts where ``devices`` is empty."""
    backends: frozenset[str] = frozenset()
    downloaded: float = 0.0
    """Share of the model that is on its disk already."""
    rdma: bool | None = None
    """Whether RDMA is switched on; None, nobody said, counts as no."""
    memory_bandwidth: float | None = None
    """Bytes/s of the node as one device; None: not known."""
    devices: tuple[ExoDevice, ...] = ()
    """Its devices, where they are known and have memory of their own."""

    def __post_init__(self) -> None:
        for each in (self, *self.devices):
            if each.available_bytes < 0:
                raise InvalidPlacementInput("it must not be negative", field=f"nodes.{each.id}.available_bytes")

    @property
    def parts(self) -> tuple[ExoDevice, ...]:
        """What layers are put on: its devices, or itself as one."""
        return self.devices or (ExoDevice(self.id, self.available_bytes, self.memory_bandwidth),)

    @property
    def room(self) -> int:
        """Bytes of all parts together."""
        return sum(part.available_bytes for part in self.parts)

    @property
    def largest(self) -> int:
        """Bytes of the part that has most."""
        return max(part.available_bytes for part in self.parts)

    def layers(self, model: ExoModel) -> int:
        """Whole layers that its parts hold together."""
        return sum(model.capacity(part.available_bytes) for part in self.parts)


@dataclass(frozen=True)
class ExoRequest:
    """What is asked for, and what there is.

    Raises:
        InvalidPlacementInput: two nodes of one name, an edge or a required node that is not there, ``min_nodes``
            below 1.
    """

    model: ExoModel
    nodes: tuple[ExoNode, ...]
    edges: frozenset[tuple[str, str]] = frozenset()
    """Directed: the first reaches the second, in any way."""
    rdma_edges: frozenset[tuple[str, str]] = frozenset()
    """Those of ``edges`` that are RDMA connections."""
    sharding: Sharding = Sharding.PIPELINE
    engine: Engine = Engine.RING
    min_nodes: int = 1
    required: frozenset[str] = field(default_factory=frozenset[str])
    """Nodes that must take part."""

    def __post_init__(self) -> None:
        names = [node.id for node in self.nodes]
        if len(set(names)) != len(names):
            raise InvalidPlacementInput("two nodes have one name", field="nodes")
        if self.min_nodes < 1:
            raise InvalidPlacementInput("it must be positive", field="min_nodes")
        for where, ends in (("edges", self.edges), ("rdma_edges", self.rdma_edges)):
            for end in sorted({end for edge in ends for end in edge} - set(names)):
                raise InvalidPlacementInput(f"unknown node {end!r}", field=where)
        for name in sorted(self.required - set(names)):
            raise InvalidPlacementInput(f"unknown node {name!r}", field="required")

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Nodes that reach at most one other node."""
        reached = Counter(source for source, _ in self.edges)
        return frozenset(node.id for node in self.nodes if reached[node.id] <= 1)
