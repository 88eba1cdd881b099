"""How fast placement is, and how near to the best: one line per size of cluster and kind of model.

    python benchmarks/placement.py [--devices 4,16,32,64,256,1024] [--seeds 3] [--objective latency]

*loose* is a real size of model (8B, 70B, 405B; 4 bits at home, 16 bits elsewhere), or half of what the devices hold
where it is larger; *tight* fills 90 to 98 % of what they hold in whole layers. Every plan is checked by the validator.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    InfeasiblePlacement,
    PlacementTimeout,
    PlanStatus,
    Workload,
)
from gpurt.placement.synthetic import ClusterKind, model_for, synthetic_cluster, synthetic_model

KINDS: tuple[ClusterKind, ...] = ("home", "hetero", "datacentre")
GB = 10**9
SIZES = {"home": {32: 5 * GB, 80: 40 * GB, 126: 230 * GB}}
LARGE = {32: 16 * GB, 80: 141 * GB, 126: 812 * GB}
BUDGETS = {4: (15, 15), 16: (15, 15), 32: (10, 10), 64: (2, 10), 256: (2, 2), 1024: (3, 3)}
RULES = Constraints(workload=Workload(context_tokens=8192))


@dataclass
class Row:
    seconds: list[float]
    gaps: list[float]
    proven: int = 0
    infeasible: int = 0
    none: int = 0
    first: int = 0


def run(count: int, *, tight: bool, seeds: int, objective: str, verbose: bool) -> Row:
    row = Row([], [])
    budget = BUDGETS[min(BUDGETS, key=lambda size: abs(size - count))][tight]
    for kind in KINDS:
        for layers in (32, 80, 126):
            for seed in range(seeds):
                devices, topology = synthetic_cluster(kind, count, seed)
                fill = 0.90 + 0.04 * ((seed + layers) % 3) if tight else 0.5
                model = model_for(devices, layers, fill, tensor_parallel=(1, 2, 4, 8))
                size = SIZES.get(kind, LARGE)[layers]
                if not tight and size < model.layers[0].weight_bytes * layers:
                    model = synthetic_model(layers, size, tensor_parallel=(1, 2, 4, 8))
                solver = ConstraintSatisfactionPlacement()
                if count <= 16:
                    try:
                        solver.solve_placement(model, devices, topology, RULES, objective=objective, time_budget=0.1)
                        row.first += 1
                    except InfeasiblePlacement:
                        row.first += 1
                    except PlacementTimeout:
                        pass
                begin = time.perf_counter()
                try:
                    plan = solver.solve_placement(
                        model, devices, topology, RULES, objective=objective, time_budget=budget
                    )
                except InfeasiblePlacement:
                    row.infeasible += 1
                    row.seconds.append(time.perf_counter() - begin)
                    continue
                except PlacementTimeout:
                    row.none += 1
                    print("   no plan:", kind, count, layers, seed)
                    continue
                seconds = time.perf_counter() - begin
                row.seconds.append(seconds)
                row.gaps.append(100 * (plan.gap if plan.gap is not None else 1.0))
                row.proven += plan.status is PlanStatus.OPTIMAL
                if verbose:
                    print(
                        f"   {kind} {layers} {seed}: {seconds:.2f} s, {row.gaps[-1]:.3f} %, {len(plan.stages)} stages"
                    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="4,16,32,64,256,1024")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--objective", default="latency")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    head = (
        "devices",
        "case",
        "plans",
        "infeas.",
        "none",
        "plan in 0.1 s",
        "proven",
        "gap % median",
        "max",
        "s median",
        "p95",
        "max",
    )
    print(("{:>8} " + "{:>6} " * 4 + "{:>13} " * 3 + "{:>8} " * 4).format(*head, ""))
    for count in (int(text) for text in options.devices.split(",")):
        for tight in (False, True):
            row = run(count, tight=tight, seeds=options.seeds, objective=options.objective, verbose=options.verbose)
            seconds = sorted(row.seconds)
            late = seconds[int(0.95 * (len(seconds) - 1))]
            total = len(row.gaps) + row.infeasible + row.none
            print(
                f"{count:>8} {'tight' if tight else 'loose':>6} {len(row.gaps):>6} {row.infeasible:>6} {row.none:>6} "
                f"{f'{row.first}/{total}' if count <= 16 else '':>13} {f'{row.proven}/{len(row.gaps)}':>13} "
                f"{statistics.median(row.gaps or [0]):>13.4f} {max(row.gaps or [0]):>8.4f} "
                f"{statistics.median(seconds):>8.2f} {late:>8.2f} {seconds[-1]:>8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
