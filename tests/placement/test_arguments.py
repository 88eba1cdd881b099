"""Every public function is given what it does not take, one argument after the other: the argument is named."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import gpurt.placement
from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    InvalidPlacementInput,
    ModelSpec,
    PlanVersion,
    Relaxation,
    RelaxationKind,
    Replanner,
    Topology,
    WorkloadRequest,
    apply_relaxation,
    choose_device,
    create_cross_vendor_mesh,
    create_device_mesh,
    device_from_gpu,
    devices_from_view,
    explain_plan,
    explain_replicas,
    get_cross_vendor_capabilities,
    get_optimal_device,
    get_optimal_device_placement,
    get_performance_estimate,
    inventory_of,
    one_step_less,
    optimize_workload_placement,
    predict_load,
    repair_placement,
    solve_replicas,
    solve_replicas_async,
    validate_plan,
    validate_replicas,
    what_ifs,
)
from gpurt.placement.meshes import communication_of
from tests.cluster.support import device as gpu
from tests.placement.rack import CPU, device

pytestmark = pytest.mark.wide

MODEL = ModelSpec.uniform("m", layers=2, size_bytes=100)
DEVICES = [device("a"), device("b")]
GPU = gpu()
LINKS, RULES = Topology(), Constraints()
SOLVER = ConstraintSatisfactionPlacement()
PLAN = SOLVER.solve_placement(MODEL, DEVICES)
REPLICAS = solve_replicas(MODEL, DEVICES, constraints=Constraints(replicas=2))
CHANGE = Relaxation(kind=RelaxationKind.BATCH, change="", amount=1, minimal=True)
MESH = create_cross_vendor_mesh(DEVICES)
WORK = [WorkloadRequest(name="w", memory_bytes=1)]
SEARCH = {"time_budget": 1.0, "target_gap": 0.1, "seed": 0, "objective": "latency"}
FIT = {"precision": None, "backends": None, "policy": "fastest", "accept_estimates": False}
FITTING = {"memory_requirement_gb": 0.0, "compute_requirement_tflops": None, "preferred_vendors": None}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "apply_relaxation": (
        apply_relaxation,
        {"relaxation": CHANGE, "model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES},
    ),
    "choose_device": (choose_device, {"devices": DEVICES, **FITTING, **FIT}),
    "communication_of": (communication_of, {"devices": DEVICES}),
    "create_cross_vendor_mesh": (create_cross_vendor_mesh, {"devices": DEVICES, "topology": LINKS}),
    "create_device_mesh": (
        create_device_mesh,
        {"devices": DEVICES, "topology": LINKS, "data": 1, "pipeline": 1, "tensor": 1},
    ),
    "explain_plan": (explain_plan, {"plan": PLAN, "model": MODEL, "devices": DEVICES, "constraints": RULES}),
    "explain_replicas": (
        explain_replicas,
        {"model": MODEL, "devices": DEVICES, "constraints": RULES, "replicated": REPLICAS},
    ),
    "device_from_gpu": (device_from_gpu, {"device": GPU, "node": "n", "measured": None, "reserve": 0.1}),
    "devices_from_view": (
        devices_from_view,
        {"available": {("n", "a"): GPU}, "zones": {}, "reserve": 0.1, "measured": {}, "resident": {}, "held": {}},
    ),
    "get_cross_vendor_capabilities": (get_cross_vendor_capabilities, {"devices": DEVICES}),
    "get_optimal_device": (get_optimal_device, {"devices": DEVICES, **FITTING, **FIT}),
    "get_optimal_device_placement": (
        get_optimal_device_placement,
        {"devices": DEVICES, "memory_gb": 1.0, "compute_tflops": 1.0, "policy": "fastest", "accept_estimates": True},
    ),
    "get_performance_estimate": (
        get_performance_estimate,
        {"device": DEVICES[0], "m": 1, "n": 1, "k": 1, "element_bytes": 2},
    ),
    "inventory_of": (inventory_of, {"devices": {}, "away": None, "resident": None, "reserve": 0.1}),
    "one_step_less": (one_step_less, {"relaxation": CHANGE}),
    "optimize_workload_placement": (optimize_workload_placement, {"workloads": WORK, "devices": DEVICES}),
    "predict_load": (predict_load, {"plan": PLAN, "model": MODEL, "devices": DEVICES}),
    "repair_placement": (
        repair_placement,
        {
            "plan": PLAN,
            "model": MODEL,
            "devices": DEVICES,
            "topology": LINKS,
            "constraints": RULES,
            "policy": None,
            "time_budget": 1.0,
            "seed": 0,
        },
    ),
    "Replanner": (
        Replanner,
        {
            "model": MODEL,
            "plan": PLAN,
            "version": PlanVersion(term=1, n=1),
            "constraints": RULES,
            "policy": None,
            "time_budget": 1.0,
            "seed": 0,
        },
    ),
    "Replanner.change": (
        Replanner(MODEL, PLAN, PlanVersion(term=1, n=1)).change,
        {"devices": DEVICES, "topology": LINKS},
    ),
    "solve_placement": (
        SOLVER.solve_placement,
        {"model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES, **SEARCH},
    ),
    "solve_placement_async": (
        SOLVER.solve_placement_async,
        {"model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES, **SEARCH},
    ),
    "solve_replicas": (
        solve_replicas,
        {"model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES, **SEARCH},
    ),
    "solve_replicas_async": (
        solve_replicas_async,
        {"model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES, **SEARCH},
    ),
    "validate_plan": (
        validate_plan,
        {"model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES, "plan": PLAN},
    ),
    "validate_replicas": (
        validate_replicas,
        {"model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES, "replicated": REPLICAS},
    ),
    "what_ifs": (
        what_ifs,
        {"model": MODEL, "devices": DEVICES, "topology": LINKS, "constraints": RULES, "plan": PLAN},
    ),
    "ModelSpec.from_config": (ModelSpec.from_config, {"source": {}, "quantisation": None, "dtype": None}),
    "ModelSpec.from_gguf": (ModelSpec.from_gguf, {"path": ""}),
    "ModelSpec.from_safetensors": (ModelSpec.from_safetensors, {"path": ""}),
    "ModelSpec.uniform": (lambda **given: ModelSpec.uniform("m", **given), {"layers": 1, "size_bytes": 1}),
    "PlanVersion.next": (PlanVersion(term=1, n=1).next, {"term": None}),
    "Topology.dense": (LINKS.dense, {"devices": DEVICES}),
    "Topology.unconnected": (Topology.unconnected, {"links": []}),
    "Topology.within": (LINKS.within, {"devices": DEVICES}),
    "DeviceMesh.along": (MESH.along, {"axis": "device", "rank": 0}),
    "DeviceMesh.shares": (MESH.shares, {"total": 1}),
}
"""Of each function a call that is right."""


class Strange:
    """Nothing that anything takes."""


def wrongs() -> list[Any]:
    cases: list[Any] = []
    for name, (function, given) in CALLS.items():
        for argument in given:
            cases += [
                pytest.param(function, given, argument, wrong, id=f"{name}-{argument}-{type(wrong).__name__}")
                for wrong in (Strange(), [Strange()], b"x")
            ]
    return cases


@pytest.mark.parametrize(("function", "given", "argument", "wrong"), wrongs())
async def test_what_an_argument_is_not(
    function: Callable[..., Any], given: dict[str, Any], argument: str, wrong: object
) -> None:
    async def call() -> None:
        found = function(**{**given, argument: wrong})
        if inspect.isawaitable(found):
            await found

    with pytest.raises(InvalidPlacementInput) as caught:
        await call()
    assert caught.value.field.partition(".")[0] == argument
    assert re.search(r"Strange|list|bytes|b'x'", str(caught.value)), "what it was is said"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: get_optimal_device(None), "devices"),  # type: ignore[arg-type]
        (lambda: ModelSpec.from_config(None), "source"),  # type: ignore[arg-type]
        (lambda: optimize_workload_placement([{"name": "w"}], [CPU]), "workloads.0"),  # type: ignore[list-item]
        (lambda: get_optimal_device([CPU, {"id": "x"}]), "devices.1"),  # type: ignore[list-item]
        (lambda: get_optimal_device([CPU, CPU]), "devices.1.id"),
        (lambda: get_optimal_device(CPU), "devices"),  # type: ignore[arg-type]
        (lambda: get_optimal_device({"a": CPU}), "devices"),  # type: ignore[arg-type]
        (lambda: get_optimal_device([CPU], preferred_vendors=[1]), "preferred_vendors.0"),  # type: ignore[list-item]
        (lambda: get_optimal_device([CPU], backends="cpu"), "backends"),
        (lambda: SOLVER.solve_placement(MODEL, DEVICES, topology={}), "topology"),  # type: ignore[arg-type]
        (lambda: SOLVER.solve_placement(MODEL, DEVICES, constraints=()), "constraints"),  # type: ignore[arg-type]
    ],
)
def test_near_misses(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        call()
    assert caught.value.field == argument


def test_no_public_function_is_forgotten() -> None:
    public = {name for name in gpurt.placement.__all__ if inspect.isfunction(getattr(gpurt.placement, name))}
    assert public <= set(CALLS)
