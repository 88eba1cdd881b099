"""What is told and when; devices that hang, fail, go and come back."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
import time

import anyio
import pytest

from gpurt.errors import DeviceLost, DeviceNotFound, DeviceUnresponsive
from gpurt.sources.condition import Throttle
from gpurt.telemetry import Aspect, RawReading, TelemetryCollector
from gpurt.types import DeviceState
from tests.telemetry.rig import GIB, NORMAL, Clock, Device, Rig

TOTAL = 100 * GIB
POINT = GIB


class TestThresholds:
    @pytest.mark.parametrize(
        ("metric", "before", "quiet", "told"),
        [
            ("memory_used_bytes", 50 * POINT, 50.9 * POINT, 51.1 * POINT),
            ("memory_used_bytes", 50 * POINT, 51 * POINT, 51 * POINT + 1),
            ("memory_used_bytes", 50 * POINT, 49.1 * POINT, 48.9 * POINT),
            ("temperature_c", 45.0, 50.0, 50.1),
            ("temperature_c", 45.0, 40.0, 39.9),
            ("utilization_percent", 40, 50, 51),
            ("utilization_percent", 100, 90, 89),
        ],
    )
    async def test_x10_memory_1_point_temperature_5_degrees_utilisation_10_points(
        self, metric: str, before: float, quiet: float, told: float
    ) -> None:
        device = Device(memory_total_bytes=TOTAL, **{metric: before})
        rig = Rig(device, min_interval_s=0)
        assert await rig.aspects() == [{"first"}]
        device.values[metric] = quiet
        assert await rig.aspects() == []
        device.values[metric] = told
        aspect = {"memory_used_bytes": "memory", "temperature_c": "temperature"}.get(metric, "utilization")
        assert await rig.aspects() == [{aspect}]
        assert await rig.aspects() == []

    async def test_x10_small_steps_add_up(self) -> None:
        device = Device(temperature_c=40)
        rig = Rig(device, min_interval_s=0)
        await rig.poll()
        told: list[float] = []
        for step in range(1, 13):
            device.values["temperature_c"] = 40 + step
            told += [change.sample.values["temperature_c"] for change in await rig.poll()]
        assert told == [46, 52]

    async def test_x10_temperature_none_is_not_0(self) -> None:
        device = Device(temperature_c=0)
        rig = Rig(device, min_interval_s=0)
        await rig.poll()
        device.values["temperature_c"] = None
        (change,) = await rig.poll()
        assert change.aspects == {Aspect.TEMPERATURE}
        assert "temperature_c" not in change.sample.values
        assert change.sample.unavailable["temperature_c"] == "unsupported"
        assert await rig.poll() == ()
        device.values["temperature_c"] = 0
        assert await rig.aspects() == [{"temperature"}]

    async def test_memory_without_a_total_has_no_points(self) -> None:
        device = Device(memory_total_bytes=None)
        rig = Rig(device, min_interval_s=0)
        await rig.poll()
        device.values["memory_used_bytes"] = 60 * GIB
        assert await rig.poll() == ()
        device.values["memory_used_bytes"] = None
        assert await rig.aspects() == [{"memory"}]

    async def test_throttle_flips_are_told_at_once_and_not_more_often_than_allowed(self) -> None:
        device = Device()
        rig = Rig(device, min_interval_s=10)
        await rig.poll()
        device.throttle = frozenset({Throttle.POWER_CAP})
        assert await rig.aspects() == []  # a GPU at its power limit is not throttled
        device.throttle = frozenset({Throttle.HARDWARE_THERMAL})
        assert await rig.aspects() == [{"throttle"}]
        flips = 0
        for _ in range(40):
            device.throttle = frozenset() if device.throttle else frozenset({Throttle.THERMAL})
            flips += len(await rig.poll())
        assert flips == 3  # with a device that flips at every poll


class TestRate:
    async def test_values_are_told_for_all_devices_at_once_every_10_s(self) -> None:
        devices = [Device() for _ in range(8)]
        rig = Rig(*devices)
        assert len(await rig.poll()) == 8
        at: list[tuple[float, int]] = []
        for step in range(40):
            for device in devices:
                device.values["temperature_c"] = 90 if step % 2 else 40
            changes = await rig.poll()
            if changes:
                at.append((rig.clock.now, len(changes)))
        assert [count for _, count in at] == [8] * len(at)
        assert len(at) in (3, 4)
        assert all(b - a >= 10 for (a, _), (b, _) in itertools.pairwise(at))

    async def test_what_was_held_back_is_told_later_if_it_still_holds(self) -> None:
        device = Device(temperature_c=40)
        rig = Rig(device)
        await rig.poll()
        device.values["temperature_c"] = 60
        assert await rig.aspects() == [{"temperature"}]
        device.values["temperature_c"] = 80
        for _ in range(9):
            assert await rig.poll() == ()
        (change,) = await rig.poll()
        assert change.previous is not None
        assert (change.previous.values["temperature_c"], change.sample.values["temperature_c"]) == (60, 80)


class TestTrouble:
    async def test_a_device_that_hangs_delays_no_other(self) -> None:
        """E-47 and HNG-1: readings of the others come at every poll; the hung one is asked once, and grows old."""
        hung, well = Device(), Device()
        rig = Rig(hung, well, silent_after_s=5)
        await rig.poll()
        hung.gate = asyncio.Event()
        told = [change for _ in range(40) for change in await rig.poll() if change.device_id == "gpu:0"]
        assert (hung.calls, well.calls) == (2, 41)
        assert rig.ran_out_of_patience == 1  # it is waited for once
        (change,) = told
        assert change.sample.contact is DeviceState.UNRESPONSIVE
        assert change.sample.contact_reason == "no answer for 5 s"
        reading = rig.collector.readings("gpu:0")["temperature_c"]
        assert (reading.value, reading.reason, reading.last) == (None, "stale", 41)
        assert reading.age_s == 40
        assert rig.collector.readings("gpu:1")["temperature_c"].age_s == 0
        hung.gate.set()
        hung.gate = None
        await rig.sleep(0)
        assert await rig.aspects() == [{"contact"}]
        await rig.poll()
        assert rig.collector.readings("gpu:0")["temperature_c"].age_s == 0

    async def test_a_device_that_never_answered_is_told_too(self) -> None:
        device = Device()
        device.gate = asyncio.Event()
        rig = Rig(device, silent_after_s=5)
        for _ in range(5):
            assert await rig.poll() == ()
        (change,) = await rig.poll()
        assert (change.aspects, change.sample.contact) == ({Aspect.FIRST}, DeviceState.UNRESPONSIVE)
        rig.collector.stop()

    async def test_m37_old_values_are_no_values(self) -> None:
        rig = Rig(stale_after_s=30)
        await rig.poll()
        rig.clock.now += 30
        assert rig.collector.readings("gpu:0")["memory_used_bytes"].value == 8 * GIB
        rig.clock.now += 1
        reading = rig.collector.readings("gpu:0")["memory_used_bytes"]
        assert (reading.value, reading.reason, reading.last) == (None, "stale", 8 * GIB)

    @pytest.mark.parametrize(
        ("error", "contact"),
        [
            (DeviceLost("gone"), DeviceState.LOST),
            (DeviceUnresponsive("hung"), DeviceState.UNRESPONSIVE),
            (OSError("999"), DeviceState.SUSPECT),
            (ZeroDivisionError(), DeviceState.SUSPECT),
        ],
    )
    async def test_l43_l44_a_device_that_fails_is_told_once_and_costs_itself(
        self, error: Exception, contact: DeviceState
    ) -> None:
        devices = [Device() for _ in range(8)]
        rig = Rig(*devices)
        await rig.poll()
        devices[3].error = error
        changes = [change for _ in range(20) for change in await rig.poll()]
        assert [(change.device_id, change.sample.contact) for change in changes] == [("gpu:3", contact)]
        assert rig.collector.readings("gpu:3")["power_w"].reason == "error"
        assert all(rig.collector.readings(f"gpu:{i}")["power_w"].value == 69.85 for i in range(8) if i != 3)
        devices[3].error = None
        (back,) = await rig.poll()
        assert (back.aspects, back.sample.contact) == ({Aspect.CONTACT}, DeviceState.HEALTHY)

    async def test_l42_a_reading_without_any_value_is_a_failed_one(self) -> None:
        device = Device()
        rig = Rig(device)
        await rig.poll()
        good, device.values = device.values, dict.fromkeys(NORMAL)
        assert await rig.aspects() == [{"memory", "temperature", "utilization"}]  # unsupported is an answer

        async def fails() -> RawReading:
            return RawReading({}, dict.fromkeys(NORMAL, "error"))

        rig.collector.add("gpu:0", fails)
        (change,) = await rig.poll()
        assert change.sample.contact is DeviceState.SUSPECT
        device.values = good
        rig.collector.add("gpu:0", device)
        assert await rig.aspects() == [{"contact"}]

    async def test_tel_1_absurd_values_are_counted(self) -> None:
        device = Device(utilization_percent=2147483632, temperature_c=float("nan"))
        rig = Rig(device)
        for _ in range(3):
            await rig.poll()
        assert rig.collector.dropped("gpu:0") == {"utilization_percent": 3, "temperature_c": 3}
        assert rig.collector.readings("gpu:0")["utilization_percent"].reason == "invalid"

    async def test_a_source_that_cancels_itself_is_asked_again(self) -> None:
        async def broken() -> RawReading:
            raise asyncio.CancelledError

        rig = Rig()
        rig.collector.add("gpu:0", broken)
        await rig.poll()
        rig.collector.add("gpu:0", rig.devices[0])
        await rig.poll()
        assert rig.collector.latest("gpu:0") is not None


class TestEndurance:
    async def test_1000_polls_one_event_per_change_and_no_growth(self) -> None:
        """A driver that hangs, recovers, loses a GPU and gets it back, 50 times in 1,000 polls."""
        device, other = Device(), Device()
        rig = Rig(device, other, silent_after_s=3)
        await rig.poll()
        contacts: list[str] = []
        before: tuple[int, int, int] | None = None
        for turn in range(50):
            device.gate = asyncio.Event()
            for step in range(20):
                if step == 7:
                    device.gate.set()
                    device.gate = None
                device.error = DeviceLost("gone") if 10 <= step < 15 else None
                contacts += [str(change.sample.contact) for change in await rig.poll()]
            if turn == 25:
                gc.collect()
                before = _resources()
        gc.collect()
        assert contacts == ["unresponsive", "healthy", "lost", "healthy"] * 50
        assert before is not None
        tasks, threads, descriptors = _resources()
        assert (tasks, threads, descriptors) == before
        assert len(rig.collector.history("gpu:0")) == 300
        assert other.calls == 1001

    async def test_e48_polls_at_the_same_time_ask_each_device_once(self) -> None:
        device = Device()
        device.gate = asyncio.Event()
        rig = Rig(device)
        polls = [asyncio.create_task(rig.collector.poll()) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        device.gate.set()
        told = [change for changes in await asyncio.gather(*polls) for change in changes]
        assert (device.calls, len(told)) == (1, 1)


def _resources() -> tuple[int, int, int]:
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return len(asyncio.all_tasks()), threading.active_count(), descriptors


class TestRun:
    async def test_run_keeps_its_interval_and_ends_when_cancelled(self) -> None:
        device = Device()
        clock, slept = Clock(), []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if seconds == 0.5:  # the patience of a poll
                await asyncio.Event().wait()
            clock.now += seconds
            await asyncio.sleep(0)

        collector = TelemetryCollector({"gpu:0": device}, clock=clock, sleep=sleep)
        running = asyncio.create_task(collector.run())
        with collector.changes() as changes:
            assert (await anext(changes)).aspects == {Aspect.FIRST}
        while device.calls < 5:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert set(slept) == {0.5, 1.0}

    async def test_e49_cancelled_while_a_driver_hangs_it_returns_at_once(self) -> None:
        device = Device()
        device.gate = asyncio.Event()
        collector = TelemetryCollector({"gpu:0": device}, patience_s=60)
        began = time.monotonic()
        with anyio.move_on_after(0.02):
            await collector.run()
        await asyncio.sleep(0)
        assert time.monotonic() - began < 10
        assert device.cancelled == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await collector.poll()
        collector.stop()

    def test_one_collector_on_many_loops(self) -> None:
        device = Device()
        collector = TelemetryCollector({"gpu:0": device})

        async def once() -> None:
            await collector.poll()
            collector.stop()

        for _ in range(3):
            asyncio.run(once())
        assert device.calls == 3

    async def test_stop_drops_the_question_and_its_late_answer(self) -> None:
        device = Device()
        device.gate = asyncio.Event()
        rig = Rig(device)
        await rig.poll()
        rig.collector.stop()
        await asyncio.sleep(0)
        assert device.cancelled == 1
        assert rig.collector.latest("gpu:0") is None


class TestDevicesAndFeeds:
    async def test_devices_come_and_go(self) -> None:
        rig = Rig()
        await rig.poll()
        second = Device()
        rig.collector.add("gpu:1", second)
        assert [change.device_id for change in await rig.poll()] == ["gpu:1"]
        rig.collector.remove("gpu:0")
        rig.collector.remove("gpu:0")
        await rig.poll()
        assert (rig.collector.device_ids, rig.devices[0].calls, second.calls) == (("gpu:1",), 2, 2)
        for call in (rig.collector.latest, rig.collector.readings, rig.collector.history, rig.collector.dropped):
            with pytest.raises(DeviceNotFound):
                call("gpu:0")

    async def test_a_late_reader_hears_what_is_known_first(self) -> None:
        rig = Rig(Device(), Device())
        await rig.poll()
        with rig.collector.changes() as changes:
            assert {(await anext(changes)).device_id for _ in range(2)} == {"gpu:0", "gpu:1"}

    async def test_a_slow_reader_gets_one_change_per_device(self) -> None:
        device = Device(temperature_c=0)
        rig = Rig(device, min_interval_s=0)
        with rig.collector.changes() as changes:
            for step in range(100):
                device.values["temperature_c"] = step % 2 * 50
                device.values["utilization_percent"] = 50 if step > 50 else 0
                await rig.poll()
            change = await anext(changes)
        assert change.aspects == {Aspect.FIRST, Aspect.TEMPERATURE, Aspect.UTILIZATION}
        assert (change.previous, change.sample.values["temperature_c"]) == (None, 50)
        with pytest.raises(StopAsyncIteration):
            await anext(changes)

    async def test_feeds_end_with_the_collector(self) -> None:
        rig = Rig()
        await rig.poll()
        feed = rig.collector.changes()
        rig.collector.stop()
        assert [change.device_id async for change in feed] == ["gpu:0"]
        feed.close()

    async def test_history_is_for_sparklines(self) -> None:
        device = Device(memory_total_bytes=100, memory_used_bytes=0, memory_free_bytes=0, memory_reserved_bytes=0)
        rig = Rig(device, history=4)
        for step in range(6):
            device.values.update(temperature_c=step if step != 4 else None, memory_used_bytes=step)
            await rig.poll()
        history = rig.collector.history("gpu:0")
        assert history.series("temperature_c") == (2, 3, None, 5)
        assert history.series("memory_percent") == (2, 3, 4, 5)
        with pytest.raises(KeyError):
            history.series("weight")

    def test_impossible_options_are_refused(self) -> None:
        with pytest.raises(ValueError, match="positive"):
            TelemetryCollector({}, interval_s=0)


@pytest.mark.parametrize("answer", [None, {"temperature_c": 41.0}, 41.0, "41"])
async def test_a_reader_that_returns_something_else_is_suspect_and_says_why(answer: object) -> None:
    async def read() -> object:
        return answer

    collector = TelemetryCollector({"a": read})  # type: ignore[dict-item]
    await collector.poll()
    sample = collector.latest("a")
    assert sample is not None
    assert sample.contact is DeviceState.SUSPECT
    assert f"returned {type(answer).__name__}" in (sample.contact_reason or "")
