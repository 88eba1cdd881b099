"""Plans after a loss: how fast, how much moves, and how near to the best full plan.

    python benchmarks/repair.py [--losses 1000] [--devices 8,16,32,64,256] [--full-seconds 1.0]

Clusters and models are synthetic and seeded. Half of the losses take one used device, half a whole node. ``fill`` is
the share of what the devices hold in whole layers that the model takes: the last is tight. Movement is no part of the
best full plan. A loss after which the full solve has no plan either counts as infeasible, one that it survives and the
repair does not as failed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    InfeasiblePlacement,
    ModelSpec,
    PlacementDevice,
    PlacementTimeout,
    Topology,
    Workload,
    repair_placement,
    validate_plan,
)
from gpurt.placement.synthetic import ClusterKind, model_for, synthetic_cluster

KINDS: tuple[ClusterKind, ...] = ("home", "hetero", "datacentre")
LAYERS = (32, 80, 126)
FILLS = (0.2, 0.5, 0.9)
RULES = Constraints(workload=Workload(context_tokens=8192))
_CLOSE = 0.005
"""A full plan proved to be that near to the best counts as the best."""
LARGE = 256
"""From here on a cluster is filled by a real size of model at most, not by its share."""


@dataclass
class Row:
    lost: int = 0
    moved: int = 0
    seconds: list[float] = field(default_factory=list[float])
    processor: list[float] = field(default_factory=list[float])
    penalties: list[float] = field(default_factory=list[float])
    infeasible: int = 0
    failed: int = 0
    unknown: int = 0
    methods: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, other: Row) -> None:
        self.lost += other.lost
        self.moved += other.moved
        self.infeasible += other.infeasible
        self.failed += other.failed
        self.unknown += other.unknown
        for name in ("seconds", "processor", "penalties"):
            getattr(self, name).extend(getattr(other, name))
        for name, count in other.methods.items():
            self.methods[name] = self.methods.get(name, 0) + count

    @property
    def losses(self) -> int:
        return len(self.seconds) + self.infeasible + self.failed + self.unknown


def losses_of(kind: ClusterKind, count: int, layers: int, fill: float, seed: int, number: int, full: float) -> Row:
    """``number`` losses of one cluster and one model, each from the same plan."""
    row = Row()
    solver = ConstraintSatisfactionPlacement()
    devices, topology = synthetic_cluster(kind, count, seed)
    # A model that fills half of 256 devices exists nowhere: a fifth of them is already several terabytes.
    model = model_for(devices, layers, fill / 5 if count >= LARGE else fill, tensor_parallel=(1, 2, 4, 8))
    try:
        plan = solver.solve_placement(model, devices, topology, RULES, time_budget=4 * full, target_gap=0.002)
    except (InfeasiblePlacement, PlacementTimeout):
        return row
    dice = random.Random(f"{kind} {count} {layers} {fill} {seed}")
    for loss in range(number):
        name = dice.choice(plan.devices)
        node = next(device.node for device in devices if device.id == name)
        left = [device for device in devices if (device.node != node if loss % 2 else device.id != name)]
        if not left:  # its only node
            row.infeasible += 1
            continue
        best = best_value(left, full, solver, model, topology)
        begin, processor = time.perf_counter(), time.process_time()
        try:
            result = repair_placement(plan, model, left, topology, RULES, time_budget=5 * full)
        except InfeasiblePlacement:
            row.infeasible += best is None
            row.failed += best is not None
            continue
        except PlacementTimeout:
            row.failed += best is not None
            row.unknown += best is None
            continue
        row.seconds.append(time.perf_counter() - begin)
        row.processor.append(time.process_time() - processor)
        validate_plan(model, left, topology, RULES, result.plan)
        row.lost += result.layers_lost
        row.moved += result.layers_moved
        row.methods[result.method] = row.methods.get(result.method, 0) + 1
        if best is not None:
            row.penalties.append(100 * (result.plan.predicted.latency_seconds / best - 1))
    return row


def best_value(
    left: list[PlacementDevice],
    seconds: float,
    solver: ConstraintSatisfactionPlacement,
    model: ModelSpec,
    topology: Topology,
) -> float | None:
    """Seconds per token of the best full plan; None where there is none."""
    try:
        best = solver.solve_placement(model, left, topology, RULES, time_budget=seconds, target_gap=_CLOSE)
        return best.predicted.latency_seconds
    except (InfeasiblePlacement, PlacementTimeout):
        return None


def show(name: str, row: Row) -> None:
    def at(values: list[float], share: float) -> float:
        ordered = sorted(values) or [0.0]
        return ordered[int(share * (len(ordered) - 1))]

    methods = " ".join(f"{method} {count}" for method, count in sorted(row.methods.items()))
    print(
        f"{name:>16} {row.losses:>6} {row.infeasible:>7} {row.failed:>6} {row.lost:>7} {row.moved:>7} "
        f"{row.moved / max(1, row.lost):>6.2f} {1000 * statistics.median(row.seconds or [0]):>7.0f} "
        f"{1000 * at(row.seconds, 0.95):>6.0f} {1000 * at(row.processor, 0.5):>6.0f} "
        f"{1000 * at(row.processor, 0.95):>6.0f} {at(row.penalties, 0.5):>8.2f} {at(row.penalties, 0.95):>7.2f} "
        f"{at(row.penalties, 1.0):>7.2f} {sum(value > 6 for value in row.penalties):>5}  {methods}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=1000)
    parser.add_argument("--devices", default="8,16,32,64,256")
    parser.add_argument("--full-seconds", type=float, default=1.0)
    options = parser.parse_args()
    counts = [int(text) for text in options.devices.split(",")]
    cases = [(count, fill, kind, layers) for count in counts for fill in FILLS for kind in KINDS for layers in LAYERS]
    each = max(2, -(-options.losses // len(cases)))
    print(
        f"{'devices fill':>16} {'losses':>6} {'infeas.':>7} {'failed':>6} {'lost':>7} {'moved':>7} {'ratio':>6} "
        f"{'ms med.':>7} {'p95':>6} {'cpu ms':>6} {'p95':>6} {'% worse':>8} {'p95':>7} {'max':>7} {'> 6 %':>5}  method"
    )
    whole = Row()
    for count in counts:
        for fill in FILLS:
            row = Row()
            for kind in KINDS:
                for layers in LAYERS:
                    row.add(losses_of(kind, count, layers, fill, layers + count, each, options.full_seconds))
            show(f"{count} {fill:g}", row)
            whole.add(row)
    show("all", whole)


if __name__ == "__main__":
    main()
