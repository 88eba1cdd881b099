"""From numbers to a plan: which device takes which place, and what everything takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gpurt.placement.constraints import ObjectiveKind
from gpurt.placement.costs import (
    TOKEN_BYTES,
    allreduce_seconds,
    group_layer_seconds,
    head_seconds,
    resident_layers,
)
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.instance import Instance
from gpurt.placement.plan import DeviceBytes, Hop, Plan, PlanStatus, Prediction, Stage
from gpurt.placement.relaxation import Step
from gpurt.placement.spec import ModelSpec


def groups_of(instance: Instance, steps: Sequence[Step]) -> list[list[int]]:
    """Devices of each stage: of a class, the next one that is free."""
    taken = [0] * instance.classes
    groups: list[list[int]] = []
    for step in steps:
        group: list[int] = []
        for kind in instance.units[step.unit].classes:
            group.append(instance.members[kind][taken[kind]])
            taken[kind] += 1
        groups.append(group)
    return groups


def assemble(
    instance: Instance,
    steps: Sequence[Step],
    *,
    objective: ObjectiveKind,
    bound: float | None,
    target_gap: float,
    proven_gap: float,
    solver: str,
    solve_seconds: float,
    seed: int,
) -> Plan:
    model, work = instance.model, instance.constraints.workload
    groups = groups_of(instance, steps)
    stages = [_stage(instance, step, group) for step, group in zip(steps, groups, strict=True)]
    hops: list[Hop] = []
    for place in range(len(stages)):
        if len(stages) == 1:
            break
        target = (place + 1) % len(stages)
        tokens = TOKEN_BYTES if target == 0 else model.layers[stages[place].end - 1].activation_bytes_per_token
        hops.append(_hop(instance, groups, place, target, tokens * work.batch))
    links = sum(hop.seconds for hop in hops)
    memory = sum(stage.memory_seconds for stage in stages)
    compute = sum(stage.compute_seconds for stage in stages)
    overhead = sum(stage.overhead_seconds for stage in stages)
    links += sum(stage.link_seconds for stage in stages)
    used = [instance.devices[index] for group in groups for index in group]
    prediction = Prediction(
        latency_seconds=memory + compute + overhead + links,
        memory_seconds=memory,
        compute_seconds=compute,
        link_seconds=links,
        overhead_seconds=overhead,
        bottleneck_seconds=max([*(stage.seconds for stage in stages), *(hop.seconds for hop in hops)]),
        estimated=any(device.estimated for device in used)
        or any(hop.estimated for hop in hops)
        or any(stage.link_estimated for stage in stages),
    )
    price = instance.constraints.movement_seconds_per_byte
    value = objective_value(objective, prediction) + price * sum(
        _moved_weights(model, instance.devices[index], step, len(group))
        for step, group in zip(steps, groups, strict=True)
        for index in group
    )
    if bound is not None:
        bound = max(0.0, min(bound, value))
    status = PlanStatus.FEASIBLE
    if bound is not None and value - bound <= proven_gap * value:
        status = PlanStatus.OPTIMAL
    elif bound is not None and value - bound <= target_gap * value:
        status = PlanStatus.CERTIFIED
    return Plan(
        model=model.name,
        layer_count=model.layer_count,
        workload=work,
        stages=tuple(stages),
        hops=tuple(hops),
        predicted=prediction,
        objective=objective,
        value=value,
        bound=bound,
        status=status,
        solver=solver,
        solve_seconds=solve_seconds,
        seed=seed,
    )


def objective_value(objective: ObjectiveKind, prediction: Prediction) -> float:
    """What the objective counts, in seconds, without movement."""
    if objective is ObjectiveKind.LATENCY:
        return prediction.latency_seconds
    if objective is ObjectiveKind.THROUGHPUT:
        return prediction.bottleneck_seconds
    return prediction.latency_seconds + prediction.bottleneck_seconds


def _hop(instance: Instance, groups: list[list[int]], source: int, target: int, payload: int) -> Hop:
    links = instance.links
    slowest, estimated = 0.0, False
    for receiver in groups[target]:
        best = min(
            groups[source],
            key=lambda sender: links.latency[sender, receiver] + payload / links.bandwidth[sender, receiver],
        )
        seconds = float(links.latency[best, receiver] + payload / links.bandwidth[best, receiver])
        estimated = estimated or bool(links.estimated[best, receiver])
        slowest = max(slowest, seconds)
    return Hop(source=source, target=target, payload_bytes=payload, seconds=slowest, estimated=estimated)


def _stage(instance: Instance, step: Step, group: list[int]) -> Stage:
    model, work, devices = instance.model, instance.constraints.workload, instance.devices
    share = len(group)
    memory = compute = links = 0.0
    launch = max(devices[index].launch_seconds for index in group)
    held = model.layers[step.start : step.end]
    # Most layers of a model are the very same ones.
    times = Counter(id(layer) for layer in held)
    for layer in {id(layer): layer for layer in held}.values():
        count = times[id(layer)]
        total = group_layer_seconds(layer, group, devices, instance.links, work)
        sums = (
            2 * allreduce_seconds(instance.links, group, layer.activation_bytes_per_token * work.batch)
            if share > 1
            else 0.0
        )
        read = layer.weight_bytes
        if layer.read_bytes_per_token is not None:
            read = min(read, layer.read_bytes_per_token * work.batch)
        waits_for_memory = all(
            read / devices[index].memory_bandwidth >= layer.flops_per_token * work.batch / devices[index].compute_flops
            for index in group
        )
        busy = count * (total - launch - sums)
        memory += busy if waits_for_memory else 0.0
        compute += 0.0 if waits_for_memory else busy
        links += count * sums
    overhead = launch * len(held)
    if step.end == model.layer_count:
        memory += max(head_seconds(model, devices[index], share, work.batch) for index in group)
    return Stage(
        devices=tuple(devices[index].id for index in group),
        node=devices[group[0]].node,
        backend=devices[group[0]].backend,
        start=step.start,
        end=step.end,
        memory_seconds=max(0.0, memory),
        compute_seconds=max(0.0, compute),
        overhead_seconds=overhead,
        link_seconds=links,
        link_estimated=bool(instance.links.estimated[np.ix_(group, group)].any()),
        held=tuple(_held(instance, devices[index], step, share) for index in group),
    )


def _held(instance: Instance, device: PlacementDevice, step: Step, share: int) -> DeviceBytes:
    model, work = instance.model, instance.constraints.workload
    layers = model.layers[step.start : step.end]
    weights = sum(layer.weight_bytes for layer in layers)
    ends = 0
    if step.start == 0:
        ends += model.embedding_bytes
    if step.end == model.layer_count:
        ends += model.head_bytes
        if step.start == 0:
            ends -= model.tied_bytes
    kv = sum(layer.kv_bytes(work.context_tokens) for layer in layers) * work.batch
    workspace = max(layer.workspace_bytes_per_token for layer in layers) * work.batch * work.prefill_tokens
    return DeviceBytes(
        device=device.id,
        weights=-(-(weights + ends) // share),
        kv=-(-kv // share),
        activations=workspace,
        reserve=min(device.usable_bytes, device.reserve_bytes + device.overhead_bytes),
        usable=device.usable_bytes,
        moved=int(_moved_weights(model, device, step, share)),
    )


def _moved_weights(model: ModelSpec, device: PlacementDevice, step: Step, share: int) -> float:
    there = resident_layers(model, device)
    return sum(model.layers[index].weight_bytes for index in range(step.start, step.end) if not there[index]) / share
