"""NodeMonitoring: a worker's devices are watched between look-ups, and what is seen goes where it is needed.

Readings go to the cluster, best effort. Xids and failing readings go to what discovery believes of a device, and from
there to the cluster as an event, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, NoReturn

from gpurt.backend import GPUBackend
from gpurt.cluster.errors import ClusterError
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.readings import DeviceReadings
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import BackendUnavailable, Unsupported
from gpurt.identity import normalize_pci_address
from gpurt.sources.nvml_events import XidEvent, open_xid_events
from gpurt.telemetry.changes import TelemetryChange
from gpurt.telemetry.feed import ChangeFeed
from gpurt.telemetry.host import HostReader, host_reader
from gpurt.telemetry.monitoring import GPUMonitoringService
from gpurt.telemetry.readers import Read, backend_reader, with_fallback
from gpurt.types import DeviceState, GPUDevice

REFRESH_S: Final = 30.0
"""Readings that have not changed are repeated so often: any message may be lost."""
REPEAT_S: Final = 1.0
"""They are repeated for those who ask for the node's state, so often at most, however many come."""
REOPEN_FIRST_S: Final = 5.0
REOPEN_LONGEST_S: Final = 300.0
"""Between two attempts to listen to a driver that gives no events at the moment."""

_MEMORY_QUANTUM: Final = 1 << 20
_GONE: Final = frozenset({DeviceState.REMOVED})

_log = logging.getLogger("gpurt.cluster.worker")

OpenEvents = Callable[[Iterable[str]], AbstractAsyncContextManager[AsyncIterator[XidEvent]]]


