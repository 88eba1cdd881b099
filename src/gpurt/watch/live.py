"""Watching on a terminal: discovery, telemetry and the picture, until somebody ends it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gpurt.discovery.report import describe
from gpurt.errors import GPUError
from gpurt.telemetry.collector import TelemetryCollector
from gpurt.types import GPUDevice
from gpurt.watch.picture import picture
from gpurt.watch.sources import Source, source_of
from gpurt.watch.sparkline import ticks_for

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    from gpurt.discovery.result import DiscoveryResult
    from gpurt.discovery.service import GPUDiscoveryService
    from gpurt.telemetry.readers import BlockingReader

REDRAW_S: Final = 0.5
"""From one picture to the next: a terminal that was made larger or smaller is right again after that."""
TELEMETRY_S: Final = 1.0
"""From one reading to the next, unless devices are looked up more often."""
MAX_LINES: Final = 100

_WAITING: Final = {
    "stale": "devices as they are remembered; looking again …",
    "preview": "devices as they are seen; drivers are still being asked …",
}
"""What is being done by the status of what is known; with the others nothing is waited for."""


class LiveWatch:
    """One watch. ``run`` ends by cancellation only; the terminal is then as it was before.

    Args:
        service: is shut down at the end.
        interval_s: between two look-ups of devices, as the service was made with.
        source: how a device is read.
    """

    def __init__(
        self,
        service: GPUDiscoveryService,
        console: Console,
        *,
        interval_s: float,
        source: Callable[[GPUDevice], Source] = source_of,
    ) -> None:
        self._service, self._console, self._source = service, console, source
        self._collector = TelemetryCollector({}, interval_s=min(TELEMETRY_S, interval_s))
        self._devices: tuple[GPUDevice, ...] = ()
        self._readers: dict[str, BlockingReader] = {}
        self._why_none: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        self._status: str | None = "looking for devices …"
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._ticks = ticks_for(console.encoding)

    async def run(self, *, verify: bool = False) -> None:
        """Watch. ``verify``: open every driver and check every device first.

        Raises:
            GPUError: an environment variable has a value that is not allowed.
        """
        from rich.live import Live

        # A screen of its own: a picture in the scroll-back is torn apart when the terminal becomes narrower.
        live = Live(self._picture(), console=self._console, auto_refresh=False, screen=True, transient=True)
        try:
            with live:
                async with self._service, asyncio.TaskGroup() as group:
                    group.create_task(self._follow(verify))
                    group.create_task(self._collector.run())
                    group.create_task(self._draw(live))
        except* GPUError as errors:
            raise _first(errors) from None
        finally:
            for reader in self._readers.values():
                reader.close()
            self._console.print(self._picture())

    async def _follow(self, verify: bool) -> None:
        if verify:
            await self._service.discover_all_devices(verify=True)
        async for event in self._service.subscribe():
            known = await self._service.cached()
            if event.snapshot is not None:
                if known is None or known.discovery_status == "stale":
                    known = event.snapshot
            else:
                self._lines.append(describe(event))
            if known is not None:
                self._take(known)

    async def _draw(self, live: Live) -> None:
        while True:
            # A look-up that found nothing new is no event, and has ended all the same.
            known = await self._service.cached()
            if known is not None and known.discovery_status not in _WAITING:
                self._take(known)
            live.update(self._picture(), refresh=True)
            await asyncio.sleep(REDRAW_S)

    def _take(self, known: DiscoveryResult) -> None:
        """Read what is there now, and no longer what is gone."""
        self._status = _WAITING.get(known.discovery_status)
        if known.reports:
            absent = (report for report in known.reports if report.status != "ok")
            self._absent = {report.name: str(report.reason).replace("_", " ") for report in absent}
        self._devices = devices = known.devices
        there = {device.stable_id for device in devices}
        for gone in set(self._readers) - there:
            self._collector.remove(gone)
            self._readers.pop(gone).close()
        for device in devices:
            if device.stable_id in self._readers:
                continue
            found = self._source(device)
            if found.reader is not None:
                self._readers[device.stable_id] = found.reader
                self._collector.add(device.stable_id, found.reader)
                self._why_none.pop(device.stable_id, None)
            elif found.why_none is not None:
                self._why_none[device.stable_id] = found.why_none

    def _picture(self) -> Group:
        size = self._console.size
        return picture(
            self._devices,
            self._collector,
            self._why_none,
            list(self._lines),
            status=self._status,
            absent=self._absent,
            width=size.width,
            height=size.height,
            ticks=self._ticks,
        )


def _first(errors: ExceptionGroup[GPUError]) -> GPUError:
    """One of them: a person reads one line, and the others are of the same look-up."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
