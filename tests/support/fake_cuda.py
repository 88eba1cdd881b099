"""A host-memory stand-in for ``cupy_backends.cuda.api.runtime``, strict where CUDA is.

Copies are queued on their stream and happen at its synchronisation, the current device is per thread, and every
use of a wrong device, stream, pointer or direction raises what CUDA would raise.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpurt.errors import BackendUnavailable
from gpurt.sources.nvml import NvmlDevice
from gpurt.types import Telemetry

MIB = 1 << 20
H2D, D2H, D2D = 1, 2, 3

_TEXTS = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    704: "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled",
    705: "cudaErrorPeerAccessNotEnabled: peer access has not been enabled",
}


class CUDARuntimeError(RuntimeError):
    """As CuPy's: made from a status, keeps it."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_TEXTS.get(status, f"cudaError{status}"))


@dataclass
class _Allocation:
    device: int
    buffer: Any
    size: int


@dataclass
class _Stream:
    device: int
    thread: int
    queue: list[Callable[[], None]] = field(default_factory=list)
    hosts: set[int] = field(default_factory=set)
    """Pinned allocations that a queued copy uses."""


class FakeRuntime(ModuleType):
    """The module. ``calls`` has the name of every call that was made, ``live`` and ``streams`` what exists."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, *, devices: int = 2, capacity: int = 64 * MIB, peers: bool = True, is_hip: bool = False) -> None:
        super().__init__("cupy_backends.cuda.api.runtime")
        self.is_hip = is_hip
        self.capacity = capacity
        self.peers = peers
        self.count_status = 0
        self.driver_version = 12080
        self.pin_limit = 1 << 40
        self.properties: list[dict[str, Any]] = [self._properties(index) for index in range(devices)]
        self.attributes: dict[int, int] = {}
        self.calls: list[str] = []
        self.live: dict[int, _Allocation] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, _Stream] = {}
        self.enabled: list[tuple[int, int]] = []
        self.on_set_device: Callable[[int], None] = lambda _: None
        self.on_call: Callable[[str, int], None] = lambda name, device: None
        """Called before each copy, synchronisation and pinned allocation, with the thread's device. May raise."""
        self._lock = threading.RLock()
        self._current = threading.local()
        self._next_stream = 1

    def _properties(self, index: int) -> dict[str, Any]:
        return {
            "name": b"NVIDIA H100 80GB HBM3",
            "totalGlobalMem": self.capacity,
            "multiProcessorCount": 132,
            "major": 9,
            "minor": 0,
            "maxThreadsPerBlock": 1024,
            "clockRate": 1980000,
            "memoryClockRate": 2619000,
            "memoryBusWidth": 5120,
            "integrated": 0,
            "uuid": bytes([index + 1] * 16),
        }

    # Devices

    def getDeviceCount(self) -> int:
        self.calls.append("getDeviceCount")
        if self.count_status:
            raise CUDARuntimeError(self.count_status)
        return len(self.properties)

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        self._check_index(index)
        return dict(self.properties[index])

    def deviceGetPCIBusId(self, index: int) -> str:
        self._check_index(index)
        return f"0000:{index + 1:02X}:00.0"

    def deviceGetAttribute(self, attribute: int, index: int) -> int:
        self._check_index(index)
        if attribute not in self.attributes:
            raise CUDARuntimeError(1)
        return self.attributes[attribute]

    def driverGetVersion(self) -> int:
        return self.driver_version

    def setDevice(self, index: int) -> None:
        self.calls.append("setDevice")
        self._check_index(index)
        self.on_set_device(index)
        self._current.index = index

    def deviceSynchronize(self) -> None:
        self.calls.append("deviceSynchronize")
        with self._lock:
            for stream in self.streams.values():
                if stream.device == self.current:
                    self._run(stream)

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        self.on_call(name, self.current)

    @property
    def current(self) -> int:
        index = getattr(self._current, "index", None)
        # CUDA would take device 0, which is how wrong-device bugs hide.
        assert index is not None, "this thread never selected a device"
        return index

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self.properties):
            raise CUDARuntimeError(101)

    # Memory

    def memGetInfo(self) -> tuple[int, int]:
        self.calls.append("memGetInfo")
        return self.capacity - self.used_bytes(self.current), self.capacity

    def used_bytes(self, device: int) -> int:
        with self._lock:
            return sum(each.size for each in self.live.values() if each.device == device)

    def malloc(self, size: int) -> int:
        self.calls.append("malloc")
        with self._lock:
            if size > self.memGetInfo()[0]:
                raise CUDARuntimeError(2)
            buffer = (ctypes.c_ubyte * size)()
            address = ctypes.addressof(buffer)
            self.live[address] = _Allocation(self.current, buffer, size)
            return address

    def free(self, address: int) -> None:
        self.calls.append("free")
        with self._lock:
            if self.live.pop(address, None) is None:
                raise CUDARuntimeError(1)

    def hostAlloc(self, size: int, flags: int) -> int:
        self._enter("hostAlloc")
        assert flags == 1, "pinned for the current device only"
        with self._lock:
            if size > self.pin_limit - sum(map(len, self.pinned.values())):
                raise CUDARuntimeError(2)
            buffer = (ctypes.c_ubyte * size)()
            self.pinned[ctypes.addressof(buffer)] = buffer
            return ctypes.addressof(buffer)

    def freeHost(self, address: int) -> None:
        with self._lock:
            assert not any(address in stream.hosts for stream in self.streams.values()), "freed under a copy"
            if self.pinned.pop(address, None) is None:
                raise CUDARuntimeError(1)

    def _owner(self, address: int, size: int) -> int | None:
        """The device whose allocation holds the range, None for host memory."""
        for start, each in self.live.items():
            if start <= address < start + each.size:
                if address + size > start + each.size:
                    raise CUDARuntimeError(1)
                return each.device
        return None

    def _pinned_start(self, address: int, size: int) -> int | None:
        """Where the pinned allocation of the range begins, None for other memory."""
        for start, buffer in self.pinned.items():
            if start <= address < start + len(buffer):
                if address + size > start + len(buffer):
                    raise CUDARuntimeError(1)
                return start
        return None

    # Streams and copies

    def streamCreateWithFlags(self, flags: int) -> int:
        assert flags == 1, "the legacy default stream must not be waited for"
        with self._lock:
            handle, self._next_stream = self._next_stream, self._next_stream + 1
            self.streams[handle] = _Stream(self.current, threading.get_ident())
            return handle

    def streamDestroy(self, handle: int) -> None:
        with self._lock:
            stream = self._stream(handle)
            assert not stream.queue, "destroyed with work outstanding"
            del self.streams[handle]

    def streamSynchronize(self, handle: int) -> None:
        try:
            self._enter("streamSynchronize")
        except CUDARuntimeError:
            # Such an error is of the work itself, which will not be done any more.
            self.streams[handle].queue.clear()
            self.streams[handle].hosts.clear()
            raise
        with self._lock:
            self._run(self._stream(handle))

    def _stream(self, handle: int) -> _Stream:
        stream = self.streams.get(handle)
        if stream is None or stream.device != self.current or stream.thread != threading.get_ident():
            raise CUDARuntimeError(400)
        return stream

    def _run(self, stream: _Stream) -> None:
        queue, stream.queue = stream.queue, []
        for copy in queue:
            copy()
        stream.hosts.clear()

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, handle: int) -> None:
        self._enter("memcpyAsync")
        with self._lock:
            stream = self._stream(handle)
            here = stream.device
            sides = {H2D: (None, here), D2H: (here, None), D2D: (here, here)}[kind]
            if (self._owner(source, size), self._owner(target, size)) != sides:
                raise CUDARuntimeError(1)
            stream.hosts |= {self._pinned_start(address, size) for address in (source, target)} - {None}
            stream.queue.append(lambda: ctypes.memmove(target, source, size) and None)

    def memcpyPeerAsync(
        self, target: int, target_index: int, source: int, source_index: int, size: int, handle: int
    ) -> None:
        self.calls.append("memcpyPeerAsync")
        with self._lock:
            stream = self._stream(handle)
            if (self._owner(source, size), self._owner(target, size)) != (source_index, target_index):
                raise CUDARuntimeError(1)
            if (source_index, target_index) not in self.enabled:
                raise CUDARuntimeError(705)
            stream.queue.append(lambda: ctypes.memmove(target, source, size) and None)

    def deviceCanAccessPeer(self, index: int, peer: int) -> int:
        self.calls.append("deviceCanAccessPeer")
        return int(self.peers and index != peer)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        self.calls.append("deviceEnablePeerAccess")
        pair = (self.current, peer)
        if not self.peers:
            raise CUDARuntimeError(1)
        if pair in self.enabled:
            raise CUDARuntimeError(704)
        self.enabled.append(pair)


