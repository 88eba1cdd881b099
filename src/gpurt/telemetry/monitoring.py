"""GPUMonitoringService: telemetry, alerts, health and metrics of a worker's devices, put together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from gpurt.health.evidence import SEVERITY, Evidence
from gpurt.health.monitor import HealthMonitor, Transition
from gpurt.health.policy import HealthPolicy
from gpurt.health.report import HealthReport
from gpurt.telemetry.alerts import Alert, AlertRule, Alerts
from gpurt.telemetry.collector import TelemetryCollector
from gpurt.telemetry.history import WindowStats
from gpurt.telemetry.metrics import Family, render, telemetry_families
from gpurt.telemetry.readers import Read
from gpurt.telemetry.reading import Sample
from gpurt.types import DeviceState

_OF_THE_DEVICE: Final = frozenset({DeviceState.DEGRADED, DeviceState.LOST})
"""States that say more than how it answers."""

_log = logging.getLogger("gpurt.telemetry")


class GPUMonitoringService:
    """Watches devices: what they measure, how well they are, and which alerts hold.

    Args:
        readers: as of :class:`TelemetryCollector`, which also takes ``options``.
        policy: what makes a device unfit for new work.
        thermal_threshold: °C from which on a device gets no new work; over that of ``policy``.
        health: the monitor that judges, where others observe the same devices; it brings its own policy.
        rules: alerts.
        keys: the stable id of each device, under which its health is kept; default: the device id itself.
        on_alert, on_health: called on the event loop for each alert and each change of state. They must not block, and
            one that raises is logged.

    Raises:
        ValueError: ``health`` and a policy.
    """

    def __init__(
        self,
        readers: Mapping[str, Read],
        *,
        policy: HealthPolicy | None = None,
        thermal_threshold: float | None = None,
        health: HealthMonitor | None = None,
        rules: Sequence[AlertRule] = (),
        keys: Mapping[str, str] | None = None,
        on_alert: Callable[[Alert], None] | None = None,
        on_health: Callable[[Transition], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        **options: Any,
    ) -> None:
        if health is not None and (policy is not None or thermal_threshold is not None):
            raise ValueError("a monitor that is given judges by its own policy")
        policy = policy or HealthPolicy()
        if thermal_threshold is not None:
            policy = replace(policy, thermal_threshold_c=thermal_threshold)
        self.collector = TelemetryCollector(readers, clock=clock, sleep=sleep, on_sample=self._take, **options)
        self.health = health or HealthMonitor(policy, clock=clock)
        self.alerts = Alerts(rules)
        self._keys = dict(keys or {})
        self._on_alert, self._on_health = on_alert, on_health
        self._clock = clock

    def add(self, device_id: str, read: Read) -> None:
        """Watch one more device, or read one in another way."""
        self.collector.add(device_id, read)

    def remove(self, device_id: str) -> None:
        """Watch a device no longer. What is believed of it stays."""
        self.collector.remove(device_id)

    async def run(self) -> NoReturn:
        """Watch until cancelled."""
        await self.collector.run()

    def usable(self, device_id: str) -> bool:
        """Whether new work may be placed on a device, by all that is known of its health.

        Raises:
            DeviceNotFound: not one of the devices that are watched, and nothing bad is known of it either.
        """
        usable = self.health.verdict(self.key(device_id)).usable
        if usable:
            self.collector.latest(device_id)  # of a stranger nothing bad is known, and nothing good
        return usable

    def key(self, device_id: str) -> str:
        return self._keys.get(device_id, device_id)

    def xid(self, number: int, device_id: str | None) -> None:
        """Take an Xid in; one of no device in particular concerns every device.

        A device need not be watched: its health may be told before its first reading.
        """
        for device in (device_id,) if device_id is not None else self.collector.device_ids:
            self._say(self._on_health, self.health.xid(self.key(device), number))

    def stats(self, device_id: str, metric: str, window_s: float) -> WindowStats | None:
        """Figures over the last ``window_s`` seconds, of the samples that are kept; None without any value.

        Raises:
            DeviceNotFound: no such device. KeyError: no such metric.
        """
        return self.collector.history(device_id).stats(metric, self._clock() - window_s)

    def get_health_report(self, hours: float = 24.0) -> HealthReport:
        """What happened in the last ``hours``; see :meth:`HealthMonitor.get_health_report`."""
        return self.health.get_health_report(hours)

    def metrics_text(self) -> str:
        """Readings, health and alerts in the OpenMetrics format. What is not known has no sample: neither the state of
        a device that has told nothing yet, nor an alert that has not begun while its value is not there or too old."""
        state = Family("gpurt_device_state", "gauge", "1 for the state that the device is believed to be in.")
        alert = Family("gpurt_alert_active", "gauge", "1 while the alert holds for the device, 0 while it does not.")
        for device in self.collector.device_ids:
            believed = self.health.verdict(self.key(device))
            if self.collector.latest(device) is not None or not believed.usable:
                for each in SEVERITY:
                    state.add(int(each is believed.state), device=device, state=each)
            for rule in self.alerts.rules:
                holds = self._holds(rule, device)
                if holds is not None:
                    alert.add(int(holds), device=device, alert=rule.name)
        return render([*telemetry_families(self.collector), state, alert])

    def _holds(self, rule: AlertRule, device_id: str) -> bool | None:
        """Whether an alert holds; None where nobody knows. One that has begun is not over because its value is gone."""
        if self.alerts.is_active(rule, device_id):
            return True
        sample = self.collector.latest(device_id)
        if sample is None or self._clock() - sample.at > self.collector.stale_after_s:
            return None
        return False if self.alerts.is_known(rule, sample) else None

    def _take(self, sample: Sample) -> None:
        if sample.contact is not DeviceState.UNRESPONSIVE:
            for alert in self.alerts.judge(sample):
                self._say(self._on_alert, alert)
        believed = self.health.verdict(self.key(sample.device_id)).state
        if sample.contact is DeviceState.HEALTHY and sample.is_empty and believed in _OF_THE_DEVICE:
            return  # that it answers does not show it to be well
        evidence = Evidence(
            contact=sample.contact,
            contact_reason=sample.contact_reason,
            temperature_c=sample.values.get("temperature_c"),
            condition=sample.condition,
        )
        self._say(self._on_health, self.health.observe(self.key(sample.device_id), evidence))

    def _say(self, listener: Callable[[Any], None] | None, what: Any) -> None:
        if listener is None or what is None:
            return
        try:
            listener(what)
        except Exception:  # a listener's fault must not cost a reading
            _log.exception("a listener of gpurt's monitoring failed")
