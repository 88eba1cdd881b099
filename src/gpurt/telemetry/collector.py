"""TelemetryCollector: asks devices again and again, and tells what changed.

Every device has one question in flight at most, and nobody waits for a device that is late: one whose driver hangs
costs one waiting task, and its readings grow old. Nothing is bound to an event loop before the first ``poll``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import NoReturn

from gpurt.errors import DeviceLost, DeviceNotFound, DeviceUnresponsive
from gpurt.telemetry.changes import AT_ONCE, Aspect, TelemetryChange, Thresholds, compare
from gpurt.telemetry.feed import ChangeFeed
from gpurt.telemetry.history import History
from gpurt.telemetry.readers import Read, gives_nothing
from gpurt.telemetry.reading import METRICS, RawReading, Reading, Sample, checked
from gpurt.types import DeviceState


class _Channel:
    """One device."""

    def __init__(self, device_id: str, read: Read, history: int) -> None:
        self.device_id = device_id
        self.read = read
        self.task: asyncio.Task[None] | None = None
        self.asked_at = 0.0
        self.late = False
        """The question in flight has been waited for long enough."""
        self.sample: Sample | None = None
        self.told: Sample | None = None
        self.flip_told_at: float | None = None
        self.history = History(history)
        self.dropped: Counter[str] = Counter()


class TelemetryCollector:
    """Polls devices and tells changes.

    Args:
        readers: how each device is read, by device id; see :mod:`gpurt.telemetry.readers`.
        interval_s: from the beginning of one poll to the next, in ``run``.
        patience_s: how long one poll waits for a device; its answer counts whenever it comes.
        silent_after_s: without an answer for so long, a device is told to be ``unresponsive``.
        stale_after_s: older values are not given as values any more.
        min_interval_s: changed values are told for all devices together, so often at most; a flip of throttling so
            often per device. First samples and changes of contact are told at once.
        history: samples kept per device.
        on_sample: called with every new sample, on the event loop; also with the last one of a device that has become
            unresponsive, marked so. It must not block, and must not raise.
        clock, sleep: seconds, monotonic.
    """

    def __init__(
        self,
        readers: Mapping[str, Read],
        *,
        interval_s: float = 1.0,
        patience_s: float = 0.5,
        silent_after_s: float = 5.0,
        stale_after_s: float = 30.0,
        thresholds: Thresholds | None = None,
        min_interval_s: float = 10.0,
        history: int = 300,
        on_sample: Callable[[Sample], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if not (interval_s > 0 and patience_s > 0 and silent_after_s > 0 and stale_after_s > 0 and history > 0):
            raise ValueError("intervals, patience, ages and history must be positive")
        self._interval_s, self._patience_s = interval_s, patience_s
        self._silent_after_s, self.stale_after_s = silent_after_s, stale_after_s
        self._thresholds = thresholds or Thresholds()
        self._min_interval_s = min_interval_s
        self._history = history
        self._on_sample = on_sample
        self.clock, self._sleep = clock, sleep
        self._feeds: list[ChangeFeed] = []
        self._values_told_at: float | None = None
        self._channels = {key: _Channel(key, read, history) for key, read in readers.items()}

    # Devices

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(self._channels)

    def add(self, device_id: str, read: Read) -> None:
        """Poll one more device from the next poll on, or read one in another way. What was read before stays."""
        if device_id in self._channels:
            self._channels[device_id].read = read
        else:
            self._channels[device_id] = _Channel(device_id, read, self._history)

    def remove(self, device_id: str) -> None:
        """Poll a device no longer, and forget what it told. Does nothing for one that is not there."""
        channel = self._channels.pop(device_id, None)
        if channel is not None and channel.task is not None:
            channel.task.cancel()

    # What is known

    def latest(self, device_id: str) -> Sample | None:
        """The last sample of a device, however old; None before the first.

        Raises:
            DeviceNotFound: not one of this collector's.
        """
        return self._channel(device_id).sample

    def readings(self, device_id: str) -> dict[str, Reading]:
        """Every metric of a device as it is known now, each with its age.

        Raises:
            DeviceNotFound.
        """
        channel, now = self._channel(device_id), self.clock()
        if channel.sample is None:
            return {name: Reading(None, metric.unit, float("inf"), "stale") for name, metric in METRICS.items()}
        return {name: channel.sample.reading(name, now, self.stale_after_s) for name in METRICS}

    def history(self, device_id: str) -> History:
        """The last samples of a device. Raises DeviceNotFound."""
        return self._channel(device_id).history

    def dropped(self, device_id: str) -> Mapping[str, int]:
        """How often each metric of a device told something impossible. Raises DeviceNotFound."""
        return dict(self._channel(device_id).dropped)

    def changes(self) -> ChangeFeed:
        """Changes from now on, beginning with what is known of each device. Somebody must ``run`` or ``poll``.

        Close it, or use it in ``with``; must be called on the event loop that reads it.
        """
        feed = ChangeFeed(self._feeds.remove)
        for channel in self._channels.values():
            if channel.told is not None:
                feed.put(TelemetryChange(channel.device_id, frozenset({Aspect.FIRST}), channel.told, None))
        self._feeds.append(feed)
        return feed

    # Polling

    async def run(self) -> NoReturn:
        """Poll until cancelled; on the way out, questions in flight are dropped."""
        try:
            while True:
                began = self.clock()
                await self.poll()
                await self._sleep(max(0.0, began + self._interval_s - self.clock()))
        finally:
            self.stop()

    async def poll(self) -> tuple[TelemetryChange, ...]:
        """Ask every device that is not being asked already, and wait ``patience_s`` at most for all together.

        Returns the changes that it told to every feed; of polls at the same time, one does. Cancelled, it returns at
        once; questions in flight go on and count when they are answered.
        """
        now = self.clock()
        for channel in self._channels.values():
            if channel.task is None:
                channel.asked_at, channel.late = now, False
                channel.task = asyncio.create_task(self._ask(channel), name=f"gpurt telemetry {channel.device_id}")
        asked = [channel for channel in self._channels.values() if not channel.late]
        await self._wait({channel.task for channel in asked if channel.task is not None})
        for channel in asked:
            channel.late = channel.task is not None
        return self._tell()

    def stop(self) -> None:
        """Drop the questions in flight and close every feed. Polling may begin again, on any loop."""
        for channel in self._channels.values():
            if channel.task is not None:
                channel.task.cancel()
                channel.task = None
        for feed in tuple(self._feeds):
            feed.close()

    # Inside

    def _channel(self, device_id: str) -> _Channel:
        try:
            return self._channels[device_id]
        except KeyError:
            raise DeviceNotFound(f"no telemetry is collected of {device_id!r}", operation="telemetry") from None

    async def _wait(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        pending: set[asyncio.Task[object]] = set(tasks)
        if not pending:
            return
        patience = asyncio.create_task(self._be_patient())
        try:
            while pending and not patience.done():
                done, _ = await asyncio.wait({*pending, patience}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
        finally:
            patience.cancel()

    async def _be_patient(self) -> None:
        await self._sleep(self._patience_s)

    async def _ask(self, channel: _Channel) -> None:
        try:
            raw, contact, why = await _answer(channel.read)
        finally:
            # `stop` or `remove` may have taken the channel from this question; its answer is nobody's then.
            current = channel.task is asyncio.current_task()
            if current:
                channel.task = None
        if current:
            values, reasons, impossible = checked(raw)
            channel.dropped.update(impossible)
            sample = Sample(channel.device_id, channel.asked_at, values, reasons, raw.condition, contact, why)
            self._take(channel, sample)

    def _take(self, channel: _Channel, sample: Sample) -> None:
        channel.sample = sample
        channel.history.add(sample)
        if self._on_sample is not None:
            self._on_sample(sample)

    def _tell(self) -> tuple[TelemetryChange, ...]:
        now = self.clock()
        values_may = self._values_told_at is None or now - self._values_told_at >= self._min_interval_s
        changes: list[TelemetryChange] = []
        for channel in self._channels.values():
            self._mark_silent(channel, now)
            if channel.sample is None:
                continue
            aspects = compare(channel.told, channel.sample, self._thresholds)
            flip_may = channel.flip_told_at is None or now - channel.flip_told_at >= self._min_interval_s
            flips = Aspect.THROTTLE in aspects and flip_may
            if not (aspects & AT_ONCE or flips or (values_may and aspects - {Aspect.THROTTLE})):
                continue
            if Aspect.THROTTLE in aspects:
                channel.flip_told_at = now
            if values_may and not aspects & AT_ONCE:
                self._values_told_at = now
            changes.append(TelemetryChange(channel.device_id, aspects, channel.sample, channel.told))
            channel.told = channel.sample
        for change in changes:
            for feed in self._feeds:
                feed.put(change)
        return tuple(changes)

    def _mark_silent(self, channel: _Channel, now: float) -> None:
        silent_s = now - channel.asked_at
        if channel.task is None or silent_s < self._silent_after_s:
            return
        last = channel.sample
        if last is not None and last.contact is DeviceState.UNRESPONSIVE:
            return
        why = f"no answer for {silent_s:.0f} s"
        if last is None:
            last = Sample(channel.device_id, channel.asked_at, {}, dict.fromkeys(METRICS, "stale"))
        channel.sample = replace(last, contact=DeviceState.UNRESPONSIVE, contact_reason=why)
        if self._on_sample is not None:
            self._on_sample(channel.sample)


async def _answer(read: Read) -> tuple[RawReading, DeviceState, str | None]:
    """A reading, how the device answered, and what it said where that was not a reading."""
    try:
        raw = await read()
    except DeviceUnresponsive as exc:
        return _nothing(), DeviceState.UNRESPONSIVE, str(exc)
    except DeviceLost as exc:
        return _nothing(), DeviceState.LOST, str(exc)
    except Exception as exc:  # whatever a source raises costs this reading, and is told with it
        return _nothing(), DeviceState.SUSPECT, f"{type(exc).__name__}: {exc}"
    if not isinstance(raw, RawReading):  # pyright: ignore[reportUnnecessaryIsInstance]  (readers are the callers' own)
        return _nothing(), DeviceState.SUSPECT, f"the reader returned {type(raw).__name__}, not a RawReading"
    reason = gives_nothing(raw)
    if reason is not None:
        return raw, DeviceState.SUSPECT, f"the reading has no value: {reason}"
    return raw, DeviceState.HEALTHY, None


def _nothing() -> RawReading:
    return RawReading({}, dict.fromkeys(METRICS, "error"))
