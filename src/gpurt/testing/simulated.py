"""Devices that do not exist, with the capacity, links and sensors of real ones.

Their memory is real: what is written can be read back (see :mod:`gpurt.testing.sparse`). Every record says
``simulated=True`` and its name begins with "Simulated".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, DeviceLost, GPUError, ReasonCode
from gpurt.limits import limit_memory, limit_of
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.profiles import GIB, Profile, parse_simulation
from gpurt.testing.sparse import PAGE_BYTES, HostBudget, MemoryReleased, SparseMemory
from gpurt.testing.wire import Wire
from gpurt.types import Capabilities, DeviceIdentity, GPUDevice, Telemetry
from gpurt.usable_memory import PROFILE, MemorySettings, with_usable_memory

DEFAULT_REAL_BYTES = 4 * GIB
"""Host memory behind all devices of one driver, by default."""

_MEMORY_FIELDS = ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")
_SENSOR_FIELDS = ("temperature_c", "power_w", "clock_mhz", "utilization_percent")


class SimulatedDeviceLost(RuntimeError):
    """What a call on a removed device raises; means :class:`gpurt.errors.DeviceLost`."""


class _Slot:
    """One simulated device. Guarded by the driver's lock."""

    def __init__(self, profile: Profile, identity: DeviceIdentity) -> None:
        self.profile = profile
        self.identity = identity
        self.removed = False
        self.live: set[SparseMemory] = set()
        self.used = 0
        self.overrides: dict[str, Any] = {}
        self.inbound = Wire(profile.host_link_gbps, profile.latency_s)
        # Unified memory has one path for both directions.
        self.outbound = self.inbound if profile.unified_memory else Wire(profile.host_link_gbps, profile.latency_s)
        # A copy within the device reads and writes the same memory.
        self.local = Wire(profile.memory_bandwidth_gbps / 2, profile.latency_s)
        self.peer = None if profile.peer_link_gbps is None else Wire(profile.peer_link_gbps, profile.latency_s)


