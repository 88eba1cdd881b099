"""Equal to the optimum of a plain integer programme: arcs and layer flow, written from the inputs alone."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    InfeasiblePlacement,
    ModelSpec,
    PlacementDevice,
    Topology,
    Workload,
)
from gpurt.placement.synthetic import model_for, synthetic_cluster

highspy = pytest.importorskip("highspy")
WORK = Workload(context_tokens=8192)


def reference(model: ModelSpec, devices: tuple[PlacementDevice, ...], topology: Topology) -> float | None:
    """Least latency over all paths of single devices; None where there is none."""
    count, layers = len(devices), model.layer_count
    layer = model.layers[0]
    links = topology.dense(devices)
    hop = links.seconds(layer.activation_bytes_per_token)
    back = links.seconds(4)
    held = layer.weight_bytes + layer.kv_bytes(WORK.context_tokens)
    seconds, head, inner, first, last, whole = [], [], [], [], [], []
    for device in devices:
        busy = max(layer.weight_bytes / device.memory_bandwidth, layer.flops_per_token / device.compute_flops)
        seconds.append(busy + layer.kv_bytes(WORK.context_tokens) / device.memory_bandwidth + device.launch_seconds)
        head.append(max(model.head_bytes / device.memory_bandwidth, model.head_flops_per_token / device.compute_flops))
        inner.append(min(layers, device.budget_bytes // held))
        first.append(min(layers, max(0, device.budget_bytes - model.embedding_bytes) // held))
        last.append(min(layers, max(0, device.budget_bytes - model.head_bytes) // held))
        both = model.embedding_bytes + model.head_bytes - model.tied_bytes
        whole.append(device.budget_bytes - both >= held * layers)
    best = min((seconds[one] * layers + head[one] for one in range(count) if whole[one]), default=np.inf)
    # Nodes 0..count-1 and a depot: flow on an arc is how many layers are done when it is passed.
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 1e-6)
    solver.setOptionValue("time_limit", 60.0)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    arc = {pair: solver.addBinary(float(hop[pair])) for pair in pairs}
    done = {pair: solver.addVariable(0, layers, 0.0) for pair in pairs}
    close = {pair: solver.addBinary(float(back[pair]) + head[pair[0]]) for pair in pairs}
    number = [solver.addIntegral(0, layers, seconds[one]) for one in range(count)]
    solver.addConstr(solver.qsum(close.values()) == 1)
    for one in range(count):
        into = solver.qsum(arc[a, one] for a in range(count) if a != one)
        out = solver.qsum(arc[one, b] for b in range(count) if b != one)
        begin = solver.qsum(close[a, one] for a in range(count) if a != one)
        finish = solver.qsum(close[one, b] for b in range(count) if b != one)
        solver.addConstr(into + begin == out + finish)
        solver.addConstr(into + begin <= 1)
        room = inner[one] * (into + begin) - (inner[one] - first[one]) * begin - (inner[one] - last[one]) * finish
        solver.addConstr(number[one] <= room)
        solver.addConstr(number[one] >= into + begin)
        came = solver.qsum(done[a, one] for a in range(count) if a != one)
        goes = solver.qsum(done[one, b] for b in range(count) if b != one)
        solver.addConstr(came + number[one] == goes + layers * finish)
    for pair in pairs:
        solver.addConstr(done[pair] <= layers * arc[pair])
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        best = min(best, float(solver.getInfo().objective_function_value))
    else:
        assert solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible
    return None if best == np.inf else best


def compare(seed: int) -> None:
    kind = ("home", "hetero", "datacentre")[seed % 3]
    count = 4 + seed % 13
    devices, topology = synthetic_cluster(kind, count, seed)
    model = model_for(devices, (16, 32, 80)[seed % 7 % 3], (0.3, 0.6, 0.94)[seed % 5 % 3])
    best = reference(model, devices, topology)
    try:
        plan = ConstraintSatisfactionPlacement().solve_placement(
            model, devices, topology, Constraints(workload=WORK), time_budget=15
        )
    except InfeasiblePlacement:
        assert best is None
        return
    assert best is not None
    assert plan.value == pytest.approx(best, rel=1.1e-4)
    assert plan.bound is not None
    assert plan.bound <= best * (1 + 1e-5)
    assert plan.status == "optimal"


@pytest.mark.parametrize("seed", range(6))
def test_a_plain_integer_programme_finds_nothing_better(seed: int) -> None:
    compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_two_hundred_plain_integer_programmes_find_nothing_better(seed: int) -> None:
    compare(seed)
