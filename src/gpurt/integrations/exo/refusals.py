"""Why a model is not placed, with the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpurt.integrations.exo.answer import ExoPlacementRefused
from gpurt.integrations.exo.inputs import ExoNode, ExoRequest, Sharding


def room(nodes: Sequence[ExoNode]) -> int:
    return sum(node.room for node in nodes)


def no_room(request: ExoRequest, nodes: Sequence[ExoNode]) -> ExoPlacementRefused:
    model = request.model
    have = room(nodes)
    held = sum(node.layers(model) for node in nodes)
    if have < model.size_bytes:
        why = f"{len(nodes)} nodes have {have} bytes together, {model.size_bytes - have} too few"
    elif request.sharding is Sharding.PIPELINE and held < model.layers:
        why = f"{len(nodes)} nodes hold {held} whole layers of {model.layers}"
    else:
        why = f"no ring of at least {max(2, request.min_nodes)} of {len(nodes)} nodes holds it"
    return refused(request, nodes, "memory", f"{model.name} needs {model.size_bytes} bytes: {why}")


def no_time(request: ExoRequest, nodes: Sequence[ExoNode], seconds: float) -> ExoPlacementRefused:
    return refused(request, nodes, "time", f"no placement and no proof that there is none in {seconds:g} s")


def refused(request: ExoRequest, nodes: Sequence[ExoNode], constraint: str, message: str) -> ExoPlacementRefused:
    among = {node.id for node in nodes}
    report = {
        "needed_bytes": request.model.size_bytes,
        "layers": request.model.layers,
        "rooms": {node.id: node.room for node in request.nodes},
        "capacities": {node.id: node.layers(request.model) for node in request.nodes},
        "excluded": {node.id: "no fitting backend" for node in request.nodes if node.id not in among},
    }
    return ExoPlacementRefused(message, constraint=constraint, report=report)


def names_of(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
