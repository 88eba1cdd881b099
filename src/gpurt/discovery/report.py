"""A discovery as text for people: a table of devices, and why each absent backend is absent."""

from __future__ import annotations

import platform as host_platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.result import DiscoveryResult
from gpurt.platforms import current_platform
from gpurt.types import BackendReport, GPUDevice

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH_WITHOUT_TERMINAL: Final = 140
"""A pipe has no width; 80 columns would cut UUIDs in two."""

_VISIBILITY_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GGML_VK_VISIBLE_DEVICES",
    "GPURT_BACKEND",
    "GPURT_PLUGINS",
)


def render(result: DiscoveryResult, *, explain: bool, environ: Mapping[str, str]) -> Iterator[RenderableType]:
    """What to print, in order. ``explain`` adds how the answer came about."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None, header_style="bold")
    for column in ("device", "name", "memory usable / total", "health", "identity", "backend"):
        table.add_column(column, overflow="fold")
    for device in result.devices:
        # Text, not str: "[…]" in a name must not be read as markup.
        table.add_row(*(Text(cell) for cell in _row(device)), style=None if device.usable else "dim")
    yield table
    for device in result.devices:
        if device.state_reason:
            yield Text(f"{device.device_id}: {device.state_reason}")
    absent = [report for report in result.reports if report.status != "ok"]
    if absent:
        yield Text("Not available here:")
    for report in absent:
        yield from _absence(report)
    if explain:
        yield from _explanation(result, environ)


def describe(event: DeviceEvent) -> str:
    """One line for one event."""
    what = event.stable_id or event.backend or "-"
    if event.device is not None:
        what = f"{event.device.device_id} {event.device.name} ({event.stable_id})"
    parts = [event.observed_at, event.type.value, what]
    if event.device is not None and event.type in (EventType.HEALTH, EventType.LOST, EventType.RECOVERED):
        parts.append(f"{event.previous_state} -> {event.device.state}")
    if event.device is not None and event.type is EventType.MEMORY:
        parts.append(_memory(event.device))
    if event.reason:
        parts.append(event.reason)
    return "  ".join(parts)


def _row(device: GPUDevice) -> tuple[str, ...]:
    health = device.state.value if device.usable else f"{device.state.value}, not usable"
    identity = device.stable_id if device.identity and device.identity.stable else f"{device.stable_id} (not stable)"
    name = f"{device.name} (simulated)" if device.simulated else device.name
    backends = ", ".join(device.backends or (device.backend,))
    return device.device_id, name, _memory(device), health, identity, backends


def _memory(device: GPUDevice) -> str:
    usable = device.memory_usable_bytes if device.memory_usable_bytes is not None else device.memory_available
    shared = ", shared with the host" if device.unified_memory else ""
    return f"{_gib(usable)} / {_gib(device.memory_bytes)}{shared}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / (1 << 30):.1f} GiB"


def _absence(report: BackendReport) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(f"  {report.name}: {report.reason}: {report.message}")
    if report.hint:
        yield Text(f"      to do: {report.hint}")


def _explanation(result: DiscoveryResult, environ: Mapping[str, str]) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text("How this was found out:")
    for report in result.reports:
        shown = ", ".join(report.device_ids) or "no device"
        outcome = report.message if report.status == "ok" else str(report.reason)
        yield Text(f"  {report.name}: asked for {report.elapsed_ms:.0f} ms, shows {shown} ({outcome})")
    for device in result.devices:
        source = device.memory_usable_source or "free memory"
        yield Text(f"  {device.device_id}: {device.backend_name} {device.driver_version or ''}; memory by {source}")
    variables = [f"{name}={environ[name]!r}" for name in _VISIBILITY_VARIABLES if name in environ]
    yield Text(f"  environment: {', '.join(variables) or 'no variable that hides or chooses devices is set'}")
    yield Text(f"  platform: {current_platform(environ=environ)}, Python {host_platform.python_version()}")
    saved = "saved" if result.persisted else "NOT saved"
    yield Text(f"  registry: {result.registry} ({saved}); status {result.discovery_status}")