class FakeNvml:
    """Stands for :class:`gpurt.sources.nvml.NvmlSession`."""

    driver_version = "580.159"

    def __init__(self, records: Sequence[NvmlDevice]) -> None:
        self._records = tuple(records)
        self.closed = 0
        self.asked: list[str] = []

    def devices(self) -> tuple[NvmlDevice, ...]:
        return self._records

    def telemetry(self, address: str) -> Telemetry:
        self.asked.append(address)
        return Telemetry(
            memory_total_bytes=80 * MIB,
            memory_used_bytes=12 * MIB,
            memory_free_bytes=60 * MIB,
            memory_reserved_bytes=8 * MIB,
            temperature_c=41.0,
            power_w=69.85,
            clock_mhz=1980,
            utilization_percent=0.0,
        )

    def close(self) -> None:
        self.closed += 1


class LiveNvml(FakeNvml):
    """NVML over the stand-in runtime's own figures: what is allocated there is used."""

    def __init__(self, runtime: FakeRuntime) -> None:
        total = runtime.capacity
        count = len(runtime.properties)
        super().__init__([nvml_record(n, memory_total_bytes=total, memory_free_bytes=total) for n in range(count)])
        self._runtime = runtime

    def telemetry(self, address: str) -> Telemetry:
        index = next(each.index for each in self._records if each.pci_address == address)
        used = self._runtime.used_bytes(index)
        figures = {"memory_total_bytes": self._runtime.capacity, "memory_used_bytes": used}
        figures |= {"memory_free_bytes": self._runtime.capacity - used, "memory_reserved_bytes": 0}
        return super().telemetry(address).model_copy(update=figures)


