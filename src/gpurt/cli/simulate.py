"""``gpurt simulate``: a cluster of synthetic nodes with faults, which checks by itself that the master is right."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import TYPE_CHECKING

from gpurt.cli.progress import progress
from gpurt.cli.running import run_command

if TYPE_CHECKING:
    from gpurt.testing.cluster_simulation import SimulationReport
    from gpurt.testing.simulation_plan import SimulatedFault

_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.testing.simulation_plan import SimulatedFault, SimulationConfig

    default, said = SimulationConfig(), "(default: %(default)s)"
    parser.add_argument("--nodes", type=int, default=default.nodes, help=f"how many nodes {said}")
    parser.add_argument("--devices", type=int, default=default.devices, help=f"simulated devices of each {said}")
    parser.add_argument("--seconds", type=float, default=default.seconds, help=f"how long something happens {said}")
    parser.add_argument(
        "--churn",
        metavar="PER_SECOND",
        type=float,
        default=default.churn,
        help=f"changes of devices a second, of all nodes together {said}",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help=f"decides all that happens {said}")
    parser.add_argument(
        "--faults",
        metavar="FAULT,...",
        type=_faults,
        default=default.faults,
        help=f"some of {','.join(SimulatedFault)}, or none (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="the report as one JSON line on stdout")


def run(args: argparse.Namespace) -> int:
    """1: the view did not become what is true, or an event was lost or applied twice."""
    from gpurt.testing.cluster_simulation import simulate
    from gpurt.testing.simulation_plan import SimulationConfig

    config = SimulationConfig(args.nodes, args.devices, args.seconds, args.churn, args.seed, args.faults)
    # What is done to the nodes is what the bus warns of, a line for each.
    log = logging.getLogger("gpurt.cluster")
    level = log.level
    log.setLevel(level if args.verbose else logging.CRITICAL)
    try:
        about = f"gpurt simulate: {config.nodes:,} nodes join, then {config.seconds:g} s of changes and faults"
        with progress(about) as tell:
            report = run_command(simulate(config, on_progress=tell))
    finally:
        log.setLevel(level)
    if args.json:
        sys.stdout.write(json.dumps(report.document()) + "\n")
    else:
        _show(report)
    return 0 if report.ok else 1


def _faults(text: str) -> tuple[SimulatedFault, ...]:
    from gpurt.testing.simulation_plan import SimulatedFault

    if text == "none":
        return ()
    try:
        return tuple(dict.fromkeys(SimulatedFault(word.strip()) for word in text.split(",")))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{exc}: known are {', '.join(SimulatedFault)}, and none") from exc


def _show(report: SimulationReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    converged = (
        f"{_seconds(report.converged_s)} after the last step, conflicts over {_seconds(report.conflicts_over_s)}"
    )
    for name, value in (
        ("nodes", f"{report.config.nodes:,} of {report.config.devices} devices, there in {report.joined_s:.1f} s"),
        ("events", f"{report.events:,} applied, {report.contained:,} in snapshots"),
        ("done", _counts(report.done)),
        ("seen", _counts(report.seen)),
        ("resyncs", _counts(report.resyncs)),
        ("converged", converged),
        ("differences", ", ".join(report.differences[:10]) or "none"),
        ("wrong", _counts(report.wrong)),
        ("memory", f"{report.memory_bytes / _MIB:.0f} MiB; the nodes {report.nodes_memory_bytes / _MIB:,.0f} MiB"),
        ("processor time", f"{report.processor_s:.1f} s"),
        ("truth", f"{report.truth}, seed {report.config.seed}"),
    ):
        table.add_row(name, value)
    Console(markup=False, highlight=False).print(table)


def _seconds(value: float | None) -> str:
    return "NOT" if value is None else f"{value:.2f} s"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"
