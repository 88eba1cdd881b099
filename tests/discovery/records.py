"""Device records, reports and results for the tests of this folder."""

from __future__ import annotations

from typing import Any

from gpurt.discovery.result import DiscoveryResult, summarize
from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.types import BackendReport, DeviceKind, GPUDevice

GIB = 1 << 30
UUIDS = [f"GPU-{c * 8}-0000-1111-2222-333333333333" for c in "abcdef"]
PCIS = [f"00000000:0{n}:00.0" for n in range(1, 7)]


def device(n: int = 0, *, backend: str = "cuda", known: str = "both", **fields: Any) -> GPUDevice:
    """Card ``n``: ``known`` says which identity its backend gives: ``both uuid pci none``."""
    identity = device_identity(
        uuid=UUIDS[n] if known in ("both", "uuid") else None,
        pci_address=PCIS[n] if known in ("both", "pci") else None,
        fallback=f"{backend}:{n}",
    )
    record: dict[str, Any] = {
        "device_id": f"{backend}:{n}",
        "name": "NVIDIA H100 80GB HBM3",
        "vendor": "nvidia",
        "backend": backend,
        "compute_capability": "9.0",
        "memory_bytes": 80 * GIB,
        "memory_available": 79 * GIB,
        "compute_units": 132,
        "tensor_core_count": 528,
        "max_threads_per_block": 1024,
        "clock_rate_mhz": 1980,
        "bandwidth_gbps": 3352.0,
        "support_level": "full",
        "driver_version": "590.48.01",
        "backend_name": {"cuda": "cupy"}.get(backend, backend),
        "identity": identity,
    }
    return GPUDevice.model_validate(record | fields)


def cpu(**fields: Any) -> GPUDevice:
    record: dict[str, Any] = {
        "name": "AMD EPYC",
        "vendor": "amd",
        "memory_bytes": 64 * GIB,
        "memory_available": 60 * GIB,
        "backend": "cpu",
        "kind": DeviceKind.CPU,
        "identity": device_identity(uuid="host:0123456789abcdef", fallback=""),
    }
    return device(0, **(record | fields))


def ok(name: str) -> BackendReport:
    return BackendReport(name=name, status="ok")


def absent(name: str, reason: ReasonCode = ReasonCode.TIMEOUT, message: str = "no answer") -> BackendReport:
    return BackendReport(name=name, status="unavailable", reason=reason, message=message)


def result(*devices: GPUDevice, reports: list[BackendReport] | None = None) -> DiscoveryResult:
    return summarize(devices, [ok("cuda"), ok("cpu")] if reports is None else reports)
