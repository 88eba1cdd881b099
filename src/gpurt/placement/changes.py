"""A problem with one relaxation made."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Final

import numpy as np

from gpurt.placement.arguments import check_kind
from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.feasibility import Feasibility, Problem, with_bytes, with_devices
from gpurt.placement.field import integers
from gpurt.placement.infeasibility import Relaxation, RelaxationKind
from gpurt.placement.inputs import check_types
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import DEFAULT_CLASSES, LinkTable, Locality, Topology

_OF_WORKLOAD: Final = {
    RelaxationKind.CONTEXT_TOKENS: "context_tokens",
    RelaxationKind.BATCH: "batch",
    RelaxationKind.PREFILL_TOKENS: "prefill_tokens",
}
_OF_RULES: Final = {
    RelaxationKind.MAX_STAGES: "max_stages",
    RelaxationKind.MIN_STAGES: "min_stages",
    RelaxationKind.MAX_NODES: "max_nodes",
    RelaxationKind.MIN_NODES: "min_nodes",
    RelaxationKind.TENSOR_PARALLEL_MAX: "tensor_parallel_max",
    RelaxationKind.MAX_LINK_SECONDS: "max_link_seconds",
}


def apply_relaxation(
    relaxation: Relaxation,
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    topology: Topology | None = None,
    constraints: Constraints | None = None,
) -> Problem:
    """``(model, devices, topology, constraints)`` with the change made: what to give to ``solve_placement``.

    Raises:
        InvalidPlacementInput: an argument is of another kind.
    """
    check_kind(relaxation, Relaxation, "relaxation")
    topology = Topology() if topology is None else topology
    constraints = Constraints() if constraints is None else constraints
    check_types(model, devices, topology, constraints)
    problem = Problem(model, tuple(devices), topology, constraints)
    return changed(relaxation, problem)


def one_step_less(relaxation: Relaxation) -> Relaxation | None:
    """The relaxation with ``less`` in the place of ``amount``, which does not do; None where that is no change.

    Raises:
        InvalidPlacementInput: it is no relaxation.
    """
    check_kind(relaxation, Relaxation, "relaxation")
    if relaxation.less is None:
        return None
    less = relaxation.less
    names = relaxation.names[: int(less)] if relaxation.kind in _BY_NAMES else relaxation.names
    return relaxation.model_copy(update={"amount": less, "names": names, "less": None})


_BY_NAMES: Final = (RelaxationKind.INCLUDE, RelaxationKind.WIDEN_PIN, RelaxationKind.CONNECT)
"""Kinds whose amount is the number of their names."""


def changed(relaxation: Relaxation, problem: Problem) -> Problem:
    model, devices, _, rules = problem
    kind, amount, names = relaxation.kind, relaxation.amount, frozenset(relaxation.names)
    if kind is RelaxationKind.BYTES_PER_DEVICE:
        assert amount is not None
        return problem._replace(devices=tuple(with_bytes(device, int(amount)) for device in devices))
    if kind in _OF_WORKLOAD:
        work = rules.workload.model_copy(update={_OF_WORKLOAD[kind]: amount})
        return with_rules(problem, workload=work)
    if kind in _OF_RULES:
        return with_rules(problem, **{_OF_RULES[kind]: amount})
    if kind is RelaxationKind.QUANTISATION:
        assert amount is not None
        assert relaxation.before is not None
        return problem._replace(model=requantised(model, amount / relaxation.before, relaxation.names[0]))
    if kind in (RelaxationKind.ADD_DEVICES, RelaxationKind.ADD_DEVICE_OF_SIZE):
        assert amount is not None
        assert relaxation.device is not None
        if kind is RelaxationKind.ADD_DEVICES:
            return problem._replace(devices=with_devices(devices, relaxation.device, int(amount)))
        new = relaxation.device.model_copy(
            update={"usable_bytes": int(amount), "reserve_bytes": 0, "overhead_bytes": 0}
        )
        return problem._replace(devices=with_devices(devices, new, 1))
    if kind is RelaxationKind.INCLUDE:
        return with_rules(
            problem, exclude_devices=rules.exclude_devices - names, exclude_nodes=rules.exclude_nodes - names
        )
    if kind is RelaxationKind.REQUIRE:
        return with_rules(
            problem, require_devices=rules.require_devices - names, require_nodes=rules.require_nodes - names
        )
    if kind is RelaxationKind.STAGE_LAYERS:
        return with_rules(
            problem, stage_layers=tuple(entry for entry in rules.stage_layers if entry.device not in names)
        )
    if kind is RelaxationKind.SAME_BACKEND:
        return with_rules(problem, same_backend=False)
    if kind is RelaxationKind.CONNECT:
        return problem._replace(topology=connected(problem, relaxation.names))
    index = relaxation.index
    assert index is not None
    if kind is RelaxationKind.DOMAIN_LIMIT:
        limits = list(rules.domain_limits)
        limits[index] = limits[index].model_copy(update={"stages": amount})
        return with_rules(problem, domain_limits=tuple(limits))
    pins = list(rules.pins)
    if kind is RelaxationKind.DROP_PIN:
        del pins[index]
    else:
        pins[index] = pins[index].model_copy(update={"devices": pins[index].devices | names})
    return with_rules(problem, pins=tuple(pins))


def with_rules(problem: Problem, **rules: Any) -> Problem:
    return problem._replace(constraints=problem.constraints.model_copy(update=rules))


def requantised(model: ModelSpec, ratio: float, name: str) -> ModelSpec:
    """Every weight takes ``ratio`` of its bytes, rounded up."""

    def scaled(size: int | None) -> int | None:
        return None if size is None else ceil(size * ratio)

    known: dict[int, Any] = {}
    for layer in {id(layer): layer for layer in model.layers}.values():
        known[id(layer)] = layer.model_copy(
            update={
                field: scaled(getattr(layer, field))
                for field in ("weight_bytes", "read_bytes_per_token", "largest_tensor_bytes")
            }
        )
    ends = {field: scaled(getattr(model, field)) for field in ("embedding_bytes", "head_bytes")}
    tied = min(ceil(model.tied_bytes * ratio), *(size or 0 for size in ends.values()))
    return model.model_copy(
        update={
            "layers": tuple(known[id(layer)] for layer in model.layers),
            "quantisation": name,
            "tied_bytes": tied,
            **ends,
        }
    )


def connected(problem: Problem, names: Sequence[str]) -> Topology:
    """Every device named and all that it reaches now reach each other, at the speed of their zones."""
    _, devices, topology, _ = problem
    feasibility = Feasibility(float("inf"), search=0)
    parts = feasibility.parts(problem)
    place = feasibility.field(devices).place
    wanted = {place[name] for name in names}
    inside = [part.members for part in parts if wanted & set(integers(part.members))]
    members = np.concatenate(inside)
    number = np.concatenate([np.full(len(each), place) for place, each in enumerate(inside)])
    links = topology.dense(devices)
    latency, bandwidth = links.latency.copy(), links.bandwidth.copy()
    block = np.ix_(members, members)
    assumed = DEFAULT_CLASSES[Locality.ZONE]
    apart = number[:, None] != number[None, :]
    missing = apart & (np.isinf(latency[block]) | np.isinf(latency[block]).T)
    latency[block] = np.where(missing, assumed.latency_seconds, latency[block])
    bandwidth[block] = np.where(missing, assumed.bandwidth, bandwidth[block])
    np.fill_diagonal(bandwidth, 1.0)
    table = LinkTable(names=tuple(device.id for device in devices), latency_seconds=latency, bandwidth=bandwidth)
    return Topology(table=table)


__all__ = ["apply_relaxation", "one_step_less"]
