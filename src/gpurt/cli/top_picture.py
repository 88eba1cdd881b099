"""The picture of ``gpurt top``: as much of a cluster as a terminal has room for, or all of it as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from gpurt.cli.cluster_table import size
from gpurt.cli.top_overview import (
    DeviceLine,
    NodeLines,
    Overview,
    Sum,
    memory_usable,
    memory_used,
    names,
    power,
    why_none,
)
from gpurt.cluster.queries import nodes_by_state
from gpurt.cluster.records import ClusterSnapshot
from gpurt.printable import MAX_LINE, printable
from gpurt.types import DeviceState

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_HEADINGS: Final = ("node", "device", "name", "used", "usable", "use", "temp", "power", "health", "age")
_EXPENDABLE: Final = ("power", "name", "temp", "usable", "use", "device")
"""Columns that are left away where a terminal is narrow, the first one first."""
_NAME_WIDTH: Final = 12
"""A name is cut to so many characters before any column is left away."""
_FRAME_LINES: Final = 4
"""Heading and three rules."""
_NOBODY: Final = (
    "no node is there now: start one with gpurt worker",
    "one that was lost before is known to a master that was there",
)
_STYLES: Final = {"healthy": "green", "lost": "red", "left": "dim", "removed": "dim"}


class _Row(NamedTuple):
    cells: tuple[str, ...]
    """By ``_HEADINGS``."""
    style: str
    """Of the health."""
    dim: bool


def summary(overview: Overview) -> str:
    """Nodes and devices in one line."""
    states = nodes_by_state(ClusterSnapshot.model_construct(nodes={node.name: node.node for node in overview.nodes}))
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    lines = [line for line in overview.devices if line.found.available]
    simulated = sum(line.found.device.simulated for line in overview.devices)
    draining = sum(node.node.draining for node in overview.nodes)
    words = [f"{_counted(len(overview.nodes), 'node')}{f' ({counts})' if counts else ''}"]
    words += [f"{draining} draining"] * bool(draining)
    words.append(f"{_counted(len(overview.devices), 'device')}, {len(lines)} available")
    if simulated:
        words.append(f"{simulated} simulated")
    if lines:
        words.append(f"memory {_size(memory_used(lines))} used, {_size(memory_usable(lines))} usable")
    return ", ".join(words)


def picture(overview: Overview, title: str, notices: Sequence[str], *, width: int, height: int) -> Group:
    """For a terminal of ``width`` times ``height`` characters. Where devices are too many, nodes have a row each; where
    nodes are, those that need somebody come first, and the others are counted.

    Args:
        title: which cluster.
        notices: what has happened to the bus, newest last.
    """
    from rich.console import Group

    head = [title, summary(overview)]
    foot = [*overview.conflicts, *notices][-max(1, height // 4) :]
    room = max(1, height - _FRAME_LINES - len(head) - len(foot) - 2)
    per_device = sum(max(1, len(node.devices)) for node in overview.nodes) <= room
    rows = [row for node in overview.nodes for row in (_device_rows(node) if per_device else (_node_row(node),))]
    more = len(overview.nodes) - room
    parts: list[Table | Text] = [_line(text) for text in head]
    if rows:
        parts.append(_table(rows[:room], width))
    else:
        parts += [_line(text) for text in _NOBODY]
    if not per_device and more > 0:
        parts.append(_line(f"… and {_counted(more, 'more node')}: make the terminal higher"))
    parts += [_line(text, "yellow") for text in foot]
    return Group(*parts)


def lines(overview: Overview) -> Iterator[str]:
    """Everything as plain text, a line for each device."""
    yield printable(summary(overview), MAX_LINE)
    if not overview.nodes:
        yield from _NOBODY
    for node in overview.nodes:
        for row in _device_rows(node, repeat=True):
            told = zip(_HEADINGS[3:], row.cells[3:], strict=True)
            words = [*row.cells[:3], *(f"{heading} {cell}" for heading, cell in told)]
            yield printable("  ".join(words), MAX_LINE)
    for conflict in overview.conflicts:
        yield printable(conflict, MAX_LINE)


def _table(rows: Sequence[_Row], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    widths = {
        heading: max(len(heading), *(len(row.cells[position]) for row in rows))
        for position, heading in enumerate(_HEADINGS)
    }
    shown = list(_HEADINGS)
    # Each column has a rule and two blanks beside it.
    missing: Callable[[], int] = lambda: sum(widths[heading] + 3 for heading in shown) + 1 - width  # noqa: E731
    # The name gives way first, and then the columns do.
    widths["name"] = max(min(widths["name"], _NAME_WIDTH), widths["name"] - max(0, missing()))
    for heading in _EXPENDABLE:
        if missing() > 0:
            shown.remove(heading)
    table = Table(header_style="bold")
    for heading in shown:
        limit = widths[heading] if heading == "name" else None
        table.add_column(heading, overflow="ellipsis", no_wrap=True, max_width=limit)
    for row in rows:
        cells = [Text(cell) for cell in row.cells]
        cells[_HEADINGS.index("health")].stylize(row.style)
        chosen = [cell for heading, cell in zip(_HEADINGS, cells, strict=True) if heading in shown]
        table.add_row(*chosen, style="dim" if row.dim else None)
    return table


def _device_rows(node: NodeLines, *, repeat: bool = False) -> Iterator[_Row]:
    """``repeat``: the node's name in every row."""
    label = _label(node)
    if not node.devices:
        state = node.node.state.value
        yield _Row((label, "-", "no device", *["-"] * 5, state, "-"), _STYLES.get(state, "yellow"), False)
    for line in node.devices:
        device, told = line.found.device, line.readings
        name = f"{device.name} (simulated)" if device.simulated else device.name
        none = partial(why_none, (line,))
        figures = (
            size(told.memory_used_bytes) if told and told.memory_used_bytes is not None else none("memory_used_bytes"),
            size(device.memory_usable_bytes),
            _figure(told.utilization_percent if told else None, "%", none("utilization_percent")),
            _figure(told.temperature_c if told else None, "°C", none("temperature_c")),
            _figure(told.power_w if told else None, "W", none("power_w")),
        )
        cells = (label, printable(device.device_id), printable(name), *figures, _health(line), _age(line))
        yield _Row(cells, _STYLES.get(line.health, "yellow"), not line.found.available or line.stale)
        label = label if repeat else ""


