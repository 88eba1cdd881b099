"""What CUDA and ROCm have in common: memory and copies through CuPy's binding of the runtime.

The calls are those of ``cupy.cuda.runtime``, raw: no CuPy pool, because gpurt pools memory itself. Each lane thread
has a non-blocking stream of its own per device, so that copies in both directions, and small ones beside large
ones, overlap. Copies release the GIL. Only :meth:`CuPyDriver.open` differs between the vendors.

Pageable host memory moves at what one thread of the library reaches (7 to 16 GB/s where pinned memory reaches 53).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from typing import Any, Final, Protocol

from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, DeviceLost, GPUError, OutOfMemory, ReasonCode
from gpurt.types import Capabilities

log = logging.getLogger("gpurt.cupy")

# cudaMemcpyKind, cudaStreamNonBlocking and cudaError_t of CUDA's driver_types.h; HIP's agree.
HOST_TO_DEVICE: Final = 1
DEVICE_TO_HOST: Final = 2
DEVICE_TO_DEVICE: Final = 3
STREAM_NON_BLOCKING: Final = 1
ERROR_MEMORY_ALLOCATION: Final = 2
ERROR_PEER_ACCESS_ALREADY_ENABLED: Final = 704
LOST_STATUSES: Final = frozenset({46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Statuses after which "any further CUDA work will return the same error" (driver_types.h), uncorrectable ECC and
NVLink errors (214, 220), devices unavailable (46), and unknown (999), after which nothing is known of the context."""

STAGING_BYTES: Final = 8 << 20
"""Pinned host memory per lane thread, for copies between devices without a direct path. 4 MiB buffers are where
host copies stop getting faster; twice that halves the number of synchronisations."""


class Contexts(Protocol):
    """Makes device contexts ahead of CuPy, which holds the GIL while it does."""

    def prepare(self) -> None: ...
    def retain(self, index: int) -> None: ...
    def release(self) -> None: ...


