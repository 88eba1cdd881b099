"""Why a plan is as it is, in sentences: what was left out, what limits it, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpurt.placement.arguments import check_kind
from gpurt.placement.constraints import Constraints, ObjectiveKind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlan
from gpurt.placement.grouping import can_compute, filter_devices
from gpurt.placement.inputs import check_types
from gpurt.placement.plan import Plan, PlanStatus, Stage
from gpurt.placement.plan_form import check_form
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.topology import Topology
from gpurt.placement.what_if import WhatIf
from gpurt.placement.words import counted, listed, size_words, time_words

WORTH_SAYING: Final = 0.01
"""Gains below this share are noise: what-if plans are not proved any closer."""


def explain_plan(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    constraints: Constraints,
    plan: Plan,
    *,
    left_out: Mapping[str, str] | None = None,
    what_ifs: Sequence[WhatIf] = (),
) -> tuple[str, ...]:
    """Sentences for people, in the order: left out, not needed, full, time, what would help, what is estimated.

    Args:
        left_out: devices that are not among ``devices``, and why.
        what_ifs: see :func:`gpurt.placement.what_if.what_ifs`; without them nothing is said of what would help.

    Raises:
        InvalidPlacementInput: an argument is of another kind.
        InvalidPlan: the plan contradicts itself, is of a model with another number of layers, or uses a device that is
            not among ``devices``.
    """
    check_kind(plan, Plan, "plan")
    check_types(model, devices, Topology(), constraints)
    check_form(plan)
    if plan.layer_count != model.layer_count:
        raise InvalidPlan(f"the plan has {plan.layer_count} layers", rule="model", where="layer_count")
    for name in sorted(set(plan.devices) - {device.id for device in devices}):
        raise InvalidPlan("no such device", rule="device", where=name)
    return (
        *explain_left_out(model, devices, constraints, left_out or {}),
        *_not_needed(model, devices, constraints, plan),
        *_full(model, devices, constraints, plan),
        *_time(plan),
        *_help(plan, what_ifs),
        *_estimated(model, devices, plan),
    )


def explain_left_out(
    model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints, left_out: Mapping[str, str]
) -> tuple[str, ...]:
    """A sentence for every reason for which devices take no part, with their names."""
    reasons = dict(left_out)
    by_id = {device.id: device for device in devices}
    for name, rule in filter_devices(model, devices, constraints)[1]:
        reasons[name] = why_filtered(model, by_id[name], rule)
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return tuple(f"left out, {listed(group)}: {reason}" for reason, group in names.items())


def why_filtered(model: ModelSpec, device: PlacementDevice, rule: str) -> str:
    """In words, for a rule of :func:`gpurt.placement.grouping.filter_devices`."""
    match rule:
        case "excluded":
            return "excluded by the constraints"
        case "backend":
            return f"the model does not run on {device.backend}, only on {', '.join(sorted(model.backends or ()))}"
        case "capability":
            return _cannot(model, device)
        case _:
            kept = device.reserve_bytes + device.overhead_bytes
            return f"nothing is left of {size_words(device.usable_bytes)} beside {size_words(kept)} kept free"


def _cannot(model: ModelSpec, device: PlacementDevice) -> str:
    layer = next(each for each in model.layers if not can_compute(device, each, model))
    dtype = layer.dtype or model.dtype
    if dtype is not None and device.dtypes is not None and dtype not in device.dtypes:
        return f"it does not compute in {dtype}, only in {', '.join(sorted(device.dtypes)) or 'nothing'}"
    missing = layer.operations & device.unsupported_operations
    if missing:
        return f"it lacks {', '.join(sorted(missing))}"
    most, need = device.max_allocation_bytes or 0, layer.largest_tensor_bytes or 0
    return f"a tensor has {size_words(need)}, and one allocation there at most {size_words(most)}"


def _not_needed(
    model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints, plan: Plan
) -> Iterator[str]:
    kept, _ = filter_devices(model, devices, constraints)
    idle = [device.id for device in kept if device.id not in set(plan.devices)]
    if not idle:
        return
    if plan.status is PlanStatus.OPTIMAL:
        certain = "it is proved that no plan with them is better"
    elif plan.gap is not None:
        certain = f"no plan at all is better by more than {plan.gap:.2%}"
    else:
        certain = "no better plan with them was found"
    yield f"not used, {listed(idle)}: {certain}"


def _full(model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints, plan: Plan) -> Iterator[str]:
    work = constraints.workload
    by_id = {device.id: device for device in devices}

    def takes(layer: LayerSpec, share: int) -> int:
        return (layer.weight_bytes + work.batch * layer.kv_bytes(work.context_tokens)) // share

    full: list[str] = []
    for number, stage in enumerate(plan.stages):
        # The layers that could come to a stage without disturbing the order are those beside its own.
        beside = [model.layers[index] for index in (stage.start - 1, stage.end) if 0 <= index < plan.layer_count]
        if not beside:
            continue
        least = min(takes(layer, len(stage.devices)) for layer in beside)
        for held in stage.held:
            free = by_id[held.device].budget_bytes - (held.weights + held.kv + held.activations)
            if free < least:
                full.append(
                    f"{held.device} of stage {number + 1} ({size_words(free)} left, {size_words(least)} needed)"
                )
    if full:
        yield f"full, not one layer more fits: {listed(full, 4)}"
    elif len(plan.stages) > 1:
        yield "memory does not limit this plan: every stage has room for another layer"


def _time(plan: Plan) -> Iterator[str]:
    told = plan.predicted
    whole = told.latency_seconds
    parts = (
        ("reading weights and cache", told.memory_seconds),
        ("arithmetic", told.compute_seconds),
        ("links", told.link_seconds),
        ("fixed cost of layers", told.overhead_seconds),
    )
    if whole > 0:
        shares = ", ".join(f"{seconds / whole:.0%} {name}" for name, seconds in parts if seconds / whole >= 0.005)
        yield f"of {time_words(whole)} for a token: {shares}"
    slowest = max(range(len(plan.stages)), key=lambda index: plan.stages[index].seconds)
    if len(plan.stages) > 1:
        hop = max(plan.hops, key=lambda each: each.seconds)
        yield (
            f"slowest stage: {slowest + 1} with {time_words(plan.stages[slowest].seconds)}; slowest way: from stage "
            f"{hop.source + 1} to {hop.target + 1} with {time_words(hop.seconds)} for {hop.payload_bytes:,} bytes"
        )
    if plan.objective is not ObjectiveKind.LATENCY:
        limit = "a stage" if plan.stages[slowest].seconds >= told.bottleneck_seconds * (1 - 1e-9) else "a link"
        yield f"{limit} limits throughput: one step every {time_words(told.bottleneck_seconds)}"


def _help(plan: Plan, what_ifs: Sequence[WhatIf]) -> Iterator[str]:
    for each in what_ifs:
        if each.gain >= WORTH_SAYING:
            yield (
                f"{each.change} would give {time_words(each.plan.value)} instead of {time_words(plan.value)}, "
                f"{each.gain:.0%} less, on {counted(len(each.plan.devices), 'device')}"
            )
    small = [each.change for each in what_ifs if each.gain < WORTH_SAYING]
    if small:
        yield f"would not help by {WORTH_SAYING:.0%}: {listed(small)}"


def _estimated(model: ModelSpec, devices: Sequence[PlacementDevice], plan: Plan) -> Iterator[str]:
    fields: dict[str, list[str]] = {}
    for device in devices:
        if device.id in set(plan.devices) and device.estimated:
            fields.setdefault(" and ".join(sorted(device.estimated)), []).append(device.id)
    for names, group in fields.items():
        yield f"not measured, {names} of {listed(group)}: taken from a table"
    hops = [hop for hop in plan.hops if hop.estimated]
    if hops and len(plan.stages) > 1:
        yield f"not measured, {counted(len(hops), 'link')} of {len(plan.hops)}: assumed by where the devices are"
    groups = [stage for stage in plan.stages if stage.link_estimated]
    if groups:
        number = counted(len(groups), "tensor-parallel group")
        yield f"not measured, links within {number}: assumed by where the devices are"
    if model.estimated:
        yield f"not told by the model's files: {listed(model.estimated)}"


def is_estimated(stage: Stage, devices: Mapping[str, PlacementDevice]) -> bool:
    """Some speed behind the stage's time comes from a table."""
    speeds = {"memory_bandwidth", "compute_flops", "launch_seconds"}
    return any(devices[name].estimated & speeds for name in stage.devices)
