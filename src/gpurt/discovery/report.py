"""A discovery as text for people: a table of devices, and why each absent backend is absent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.result import DiscoveryResult
from gpurt.printable import MAX_LINE, printable
from gpurt.types import BackendReport, DeviceState, GPUDevice

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH_WITHOUT_TERMINAL: Final = 140
"""A pipe has no width; 80 columns would cut UUIDs in two."""

_OUT_OF_REACH: Final = frozenset({DeviceState.SUSPECT, DeviceState.UNRESPONSIVE, DeviceState.LOST, DeviceState.REMOVED})


def render(result: DiscoveryResult, *, reasons: bool = True, recorded: bool = False) -> Iterator[RenderableType]:
    """What to print, in order.

    Args:
        reasons: also why devices and backends cannot be used; False where somebody explains it all.
        recorded: the devices are of a recording, not of this machine.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None, header_style="bold")
    for column in ("device", "name", "memory usable / total", "health", "identity", "backend"):
        table.add_column(column, overflow="fold")
    for device in result.devices:
        # Text, not str: "[…]" in a name must not be read as markup.
        table.add_row(
            *(Text(printable(cell)) for cell in _row(device, recorded)), style=None if device.usable else "dim"
        )
    yield table
    if not reasons:
        return
    for device in result.devices:
        if device.state_reason:
            yield Text(printable(f"{shown_id(device, recorded)}: {device.state_reason}", MAX_LINE))
    absent = [report for report in result.reports if report.status != "ok"]
    if absent:
        yield Text("Not available here:")
    for report in absent:
        yield from _absence(report)


def describe(event: DeviceEvent) -> str:
    """One line for one event."""
    what = event.stable_id or event.backend or "-"
    if event.device is not None:
        what = f"{event.device.device_id} {event.device.name} ({event.stable_id})"
    parts = [event.observed_at, event.type.value, what]
    if event.device is not None and event.type in (EventType.HEALTH, EventType.LOST, EventType.RECOVERED):
        parts.append(f"{event.previous_state} -> {event.device.state}")
    if event.device is not None and event.type is EventType.MEMORY:
        parts.append(memory(event.device))
    if event.reason:
        parts.append(event.reason)
    return "  ".join(parts)


def shown_id(device: GPUDevice, recorded: bool = False) -> str:
    """The device's name of today, marked where it is a recording's."""
    return f"{device.device_id} (recorded)" if recorded else device.device_id


def memory(device: GPUDevice) -> str:
    """``usable / total``. Of a device that nobody reaches any more it was usable once, and is not now."""
    usable = None if is_out_of_reach(device) else device.memory_usable_bytes
    told = size_text(usable)
    if usable is None and device.memory_available is not None and not is_out_of_reach(device):
        told = f"{size_text(device.memory_available)} free"
    shared = ", shared with the host" if device.unified_memory else ""
    return f"{told} / {size_text(device.memory_bytes)}{shared}"


def is_out_of_reach(device: GPUDevice) -> bool:
    """Whether its figures are those of an earlier look: it does not answer now."""
    return not device.usable and device.state in _OUT_OF_REACH


def size_text(size: int | None) -> str:
    """A size in a unit in which it is no 0; ``unknown`` for None."""
    if size is None:
        return "unknown"
    if size < 1 << 10:
        return f"{size} byte{'s' * (size != 1)}"
    if size < 1 << 30:
        unit, scale = ("KiB", 1 << 10) if size < 1 << 20 else ("MiB", 1 << 20)
        return f"{size / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size / (1 << 30):.1f} GiB"


def _row(device: GPUDevice, recorded: bool) -> tuple[str, ...]:
    health = device.state.value if device.usable else f"{device.state.value}, not usable"
    identity = device.stable_id if device.identity and device.identity.stable else f"{device.stable_id} (not stable)"
    name = f"{device.name} (simulated)" if device.simulated else device.name
    backends = ", ".join(device.backends or (device.backend,))
    return shown_id(device, recorded), name, memory(device), health, identity, backends


def _absence(report: BackendReport) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(f"  {printable(report.name)}: {printable(f'{report.reason}: {report.message}', MAX_LINE)}")
    if report.hint:
        yield Text(f"      to do: {printable(report.hint, MAX_LINE)}")
