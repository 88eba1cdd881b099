"""The metrics of a worker: its devices, what they measure, its backends and what came of their probes."""

from __future__ import annotations

from typing import Final

from gpurt.backend import GPUBackend
from gpurt.cluster.state import device_keys
from gpurt.cluster.worker import Worker
from gpurt.health.report import HealthReport
from gpurt.telemetry.backend_metrics import backend_families
from gpurt.telemetry.collector import TelemetryCollector
from gpurt.telemetry.exporter import Families
from gpurt.telemetry.metrics import Family, device_families, probe_families, telemetry_families, xid_families

XID_HOURS: Final = 1.0
"""How far back Xids are counted."""


class NodeMetrics:
    """Metrics of the node ``node``, also before it has joined: then only that it is there."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._worker: Worker | None = None
        self._backends: list[GPUBackend] = []

    def watch(self, worker: Worker) -> None:
        """The worker has joined."""
        self._worker = worker

    def use(self, backend: GPUBackend) -> None:
        """Tell of an initialised backend, too."""
        self._backends.append(backend)

    def families(self) -> list[Family]:
        """As of now, on the loop of the worker."""
        up = Family("gpurt_node_joined", "gauge", "1 once the node has told the cluster what devices it has, else 0.")
        worker = self._worker
        up.add(int(worker is not None), node=self._node)
        snapshot = None if worker is None else worker.publisher.snapshot()
        monitoring = None if worker is None else worker.monitoring
        service = None if monitoring is None else monitoring.service
        return [
            up,
            *device_families({} if snapshot is None else device_keys(snapshot.gpu_devices)),
            *probe_families(() if snapshot is None else snapshot.reports),
            *telemetry_families(TelemetryCollector({}) if service is None else service.collector),
            *xid_families(HealthReport(XID_HOURS, {}) if service is None else service.get_health_report(XID_HOURS)),
            *backend_families(self._backends),
        ]

    async def take(self) -> Families:
        """For a :class:`gpurt.telemetry.exporter.MetricsServer`."""
        families = self.families()
        return lambda: families
