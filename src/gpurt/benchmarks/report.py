"""Results for people: a table by topic, with a bar for the share of the ceiling."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from gpurt.benchmarks.comparison import TOLERANCE, Comparison
from gpurt.benchmarks.measurement import Measurement
from gpurt.benchmarks.runner import Results

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PIPE_WIDTH: Final = 240
"""A file or a pipe gets whole rows, not rows folded at 80 columns."""
_NAMED_FROM: Final = 150
"""Columns. In a narrower terminal there is no room for the peers and ceilings themselves, only for the ratios."""
_NAME_WIDTH: Final = 26
_BAR_WIDTH: Final = 8
_TARGET_WIDTH: Final = 12
_STYLES: Final = {"better": "green", "worse": "red"}


def show(results: Results, comparison: Comparison | None) -> None:
    """Print to stdout."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    if results.measurements:
        _table(console, results.measurements, comparison)
    if comparison is not None:
        for change in comparison.missing:
            console.print(f"{change.topic}: no longer measured: {change.name}", markup=False)
        for difference in comparison.differences:
            console.print(f"not the same conditions: {difference}", markup=False)
    for what, reasons in (("skipped", results.skipped), ("failed", results.failed)):
        for name, reason in reasons.items():
            console.print(f"{name} {what}: {reason}", markup=False)
    if results.device is not None:
        simulated = " (simulated)" if results.device.simulated else ""
        console.print(f"{results.device.device_id} {results.device.name}{simulated}", markup=False)
    console.print(" · ".join(f"{key} {value}" for key, value in results.machine.items()), markup=False)
    notes = "of peer, of ceiling: 1 is as good, more is better. The load of the machine is part of every figure."
    if console.width < _NAMED_FROM:
        notes += " A wider terminal, a pipe and --json show peers and ceilings."
    if comparison is not None:
        notes += f" A change of up to {TOLERANCE:.0%} is none."
    console.print(notes)


def _table(console: Console, rows: list[Measurement], comparison: Comparison | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    named = console.width >= _NAMED_FROM
    # Beside changes, a narrow terminal has no room for bars and targets either.
    judged = named or comparison is None
    table.add_column("", min_width=_NAME_WIDTH, no_wrap=named)
    table.add_column("gpurt", justify="right", no_wrap=True)
    for column in ("peer", "ceiling"):
        if named:
            table.add_column(column, justify="right")
        table.add_column(f"of {column}", justify="right", no_wrap=True)
    if judged:
        table.add_column("", width=_BAR_WIDTH)
        table.add_column("target", min_width=_TARGET_WIDTH)
    if comparison is not None:
        table.add_column("before", justify="right", no_wrap=True)
        table.add_column("change", no_wrap=True)
    topic = None
    for row in rows:
        if row.topic != topic:
            topic = row.topic
            table.add_row(f"[bold]{topic}[/bold]")
        cells: list[RenderableType] = [f"  {row.name}", f"{_figure(row.ours)} {row.unit}"]
        if named:
            cells.append("\n".join(_named(figure, name) for name, figure in _peers(row)))
        cells.append(_times(row.of_peer))
        if named:
            cells.append("" if row.ceiling is None else _named(row.ceiling, row.ceiling_name))
        cells.append(_times(row.of_ceiling))
        if judged:
            cells += [_bar(row.of_ceiling), _target(row)]
        if comparison is not None:
            change = comparison.of(row)
            style = _STYLES.get(change.verdict)
            text = change.verdict if change.ratio is None else f"×{change.ratio:.2f} {change.verdict}"  # noqa: RUF001
            cells += [
                "" if change.old is None else f"{_figure(change.old)} {row.unit}",
                text if style is None else f"[{style}]{text}[/{style}]",
            ]
        table.add_row(*cells)
    console.print(table)


def _peers(row: Measurement) -> list[tuple[str, float]]:
    first = [] if row.peer is None else [(row.peer_name, row.peer)]
    return [*first, *row.others.items()]


def _bar(ratio: float | None) -> RenderableType:
    from rich.progress_bar import ProgressBar

    return "" if ratio is None else ProgressBar(total=1, completed=min(1, ratio), width=_BAR_WIDTH)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _named(value: float, name: str) -> str:
    return f"{_figure(value)}  {name}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _target(row: Measurement) -> str:
    if row.on_target is None:
        return ""
    bounds: list[str] = []
    if row.target is not None:
        bounds.append(f"{'≥' if row.more_is_better else '≤'} {_figure(row.target)}")
    if row.least_of_peer is not None and row.of_peer is not None:
        bounds.append(f"≥ {row.least_of_peer:g} of peer")
    if row.least_of_ceiling is not None and row.of_ceiling is not None:
        bounds.append(f"≥ {row.least_of_ceiling:g} of ceiling")
    return f"{', '.join(bounds)} {'met' if row.on_target else 'missed'}"
