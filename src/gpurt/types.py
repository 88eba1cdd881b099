"""What a device is: plain frozen values, safe to log, compare, send and store.

Sizes are bytes, temperatures °C, power W, clocks MHz, bandwidth GB/s (10^9 bytes per second). A value that
is not known is None, never 0: 0 is a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpurt.errors import ReasonCode


class MappingModel(BaseModel):
    """A frozen record that answers ``record.field`` and ``record["field"]`` alike.

    ``dict(record)``, ``record.keys()``, ``"field" in record`` and ``len(record)`` work on the declared fields.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields

    def __len__(self) -> int:
        return len(type(self).model_fields)

    def keys(self) -> tuple[str, ...]:
        return tuple(type(self).model_fields)

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, key) for key in self.keys())

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(zip(self.keys(), self.values(), strict=True))


class DeviceState(StrEnum):
    """What gpurt believes about a device at this moment."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Works, but should not get new work: failed verification, pending row remap, throttled beyond use."""
    SUSPECT = "suspect"
    """Its node or its telemetry stopped answering; not yet given up."""
    UNRESPONSIVE = "unresponsive"
    """A driver call has not returned for longer than ``hang_after``."""
    LOST = "lost"
    """Fell off the bus, or its context is poisoned."""
    REMOVED = "removed"
    """A successful enumeration no longer contains it."""
    UNKNOWN = "unknown"
    """A state that this version does not know, from a newer peer."""

    @classmethod
    def _missing_(cls, value: object) -> DeviceState:
        return cls.UNKNOWN


class DeviceKind(StrEnum):
    GPU = "gpu"
    INTEGRATED_GPU = "igpu"
    CPU = "cpu"
    ACCELERATOR = "accelerator"
    SOFTWARE = "software"
    """A software implementation of a GPU interface (llvmpipe, WARP). Never selected automatically."""
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> DeviceKind:
        return cls.UNKNOWN


class DeviceIdentity(BaseModel):
    """Which physical device this is, whatever its index is today.

    ``key`` is the vendor's UUID (plus partition), else the PCI address (plus partition), else a name with
    ``stable=False``. Two records with equal stable keys on one host are the same device.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: str
    stable: bool = True
    uuid: str | None = None
    """Vendor UUID as the vendor prints it, e.g. ``GPU-1a2b…``; for a partition its own, e.g. ``MIG-…``."""
    pci_address: str | None = None
    """``dddddddd:bb:dd.f``: lower-case hexadecimal, eight-digit domain."""
    partition: str | None = None
    """Partition within the physical device (MIG ``gi/ci``), or None for a whole device."""
    serial: str | None = None


class DeviceSpeeds(BaseModel):
    """What one device was measured to do with nothing else going on (:mod:`gpurt.calibration`). Bandwidths in GB/s, one
    direction, rates in TFLOPS; None: not measured, and ``notes`` say why.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    backend: str
    driver_version: str | None
    """The figures hold for this backend and driver, and no other."""
    measured_at: str
    """ISO 8601, UTC."""
    to_device_gbps: float | None = None
    """Host memory to the device, page-locked where the library can."""
    from_device_gbps: float | None = None
    memory_gbps: float | None = None
    """The device's own memory: read by a kernel, or read and written by a copy, whichever is faster."""
    fp32_tflops: float | None = None
    """Multiply-adds that depend on nothing but registers, two operations each."""
    bf16_tflops: float | None = None
    """Of matrix units, from registers."""
    load_gbps: float | None = None
    """Files in the host's page cache to this device alone."""
    load_together_gbps: float | None = None
    """The same to all devices of the backend at once, their sum."""
    notes: tuple[str, ...] = ()

    @field_validator(
        "to_device_gbps", "from_device_gbps", "memory_gbps", "fp32_tflops", "bf16_tflops", "load_gbps",
        "load_together_gbps",
    )  # fmt: skip
    @classmethod
    def _positive(cls, value: float | None) -> float | None:
        return value if value is not None and 0 < value < math.inf else None


