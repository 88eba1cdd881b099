"""DirectML through ONNX Runtime: every GPU of Windows with a driver for Direct3D 12, whoever made it.

ONNX Runtime's allocator for Python is one for the process and not for threads, so everything runs on one thread. It
moves whole tensors only; how parts of an allocation are reached, :mod:`gpurt.backends.directml.memory` says. What the
adapters are and what they have to give comes from DXGI (:mod:`gpurt.backends.directml.adapters`): ONNX Runtime tells
neither, and confirms no adapter beyond that a session was made on it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from gpurt.backend import GPUBackend
from gpurt.backends.directml.adapters import DirectMLDevices, DxgiAdapters
from gpurt.backends.directml.host import HostDevices
from gpurt.backends.directml.memory import LARGEST_CHUNK, TensorMemory, Tensors
from gpurt.backends.directml.runtime import DeviceType, load, meaning
from gpurt.backends.directml.session import DeviceCopies
from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, GPUError, ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.dxgi_calls import DxgiCalls
from gpurt.types import Capabilities, DeviceState, GPUDevice, Telemetry

log = logging.getLogger("gpurt.directml")

_COPY_CHUNKS = 4
"""So many of the largest chunks the shell hands over at a time, 5 ms at 12 GB/s: none of its borders cuts a chunk."""


class DirectMLDriver(Driver):
    """GPUs of this computer, the best first; software adapters and those of remote sessions are left out.

    Args:
        device_type: ``"cpu"`` is this class over the host's memory, as one software device or several, with any
            ONNX Runtime, on any system. For tests.
        devices: how many, for ``"cpu"``.
        largest_chunk: bytes of the tensors that large allocations consist of, a power of two.
        platform: as ``sys.platform``.
        wheels: as :func:`sysconfig.get_platform`; None asks.
        open_dxgi: opens DXGI; None is that of this computer.
    """

    name: ClassVar[str] = "directml"

    def __init__(
        self,
        *,
        device_type: DeviceType = "dml",
        devices: int = 1,
        largest_chunk: int = LARGEST_CHUNK,
        platform: str = sys.platform,
        wheels: str | None = None,
        open_dxgi: Callable[[], DxgiCalls] | None = None,
    ) -> None:
        self._type: DeviceType = device_type
        self._platform, self._wheels, self._largest = platform, wheels, largest_chunk
        self._devices: DirectMLDevices
        self._devices = HostDevices(devices) if device_type == "cpu" else DxgiAdapters(open_dxgi or _dxgi)
        self._memory: TensorMemory | None = None
        self._copies: dict[int, DeviceCopies] = {}
        used = {"memory_used_bytes"} if device_type == "cpu" else set[str]()
        self.capabilities = Capabilities(
            threading="backend",
            chunk_bytes=_COPY_CHUNKS * largest_chunk,
            # A buffer of Direct3D is made, and filled with zeros, for each chunk.
            pool_bytes=256 << 20,
            telemetry=frozenset({"memory_total_bytes", "memory_free_bytes"} | used),
        )

    def open(self) -> Sequence[GPUDevice]:
        if self._type == "dml" and self._platform != "win32":
            text = f"DirectML does not exist on {self._platform}, only on win32"
            raise BackendUnavailable(text, reason=ReasonCode.WRONG_PLATFORM, backend=self.name)
        runtime = load(self._type, wheels=self._wheels)
        try:
            devices = self._devices.open(runtime.__version__)
            self._memory = TensorMemory(runtime, self._type, self._largest)
            failures: dict[int, Exception] = {}
            for index, _ in enumerate(devices):
                try:
                    self._copies[index] = DeviceCopies(runtime, self._type, self._devices.ordinal(index))
                except Exception as exc:
                    log.warning("%s cannot be used by DirectML: %s", devices[index].name, exc)
                    failures[index] = exc
            if len(failures) == len(devices):
                raise self._unsupported(devices, failures) from failures[0]
        except BaseException:
            self.close()
            raise
        return tuple(
            _unusable(device, failures[index]) if index in failures else device for index, device in enumerate(devices)
        )

    def attach(self, index: int) -> None: ...

    def alloc(self, index: int, nbytes: int) -> Tensors:
        self._devices.take(index, nbytes)
        try:
            return self._tensors.allocate(self._devices.ordinal(index), nbytes)
        except BaseException:
            self._devices.give_back(index, nbytes)
            raise

    def free(self, index: int, mem: Tensors) -> None:
        self._tensors.free(mem)
        self._devices.give_back(index, sum(mem.sizes))

    def write(self, index: int, mem: Tensors, offset: int, src: memoryview) -> None:
        self._tensors.write(mem, offset, src)

    def read(self, index: int, mem: Tensors, offset: int, dst: memoryview) -> None:
        self._tensors.read(mem, offset, dst)

    def copy(
        self, src_index: int, src: Tensors, src_offset: int, dst_index: int, dst: Tensors, dst_offset: int, nbytes: int
    ) -> None:
        device = self._copies.get(src_index) if src_index == dst_index else None
        self._tensors.copy(src, src_offset, dst, dst_offset, nbytes, device)

    def sync(self, index: int) -> None:
        """Nothing is queued: each copy waits for its end."""

    def telemetry(self, index: int) -> Telemetry:
        return self._devices.telemetry(index)

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        self._copies.clear()
        self._devices.close()

    def classify(self, exc: Exception) -> type[GPUError] | None:
        return meaning(exc)

    @property
    def _tensors(self) -> TensorMemory:
        assert self._memory is not None, "not open"
        return self._memory

    def _unsupported(self, devices: Sequence[GPUDevice], failures: dict[int, Exception]) -> BackendUnavailable:
        reasons = "; ".join(f"{device.name}: {_first_line(failures[i])}" for i, device in enumerate(devices))
        return BackendUnavailable(
            f"DirectML can use none of the GPUs: {reasons}",
            reason=ReasonCode.UNSUPPORTED_DEVICE,
            backend=self.name,
            hint="update the graphics driver; DirectML needs Windows 10 1903 and a GPU with Direct3D 12",
        )


class DirectMLBackend(DriverBackend):
    """GPUs of Windows; ``device_type`` is that of :class:`DirectMLDriver`, ``options`` those of ``DriverBackend``."""

    def __init__(self, *, device_type: DeviceType = "dml", **options: Any) -> None:
        super().__init__(DirectMLDriver(device_type=device_type), **options)


def create() -> GPUBackend:
    """What the factory calls."""
    return DirectMLBackend()


def _dxgi() -> DxgiCalls:
    from gpurt.sources.dxgi_com import open_dxgi

    return open_dxgi()


def _unusable(device: GPUDevice, failure: Exception) -> GPUDevice:
    reason = f"{ReasonCode.UNSUPPORTED_DEVICE}: {_first_line(failure)}"
    return device.model_copy(update={"usable": False, "state": DeviceState.DEGRADED, "state_reason": reason})


def _first_line(exc: Exception) -> str:
    text = exc.message if isinstance(exc, GPUError) else str(exc)
    return next(iter(text.strip().splitlines()), type(exc).__name__)