class NodeMonitoring:
    """Watches the devices that ``discovery`` knows, under their stable ids.

    Args:
        discovery: has loaded its registry: its health is what is fed here.
        publisher: None publishes no readings.
        interval_s: between two readings of a device.
        refresh_s: see :data:`REFRESH_S`.
        open_events: in place of NVML's events.
        root: where the host's figures are read from.
        options: of :class:`GPUMonitoringService`: alerts, listeners, thresholds.
    """

    def __init__(
        self,
        discovery: GPUDiscoveryService,
        publisher: NodePublisher | None = None,
        *,
        interval_s: float = 1.0,
        refresh_s: float = REFRESH_S,
        open_events: OpenEvents = open_xid_events,
        root: Path = Path("/"),
        **options: Any,
    ) -> None:
        self._discovery, self._publisher = discovery, publisher
        self._refresh_s = refresh_s
        self._open_events = open_events
        self._root = root
        self.service = GPUMonitoringService(
            {}, health=discovery.health.monitor, on_health=discovery.take_health, interval_s=interval_s, **options
        )
        self._devices: dict[str, GPUDevice] = {}
        self._backends: list[GPUBackend] = []
        self._host_readers: dict[str, HostReader] = {}
        self._addresses: tuple[str, ...] = ()
        self._moved, self._asked = asyncio.Event(), asyncio.Event()

    def use(self, backend: GPUBackend) -> None:
        """Read the devices of an initialised backend through it, too, from the next reading on. Never closed here."""
        self._backends.append(backend)
        self._follow_devices(self._devices.values())

    async def run(self) -> NoReturn:
        """Watch until cancelled."""
        before = self._discovery.health.is_watched
        self._discovery.health.is_watched = self._is_told
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_discovery(), name="gpurt-monitoring-devices")
                group.create_task(self._listen(), name="gpurt-monitoring-events")
                if self._publisher is not None:
                    self._publisher.on_asked = self._asked.set
                    group.create_task(self._publish(self._publisher), name="gpurt-monitoring-readings")
                    group.create_task(self._repeat(self._publisher), name="gpurt-monitoring-asked")
                await self.service.run()
        finally:
            if self._publisher is not None:
                self._publisher.on_asked = None
            self._discovery.health.is_watched = before
            for reader in self._host_readers.values():
                reader.close()
            self._host_readers.clear()
            for key in self.service.collector.device_ids:
                self.service.remove(key)

    # Devices

    async def _follow_discovery(self) -> None:
        async for event in self._discovery.subscribe():
            if event.snapshot is not None:
                self._take_result(event.snapshot)
            elif event.device is not None:
                devices = self._devices | {event.device.stable_id: event.device}
                if event.device.state in _GONE:
                    del devices[event.device.stable_id]
                self._follow_devices(devices.values())

    def _take_result(self, result: DiscoveryResult) -> None:
        self._follow_devices(result.devices)

    def _follow_devices(self, devices: Iterable[GPUDevice]) -> None:
        before, self._devices = self._devices, {device.stable_id: device for device in devices}
        for key in before.keys() - self._devices.keys():
            self.service.remove(key)
            if (reader := self._host_readers.pop(key, None)) is not None:
                reader.close()
        for key, device in self._devices.items():
            read = self._reader(key, device)
            if read is not None:
                self.service.add(key, read)
        cards = (device for device in self._devices.values() if device.vendor == "nvidia" and not device.simulated)
        addresses = {device.identity.pci_address for device in cards if device.identity}
        told = tuple(sorted(address for address in addresses if address is not None))
        if told != self._addresses:
            self._addresses = told
            self._moved.set()

    def _reader(self, key: str, device: GPUDevice) -> Read | None:
        if key not in self._host_readers and (made := host_reader(device, root=self._root)) is not None:
            self._host_readers[key] = made
        reads: list[Read] = [self._host_readers[key]] if key in self._host_readers else []
        for backend in self._backends:
            reads += [backend_reader(backend, each.device_id) for each in backend.devices if each.stable_id == key]
        if not reads:
            return None
        return reads[0] if len(reads) == 1 else with_fallback(*reads)

    def _is_told(self, key: str) -> bool:
        collector = self.service.collector
        sample = collector.latest(key) if key in collector.device_ids else None
        return sample is not None and not (sample.contact is DeviceState.HEALTHY and sample.is_empty)

    # Xids

    async def _listen(self) -> NoReturn:
        pause = REOPEN_FIRST_S
        while True:
            self._moved.clear()
            if not self._addresses:
                await self._moved.wait()
                continue
            wait: float | None = None
            try:
                async with self._open_events(self._addresses) as events:
                    pause = REOPEN_FIRST_S
                    await self._take_events(events)
                    continue
            except Unsupported as exc:
                _log.info("Xids are not told here, only polling is left: %s", exc)
            except (BackendUnavailable, OSError) as exc:
                _log.warning("Xids are not told at the moment: %s", exc)
                wait, pause = pause, min(2 * pause, REOPEN_LONGEST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._moved.wait()

    async def _take_events(self, events: AsyncIterator[XidEvent]) -> None:
        """Until other cards are there."""
        taking = asyncio.ensure_future(self._take_each(events))
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            await asyncio.wait({taking, moved}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                taking.result()
        finally:
            taking.cancel()
            moved.cancel()
            await asyncio.wait({taking, moved})

    async def _take_each(self, events: AsyncIterator[XidEvent]) -> None:
        async for event in events:
            for key in self._concerned(event):
                self.service.xid(event.xid, key)
        raise OSError("the driver has ended its events")

    def _concerned(self, event: XidEvent) -> list[str]:
        """Stable ids of the devices that an Xid is about: of all cards, where the driver does not say which."""
        keys: list[str] = []
        for key, device in self._devices.items():
            if device.vendor != "nvidia" or device.simulated or device.identity is None:
                continue
            if event.pci_address is not None:
                if normalize_pci_address(device.identity.pci_address) != normalize_pci_address(event.pci_address):
                    continue
                if event.partition is not None and device.identity.partition not in (None, event.partition):
                    continue
            keys.append(key)
        return keys

    # Readings

    async def _publish(self, publisher: NodePublisher) -> None:
        """When something has changed by more than its threshold, which is every 10 s at most but for a device that
        comes, goes or is throttled; and every ``refresh_s``."""
        with self.service.collector.changes() as changes:
            waiting: asyncio.Future[TelemetryChange | None] | None = None
            try:
                while True:
                    waiting = waiting or asyncio.ensure_future(_next(changes))
                    await asyncio.wait({waiting}, timeout=self._refresh_s)
                    if waiting.done():
                        if waiting.result() is None:
                            return
                        waiting = None
                    await self._send(publisher)
            finally:
                if waiting is not None:
                    waiting.cancel()

    async def _repeat(self, publisher: NodePublisher) -> NoReturn:
        """For who has come just now: everybody begins with a question for the node's state, and nothing else tells
        values that do not change."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._send(publisher)
            await asyncio.sleep(REPEAT_S)

    async def _send(self, publisher: NodePublisher) -> None:
        try:
            if readings := self.readings():
                await publisher.publish_telemetry(readings)
        except ClusterError as exc:
            _log.info("readings are dropped: %s", exc)

    def readings(self) -> list[DeviceReadings]:
        """Of every device that has told anything, as of now. Memory to the MiB."""
        found: list[DeviceReadings] = []
        collector = self.service.collector
        for key in collector.device_ids:
            sample = collector.latest(key)
            if sample is not None:
                record = sample.record(collector.clock(), collector.stale_after_s)
                for name, value in record.items():
                    if name.endswith("_bytes") and value is not None:
                        record[name] = round(value / _MEMORY_QUANTUM) * _MEMORY_QUANTUM
                found.append(DeviceReadings.model_validate({"device": key, **record}))
        return found


async def _next(changes: ChangeFeed) -> TelemetryChange | None:
    """None at the end: a task must not end with StopAsyncIteration that nobody takes."""
    return await anext(changes, None)
