"""Telemetry as text for Prometheus and its like, in the OpenMetrics format 1.0.

What is not known has no sample: a series that ends is how this format says so. Why it is not known is a series of its
own, ``gpurt_unavailable``. Units are base units, as the format wants: ratios, seconds, hertz.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from gpurt.health.evidence import SEVERITY
from gpurt.health.policy import XID_MEANINGS
from gpurt.printable import printable

if TYPE_CHECKING:
    from gpurt.health.report import HealthReport
    from gpurt.telemetry.collector import TelemetryCollector
    from gpurt.types import BackendReport, GPUDevice

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""For the header of an HTTP answer."""

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_ESCAPES: Final = {"\\": r"\\", "\n": r"\n", '"': r"\""}

_GAUGES: Final = (
    # metric of ours, family, unit, help
    ("memory_total_bytes", "gpurt_memory_total_bytes", "bytes", "Memory of the device."),
    ("memory_used_bytes", "gpurt_memory_used_bytes", "bytes", "Memory in use by anybody."),
    ("memory_free_bytes", "gpurt_memory_free_bytes", "bytes", "Memory that is free."),
    ("memory_reserved_bytes", "gpurt_memory_reserved_bytes", "bytes", "Memory that the driver keeps for itself."),
    ("temperature_c", "gpurt_temperature_celsius", "celsius", "Temperature of the device."),
    ("power_w", "gpurt_power_watts", "watts", "Power that the device draws."),
    ("clock_mhz", "gpurt_clock_hertz", "hertz", "Clock of the device's processors."),
    ("utilization_percent", "gpurt_utilization_ratio", "ratio", "Share of time in which the device was busy."),
)