def nvml_record(index: int, **fields: Any) -> NvmlDevice:
    """What NVML says of fake CUDA device ``index``."""
    known: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-0000000{index}-0000-0000-0000-000000000000",
        "pci_address": f"00000000:{index + 1:02x}:00.0",
        "memory_total_bytes": 80 * MIB,
        "memory_free_bytes": 60 * MIB,
    }
    return NvmlDevice(index, **(known | fields))


def installed() -> FakeRuntime | None:
    """The stand-in that ``install`` has put into this process."""
    there = sys.modules.get("cupy_backends.cuda.api.runtime")
    return there if isinstance(there, FakeRuntime) else None


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime | None = None) -> FakeRuntime:
    """Put the stand-in where CuPy's binding would be found."""
    runtime = runtime or FakeRuntime()
    runtime.__spec__ = importlib.machinery.ModuleSpec(runtime.__name__, None)
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
        package = ModuleType(name)
        package.__path__ = []
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    return runtime


def install_nvml(monkeypatch: pytest.MonkeyPatch, answer: FakeNvml | BackendUnavailable) -> None:
    """Let ``open_session`` return, or raise, ``answer``."""

    def open_session() -> FakeNvml:
        if isinstance(answer, BackendUnavailable):
            raise answer
        return answer

    monkeypatch.setattr("gpurt.sources.nvml.open_session", open_session)


class FakeLibcuda(SimpleNamespace):
    """The driver API's few calls of the warm-up; ``log`` has them in order."""

    def __init__(self, log: list[str], *, init_status: int = 0) -> None:
        super().__init__()
        self.log = log
        self.init_status = init_status

    def dlopen(self, name: bytes, mode: Any) -> int:
        return 1

    def cuInit(self, flags: int) -> int:
        self.log.append("cuInit")
        return self.init_status

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.log.append(f"retain {device.value}")
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        self.log.append(f"release {device}")
        return 0
