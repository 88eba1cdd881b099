"""Alerts, figures over a window, and health, put together."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from gpurt.errors import DeviceLost, DeviceNotFound
from gpurt.health import HealthMonitor, HealthPolicy, Transition
from gpurt.telemetry import Alert, AlertRule, GPUMonitoringService, Thresholds
from gpurt.telemetry.history import window_stats
from gpurt.types import DeviceState
from tests.telemetry.openmetrics import parse
from tests.telemetry.rig import Clock, Device

HOT = AlertRule("hot", "temperature_c", above=80, margin=5)
FULL = AlertRule("full", "memory_percent", above=90)
IDLE = AlertRule("idle", "utilization_percent", below=5)


class Rig:
    def __init__(self, *devices: Device, **options: Any) -> None:
        self.devices = devices or (Device(utilization_percent=50),)
        self.clock = Clock()
        self.alerts: list[Alert] = []
        self.transitions: list[Transition] = []
        self.service = GPUMonitoringService(
            {f"gpu:{index}": device for index, device in enumerate(self.devices)},
            on_alert=self.alerts.append,
            on_health=self.transitions.append,
            clock=self.clock,
            **{"patience_s": 60.0, **options},
        )

    async def poll(self, times: int = 1, **values: Any) -> None:
        for device in self.devices:
            device.values.update(values)
        for _ in range(times):
            self.clock.now += 1
            await self.service.collector.poll()


async def test_x11_an_alert_fires_once_per_crossing() -> None:
    rig = Rig(rules=[HOT, FULL, IDLE])
    for celsius in (79, 80, 80.1, 95, 85, 79, 81, 75.1, 75, 74, 79, 81, 99):
        await rig.poll(3, temperature_c=celsius)
    assert [(alert.rule.name, alert.active, alert.value) for alert in rig.alerts] == [
        ("hot", True, 80.1),
        ("hot", False, 75),
        ("hot", True, 81),
    ]


async def test_x11_a_value_that_is_unknown_neither_fires_nor_ends_an_alert() -> None:
    rig = Rig(rules=[IDLE])
    await rig.poll(utilization_percent=None)
    assert rig.alerts == []
    await rig.poll(utilization_percent=4)
    await rig.poll(5, utilization_percent=None)
    rig.devices[0].error = DeviceLost("gone")
    await rig.poll(5)
    rig.devices[0].error = None
    await rig.poll(5, utilization_percent=3)
    assert [alert.active for alert in rig.alerts] == [True]
    await rig.poll(utilization_percent=5)
    assert [alert.active for alert in rig.alerts] == [True, False]


async def test_x11_alerts_are_per_device() -> None:
    rig = Rig(Device(temperature_c=90), Device(temperature_c=20), rules=[HOT])
    await rig.poll(3)
    assert [alert.device_id for alert in rig.alerts] == ["gpu:0"]
    active = parse(rig.service.metrics_text())["gpurt_alert_active"]
    assert [active.value(device=f"gpu:{index}", alert="hot") for index in range(2)] == [1, 0]


async def test_x11_window_stats_are_exact() -> None:
    rig = Rig(history=1000)
    rng = random.Random(11)
    values = [rng.choice([None, round(rng.uniform(20, 90), 3)]) for _ in range(200)]
    for value in values:
        await rig.poll(temperature_c=value)
    for window in (1, 7, 60, 199, 10_000):
        known = sorted(value for value in values[-window - 1 :] if value is not None)
        stats = rig.service.stats("gpu:0", "temperature_c", window)
        if not known:
            assert stats is None
            continue
        assert stats is not None
        assert (stats.count, stats.minimum, stats.maximum) == (len(known), known[0], known[-1])
        assert stats.mean == pytest.approx(statistics.fmean(known), rel=1e-15)
        assert stats.p50 == statistics.median_low(known)
        assert sum(value <= stats.p95 for value in known) >= 0.95 * len(known)
        assert sum(value < stats.p95 for value in known) < 0.95 * len(known)


def test_stats_of_nothing_and_of_one() -> None:
    assert window_stats([]) is None
    one = window_stats([7])
    assert one is not None
    assert (one.minimum, one.mean, one.p50, one.p95) == (7, 7, 7, 7)


async def test_d20_hot_device_is_excluded_and_reported() -> None:
    rig = Rig(Device(temperature_c=60), Device(temperature_c=60), thermal_threshold=85, keys={"gpu:0": "GPU-1a1a"})
    await rig.poll(3)
    rig.devices[0].values["temperature_c"] = 92
    await rig.poll()
    assert [rig.service.usable(f"gpu:{index}") for index in range(2)] == [False, True]
    report = rig.service.get_health_report(hours=1).devices
    assert (report["GPU-1a1a"].state, report["GPU-1a1a"].hottest_c) == (DeviceState.DEGRADED, 92)
    assert report["gpu:1"].usable
    state = parse(rig.service.metrics_text())["gpurt_device_state"]
    assert state.value(device="gpu:0", state="degraded") == 1
    await rig.poll(3, temperature_c=60)
    assert rig.service.usable("gpu:0")
    assert [step.state for step in rig.transitions] == [DeviceState.DEGRADED, DeviceState.HEALTHY]


async def test_l43_lost_device_is_lost_at_the_next_poll() -> None:
    rig = Rig(Device(), Device())
    await rig.poll()
    rig.devices[1].error = DeviceLost("fallen off the bus")
    await rig.poll()
    assert [(step.key, step.state) for step in rig.transitions] == [("gpu:1", DeviceState.LOST)]


async def test_nvi_10_an_xid_of_no_device_concerns_all() -> None:
    rig = Rig(Device(), Device())
    await rig.poll()
    rig.service.xid(31, None)
    assert rig.transitions == []
    rig.service.xid(95, "gpu:1")
    assert [rig.service.usable(f"gpu:{index}") for index in range(2)] == [True, False]
    rig.service.xid(79, None)
    assert [step.state for step in rig.transitions[-2:]] == [DeviceState.LOST, DeviceState.LOST]


async def test_a_listener_that_fails_costs_no_reading(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(rules=[HOT])
    rig.service = GPUMonitoringService(
        {"gpu:0": Device(temperature_c=99)}, rules=[HOT], on_alert=lambda _: 1 // 0, patience_s=60.0
    )
    await rig.service.collector.poll()
    assert rig.service.collector.latest("gpu:0") is not None
    assert "listener" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": "temperature_c"}, "one of"),
        ({"metric": "temperature_c", "above": 1, "below": 0}, "one of"),
        ({"metric": "weight", "above": 1}, "no metric"),
        ({"metric": "power_w", "above": 1, "margin": -1}, "negative"),
    ],
)
def test_impossible_rules_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AlertRule("x", **options)
    with pytest.raises(ValueError, match="different names"):
        GPUMonitoringService({}, rules=[HOT, HOT])


async def test_a_monitor_may_be_shared_and_brings_its_own_policy() -> None:
    shared = HealthMonitor()
    told: list[Transition] = []
    service = GPUMonitoringService({}, health=shared, on_health=told.append)
    service.xid(79, "gpu:0")
    assert [transition.state for transition in told] == [DeviceState.LOST]
    assert shared.verdict("gpu:0").state is DeviceState.LOST
    for options in ({"policy": HealthPolicy()}, {"thermal_threshold": 80.0}):
        with pytest.raises(ValueError, match="own policy"):
            GPUMonitoringService({}, health=shared, **options)


async def test_devices_come_and_go() -> None:
    service = GPUMonitoringService({})
    service.add("gpu:1", Device())
    await service.collector.poll()
    assert service.collector.latest("gpu:1") is not None
    service.xid(48, "gpu:1")
    service.remove("gpu:1")
    assert service.collector.device_ids == ()
    assert not service.usable("gpu:1")


async def test_a_device_that_is_not_watched_is_not_found() -> None:
    rig = Rig()
    for ask in (
        lambda: rig.service.usable("zzz"),
        lambda: rig.service.stats("zzz", "temperature_c", 60),
        lambda: rig.service.collector.latest("zzz"),
    ):
        with pytest.raises(DeviceNotFound, match="zzz"):
            ask()
    assert rig.service.usable("gpu:0")


async def test_an_alert_about_what_is_not_known_has_no_sample() -> None:
    rig = Rig(Device(), Device(), Device(), rules=[HOT, FULL])
    assert "gpurt_alert_active" not in parse(rig.service.metrics_text())
    assert "gpurt_device_state" not in parse(rig.service.metrics_text())
    rig.devices[0].values["temperature_c"] = None
    rig.devices[2].values["temperature_c"] = 90
    await rig.poll()

    def alerts() -> dict[tuple[str, str], float]:
        samples = parse(rig.service.metrics_text())["gpurt_alert_active"].samples
        told = {(dict(labels)["device"], dict(labels)["alert"]): value for labels, value in samples.items()}
        return dict(sorted(told.items()))

    full = {("gpu:0", "full"): 0, ("gpu:1", "full"): 0, ("gpu:2", "full"): 0}
    assert alerts() == {**full, ("gpu:1", "hot"): 0, ("gpu:2", "hot"): 1}
    await rig.poll(temperature_c=None)
    assert alerts() == {**full, ("gpu:2", "hot"): 1}, "one that has begun is not over because its value is gone"
    rig.clock.now += 31
    assert alerts() == {("gpu:2", "hot"): 1}, "values that are too old say nothing"


@pytest.mark.parametrize("bound", [float("nan"), float("inf"), "80", True])
def test_bounds_that_nothing_reaches_are_refused(bound: Any) -> None:
    for make in (
        lambda: AlertRule("x", "temperature_c", above=bound),
        lambda: AlertRule("x", "temperature_c", below=bound),
        lambda: AlertRule("x", "temperature_c", above=80, margin=bound),
        lambda: HealthPolicy(thermal_threshold_c=bound),
        lambda: HealthPolicy(xid_hold_s=bound),
        lambda: GPUMonitoringService({}, thermal_threshold=bound),
        lambda: Thresholds(temperature_c=bound),
    ):
        with pytest.raises(ValueError, match="finite number"):
            make()
