"""NVIDIA GPUs through CuPy, with identity and sensors from NVML."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from gpurt.backend import GPUBackend
from gpurt.backends.cupy.cuda_context import PrimaryContexts
from gpurt.backends.cupy.cuda_refusals import driver_trouble, no_device, not_counted
from gpurt.backends.cupy.driver import CuPyDriver
from gpurt.backends.cupy.record import device_record
from gpurt.backends.cupy.runtime import CUDA_INSTALL_HINT
from gpurt.backends.cupy.tuning_file import TuningFile
from gpurt.errors import BackendUnavailable
from gpurt.identity import device_identity, normalize_uuid
from gpurt.runtime.backend import DriverBackend
from gpurt.sources import nvml
from gpurt.types import DeviceIdentity, DeviceState, GPUDevice, Telemetry

log = logging.getLogger("gpurt.cuda")

# cudaDeviceAttr, driver_types.h: kHz and bits. CUDA 13 took them out of the properties, not of the attributes.
_CLOCK_RATE, _MEMORY_CLOCK_RATE, _MEMORY_BUS_WIDTH = 13, 36, 37

# Tensor cores per multiprocessor, from NVIDIA's architecture white papers: Volta, Turing 8; GA100, GA10x, Ada,
# Hopper, Blackwell 4.
_TENSOR_CORES: Final = {
    "7.0": 8, "7.2": 8, "7.5": 8, "8.0": 4, "8.6": 4, "8.7": 4, "8.9": 4, "9.0": 4, "10.0": 4, "10.3": 4,
    "12.0": 4, "12.1": 4,
}  # fmt: skip
_TURING_WITHOUT = re.compile(r"\bGTX 16|\bT(?:4|5|6)\d\d\b|\bT1[02]00\b|\bMX[45]\d\d\b")
"""TU116 and TU117 are compute capability 7.5 without tensor cores."""


class CUDADriver(CuPyDriver):
    """CUDA devices in CUDA's own order, which ``CUDA_VISIBLE_DEVICES`` decides.

    ``environ`` is looked at to explain an empty list (default: the process's own); it selects nothing. ``tunings`` is
    as for :class:`CuPyDriver`.
    """

    name: ClassVar[str] = "cuda"
    hip: ClassVar[bool] = False
    capabilities = CuPyDriver.capabilities.model_copy(
        update={"telemetry": CuPyDriver.capabilities.telemetry | {"memory_reserved_bytes"}}
    )

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        contexts: PrimaryContexts | None = None,
        tunings: TuningFile | None = None,
    ) -> None:
        super().__init__(contexts or PrimaryContexts(), tunings)
        self._environ = environ
        self._nvml: nvml.NvmlSession | None = None
        self._no_nvml: BackendUnavailable | None = None
        self._records: dict[str | None, nvml.NvmlDevice] = {}
        self._monitored: dict[int, str] = {}
        self._partitioned: set[int] = set()

    def install_hint(self) -> str:
        return CUDA_INSTALL_HINT

    def look(self) -> None:
        self._no_nvml, self._records = None, {}
        try:
            self._nvml = nvml.open_session()
            self._records = {device.pci_address: device for device in self._nvml.devices()}
        except BackendUnavailable as exc:
            log.info("no NVML, so no sensors and no UUIDs: %s", exc)
            self._no_nvml = exc

    def trouble(self) -> BackendUnavailable | None:
        return driver_trouble()

    def refusal(self, exc: Any) -> BackendUnavailable:
        environ = os.environ if self._environ is None else self._environ
        if exc is None:
            return no_device(environ, self._no_nvml, len(self._records))

        def version() -> str | None:
            return self._driver_version() if self._runtime.driverGetVersion() else None

        return not_counted(exc, version, environ, self._no_nvml, len(self._records))

    def telemetry(self, index: int) -> Telemetry:
        address = self._monitored.get(index)
        if address is None or self._nvml is None:
            return self.plain_telemetry(index)
        reading = self._nvml.telemetry(address)
        if index not in self._partitioned:
            return reading
        # NVML's address is the whole GPU's; of memory this process has its partition's.
        fields = self.memory_fields(index)
        unavailable = {key: reason for key, reason in reading.unavailable.items() if key not in fields}
        change = {"memory_reserved_bytes": None, "unavailable": unavailable | {"memory_reserved_bytes": "unsupported"}}
        return reading.model_copy(update=fields | change)

    def close(self) -> None:
        super().close()
        self._monitored.clear()
        self._partitioned.clear()
        session, self._nvml = self._nvml, None
        if session is not None:
            session.close()

    def describe(self, index: int) -> GPUDevice:
        answers = self.ask(index)
        address, properties = answers.pci_address, answers.properties
        record = self._records.get(address) if address else None
        if record is not None and address is not None:
            self._monitored[index] = address
            if record.partitions:
                self._partitioned.add(index)
        integrated = bool(properties.get("integrated")) or bool(record and record.unified_memory)
        units = properties.get("multiProcessorCount")
        name = answers.text("name") or (record.name if record else None) or "NVIDIA GPU"
        capability = f"{properties['major']}.{properties['minor']}" if "major" in properties else None
        return device_record(
            self.name,
            index,
            answers,
            vendor="nvidia",
            name=name,
            identity=_identity(index, address, properties, record),
            memory=self._memory(index, properties, record),
            driver_version=self._driver_version(),
            architecture=capability or (record.compute_capability if record else None),
            compute_units=units,
            clock_rate_mhz=self._clock_mhz(index, properties) or (record.max_clock_mhz if record else None),
            integrated=integrated,
            unified=integrated,
            tensor_core_count=_tensor_cores(name, capability, units),
            bandwidth_gbps=self._bandwidth_gbps(index, properties)
            or (record.memory_bandwidth_gbps if record else None),
            state=record.state if record else DeviceState.HEALTHY,
            state_reason=record.reason if record else None,
            numa_node=record.numa_node if record else None,
        )

    # Inside

    def _memory(
        self, index: int, properties: Mapping[str, Any], record: nvml.NvmlDevice | None
    ) -> tuple[int | None, int | None]:
        """Total and free bytes."""
        total = properties.get("totalGlobalMem") or (record.memory_total_bytes if record else None)
        if not properties:
            return total, None
        whole = record is not None and not record.partitions
        return self.memory_at_open(index, total, record.memory_free_bytes if record and whole else None)

    def _attribute(self, index: int, properties: Mapping[str, Any], key: str, attribute: int) -> int | None:
        value = properties.get(key)
        if value is None and properties:
            try:
                value = self._runtime.deviceGetAttribute(attribute, index)
            except self._runtime.CUDARuntimeError as exc:
                log.debug("%s:%d has no %s: %s", self.name, index, key, exc)
        return value or None

    def _clock_mhz(self, index: int, properties: Mapping[str, Any]) -> int | None:
        khz = self._attribute(index, properties, "clockRate", _CLOCK_RATE)
        return None if khz is None else khz // 1000

    def _bandwidth_gbps(self, index: int, properties: Mapping[str, Any]) -> float | None:
        khz = self._attribute(index, properties, "memoryClockRate", _MEMORY_CLOCK_RATE)
        bits = self._attribute(index, properties, "memoryBusWidth", _MEMORY_BUS_WIDTH)
        # Two transfers a clock, eight bits a byte.
        return None if khz is None or bits is None else round(2 * khz * 1e3 * bits / 8 / 1e9, 1)

    def _driver_version(self) -> str | None:
        if self._nvml is not None and self._nvml.driver_version:
            return self._nvml.driver_version
        number: int = self._runtime.driverGetVersion()
        return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else None


class CUDABackend(DriverBackend):
    """NVIDIA GPUs; ``options`` are those of :class:`DriverBackend`.

    Args:
        registry_path: the registry file, for what is measured of copies; None is the one in the user's state directory.
    """

    def __init__(self, *, registry_path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(CUDADriver(tunings=TuningFile(registry_path)), **options)


def create() -> GPUBackend:
    """What the factory calls."""
    return CUDABackend()


def _tensor_cores(name: str, capability: str | None, units: int | None) -> int | None:
    if capability is None or units is None:
        return None
    if int(capability.split(".")[0]) < 7 or (capability == "7.5" and _TURING_WITHOUT.search(name)):
        return 0
    per_unit = _TENSOR_CORES.get(capability)
    return None if per_unit is None else per_unit * units


def _identity(
    index: int, address: str | None, properties: Mapping[str, Any], record: nvml.NvmlDevice | None
) -> DeviceIdentity:
    fallback = f"cuda:{index}"
    if record is None or not record.partitions:
        return device_identity(uuid=record.uuid if record else None, pci_address=address, fallback=fallback)
    # Partitions share the GPU's address: only the UUID tells which one this is.
    uuid = normalize_uuid(properties.get("uuid"), prefix="MIG-")
    for partition in record.partitions:
        if uuid is not None and partition.uuid == uuid:
            return device_identity(uuid=uuid, pci_address=address, partition=partition.partition, fallback=fallback)
    return device_identity(fallback=fallback)