class _Lane(threading.local):
    """What the calling thread has made."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        self.staging: dict[int, _Staging] = {}


class CuPyDriver(Driver):
    """The shared part; a vendor's driver adds ``open``, ``telemetry`` and ``name``.

    A memory token is the device address, an int. Any thread may call anything: each call selects its device.
    """

    capabilities = Capabilities(
        threading="queue",
        p2p=True,
        alignment_bytes=1,
        chunk_bytes=32 << 20,
        telemetry=frozenset(
            {
                "memory_total_bytes",
                "memory_used_bytes",
                "memory_free_bytes",
                "memory_reserved_bytes",
                "temperature_c",
                "power_w",
                "clock_mhz",
                "utilization_percent",
            }
        ),
    )

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._runtime: Any = None
        self._lane = _Lane()
        self._peers: dict[tuple[int, int], bool] = {}
        self._lock = threading.Lock()

    def attach(self, index: int) -> None:
        """Does nothing: a thread that only reads sensors must not cost a context (hundreds of MB of the device).

        The thread's stream, and with the first of all the context, are made by the first call that needs them.
        """

    def detach(self, index: int) -> None:
        # May come after close(), hence no _select(): the runtime and its contexts outlive that, our hold does not.
        lane = self._lane
        staging = lane.staging.pop(index, None)
        stream = lane.streams.pop(index, None)
        try:
            if staging is not None:
                staging.free()
        finally:
            if stream is not None:
                self._runtime.setDevice(index)
                self._runtime.streamDestroy(stream)

    def alloc(self, index: int, nbytes: int) -> int:
        return self._select(index).malloc(nbytes)

    def free(self, index: int, mem: int) -> None:
        self._select(index).free(mem)

    def write(self, index: int, mem: int, offset: int, src: memoryview) -> None:
        runtime, stream = self._on_stream(index)
        host = _bytes_array(src)
        runtime.memcpyAsync(mem + offset, _address(host), len(src), HOST_TO_DEVICE, stream)
        runtime.streamSynchronize(stream)

    def read(self, index: int, mem: int, offset: int, dst: memoryview) -> None:
        runtime, stream = self._on_stream(index)
        host = _bytes_array(dst)
        runtime.memcpyAsync(_address(host), mem + offset, len(dst), DEVICE_TO_HOST, stream)
        runtime.streamSynchronize(stream)

    def copy(
        self, src_index: int, src: int, src_offset: int, dst_index: int, dst: int, dst_offset: int, nbytes: int
    ) -> None:
        """On one device and between peers directly; otherwise through ``STAGING_BYTES`` of host memory, in turn."""
        source, target = src + src_offset, dst + dst_offset
        if src_index != dst_index and not self._peer_access(src_index, dst_index):
            self._copy_staged(src_index, source, dst_index, target, nbytes)
            return
        runtime, stream = self._on_stream(src_index)
        if src_index == dst_index:
            runtime.memcpyAsync(target, source, nbytes, DEVICE_TO_DEVICE, stream)
        else:
            runtime.memcpyPeerAsync(target, dst_index, source, src_index, nbytes, stream)
        runtime.streamSynchronize(stream)

    def sync(self, index: int) -> None:
        self._select(index).deviceSynchronize()

    def close(self) -> None:
        self._peers.clear()
        self._contexts.release()

    def classify(self, exc: Exception) -> type[GPUError] | None:
        if self._runtime is not None and isinstance(exc, self._runtime.CUDARuntimeError):
            status = getattr(exc, "status", None)
            if status == ERROR_MEMORY_ALLOCATION:
                return OutOfMemory
            return DeviceLost if status in LOST_STATUSES else None
        # cupy.cuda.memory.OutOfMemoryError is a MemoryError.
        return super().classify(exc)

    # For vendors

    def load_runtime(self, *, hip: bool, install_hint: str) -> Any:
        """Import CuPy's runtime module and keep it.

        Raises:
            BackendUnavailable: ``no_library``: not installed, not loadable, or built for the other vendor.
        """
        wanted, other = ("ROCm", "CUDA") if hip else ("CUDA", "ROCm")
        if importlib.util.find_spec("cupy") is None and importlib.util.find_spec("cupy_backends") is None:
            raise self._no_library(f"CuPy for {wanted} is not installed", install_hint)
        try:
            runtime = _import_runtime()
        except Exception as exc:
            first_line = next(iter(str(exc).strip().splitlines()), "")
            text = f"CuPy is installed and cannot be loaded: {type(exc).__name__}: {first_line}"
            raise self._no_library(text, install_hint) from exc
        if bool(runtime.is_hip) != hip:
            text = f"the installed CuPy is built for {other}, not for {wanted}"
            raise self._no_library(text, f"pip uninstall the CuPy that is there, then {install_hint}")
        self._runtime = runtime
        return runtime

    def memory_info(self, index: int) -> tuple[int, int]:
        """Free and total bytes of a device. Makes its context."""
        free, total = self._select(index).memGetInfo()
        return free, total

    def _no_library(self, text: str, install_hint: str) -> BackendUnavailable:
        return BackendUnavailable(text, backend=self.name, reason=ReasonCode.NO_LIBRARY, install_hint=install_hint)

    # Inside

    def _select(self, index: int) -> Any:
        """Make ``index`` the calling thread's device; returns the runtime."""
        self._contexts.retain(index)
        self._runtime.setDevice(index)
        return self._runtime

    def _on_stream(self, index: int) -> tuple[Any, int]:
        runtime = self._select(index)
        stream = self._lane.streams.get(index)
        if stream is None:
            stream = self._lane.streams[index] = runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)
        return runtime, stream

    def _peer_access(self, src_index: int, dst_index: int) -> bool:
        """Whether ``src_index`` reaches ``dst_index`` directly; enabled on first use."""
        pair = (src_index, dst_index)
        with self._lock:
            if pair not in self._peers:
                self._peers[pair] = self._enable_peer_access(src_index, dst_index)
            return self._peers[pair]

    def _enable_peer_access(self, src_index: int, dst_index: int) -> bool:
        runtime = self._select(src_index)
        if not runtime.deviceCanAccessPeer(src_index, dst_index):
            log.info("%s:%d cannot reach %s:%d: copies go through the host", self.name, src_index, self.name, dst_index)
            return False
        self._contexts.retain(dst_index)
        try:
            runtime.deviceEnablePeerAccess(dst_index)
        except runtime.CUDARuntimeError as exc:
            # By another library of this process, or by us before a close(): contexts outlive it.
            if exc.status != ERROR_PEER_ACCESS_ALREADY_ENABLED:
                raise
        return True

    def _copy_staged(self, src_index: int, source: int, dst_index: int, target: int, nbytes: int) -> None:
        staging = self._lane.staging.get(src_index)
        if staging is None:
            self._select(src_index)
            staging = self._lane.staging[src_index] = _Staging(self._runtime)
        for done in range(0, nbytes, STAGING_BYTES):
            part = min(STAGING_BYTES, nbytes - done)
            runtime, stream = self._on_stream(src_index)
            runtime.memcpyAsync(staging.address, source + done, part, DEVICE_TO_HOST, stream)
            runtime.streamSynchronize(stream)
            self._select(dst_index)
            stream = staging.stream(dst_index)
            runtime.memcpyAsync(target + done, staging.address, part, HOST_TO_DEVICE, stream)
            runtime.streamSynchronize(stream)


class _Staging:
    """A bounce buffer of ``STAGING_BYTES``, pinned, or plain where no more can be pinned, and the streams out of it.

    These streams are not the lane's own: they are gone with the buffer, when the lane leaves the source device.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._streams: dict[int, int] = {}
        self._plain: Any = None
        try:
            self.address: int = runtime.hostAlloc(STAGING_BYTES, 0)
        except runtime.CUDARuntimeError as exc:
            if exc.status != ERROR_MEMORY_ALLOCATION:
                raise
            self._plain = _plain_buffer(STAGING_BYTES)
            self.address = _address(self._plain)

    def stream(self, index: int) -> int:
        """This thread's stream on ``index``, which must be its current device."""
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = self._runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)
        return stream

    def free(self) -> None:
        if self._plain is None:
            self._runtime.freeHost(self.address)
        for index, stream in self._streams.items():
            self._runtime.setDevice(index)
            self._runtime.streamDestroy(stream)


def _import_runtime() -> Any:
    try:
        # 15 ms. The public name is cupy.cuda.runtime, the same module, but importing it takes 600 ms.
        return importlib.import_module("cupy_backends.cuda.api.runtime")
    except ModuleNotFoundError:
        return importlib.import_module("cupy").cuda.runtime


def _bytes_array(view: memoryview) -> Any:
    import numpy as np

    # Not ctypes: it refuses read-only memory, such as bytes.
    return np.frombuffer(view, np.uint8)


def _plain_buffer(nbytes: int) -> Any:
    import numpy as np

    return np.empty(nbytes, np.uint8)


def _address(array: Any) -> int:
    return array.__array_interface__["data"][0]