@dataclass(slots=True)
class Family:
    """One metric of the text: its name, and samples by label values. A counter's name has no ``_total``.

    Raises:
        ValueError: a name, label or value that the format does not have.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    unit: str = ""
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list[tuple[Mapping[str, str], float]])

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or (self.unit and not self.name.endswith(f"_{self.unit}")):
            raise ValueError(f"{self.name!r} is no name of a metric with unit {self.unit!r}")

    def add(self, value: float, /, **labels: str) -> None:
        if not math.isfinite(value) or (self.kind == "counter" and value < 0):
            raise ValueError(f"{self.name}: {value!r} is no value of a {self.kind}")
        self.samples.append((labels, value))


def render(families: Iterable[Family]) -> str:
    """The text, with its end mark. Families without samples are left out.

    Raises:
        ValueError: two families of one name, or two samples with the same labels.
    """
    lines: list[str] = []
    names: set[str] = set()
    for family in families:
        if family.name in names:
            raise ValueError(f"{family.name} is there twice")
        names.add(family.name)
        if not family.samples:
            continue
        lines.append(f"# TYPE {family.name} {family.kind}")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        suffix = "_total" if family.kind == "counter" else ""
        written: set[str] = set()
        for labels, value in family.samples:
            series = f"{family.name}{suffix}{_labels(labels)}"
            if series in written:
                raise ValueError(f"{series} is there twice")
            written.add(series)
            lines.append(f"{series} {_number(value)}")
    return "\n".join([*lines, "# EOF", ""])


def telemetry_families(collector: TelemetryCollector) -> list[Family]:
    """Everything that a collector knows, at this moment."""
    gauges = {metric: Family(name, "gauge", text, unit) for metric, name, unit, text in _GAUGES}
    age = Family("gpurt_reading_age_seconds", "gauge", "Seconds since the device was asked.", "seconds")
    contact = Family("gpurt_contact", "gauge", "1 for how the device answered last, 0 for the other ways.")
    throttled = Family("gpurt_throttled", "gauge", "1 while clocks are held down by more than the power limit.")
    unavailable = Family("gpurt_unavailable", "gauge", "1 for each metric without a value, with the reason.")
    dropped = Family("gpurt_readings_dropped", "counter", "Values that no device can have, and that were dropped.")
    for device in collector.device_ids:
        sample = collector.latest(device)
        for metric, count in sorted(collector.dropped(device).items()):
            dropped.add(count, device=device, metric=metric)
        if sample is None:
            continue
        readings = collector.readings(device)
        age.add(next(iter(readings.values())).age_s, device=device)
        for state in SEVERITY:
            contact.add(float(state is sample.contact), device=device, state=state)
        if sample.throttled is not None:
            throttled.add(float(sample.throttled), device=device)
        for metric, reading in readings.items():
            if reading.value is not None:
                gauges[metric].add(_base_unit(metric, reading.value), device=device)
            elif reading.reason is not None:
                unavailable.add(1, device=device, metric=metric, reason=reading.reason)
    return [*gauges.values(), age, contact, throttled, unavailable, dropped]


def device_families(devices: Mapping[str, GPUDevice]) -> list[Family]:
    """What a node says of its devices, by the key under which it tells them."""
    count = Family("gpurt_devices", "gauge", "Devices of the node by state.")
    info = Family("gpurt_device_info", "gauge", "1, with what the device is.")
    state = Family("gpurt_device_state", "gauge", "1 for the state that the device is believed to be in.")
    usable = Family("gpurt_device_usable", "gauge", "1 where new work may be placed on the device.")
    memory = Family("gpurt_memory_usable_bytes", "gauge", "Memory that can be allocated on the device.", "bytes")
    states = Counter(device.state for device in devices.values())
    for each in SEVERITY:
        count.add(states[each], state=each)
    for key, device in devices.items():
        info.add(
            1,
            device=key,
            device_id=device.device_id,
            name=printable(device.name),
            vendor=device.vendor,
            backend=device.backend,
            kind=device.kind,
            simulated=str(device.simulated).lower(),
        )
        for each in SEVERITY:
            state.add(int(each is device.state), device=key, state=each)
        usable.add(int(device.usable), device=key)
        if device.memory_usable_bytes is not None:
            memory.add(device.memory_usable_bytes, device=key)
    return [count, info, state, usable, memory]


def probe_families(reports: Iterable[BackendReport]) -> list[Family]:
    """What came of the last probe of each backend."""
    took = Family("gpurt_probe_duration_seconds", "gauge", "How long the backend's last probe took.", "seconds")
    available = Family("gpurt_backend_available", "gauge", "1 where the backend can be used here, else 0.")
    unavailable = Family(
        "gpurt_backend_unavailable", "gauge", "1 for each backend that cannot be used, with the reason."
    )
    for report in {report.name: report for report in reports}.values():
        available.add(int(report.status == "ok"), backend=report.name)
        if report.reason is not None:
            unavailable.add(1, backend=report.name, reason=report.reason)
        if report.elapsed_ms > 0:  # 0 is of one that was not asked
            took.add(report.elapsed_ms / 1000, backend=report.name)
    return [took, available, unavailable]


def xid_families(report: HealthReport) -> list[Family]:
    """Xids of the report's time. A gauge: what is remembered has an end, and a counter must never become less."""
    xids = Family("gpurt_xids_recent", "gauge", f"Xids of the last {report.hours:g} h, those of applications included.")
    for key, device in report.devices.items():
        counts: Counter[str] = Counter()
        for number, count in device.xids.items():
            # Drivers may tell any number; only those with a meaning get a series of their own.
            counts[str(number) if number in XID_MEANINGS else "other"] += count
        for name, count in sorted(counts.items()):
            xids.add(count, device=key, xid=name)
    return [xids]


def metrics_text(collector: TelemetryCollector) -> str:
    """What a scrape of this collector answers; its content type is :data:`CONTENT_TYPE`."""
    return render(telemetry_families(collector))


def _base_unit(metric: str, value: float) -> float:
    if metric == "utilization_percent":
        return value / 100
    return value * 1_000_000 if metric == "clock_mhz" else value


def _labels(labels: Mapping[str, str]) -> str:
    for name in labels:
        if not _NAME.fullmatch(name) or name.startswith("__"):
            raise ValueError(f"{name!r} is no name of a label")
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(text: str) -> str:
    # Lone surrogates, as in file names of other encodings, cannot be sent as UTF-8.
    text = text.encode("utf-8", "replace").decode()
    return "".join(_ESCAPES.get(character, character) for character in text)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