def _node_row(node: NodeLines) -> _Row:
    """All devices of a node together: sums, and the worst of what has no sum."""
    if not node.devices:
        return next(_device_rows(node))
    told = [line.readings for line in node.devices if line.readings is not None]
    busy = [each.utilization_percent for each in told if each.utilization_percent is not None]
    heat = [each.temperature_c for each in told if each.temperature_c is not None]
    watts = power(node.devices)
    none = partial(why_none, node.devices)
    ill = sum(line.health is not DeviceState.HEALTHY for line in node.devices)
    health = node.worst.value if ill in (0, len(node.devices)) else f"{ill} {node.worst.value}"
    oldest = max(node.devices, key=lambda line: -1.0 if line.readings is None else line.readings.age_s)
    simulated = " (simulated)" if any(line.found.device.simulated for line in node.devices) else ""
    cells = (
        _label(node),
        _counted(len(node.devices), "device"),
        printable(names(node.devices) + simulated),
        _size(memory_used(node.devices), none("memory_used_bytes")),
        _size(memory_usable(node.devices)),
        _figure(sum(busy) / len(busy) if busy else None, "%", none("utilization_percent")),
        _figure(max(heat, default=None), "°C", none("temperature_c")),
        ("" if watts.complete or watts.value is None else "≥ ") + _figure(watts.value, "W", none("power_w")),
        health,
        _age(oldest),
    )
    away = not any(line.found.available for line in node.devices)
    return _Row(cells, _STYLES.get(node.worst, "yellow"), away or oldest.stale)


def _label(node: NodeLines) -> str:
    marks: list[str] = [] if node.node.state == "healthy" else [f"{node.node.state} {_seconds(node.state_s)}"]
    marks += ["draining"] * node.node.draining + ["name used twice"] * node.conflict
    if node.refused:
        marks.append(f"{_counted(sum(node.refused.values()), 'value')} refused")
    return f"{node.name}{''.join(f' ({mark})' for mark in marks)}"


def _health(line: DeviceLine) -> str:
    if line.health is not DeviceState.HEALTHY or line.found.device.usable:
        return line.health.value
    return f"{line.health.value}, not usable"


def _age(line: DeviceLine) -> str:
    if line.readings is None:
        return "-"
    return f"{_seconds(line.readings.age_s)}{' stale' if line.stale else ''}"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    # A node may claim any age.
    return f"{value / 3600:.0f} h" if value < 1e7 else "? h"


def _figure(value: float | None, unit: str, none: str) -> str:
    if value is None:
        return none
    # A node may claim anything, and a picture has no room for a number of 300 digits.
    return f"{value:.0f} {unit}" if abs(value) < 1e6 else "?"


def _size(total: Sum, none: str = "?") -> str:
    if total.value is None:
        return none
    return ("" if total.complete else "≥ ") + size(int(total.value))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text, MAX_LINE), style=style, no_wrap=True, overflow="ellipsis")
