"""The cluster for people: a table of nodes and devices, and one line for each change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from gpurt.types import GPUDevice

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from gpurt.cluster.changes import Change
    from gpurt.cluster.records import ClusterSnapshot, DeviceRecord

_STYLES: Final = {
    "healthy": "green",
    "suspect": "yellow",
    "degraded": "yellow",
    "unresponsive": "yellow",
    "lost": "red",
    "left": "dim",
    "removed": "dim",
}


def cluster_table(snapshot: ClusterSnapshot, *, max_rows: int | None = None, compact: bool = False) -> Table:
    """Nodes in order of name, each with its devices in its own order of preference.

    Args:
        max_rows: stop there and say how many nodes follow: a table of 1,600 rows takes more than a second to draw.
        compact: for 80 columns and few lines: one row for all devices of a node that look alike, and no ids.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title="cluster")
    if compact:
        for heading in ("node", "state", "name", "usable / total", "health"):
            # Where there is too little room, the name alone gives way.
            table.add_column(heading, overflow="ellipsis", no_wrap=heading != "name")
    else:
        for heading in ("node", "state", "device", "name", "memory usable / total", "health", "identity"):
            table.add_column(heading, overflow="fold")
    names = sorted(snapshot.nodes)
    for position, name in enumerate(names):
        node = snapshot.nodes[name]
        room = None if max_rows is None else max_rows - table.row_count
        if room is not None and room <= 0:
            more = len(names) - position
            table.add_row("…", f"{more} more {'node' if more == 1 else 'nodes'}")
            break
        first = (Text(name), Text(node.state, style=_STYLES.get(node.state, "")))
        rows: Iterable[tuple[Text | str, ...]]
        if not node.devices:
            rows = [("no device",) if compact else ("-", "no device")]
        else:
            rows = _alike(node.devices.values()) if compact else map(_device_row, node.devices.values())
        for row in islice(rows, room):
            table.add_row(*first, *row)
            first = (Text(""), Text(""))
    return table


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
    return printable(" ".join(words))


def printable(text: str) -> str:
    """What a node says of itself, without what would move a terminal's cursor, begin a line or break the encoding."""
    return "".join(character if character.isprintable() else "?" for character in text)


def memory(device: GPUDevice) -> str:
    """``usable / total``; ``?`` for what is not known."""
    return f"{size(device.memory_usable_bytes)} / {size(device.memory_bytes)}"


def size(nbytes: int | None) -> str:
    # A node may claim more bytes than a float can hold.
    return "?" if nbytes is None or nbytes.bit_length() > 64 else f"{nbytes / (1 << 30):.1f} GiB"
