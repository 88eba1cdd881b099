"""The host's memory as DirectML's stand-in: what ONNX Runtime calls ``cpu``. For tests, and only when asked for."""

from __future__ import annotations

from gpurt.backends.host_budget import HostBudget
from gpurt.sources import host
from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice, Telemetry


class HostDevices:
    """:class:`gpurt.backends.directml.adapters.DirectMLDevices` of the host's memory, split into ``count`` devices."""

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._budget = HostBudget("directml", devices=count)
        self.take, self.give_back = self._budget.take, self._budget.give_back

    def open(self, version: str) -> list[GPUDevice]:
        self._budget.reset()
        cpu, key, source = host.cpu_info(), f"host:{host.host_fingerprint()}", host.memory_budget().source
        devices: list[GPUDevice] = []
        for index in range(self._count):
            total, free = self._budget.reading(index)
            device = GPUDevice(
                device_id=f"directml:{index}",
                name=f"ONNX Runtime on {cpu.name}",
                vendor=cpu.vendor,
                backend="directml",
                compute_capability=cpu.instruction_set,
                memory_bytes=total,
                memory_available=free,
                compute_units=host.cpu_count(),
                tensor_core_count=None,
                max_threads_per_block=None,
                clock_rate_mhz=None,
                bandwidth_gbps=None,
                support_level="experimental",
                driver_version=None,
                backend_name=f"onnxruntime {version}",
                # Not the host's own key, which is the CPU backend's.
                identity=DeviceIdentity(key=f"{key}/onnxruntime:{index}", partition=str(index)),
                kind=DeviceKind.SOFTWARE,
                memory_usable_bytes=free,
                memory_usable_source=source,
                memory_pool_id=key,
                unified_memory=True,
                backends=("directml",),
            )
            devices.append(device)
        return devices

    def ordinal(self, index: int) -> int:
        return 0

    def telemetry(self, index: int) -> Telemetry:
        total, free = self._budget.reading(index)
        missing = ("memory_reserved_bytes", "temperature_c", "power_w", "clock_mhz", "utilization_percent")
        return Telemetry(
            memory_total_bytes=total,
            memory_used_bytes=total - free,
            memory_free_bytes=free,
            unavailable=dict.fromkeys(missing, "unsupported"),
        )

    def close(self) -> None:
        """There is nothing to close."""