class SimulatedDriver(Driver):
    """One driver for any mixture of profiles.

    Args:
        profiles: the devices, in index order; see :func:`gpurt.testing.profiles.parse_simulation`.
        seed: part of every identity key, ``sim:<seed>:<profile>:<n>``. Equal seeds are equal machines.
        realtime: let every transfer last as long as the profile's links need.
        real_bytes_limit: host memory that all devices together may take. A write beyond it raises RuntimeError.
        settings: what people ask for of the memory; it shows in the records (:mod:`gpurt.usable_memory`).
        clock, sleep: seconds, monotonic; used with ``realtime`` only.
    """

    name: ClassVar[str] = "simulated"
    capabilities = Capabilities(
        threading="queue", p2p=True, telemetry=frozenset((*_MEMORY_FIELDS, *_SENSOR_FIELDS)), alignment_bytes=1
    )

    def __init__(
        self,
        profiles: Iterable[Profile],
        *,
        seed: str = "0",
        realtime: bool = False,
        real_bytes_limit: int = DEFAULT_REAL_BYTES,
        settings: MemorySettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._seed = seed
        self._realtime = realtime
        self._host = HostBudget(real_bytes_limit)
        self._settings = settings or MemorySettings()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._made: dict[str, int] = {}
        self._plugged: list[_Slot] = []
        self._open: tuple[_Slot, ...] = ()
        for profile in profiles:
            self.add(profile)

    # What a test does to the machine

    def add(self, profile: Profile) -> str:
        """Plug a device in; the next ``open`` shows it, after the others. Returns its identity key."""
        with self._lock:
            ordinal = self._made.get(profile.key, 0)
            self._made[profile.key] = ordinal + 1
            key = f"sim:{self._seed}:{profile.key}:{ordinal}"
            self._plugged.append(_Slot(profile, DeviceIdentity(key=key, uuid=key)))
        return key

    def remove(self, device: int | str) -> None:
        """Pull a device out: its calls fail as lost from now on, and the next ``open`` no longer shows it.

        Args:
            device: its index, or its identity key, which names it also while the driver is closed.

        Raises:
            LookupError: no such device.
        """
        with self._lock:
            slot = self._open[device] if isinstance(device, int) else self._named(device)
            slot.removed = True
            self._plugged.remove(slot)
            self._forget(slot)

    def set_telemetry(self, index: int, **fields: Any) -> None:
        """Let fields of :class:`gpurt.types.Telemetry` read as given until set again; None: not reported."""
        unknown = fields.keys() - {*_MEMORY_FIELDS, *_SENSOR_FIELDS}
        if unknown:
            raise ValueError(f"no such telemetry: {', '.join(sorted(unknown))}")
        with self._lock:
            self._open[index].overrides.update(fields)

    @property
    def live_allocations(self) -> int:
        """How many allocations of all devices have not been freed."""
        with self._lock:
            return sum(len(slot.live) for slot in self._open)

    # Driver

    def open(self) -> Sequence[GPUDevice]:
        with self._lock:
            if not self._plugged:
                raise BackendUnavailable("the simulation has no device", backend=self.name, reason=ReasonCode.NO_DEVICE)
            self._open = tuple(self._plugged)
            records = (self._record(index, slot) for index, slot in enumerate(self._open))
            return tuple(with_usable_memory(record, self._settings) for record in records)

    def attach(self, index: int) -> None:
        self._slot(index)

    def alloc(self, index: int, nbytes: int) -> SparseMemory:
        slot = self._slot(index)
        mem = SparseMemory(nbytes, self._host)
        with self._lock:
            free = slot.profile.capacity_bytes - slot.used
            if nbytes > free:
                raise MemoryError(f"{nbytes} bytes asked for, {free} of {slot.profile.capacity_bytes} free")
            slot.used += nbytes
            slot.live.add(mem)
        return mem

    def free(self, index: int, mem: SparseMemory) -> None:
        slot = self._slot(index)
        with self._lock:
            slot.live.remove(mem)
            slot.used -= mem.size
        mem.release()

    def write(self, index: int, mem: SparseMemory, offset: int, src: memoryview) -> None:
        ends_at = self._reserve(len(src), self._slot(index).inbound)
        mem.write(offset, src)
        self._wait(ends_at)

    def read(self, index: int, mem: SparseMemory, offset: int, dst: memoryview) -> None:
        ends_at = self._reserve(len(dst), self._slot(index).outbound)
        mem.read(offset, dst)
        self._wait(ends_at)

    def copy(
        self,
        src_index: int,
        src: SparseMemory,
        src_offset: int,
        dst_index: int,
        dst: SparseMemory,
        dst_offset: int,
        nbytes: int,
    ) -> None:
        source, target = self._slot(src_index), self._slot(dst_index)
        ends_at = self._reserve(nbytes, *_path(source, target))
        bounce = memoryview(bytearray(min(nbytes, PAGE_BYTES)))
        for done in range(0, nbytes, PAGE_BYTES):
            part = bounce[: nbytes - done]
            src.read(src_offset + done, part)
            dst.write(dst_offset + done, part)
        self._wait(ends_at)

    def peer_access(self, src_index: int, dst_index: int) -> bool:
        source, target = self._slot(src_index), self._slot(dst_index)
        return source is target or _path(source, target) == (source.peer, target.peer)

    def sync(self, index: int) -> None:
        self._slot(index)

    def telemetry(self, index: int) -> Telemetry:
        slot = self._slot(index)
        profile = slot.profile
        with self._lock:
            fields: dict[str, Any] = {
                "memory_total_bytes": profile.memory_bytes,
                "memory_used_bytes": slot.used,
                "memory_free_bytes": profile.capacity_bytes - slot.used,
                "memory_reserved_bytes": profile.memory_bytes - profile.capacity_bytes,
                "temperature_c": profile.temperature_c,
                "power_w": profile.power_w,
                "clock_mhz": profile.clock_mhz,
                "utilization_percent": 0.0,
                **slot.overrides,
            }
        return Telemetry(**fields, unavailable={key: "unsupported" for key, value in fields.items() if value is None})

    def close(self) -> None:
        with self._lock:
            for slot in self._open:
                self._forget(slot)
            self._open = ()

    def classify(self, exc: Exception) -> type[GPUError] | None:
        # The shell frees nothing that is in use, so only a removal releases memory under a copy.
        return DeviceLost if isinstance(exc, SimulatedDeviceLost | MemoryReleased) else super().classify(exc)

    # Inside

    def _named(self, key: str) -> _Slot:
        for slot in self._plugged:
            if slot.identity.key == key:
                return slot
        raise LookupError(f"no simulated device {key}")

    def _slot(self, index: int) -> _Slot:
        slot = self._open[index]
        if slot.removed:
            raise SimulatedDeviceLost(f"simulated device {slot.identity.key} was removed")
        return slot

    def _record(self, index: int, slot: _Slot) -> GPUDevice:
        profile = slot.profile
        return GPUDevice(
            device_id=f"{self.name}:{index}",
            name=f"Simulated {profile.name}",
            vendor=profile.vendor,
            backend=self.name,
            compute_capability=profile.compute_capability,
            memory_bytes=profile.memory_bytes,
            memory_available=profile.capacity_bytes - slot.used,
            compute_units=profile.compute_units,
            tensor_core_count=profile.tensor_core_count,
            max_threads_per_block=profile.max_threads_per_block,
            clock_rate_mhz=profile.clock_mhz,
            bandwidth_gbps=profile.memory_bandwidth_gbps,
            support_level="full",
            driver_version=None,
            backend_name=self.name,
            identity=slot.identity,
            kind=profile.kind,
            memory_usable_bytes=profile.capacity_bytes - slot.used,
            memory_usable_source=PROFILE,
            # Two unified devices of one simulation stand for two machines: each is a pool of its own.
            memory_pool_id=slot.identity.key if profile.unified_memory else None,
            unified_memory=profile.unified_memory,
            backends=(self.name,),
            simulated=True,
        )

    def _forget(self, slot: _Slot) -> None:
        for mem in slot.live:
            mem.release()
        slot.live.clear()
        slot.used = 0

    def _reserve(self, nbytes: int, *links: Wire) -> float:
        if not self._realtime:
            return 0.0
        now = self._clock()
        return max(link.reserve(nbytes, now) for link in links)

    def _wait(self, ends_at: float) -> None:
        if self._realtime and (left := ends_at - self._clock()) > 0:
            self._sleep(left)


class SimulatedBackend(DriverBackend):
    """Simulated devices as a backend; ``options`` are those of :class:`gpurt.runtime.backend.DriverBackend`.

    Args:
        settings: limits and reserves, as ``GPURT_MEMORY_LIMIT`` and ``GPURT_MEMORY_RESERVE`` set them for real devices.
    """

    def __init__(
        self,
        profiles: Iterable[Profile],
        *,
        seed: str = "0",
        realtime: bool = False,
        real_bytes_limit: int = DEFAULT_REAL_BYTES,
        settings: MemorySettings | None = None,
        **options: Any,
    ) -> None:
        driver = SimulatedDriver(
            profiles, seed=seed, realtime=realtime, real_bytes_limit=real_bytes_limit, settings=settings
        )
        super().__init__(driver, **options)
        if settings is not None:
            limit_memory(self, limit_of(settings))


def create_simulated(
    spec: str, *, seed: str = "0", environ: Mapping[str, str] | None = None, **options: Any
) -> SimulatedBackend:
    """A backend for ``spec``, such as ``"h100x8,m2-ultra"``, not initialised yet; ``seed`` names the machine.

    Args:
        environ: stands in for ``os.environ``, whose ``GPURT_MEMORY_LIMIT`` and ``GPURT_MEMORY_RESERVE`` hold for these
            devices as for real ones.
        options: of :class:`SimulatedBackend`.

    Raises:
        ValueError: as :func:`gpurt.testing.profiles.parse_simulation`.
        GPUError: one of the variables cannot be understood.
    """
    settings = MemorySettings.from_environ(os.environ if environ is None else environ)
    return SimulatedBackend(parse_simulation(spec), seed=seed, settings=settings, **options)


def _path(source: _Slot, target: _Slot) -> tuple[Wire, ...]:
    if source is target:
        return (source.local,)
    if source.peer and target.peer and source.profile.key == target.profile.key:
        return source.peer, target.peer
    return source.outbound, target.inbound
