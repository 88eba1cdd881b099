"""Placement: where every layer of a model goes.

::

    from gpurt.placement import ConstraintSatisfactionPlacement, ModelSpec, Topology

    plan = ConstraintSatisfactionPlacement().solve_placement(model=model, devices=devices, topology=Topology())
    for stage in plan.stages:
        print(stage.devices, stage.start, stage.end)

Pure: it knows models, devices and links, and no bus. Needs NumPy; with ``highspy`` and ``ortools`` (extra
``placement``) it proves more in the same time. The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurt.placement.changes import apply_relaxation, one_step_less
    from gpurt.placement.constraints import Constraints, DomainLimit, ObjectiveKind, Pin, StageLayers, Workload
    from gpurt.placement.devices import PlacementDevice, ResidentRange, device_from_gpu, devices_from_view
    from gpurt.placement.errors import (
        InfeasiblePlacement,
        InvalidPlacementInput,
        InvalidPlan,
        PlacementCancelled,
        PlacementError,
        PlacementTimeout,
    )
    from gpurt.placement.estimates import PerformanceEstimate, get_performance_estimate
    from gpurt.placement.explanation import explain_plan
    from gpurt.placement.hysteresis import RepairPolicy
    from gpurt.placement.infeasibility import (
        ConstraintKind,
        DeviceRoom,
        FilteredDevice,
        FilterReason,
        InfeasibilityReport,
        Relaxation,
        RelaxationKind,
    )
    from gpurt.placement.inventory import Inventory, inventory_of
    from gpurt.placement.loading import DeviceLoad, LoadPrediction, predict_load
    from gpurt.placement.meshes import Communication, DeviceMesh, create_cross_vendor_mesh, create_device_mesh
    from gpurt.placement.plan import Plan, PlanStatus, Stage
    from gpurt.placement.queries import (
        CrossVendorCapabilities,
        DeviceChoice,
        choose_device,
        get_cross_vendor_capabilities,
        get_optimal_device,
        get_optimal_device_placement,
    )
    from gpurt.placement.repair import repair_placement
    from gpurt.placement.replanning import FailedRepair, ProposedPlan, Replanner
    from gpurt.placement.replica_report import ReplicaReport
    from gpurt.placement.replicas import solve_replicas, solve_replicas_async
    from gpurt.placement.replicas_explained import explain_replicas
    from gpurt.placement.replicated import ReplicatedPlan, validate_replicas
    from gpurt.placement.requirements import Policy
    from gpurt.placement.retelling import RepairMethod, RepairResult
    from gpurt.placement.solver import ConstraintSatisfactionPlacement
    from gpurt.placement.spec import LayerSpec, ModelSpec
    from gpurt.placement.topology import Link, LinkClass, LinkTable, Locality, Topology
    from gpurt.placement.validation import validate_plan
    from gpurt.placement.version import PlanVersion
    from gpurt.placement.what_if import WhatIf, what_ifs
    from gpurt.placement.workloads import WorkloadPlacement, WorkloadRequest, optimize_workload_placement

__all__ = [
    "Communication",
    "ConstraintKind",
    "ConstraintSatisfactionPlacement",
    "Constraints",
    "CrossVendorCapabilities",
    "DeviceChoice",
    "DeviceLoad",
    "DeviceMesh",
    "DeviceRoom",
    "DomainLimit",
    "FailedRepair",
    "FilterReason",
    "FilteredDevice",
    "InfeasibilityReport",
    "InfeasiblePlacement",
    "InvalidPlacementInput",
    "InvalidPlan",
    "Inventory",
    "LayerSpec",
    "Link",
    "LinkClass",
    "LinkTable",
    "LoadPrediction",
    "Locality",
    "ModelSpec",
    "ObjectiveKind",
    "PerformanceEstimate",
    "Pin",
    "PlacementCancelled",
    "PlacementDevice",
    "PlacementError",
    "PlacementTimeout",
    "Plan",
    "PlanStatus",
    "PlanVersion",
    "Policy",
    "ProposedPlan",
    "Relaxation",
    "RelaxationKind",
    "RepairMethod",
    "RepairPolicy",
    "RepairResult",
    "Replanner",
    "ReplicaReport",
    "ReplicatedPlan",
    "ResidentRange",
    "Stage",
    "StageLayers",
    "Topology",
    "WhatIf",
    "Workload",
    "WorkloadPlacement",
    "WorkloadRequest",
    "apply_relaxation",
    "choose_device",
    "create_cross_vendor_mesh",
    "create_device_mesh",
    "device_from_gpu",
    "devices_from_view",
    "explain_plan",
    "explain_replicas",
    "get_cross_vendor_capabilities",
    "get_optimal_device",
    "get_optimal_device_placement",
    "get_performance_estimate",
    "inventory_of",
    "one_step_less",
    "optimize_workload_placement",
    "predict_load",
    "repair_placement",
    "solve_replicas",
    "solve_replicas_async",
    "validate_plan",
    "validate_replicas",
    "what_ifs",
]

_HOMES = {
    "changes": ("apply_relaxation", "one_step_less"),
    "infeasibility": (
        "ConstraintKind",
        "DeviceRoom",
        "FilterReason",
        "FilteredDevice",
        "InfeasibilityReport",
        "Relaxation",
        "RelaxationKind",
    ),
    "estimates": (
        "PerformanceEstimate",
        "get_performance_estimate",
    ),
    "explanation": ("explain_plan",),
    "inventory": (
        "Inventory",
        "inventory_of",
    ),
    "meshes": (
        "Communication",
        "DeviceMesh",
        "create_cross_vendor_mesh",
        "create_device_mesh",
    ),
    "queries": (
        "CrossVendorCapabilities",
        "DeviceChoice",
        "choose_device",
        "get_cross_vendor_capabilities",
        "get_optimal_device",
        "get_optimal_device_placement",
    ),
    "requirements": ("Policy",),
    "what_if": (
        "WhatIf",
        "what_ifs",
    ),
    "workloads": (
        "WorkloadPlacement",
        "WorkloadRequest",
        "optimize_workload_placement",
    ),
    "constraints": ("Constraints", "DomainLimit", "ObjectiveKind", "Pin", "StageLayers", "Workload"),
    "devices": ("PlacementDevice", "ResidentRange", "device_from_gpu", "devices_from_view"),
    "errors": (
        "InfeasiblePlacement",
        "InvalidPlacementInput",
        "InvalidPlan",
        "PlacementCancelled",
        "PlacementError",
        "PlacementTimeout",
    ),
    "loading": ("DeviceLoad", "LoadPrediction", "predict_load"),
    "plan": ("Plan", "PlanStatus", "Stage"),
    "solver": ("ConstraintSatisfactionPlacement",),
    "spec": ("LayerSpec", "ModelSpec"),
    "topology": ("Link", "LinkClass", "LinkTable", "Locality", "Topology"),
    "validation": ("validate_plan",),
    "version": ("PlanVersion",),
    "hysteresis": ("RepairPolicy",),
    "repair": ("repair_placement",),
    "replanning": ("FailedRepair", "ProposedPlan", "Replanner"),
    "replica_report": ("ReplicaReport",),
    "replicas": ("solve_replicas", "solve_replicas_async"),
    "replicas_explained": ("explain_replicas",),
    "replicated": ("ReplicatedPlan", "validate_replicas"),
    "retelling": ("RepairMethod", "RepairResult"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
