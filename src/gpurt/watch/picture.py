"""What is on the terminal: a row for each device, and the last events below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpurt.discovery.report import shown_id, size_text
from gpurt.printable import MAX_LINE, printable
from gpurt.telemetry.collector import TelemetryCollector
from gpurt.telemetry.reading import Reading, reason_words
from gpurt.types import DeviceState, GPUDevice
from gpurt.watch.sparkline import BLOCKS, sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_COLUMNS: Final = (
    # heading, metric, what the highest tick stands for where that is fixed
    ("memory used / total", "memory_used_bytes", None),
    ("use", "utilization_percent", 100.0),
    ("temp", "temperature_c", 100.0),
    ("power", "power_w", None),
)
_STYLES: Final = {DeviceState.HEALTHY: "green", DeviceState.LOST: "red", DeviceState.REMOVED: "dim"}
_FIXED_COLUMNS: Final = 66
"""Characters that names, states, ages and rules take."""
_FRAME_LINES: Final = 4
"""Heading and three rules."""


def picture(
    devices: Sequence[GPUDevice],
    collector: TelemetryCollector,
    why_none: Mapping[str, str],
    lines: Sequence[str],
    *,
    status: str | None = None,
    absent: Mapping[str, str] = MappingProxyType({}),
    width: int,
    height: int,
    ticks: str = BLOCKS,
) -> Group:
    """The picture for a terminal of ``width`` times ``height`` characters.

    Args:
        collector: has its readings under stable ids.
        why_none: by stable id, why a device is not read.
        lines: what has happened, newest last.
        status: what is going on; None: nothing that a person has to wait for.
        absent: backends that cannot be used, and why, in a few words each.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    room = max(4, min(24, (width - _FIXED_COLUMNS) // len(_COLUMNS) - 9))
    table = Table(header_style="bold")
    for heading in ("device", "name", "state", *(heading for heading, _, _ in _COLUMNS), "age"):
        # Where there is too little room, the name alone gives way.
        table.add_column(heading, overflow="ellipsis", no_wrap=heading != "name")
    notes = [
        f"{device.device_id}: no readings: {why_none[device.stable_id]}"
        for device in devices
        if device.stable_id in why_none
    ]
    if absent:
        named = ", ".join(f"{name} ({why})" for name, why in absent.items())
        notes.append(f"not available: {named}")
    lines = [*lines, *([status] if status else [])]
    # A picture that is too high loses its end, which is the news.
    rows = max(1, height - _FRAME_LINES - min(len(lines) + len(notes), 4) - 2)
    for device in devices[:rows]:
        cells = [_metric(collector, device, metric, high, room, ticks, why_none) for _, metric, high in _COLUMNS]
        state = Text(_state(device, collector), style=_STYLES.get(device.state, "yellow"))
        # Text, not str: "[…]" in a name must not be read as markup.
        name = Text(printable(device.name), no_wrap=True, overflow="ellipsis")
        table.add_row(Text(printable(shown_id(device))), name, state, *cells, Text(_age(collector, device)))
    parts: list[Table | Text] = [table]
    if len(devices) > rows and height > _FRAME_LINES + rows:
        parts.append(Text(f"… and {len(devices) - rows} more: make the terminal higher"))
    left = max(0, height - _FRAME_LINES - min(len(devices), rows) - len(parts))
    for line in [*notes, *lines][-left:] if left else ():
        parts.append(Text(printable(line, MAX_LINE), no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _metric(
    collector: TelemetryCollector,
    device: GPUDevice,
    metric: str,
    high: float | None,
    room: int,
    ticks: str,
    why_none: Mapping[str, str],
) -> Text:
    """Value and sparkline, or the reason why there is no value."""
    from rich.text import Text

    if device.stable_id not in collector.device_ids:
        return Text("-" if device.stable_id in why_none else "not read yet", style="dim")
    reading = collector.readings(device.stable_id)[metric]
    if reading.value is None:
        waiting = collector.latest(device.stable_id) is None
        return Text("not read yet" if waiting else reason_words(reading.reason) or "not told", style="dim")
    if metric == "memory_used_bytes":
        high = device.memory_bytes
    values = collector.history(device.stable_id).series(metric)
    return Text(f"{_value(device, reading, metric)} {sparkline(values, room, low=0.0, high=high, ticks=ticks)}")


def _value(device: GPUDevice, reading: Reading, metric: str) -> str:
    value = reading.value or 0
    if metric == "memory_used_bytes":
        return _of_total(int(value), device.memory_bytes)
    return f"{value:.0f} {reading.unit}"


def _of_total(used: int, total: int | None) -> str:
    """``used / total``, the unit once where both have it."""
    size, unit = size_text(used).split(" ", 1)
    whole = size_text(total)
    return f"{size} / {whole}" if whole.endswith(f" {unit}") else f"{size} {unit} / {whole}"


def _state(device: GPUDevice, collector: TelemetryCollector) -> str:
    state = device.state.value
    if device.stable_id in collector.device_ids:
        sample = collector.latest(device.stable_id)
        if sample is not None and sample.contact is not DeviceState.HEALTHY:
            # Of the two, the one of this second.
            state = f"{sample.contact.value} (reading)" if device.state is DeviceState.HEALTHY else state
    return state if device.usable else f"{state}, not usable"


def _age(collector: TelemetryCollector, device: GPUDevice) -> str:
    """Since the device was asked for what is shown."""
    sample = device.stable_id in collector.device_ids and collector.latest(device.stable_id)
    return f"{collector.readings(device.stable_id)['memory_used_bytes'].age_s:.0f} s" if sample else "-"
