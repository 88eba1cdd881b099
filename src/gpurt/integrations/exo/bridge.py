"""From exo's objects to :func:`gpurt.integrations.exo.placement.place`, and its answer back into exo's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, Final

from gpurt.integrations.exo.answer import ExoPlacement, ExoPlacementRefused
from gpurt.integrations.exo.inputs import Engine, ExoModel, ExoNode, ExoRequest, Sharding
from gpurt.integrations.exo.placement import place
from gpurt.integrations.exo.rings import DEFAULT_BUDGET
from gpurt.integrations.exo.shapes import HasAvailable, ModelCard, PlaceCommand, RdmaStatus, Topology

_HEADS_STAY_WHOLE: Final = ("DeepSeek V4",)
"""Families whose tensor sharding does not divide key-value heads."""
_EXPECTED: Final = {
    "memory": "No cycles found with sufficient memory",
    "time": "No cycles found with sufficient memory",
    "tensor": "No tensor sharding found",
    "engine": "cannot satisfy engine {engine}",
    "backend": "No cycle where every node supports a backend of the model",
    "rdma": "Requested RDMA (MlxJaccl) but no RDMA-connected cycles available",
}
"""What exo's callers and tests look for in the text of a refusal, by its constraint."""


def place_command(
    command: PlaceCommand,
    topology: Topology,
    node_memory: Mapping[Any, HasAvailable],
    node_backends: Mapping[Any, Collection[str]],
    *,
    required_nodes: Collection[str] | None = None,
    download_status: Mapping[Any, Collection[Any]] | None = None,
    node_rdma_ctl: Mapping[Any, RdmaStatus] | None = None,
    time_budget: float = DEFAULT_BUDGET,
) -> ExoPlacement:
    """Where an instance goes; the arguments are those of exo's ``place_instance``. Pure and synchronous.

    Raises:
        ExoPlacementRefused: a ``ValueError`` whose text has what exo's callers look for.
    """
    request = request_of(
        command,
        topology,
        node_memory,
        node_backends,
        required_nodes=required_nodes,
        download_status=download_status,
        node_rdma_ctl=node_rdma_ctl,
    )
    try:
        return place(request, time_budget=time_budget)
    except ExoPlacementRefused as error:
        expected = _EXPECTED[error.constraint].format(engine=request.engine)
        raise ExoPlacementRefused(
            f"{expected}: {error.message}", constraint=error.constraint, report=error.report
        ) from error


def request_of(
    command: PlaceCommand,
    topology: Topology,
    node_memory: Mapping[Any, HasAvailable],
    node_backends: Mapping[Any, Collection[str]],
    *,
    required_nodes: Collection[str] | None = None,
    download_status: Mapping[Any, Collection[Any]] | None = None,
    node_rdma_ctl: Mapping[Any, RdmaStatus] | None = None,
) -> ExoRequest:
    """The question in gpurt's records. Nodes whose memory nobody told take no part."""
    card = command.model_card
    known = [name for name in topology.list_nodes() if name in node_memory]
    rdma = node_rdma_ctl or {}
    nodes = tuple(
        ExoNode(
            name,
            node_memory[name].ram_available.in_bytes,
            frozenset(_values(node_backends.get(name, ()))),
            downloaded=_downloaded(card.model_id, (download_status or {}).get(name, ())),
            rdma=rdma[name].enabled if name in rdma else None,
        )
        for name in known
    )
    among = set(known)
    edges = [
        (each.source, each.sink, hasattr(each.edge, "source_rdma_iface"))
        for each in topology.list_connections()
        if each.source in among and each.sink in among
    ]
    return ExoRequest(
        _model_of(card),
        nodes,
        frozenset((source, sink) for source, sink, _ in edges),
        frozenset((source, sink) for source, sink, is_rdma in edges if is_rdma),
        Sharding(command.sharding),
        Engine(command.instance_meta),
        command.min_nodes,
        frozenset(required_nodes or ()),
    )


def assignments(placement: ExoPlacement, card: ModelCard) -> Any:
    """exo's ``ShardAssignments`` of a placement; ranks are places in the ring."""
    runners = import_module("exo.shared.types.worker.runners")
    shards = import_module("exo.shared.types.worker.shards")
    world = len(placement.shards)
    by_runner: dict[Any, Any] = {}
    by_node: dict[str, Any] = {}
    mirrored = card.uses_cfg and world > 1 and world % 2 == 0 and placement.sharding is Sharding.PIPELINE
    for rank, shard in enumerate(placement.shards):
        common: dict[str, Any] = {
            "model_card": card,
            "device_rank": rank,
            "world_size": world,
            "start_layer": shard.start,
            "end_layer": shard.end,
            "n_layers": card.n_layers,
        }
        if placement.sharding is Sharding.TENSOR:
            made = shards.TensorShardMetadata(**common)
        elif mirrored:
            half = world // 2
            place_in = {"cfg_rank": rank // half, "pipeline_rank": rank if rank < half else world - 1 - rank}
            made = shards.CfgShardMetadata(**common, **place_in, cfg_world_size=2, pipeline_world_size=half)
        else:
            made = shards.PipelineShardMetadata(**common)
        runner = runners.RunnerId()
        by_runner[runner] = made
        by_node[shard.node] = runner
    return runners.ShardAssignments(model_id=card.model_id, runner_to_shard=by_runner, node_to_runner=by_node)


def _model_of(card: ModelCard) -> ExoModel:
    whole_heads = card.base_model.startswith(_HEADS_STAY_WHOLE)
    return ExoModel(
        card.model_id,
        card.storage_size.in_bytes,
        card.n_layers,
        hidden_size=card.hidden_size,
        backends=frozenset(_values(card.backends)),
        supports_tensor=card.supports_tensor,
        kv_heads=None if whole_heads else card.num_key_value_heads,
        uses_cfg=card.uses_cfg,
    )


def _values(members: Collection[str]) -> list[str]:
    """Values of exo's string enumerations, or plain texts."""
    return [str(getattr(member, "value", member)) for member in members]


def _downloaded(model_id: str, progress: Collection[Any]) -> float:
    """Share of the model that is on a node's disk, of exo's ``DownloadProgress``: the first entry about it counts."""
    for each in progress:
        if each.shard_metadata.model_card.model_id != model_id:
            continue
        match type(each).__name__:
            case "DownloadCompleted":
                return 1.0
            case "DownloadOngoing":
                done, total = each.download_progress.downloaded.in_bytes, each.download_progress.total.in_bytes
            case "DownloadPending":
                done, total = each.downloaded.in_bytes, each.total.in_bytes
            case _:
                return 0.0
        return min(1.0, done / total) if total > 0 else 0.0
    return 0.0
