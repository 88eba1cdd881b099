"""How fast it is said that there is no plan, and why: one line per cause, kind of cluster and size.

    python benchmarks/infeasibility.py [--devices 64,1024] [--repeat 5]

*answer* is the whole of ``solve_placement`` up to the error with its report; *in full* is a report in which every kind
of change is tried. *least* counts changes that are proved to be the smallest. CPU time stands beside the clock's, since
other work on the machine falsifies mostly the latter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasiblePlacement,
    Locality,
    Pin,
    Topology,
    Workload,
)
from gpurt.placement.diagnosis import diagnose
from gpurt.placement.feasibility import Problem
from gpurt.placement.synthetic import ClusterKind, model_for, synthetic_cluster

KINDS: tuple[ClusterKind, ...] = ("home", "hetero", "datacentre")
CAUSES = ("bytes", "max_stages", "max_nodes", "anti-affinity", "pins", "connectivity", "link limit")


def case(kind: ClusterKind, count: int, cause: str, parallel: tuple[int, ...], seed: int) -> Problem:
    devices, topology = synthetic_cluster(kind, count, seed)
    model = model_for(devices, 126, 1.3 if cause == "bytes" else 0.4, tensor_parallel=parallel)
    model = model.model_copy(update={"dtype": "float16"})
    rules: dict[str, Any] = {}
    if cause == "max_stages":
        rules["max_stages"] = 4
    elif cause == "max_nodes":
        rules["max_nodes"] = 2
    elif cause == "anti-affinity":
        rules["domain_limits"] = (DomainLimit(domain="power", stages=1),)
    elif cause == "pins":
        smallest = min(devices, key=lambda device: device.budget_bytes)
        rules["pins"] = (Pin(start=10, end=110, devices=frozenset({smallest.id})),)
    elif cause == "connectivity":
        topology = Topology(classes={**topology.classes, Locality.WIDE: None, Locality.ZONE: None})
    elif cause == "link limit":
        rules["max_link_seconds"] = 1e-9
    work = Workload(context_tokens=8192, batch=2)
    return Problem(model, devices, topology, Constraints(workload=work, **rules))


def _changes(error: InfeasiblePlacement) -> int:
    return len(error.report.relaxations) if error.report is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="64,1024")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    row = "{:>8} {:>11} {:>4} {:>14} {:>16} {:>10} {:>10} {:>8} {:>10} {:>8}"
    print(
        row.format(
            "devices", "cluster", "tp", "case", "constraint", "answer ms", "cpu ms", "changes", "in full ms", "least"
        )
    )
    solver = ConstraintSatisfactionPlacement()
    for count in (int(text) for text in options.devices.split(",")):
        for kind in KINDS:
            for parallel in ((1,), (1, 2, 4, 8)):
                for cause in CAUSES:
                    problem = case(kind, count, cause, parallel, seed=3)
                    seconds: list[float] = []
                    busy: list[float] = []
                    constraint, changes = "plan", 0
                    for _ in range(options.repeat):
                        begin, used = time.perf_counter(), time.process_time()
                        try:
                            solver.solve_placement(*problem)
                        except InfeasiblePlacement as error:
                            constraint, changes = error.constraint, _changes(error)
                        seconds.append(time.perf_counter() - begin)
                        busy.append(time.process_time() - used)
                    if constraint == "plan":  # tensor groups hold what single devices cannot
                        print(row.format(count, kind, parallel[-1], cause, "has a plan", "", "", "", "", ""))
                        continue
                    begin = time.perf_counter()
                    report = diagnose(problem, seconds=10)
                    full = time.perf_counter() - begin
                    least = sum(change.minimal for change in report.relaxations)
                    print(
                        row.format(
                            count, kind, parallel[-1], cause, constraint, f"{1e3 * statistics.median(seconds):.0f}",
                            f"{1e3 * statistics.median(busy):.0f}", changes, f"{1e3 * full:.0f}",
                            f"{least}/{len(report.relaxations)}",
                        ),
                        flush=True,
                    )  # fmt: skip


if __name__ == "__main__":
    main()
