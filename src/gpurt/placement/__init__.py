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
    from gpurt.placement.loading import DeviceLoad, LoadPrediction, predict_load
    from gpurt.placement.plan import Plan, PlanStatus, Stage
    from gpurt.placement.solver import ConstraintSatisfactionPlacement
    from gpurt.placement.spec import LayerSpec, ModelSpec
    from gpurt.placement.topology import Link, LinkClass, LinkTable, Locality, Topology
    from gpurt.placement.validation import validate_plan
    from gpurt.placement.version import PlanVersion

__all__ = [
    "ConstraintSatisfactionPlacement",
    "Constraints",
    "DeviceLoad",
    "DomainLimit",
    "InfeasiblePlacement",
    "InvalidPlacementInput",
    "InvalidPlan",
    "LayerSpec",
    "Link",
    "LinkClass",
    "LinkTable",
    "LoadPrediction",
    "Locality",
    "ModelSpec",
    "ObjectiveKind",
    "Pin",
    "PlacementCancelled",
    "PlacementDevice",
    "PlacementError",
    "PlacementTimeout",
    "Plan",
    "PlanStatus",
    "PlanVersion",
    "ResidentRange",
    "Stage",
    "StageLayers",
    "Topology",
    "Workload",
    "device_from_gpu",
    "devices_from_view",
    "predict_load",
    "validate_plan",
]

_HOMES = {
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
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