class GPUDevice(BaseModel):
    """One device as one backend shows it. The first fifteen fields are the classic record; the rest is the truth.

    ``device_id`` (``"cuda:0"``) is the name of today: it changes with visibility variables and reboots. Store
    ``identity.key`` instead.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    device_id: str = Field(min_length=1)
    name: str
    vendor: str
    """``nvidia amd intel apple qualcomm …`` or ``unknown``."""
    backend: str
    """Short backend name, e.g. ``cuda``."""
    compute_capability: str | None
    """``"9.0"`` (NVIDIA), ``"gfx90a"`` (AMD), an instruction set for CPUs."""
    memory_bytes: int | None = Field(ge=0)
    """Total memory of the device; None when no source tells."""
    memory_available: int | None = Field(ge=0)
    """Free memory when the record was taken, before any limit of ours."""
    compute_units: int | None
    """SMs, CUs or CPU cores usable by this process."""
    tensor_core_count: int | None
    """0 where the architecture has none."""
    max_threads_per_block: int | None
    clock_rate_mhz: int | None
    bandwidth_gbps: float | None
    """Peak memory bandwidth by the vendor's figures, GB/s."""
    support_level: str
    """``full``, ``partial`` or ``experimental``."""
    driver_version: str | None
    backend_name: str
    """The driver implementation behind the backend, e.g. ``cupy``."""

    identity: DeviceIdentity | None = None
    kind: DeviceKind = DeviceKind.GPU
    state: DeviceState = DeviceState.HEALTHY
    state_reason: str | None = None
    usable: bool = True
    """False: listed so that people see it, but nothing may be placed on it; ``state_reason`` says why."""
    memory_usable_bytes: int | None = None
    """What can be allocated: total, free, budgets, cgroup and configured limits taken together."""
    memory_usable_source: str | None = None
    """Which limit decided ``memory_usable_bytes``: ``driver meminfo cgroup limit profile …``."""
    memory_pool_id: str | None = None
    """Devices of one host with equal pool ids share that memory: count it once."""
    unified_memory: bool = False
    backends: tuple[str, ...] = ()
    """Every backend that shows this physical device, the preferred one first."""
    simulated: bool = False
    """True for devices that exist only in software. Never mistake them for hardware."""
    numa_node: int | None = None
    speeds: DeviceSpeeds | None = None
    """Measured on this device with this backend and driver; None: not yet."""

    @field_validator("bandwidth_gbps")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        # NaN and infinity are not JSON: one would make the whole node record unreadable for strict parsers.
        return value if value is None or math.isfinite(value) else None

    @property
    def stable_id(self) -> str:
        """``identity.key``, or ``device_id`` where the device has no identity."""
        return self.identity.key if self.identity else self.device_id


class MemoryInfo(MappingModel):
    """Memory of one device at one moment, in bytes. ``total = used + available + reserved`` within rounding."""

    total_bytes: int = Field(ge=0)
    used_bytes: int = Field(ge=0)
    """In use by anybody: this process's live handles and other processes alike."""
    available_bytes: int = Field(ge=0)
    """What one more ``allocate`` may take, limits of ours included."""
    reserved_bytes: int = Field(ge=0)
    """Held by this process's pool or by the driver for itself; freed on ``trim`` where it is ours."""


class BackendReport(MappingModel):
    """What came of one attempt to use one backend: the answer to "why is my GPU missing?"."""

    name: str
    status: Literal["ok", "unavailable"]
    reason: ReasonCode | None = None
    """None exactly when ``status`` is ``ok``."""
    message: str = ""
    """What happened, in one or two sentences for people."""
    elapsed_ms: float = Field(default=0.0, allow_inf_nan=False)
    hint: str | None = None
    """What to do about it."""
    device_ids: tuple[str, ...] = ()


class Telemetry(BaseModel):
    """One reading. A field is a value, or None with an entry in ``unavailable`` that says why."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    clock_mhz: int | None = None
    utilization_percent: float | None = None
    unavailable: Mapping[str, str] = Field(default_factory=dict)
    """Field name → reason: ``unsupported no_permission error stale invalid``."""

    @field_validator("temperature_c", "power_w", "utilization_percent")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is None or math.isfinite(value) else None


class Capabilities(BaseModel):
    """What a driver can do and how it must be called. Fixed after ``open``."""

    model_config = ConfigDict(frozen=True)

    threading: Literal["backend", "device", "queue"] = "device"
    """Which calls may run at once. ``backend``: one thread for every call of the driver, ``open`` and telemetry
    included. ``device``: one thread per device, and another for its telemetry. ``queue``: several threads per
    device, as long as no two calls touch the same memory."""
    p2p: bool = False
    """Copies between two devices can go directly; where they cannot, ``copy`` stages through the host itself."""
    host_visible: bool = False
    """``host_view`` gives a writable ``memoryview`` of device memory."""
    cuda_pointers: bool = False
    """``pointer`` gives an address that CUDA's libraries (CuPy, PyTorch) understand."""
    unified_memory: bool = False
    loads_files: bool = False
    """``load`` copies ranges of open files to the device by itself."""
    pins_memory: bool = False
    """``host_alloc`` gives page-locked host memory, which copies go to and from without a detour."""
    kernels: frozenset[str] = frozenset()
    """Languages of source that ``compile`` takes: ``c cuda hip opencl``, or others; empty where there are no kernels.
    Names, not a plain yes: a kernel is written once for each language, and by them a caller picks its text. Whether
    the compiler itself is installed shows at the first ``compile``; asking when the driver opens would load it."""
    pools_memory: bool = False
    """The library keeps freed memory itself, so gpurt must not pool on top."""
    pool_bytes: int = Field(default=0, ge=0)
    """How much freed memory gpurt should keep per device where the user does not say; 0 for none."""
    telemetry: frozenset[str] = frozenset()
    """Names of :class:`Telemetry` fields that this driver may fill."""
    alignment_bytes: int = Field(default=1, ge=1)
    """Offsets and sizes must be multiples of this."""
    chunk_bytes: int = Field(default=32 << 20, ge=1)
    """Large copies are split here: the longest a cancelled copy keeps running."""
    max_allocation_bytes: int | None = None
    """The largest single allocation that the library accepts, or None."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Names a kernel that was compiled for one device. As a handle, it holds no pointer, and is refused by any other
    instance, process or run: it dies with ``shutdown``.
    """

    kernel_id: int
    device_id: str
    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Names an allocation. Holds no pointer: safe to log, compare and pickle, useless in another process.

    ``generation`` is random per backend instance, so a handle of another instance, process or run is refused.
    """

    handle_id: int
    device_id: str
    size_bytes: int
    generation: int
