"""Telemetry: checked readings, changes worth telling, history, alerts and metrics of a host's devices."""

from gpurt.telemetry.alerts import Alert, AlertRule
from gpurt.telemetry.changes import Aspect, TelemetryChange, Thresholds
from gpurt.telemetry.collector import TelemetryCollector
from gpurt.telemetry.feed import ChangeFeed
from gpurt.telemetry.history import WindowStats
from gpurt.telemetry.host import host_reader
from gpurt.telemetry.monitoring import GPUMonitoringService
from gpurt.telemetry.readers import BlockingReader, NvmlReader, Read, backend_reader, with_fallback
from gpurt.telemetry.reading import METRICS, RawReading, Reading, Sample
from gpurt.telemetry.recovery import LeakDetector, wait_for_memory

GPUTelemetryCollector = TelemetryCollector

__all__ = [
    "METRICS",
    "Alert",
    "AlertRule",
    "Aspect",
    "BlockingReader",
    "ChangeFeed",
    "GPUMonitoringService",
    "GPUTelemetryCollector",
    "LeakDetector",
    "NvmlReader",
    "RawReading",
    "Read",
    "Reading",
    "Sample",
    "TelemetryChange",
    "TelemetryCollector",
    "Thresholds",
    "WindowStats",
    "backend_reader",
    "host_reader",
    "wait_for_memory",
    "with_fallback",
]
