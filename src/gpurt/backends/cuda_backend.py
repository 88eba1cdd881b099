"""NVIDIA GPUs through CuPy, with identity and sensors from NVML."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from gpurt.backend import GPUBackend
from gpurt.backends.cuda_context import PrimaryContexts
from gpurt.backends.cupy_driver import CuPyDriver
from gpurt.backends.cupy_runtime import CUDA_INSTALL_HINT
from gpurt.backends.tuning_file import TuningFile
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.identity import device_identity, normalize_pci_address, normalize_uuid
from gpurt.printable import quoted
from gpurt.shell import DriverBackend
from gpurt.sources import nvml
from gpurt.sources.host import host_fingerprint
from gpurt.types import DeviceIdentity, DeviceKind, DeviceState, GPUDevice, Telemetry

log = logging.getLogger("gpurt.cuda")

# cudaError_t, driver_types.h.
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100
_REFUSALS: Final[Mapping[int, tuple[ReasonCode, str | None]]] = {
    46: (ReasonCode.ERROR, "another process has the GPU in exclusive mode: stop it, or `nvidia-smi -c 0`"),
    802: (ReasonCode.NO_DRIVER, "start the fabric manager: `sudo systemctl start nvidia-fabricmanager`"),
    803: (ReasonCode.DRIVER_MISMATCH, "reboot, or reload the kernel modules"),
    804: (ReasonCode.DRIVER_MISMATCH, "remove the cuda-compat package, which this GPU does not support"),
}
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

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        contexts: PrimaryContexts | None = None,
        tunings: TuningFile | None = None,
    ) -> None:
        self._cuda_contexts = contexts or PrimaryContexts()
        super().__init__(self._cuda_contexts, tunings)
        self._environ = environ
        self._nvml: nvml.NvmlSession | None = None
        self._monitored: dict[int, str] = {}
        self._partitioned: set[int] = set()

    def open(self) -> Sequence[GPUDevice]:
        try:
            runtime = self.load_runtime(hip=False, install_hint=CUDA_INSTALL_HINT)
        except BackendUnavailable as exc:
            first = self._driver_trouble(exc)
            if first is None:
                raise
            raise first from exc
        trouble: BackendUnavailable | None = None
        records: dict[str | None, nvml.NvmlDevice] = {}
        try:
            self._nvml = nvml.open_session()
            records = {device.pci_address: device for device in self._nvml.devices()}
        except BackendUnavailable as exc:
            log.info("no NVML, so no sensors and no UUIDs: %s", exc)
            trouble = exc
        try:
            self._contexts.prepare()
            try:
                count: int = runtime.getDeviceCount()
            except runtime.CUDARuntimeError as exc:
                raise self._refusal(exc, trouble, records) from exc
            if not count:
                raise self._nothing(trouble, records)
            devices = tuple(self._describe(index, records) for index in range(count))
            self.load_tunings(devices)
            return devices
        except BaseException:
            self.close()
            raise

    def telemetry(self, index: int) -> Telemetry:
        address = self._monitored.get(index)
        if address is None or self._nvml is None:
            fields = self._memory_fields(index)
            others = sorted(self.capabilities.telemetry - fields.keys())
            return Telemetry(**fields, unavailable=dict.fromkeys(others, "unsupported"))
        reading = self._nvml.telemetry(address)
        if index not in self._partitioned:
            return reading
        # NVML's address is the whole GPU's; of memory this process has its partition's.
        fields = self._memory_fields(index)
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

    # Inside

    def _memory_fields(self, index: int) -> dict[str, int]:
        free, total = self.memory_info(index)
        return {"memory_total_bytes": total, "memory_used_bytes": total - free, "memory_free_bytes": free}

    def _describe(self, index: int, records: Mapping[str | None, nvml.NvmlDevice]) -> GPUDevice:
        runtime = self._runtime
        properties: dict[str, Any] = {}
        address: str | None = None
        failure: str | None = None
        try:
            address = normalize_pci_address(runtime.deviceGetPCIBusId(index))
            properties = self._cuda_contexts.properties(index) or runtime.getDeviceProperties(index)
        except runtime.CUDARuntimeError as exc:
            # One device's failure is that device's: the others keep their index.
            failure = str(exc)
        record = records.get(address) if address else None
        if record is not None and address is not None:
            self._monitored[index] = address
            if record.partitions:
                self._partitioned.add(index)
        total, free = self._memory_at_open(index, properties, record)
        integrated = bool(properties.get("integrated")) or bool(record and record.unified_memory)
        state = record.state if record else DeviceState.HEALTHY
        reason = failure or (record.reason if record else None)
        if failure and state is DeviceState.HEALTHY:
            state = DeviceState.DEGRADED
        units = properties.get("multiProcessorCount")
        name = _text(properties.get("name")) or (record.name if record else None) or "NVIDIA GPU"
        capability = f"{properties['major']}.{properties['minor']}" if "major" in properties else None
        return GPUDevice(
            device_id=f"{self.name}:{index}",
            name=name,
            vendor="nvidia",
            backend=self.name,
            compute_capability=capability or (record.compute_capability if record else None),
            memory_bytes=total,
            memory_available=free,
            compute_units=units,
            tensor_core_count=_tensor_cores(name, capability, units),
            max_threads_per_block=properties.get("maxThreadsPerBlock"),
            clock_rate_mhz=self._clock_mhz(index, properties) or (record.max_clock_mhz if record else None),
            bandwidth_gbps=self._bandwidth_gbps(index, properties)
            or (record.memory_bandwidth_gbps if record else None),
            support_level="full",
            driver_version=self._driver_version(),
            backend_name="cupy",
            identity=_identity(index, address, properties, record),
            kind=DeviceKind.INTEGRATED_GPU if integrated else DeviceKind.GPU,
            state=state,
            state_reason=reason,
            usable=failure is None and state is not DeviceState.LOST,
            memory_usable_bytes=free,
            memory_usable_source=None if free is None else "driver",
            memory_pool_id=f"host:{host_fingerprint()}" if integrated else None,
            unified_memory=integrated,
            backends=(self.name,),
            numa_node=record.numa_node if record else None,
        )

    def _memory_at_open(
        self, index: int, properties: Mapping[str, Any], record: nvml.NvmlDevice | None
    ) -> tuple[int | None, int | None]:
        """Total and free bytes. Asks NVML for what is free, because asking CUDA makes a context."""
        total = properties.get("totalGlobalMem") or (record.memory_total_bytes if record else None)
        if not properties:
            return total, None
        if record is not None and not record.partitions and record.memory_free_bytes is not None:
            # NVML counts what the driver keeps for itself in its total, CUDA does not.
            return total, record.memory_free_bytes if total is None else min(record.memory_free_bytes, total)
        try:
            free, _ = self.memory_info(index)
        except self._runtime.CUDARuntimeError as exc:
            log.warning("%s:%d does not tell its free memory: %s", self.name, index, exc)
            return total, None
        return total, free

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

    # Why there is nothing

    def _driver_trouble(self, exc: BackendUnavailable) -> BackendUnavailable | None:
        """What NVML has against the driver, said before CuPy's refusal ``exc``: without a driver no library helps."""
        try:
            session = nvml.open_session()
            try:
                cards = session.devices()
            finally:
                session.close()
        except BackendUnavailable as trouble:
            reason, text, hint = trouble.reason, trouble.message, trouble.hint
        else:
            reason, text, hint = ReasonCode.NO_DEVICE, "the NVIDIA driver shows no device", None
            if cards:
                return None
        if reason is ReasonCode.NO_LIBRARY:
            return None
        return BackendUnavailable(
            f"{text}; {exc.message}",
            reason=reason,
            backend=self.name,
            install_hint=exc.install_hint,
            hint="; ".join(filter(None, (hint, exc.hint))),
        )

    def _refusal(
        self, exc: Any, trouble: BackendUnavailable | None, records: Mapping[str | None, nvml.NvmlDevice]
    ) -> BackendUnavailable:
        """What it means that CUDA cannot count its devices; ``trouble`` is what NVML had to say."""
        if exc.status == _NO_DEVICE:
            return self._nothing(trouble, records)
        if exc.status != _INSUFFICIENT_DRIVER:
            reason, hint = _REFUSALS.get(exc.status, (ReasonCode.ERROR, trouble.hint if trouble else None))
            return self._unavailable(str(exc), reason, exc.status, hint)
        # Of a driver that is absent, too old, mismatched or closed to us, CUDA says "insufficient" alike.
        if trouble is None and self._runtime.driverGetVersion():
            text = f"the NVIDIA driver {self._driver_version()} is too old for the installed CuPy"
            hint = "update the NVIDIA driver, or install the CuPy of its CUDA version (cupy-cuda12x for CUDA 12)"
            return self._unavailable(text, ReasonCode.DRIVER_MISMATCH, exc.status, hint)
        if trouble is None:
            text = "the NVIDIA driver works, but its CUDA library (libcuda) is not there"
            hint = "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; otherwise reinstall the driver"
            return self._unavailable(text, ReasonCode.DRIVER_MISMATCH, exc.status, hint)
        text = f"CUDA finds no usable driver; NVML: {trouble.message}"
        if trouble.reason in (ReasonCode.NO_DRIVER, ReasonCode.DRIVER_MISMATCH, ReasonCode.NO_PERMISSION):
            return self._unavailable(text, trouble.reason, exc.status, trouble.hint)
        return self._unavailable(text, ReasonCode.NO_DRIVER, exc.status, "install the NVIDIA driver")

    def _nothing(
        self, trouble: BackendUnavailable | None, records: Mapping[str | None, nvml.NvmlDevice]
    ) -> BackendUnavailable:
        """What it means that CUDA counts no device."""
        mask = (os.environ if self._environ is None else self._environ).get("CUDA_VISIBLE_DEVICES")
        if mask is not None and (records or trouble):
            text = f"CUDA_VISIBLE_DEVICES={quoted(mask)} leaves no device" + (f" of {len(records)}" if records else "")
            hint = "unset CUDA_VISIBLE_DEVICES, or name devices that exist"
            return self._unavailable(text, ReasonCode.HIDDEN_BY_ENVIRONMENT, _NO_DEVICE, hint)
        return self._unavailable("CUDA works and finds no device", ReasonCode.NO_DEVICE, _NO_DEVICE, None)

    def _unavailable(self, text: str, reason: ReasonCode, code: int, hint: str | None) -> BackendUnavailable:
        return BackendUnavailable(text, reason=reason, backend=self.name, code=code, hint=hint)


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


def _text(value: str | bytes | None) -> str:
    # Older CuPy hands the C array out as bytes.
    return value.decode("utf-8", "replace").strip("\0 ") if isinstance(value, bytes) else (value or "")


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
