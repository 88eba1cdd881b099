"""The cluster for people: a table of nodes and devices, and one line for each change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from gpurt.types import GPUDevice

if TYPE_CHECKING:
    from rich.table import Table

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
        compact: for 80 columns and few lines: no identities, and one row for devices of a node that are alike.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title="cluster")
    headings = ["node", "state", "device", "name", "usable / total" if compact else "memory usable / total", "health"]
    for heading in headings if compact else [*headings, "identity"]:
        table.add_column(heading, overflow="ellipsis" if compact else "fold", no_wrap=compact)
    names = sorted(snapshot.nodes)
    for position, name in enumerate(names):
        node = snapshot.nodes[name]
        room = None if max_rows is None else max_rows - table.row_count
        if room is not None and room <= 0:
            table.add_row("…", f"{len(names) - position} more node{'s' * (len(names) - position > 1)}")
            break
        first = (Text(name), Text(node.state, style=_STYLES.get(node.state, "")))
        if not node.devices:
            table.add_row(*first, "-", "no device", "", "", "")
        for records in islice(_alike(node.devices.values()) if compact else _each(node.devices.values()), room):
            device = records[0].device
            more = len(records) > 1
            state, *remark = _health(records[0])
            table.add_row(
                *first,
                Text(printable(device.device_id) + (" …" if more else "")),
                Text(printable(device.name) + (f" ×{len(records)}" if more else "")),  # noqa: RUF001
                memory(device),
                Text(state, style=_STYLES.get(state, "")).append(" ".join(["", *remark]), style="dim"),
                *([] if compact else [Text(printable(device.stable_id))]),
            )
            first = (Text(""), Text(""))
    return table


def _each(records: Iterable[DeviceRecord]) -> Iterator[list[DeviceRecord]]:
    return ([record] for record in records)


def _alike(records: Iterable[DeviceRecord]) -> Iterator[list[DeviceRecord]]:
    """Those that would show the same, together, in the order of the first of each."""
    groups: dict[object, list[DeviceRecord]] = {}
    for record in records:
        look = (record.device.backend, record.device.name, memory(record.device), *_health(record))
        groups.setdefault(look, []).append(record)
    return iter(groups.values())


def _health(record: DeviceRecord) -> list[str]:
    return [record.device.state, *([] if record.available else ["(not available)"])]


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
            words += _health(record)
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
