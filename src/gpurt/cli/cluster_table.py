"""The cluster for people: a table of nodes and devices, and one line for each change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from gpurt.discovery.report import size_text
from gpurt.printable import MAX_LINE, printable
from gpurt.types import GPUDevice

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from gpurt.cluster.changes import Change
    from gpurt.cluster.readings import DeviceReadings
    from gpurt.cluster.records import ClusterSnapshot, DeviceRecord, NodeRecord

_STYLES: Final = {
    "healthy": "green",
    "suspect": "yellow",
    "degraded": "yellow",
    "unresponsive": "yellow",
    "unknown": "yellow",
    "lost": "red",
    "left": "dim",
    "removed": "dim",
}


ReadingsOf = Callable[[str], "Mapping[str, DeviceReadings]"]
"""What the devices of a node measure, by device key."""


def cluster_table(
    snapshot: ClusterSnapshot,
    *,
    readings: ReadingsOf | None = None,
    max_rows: int | None = None,
    compact: bool = False,
) -> Table:
    """Nodes in order of name, each with its devices in its own order of preference.

    Args:
        readings: adds a column with what each device measures; not with ``compact``.
        max_rows: stop there and say how many nodes follow: a table of 1,600 rows takes more than a second to draw.
        compact: for 80 columns and few lines: one row for all devices of a node that look alike, and no ids.
    """
    from rich.table import Table
    from rich.text import Text

    wrong = "\n".join(printable(each.message, MAX_LINE) for each in snapshot.plan_troubles)
    table = Table(title="cluster", caption=Text(wrong, style="red") if wrong else None)
    if compact:
        for heading in ("node", "state", "name", "usable / total", "health"):
            # Where there is too little room, the name alone gives way.
            table.add_column(heading, overflow="ellipsis", no_wrap=heading != "name")
    else:
        headings = ("node", "state", "device", "name", "memory usable / total", "health", "identity")
        for heading in headings if readings is None else (*headings, "measured"):
            table.add_column(heading, overflow="fold")
    names = sorted(snapshot.nodes)
    for position, name in enumerate(names):
        node = snapshot.nodes[name]
        room = None if max_rows is None else max_rows - table.row_count
        if room is not None and room <= 0:
            more = len(names) - position
            table.add_row("…", f"{more} more {'node' if more == 1 else 'nodes'}")
            break
        state = Text(node.state, style=_STYLES.get(node.state, ""))
        if node.state == "unknown":
            state.append(" (hub away)", style="dim")
        if node.draining:
            state.append(" (draining)", style="dim")
        first = (Text(name), state)
        rows: Iterable[tuple[Text | str, ...]]
        if not node.devices:
            rows = [("no device",) if compact else ("-", "no device")]
        else:
            rows = _alike(node.devices.values()) if compact else _device_rows(node, readings)
        for row in islice(rows, room):
            table.add_row(*first, *row)
            first = (Text(""), Text(""))
    return table


def _device_rows(node: NodeRecord, readings: ReadingsOf | None) -> Iterator[tuple[Text | str, ...]]:
    told = None if readings is None else readings(node.node)
    for key, record in node.devices.items():
        row = _device_row(record)
        yield row if told is None else (*row, measured(told.get(key)))


def _device_row(record: DeviceRecord) -> tuple[Text | str, ...]:
    from rich.text import Text

    device = record.device
    health = Text(device.state, style=_STYLES.get(device.state, ""))
    if not record.available:
        health.append(" (not available)", style="dim")
    identity = Text(printable(device.stable_id))
    return Text(printable(device.device_id)), Text(printable(device.name)), memory(device), health, identity


def _alike(records: Iterable[DeviceRecord]) -> Iterator[tuple[Text | str, ...]]:
    """A row for those that look the same, in the order of the first of each."""
    from rich.text import Text

    looks = Counter((printable(r.device.name), memory(r.device), r.device.state, r.available) for r in records)
    for (name, text, state, available), count in looks.items():
        style = _STYLES.get(state, "") if available else "dim"
        label = name if count == 1 else f"{count}× {name}"  # noqa: RUF001
        yield Text(label, no_wrap=True, overflow="ellipsis"), text, Text(state, style=style)


def change_line(change: Change, snapshot: ClusterSnapshot) -> str:
    """One change in one line, with the device's name where there is one."""
    words = [change.kind.value.replace("_", " ")]
    if change.node is not None:
        words.append(change.node)
    if change.device is not None:
        node = snapshot.nodes.get(change.node or "")
        record = node.devices.get(change.device) if node else None
        words.append(f"{record.device.device_id} {record.device.name}" if record else change.device)
        if record and change.kind == "device_health":
            words[-1] += ":"
            words.append(record.device.state if record.available else f"{record.device.state} (not available)")
    if change.missed:
        words.append(f"({change.missed} changes were missed)")
    if change.message:
        words.append(change.message)
    return printable(" ".join(words), MAX_LINE)


def measured(told: DeviceReadings | None) -> str:
    """``utilisation, temperature, memory used, power, age``; ``?`` for what is not known."""
    if told is None:
        return "-"
    used = f"{size(told.memory_used_bytes)} used"
    figures = (_figure(told.utilization_percent, "%"), _figure(told.temperature_c, "°C"), used)
    words = [*figures, _figure(told.power_w, "W"), f"{_figure(told.age_s, 's')} ago"]
    if told.contact != "healthy":
        words.insert(0, printable(told.contact))
    return ", ".join(words)


def _figure(value: float | None, unit: str) -> str:
    # A node may claim anything, and a picture has no room for a number of 300 digits.
    return f"? {unit}" if value is None or not abs(value) < 1e6 else f"{value:.0f} {unit}"


def memory(device: GPUDevice) -> str:
    """``usable / total``; ``?`` for what is not known."""
    return f"{size(device.memory_usable_bytes)} / {size(device.memory_bytes)}"


def size(nbytes: int | None) -> str:
    # A node may claim more bytes than a float can hold.
    return "?" if nbytes is None or nbytes.bit_length() > 64 else size_text(nbytes)
