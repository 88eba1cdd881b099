"""``gpurt bench``: gpurt's own figures on this machine, each beside a peer and a ceiling of the same run."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from importlib import import_module
from typing import Any

from gpurt.benchmarks import TOPICS
from gpurt.benchmarks.measurement import Measurement, Skipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to measure, of: {' '.join(TOPICS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: seconds, not minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, also when a target is missed: a benchmark informs. 2 for a name that does not exist."""
    names: list[str] = args.names or list(TOPICS)
    unknown = [name for name in names if name not in TOPICS]
    if unknown:
        sys.stderr.write(f"gpurt bench: nothing named {', '.join(unknown)}; choose from: {' '.join(TOPICS)}\n")
        return 2
    measured, skipped = asyncio.run(measure(names, quick=args.quick))
    if args.json:
        record = {
            "schema": 1,
            "machine": _machine(),
            "quick": args.quick,
            "measurements": [measurement.as_json() for measurement in measured],
            "skipped": skipped,
        }
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        _show(measured, skipped)
    return 0


async def measure(names: list[str], *, quick: bool) -> tuple[list[Measurement], dict[str, str]]:
    """The measurements of these topics, in order, and for each skipped topic why."""
    measured: list[Measurement] = []
    skipped: dict[str, str] = {}
    for name in names:
        if sys.stderr.isatty():
            sys.stderr.write(f"measuring {name} …\n")
        try:
            measured += await import_module(TOPICS[name]).measure(quick=quick)
        except Skipped as exc:
            skipped[name] = str(exc)
    return measured, skipped


def _machine() -> dict[str, Any]:
    from gpurt import __version__

    return {
        "gpurt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _show(measured: list[Measurement], skipped: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    # A file or a pipe gets whole rows, not rows cut to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for column in ("gpurt", "peer", "of peer", "ceiling", "of ceiling", "target"):
        table.add_column(column, justify="right")
    topic = None
    for row in measured:
        if row.topic != topic:
            topic = row.topic
            table.add_row(f"[bold]{topic}[/bold]")
        table.add_row(
            f"  {row.name}",
            f"{_figure(row.ours)} {row.unit}",
            _named(row.peer, row.peer_name),
            _times(row.of_peer),
            _named(row.ceiling, row.ceiling_name),
            _times(row.of_ceiling),
            _target(row),
        )
    if measured:
        console.print(table)
    for name, reason in skipped.items():
        console.print(f"{name} skipped: {reason}", markup=False)
    machine = _machine()
    console.print(" · ".join(f"{key} {value}" for key, value in machine.items()), markup=False)
    console.print("of peer, of ceiling: 1 is as good, more is better. The load of the machine is part of every figure.")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _named(value: float | None, name: str) -> str:
    return "" if value is None else f"{_figure(value)}  {name}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _target(row: Measurement) -> str:
    if row.target is None:
        return ""
    sign = "≥" if row.unit == "GB/s" else "≤"
    return f"{sign} {_figure(row.target)} {'met' if row.on_target else 'missed'}"
