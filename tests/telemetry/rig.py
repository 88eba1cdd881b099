"""Devices that answer what a test tells them, and a clock that it turns."""

from __future__ import annotations

import asyncio
from typing import Any

from gpurt.sources.condition import DeviceCondition, Throttle
from gpurt.telemetry import RawReading, TelemetryChange, TelemetryCollector

GIB = 1 << 30
NORMAL = {
    "memory_total_bytes": 80 * GIB, "memory_used_bytes": 8 * GIB, "memory_free_bytes": 71 * GIB,
    "memory_reserved_bytes": GIB, "temperature_c": 41, "power_w": 69.85, "clock_mhz": 345, "utilization_percent": 0,
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A source of readings. ``gate`` set to an event: the reading hangs until it is set."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = {**NORMAL, **values}
        self.throttle: frozenset[Throttle] | None = frozenset()
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.calls = self.cancelled = 0

    async def __call__(self) -> RawReading:
        self.calls += 1
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.error is not None:
            raise self.error
        return RawReading(dict(self.values), {}, DeviceCondition(throttle=self.throttle))


class Rig:
    """A collector over devices, polled by hand, a second apart.

    A poll's patience ends when every device that can answer has: the collector sleeps by ``sleep`` alone.
    """

    def __init__(self, *devices: Device, **options: Any) -> None:
        self.devices = devices or (Device(),)
        self.clock = Clock()
        readers = {f"gpu:{index}": device for index, device in enumerate(self.devices)}
        self.ran_out_of_patience = 0
        self.collector = TelemetryCollector(readers, clock=self.clock, sleep=self.sleep, **options)

    async def sleep(self, _: float) -> None:
        for _ in range(10):  # a turn of the loop for each step of a device that answers
            await asyncio.sleep(0)
        self.ran_out_of_patience += 1

    async def poll(self, *, after_s: float = 1.0) -> tuple[TelemetryChange, ...]:
        self.clock.now += after_s
        return await self.collector.poll()

    async def aspects(self, *, after_s: float = 1.0) -> list[set[str]]:
        return [{str(aspect) for aspect in change.aspects} for change in await self.poll(after_s=after_s)]
