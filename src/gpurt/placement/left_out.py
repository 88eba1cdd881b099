"""Devices that take no part in a placement, each with the reason."""

from __future__ import annotations

import numpy as np

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.field import integers
from gpurt.placement.infeasibility import FilteredDevice, FilterReason
from gpurt.placement.spec import ModelSpec


def filtered_devices(problem: Problem, feasibility: Feasibility, *, links: bool) -> tuple[FilteredDevice, ...]:
    """In the order of the devices. ``links``: also those that the others do not reach, which takes time."""
    model, devices, _, rules = problem
    found: dict[str, tuple[FilterReason, str]] = {}
    field = feasibility.field(devices)
    for name, rule in feasibility.removed(problem):
        device = devices[field.place[name]]
        if rule == "excluded":
            by = device.id if device.id in rules.exclude_devices else f"node {device.node}"
            found[name] = FilterReason.EXCLUDED, f"{by} is excluded"
        elif rule == "backend":
            found[name] = FilterReason.BACKEND, f"the model does not run on {device.backend}"
        elif rule == "memory":
            found[name] = FilterReason.NO_MEMORY, "reserve and overhead leave no usable memory"
        else:
            found[name] = _incapable(model, device)
    kept = feasibility.kept(problem)
    sizes = feasibility.rules(problem).sizes
    layers = feasibility.layers(problem)
    fits = np.zeros(len(kept), dtype=np.bool_)
    for size in sizes:
        fits |= layers.fit(field.raw[kept], size) > 0
    for index in integers(kept[~fits]):
        name = devices[index].id
        found.setdefault(name, (FilterReason.TOO_SMALL, "not one layer fits"))
    for pool in field.pools:
        members = sorted((index for index in pool if devices[index].id not in found), key=lambda i: -int(field.raw[i]))
        for index in members[1:]:
            found[devices[index].id] = (
                FilterReason.MEMORY_POOL,
                f"it shares its memory with {devices[members[0]].id}, which counts",
            )
    parts = feasibility.parts(problem) if links else []
    if len(parts) > 1:
        held = layers.fit(field.raw)
        best = max(parts, key=lambda part: int(held[part.members].sum()))
        inside = set(integers(best.members))
        for index in integers(kept):
            if index not in inside:
                text = "it does not reach the devices that hold most"
                found.setdefault(devices[index].id, (FilterReason.NOT_CONNECTED, text))
    return tuple(
        FilteredDevice.model_construct(
            device=device.id, reason=found[device.id][0], detail=found[device.id][1], usable_bytes=device.budget_bytes
        )
        for device in devices
        if device.id in found
    )


def _incapable(model: ModelSpec, device: PlacementDevice) -> tuple[FilterReason, str]:
    """Why it can compute no layer: the one reason of all layers, or several."""
    dtypes = {layer.dtype or model.dtype for layer in model.layers}
    if device.dtypes is not None and not dtypes & {None, *device.dtypes}:
        return FilterReason.DTYPE, f"it does not compute in {', '.join(sorted(str(kind) for kind in dtypes))}"
    lacking = device.unsupported_operations
    for layer in model.layers:
        lacking = lacking & layer.operations
    if lacking:
        return FilterReason.OPERATION, f"it lacks {', '.join(sorted(lacking))}"
    limit = device.max_allocation_bytes
    tensors = [layer.largest_tensor_bytes for layer in model.layers]
    if limit is not None and all(size is not None and size > limit for size in tensors):
        least = min(size for size in tensors if size is not None)
        return FilterReason.ALLOCATION, f"a tensor of {least} bytes exceeds its largest allocation of {limit}"
    return FilterReason.CAPABILITY, "of each layer it lacks the data type, an operation or the allocation"
