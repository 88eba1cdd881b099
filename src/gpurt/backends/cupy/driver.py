"""What CUDA and ROCm have in common: memory and copies through CuPy's binding of the runtime.

The calls are those of ``cupy.cuda.runtime``, raw: no CuPy pool, because gpurt pools memory itself. Each lane thread
has a non-blocking stream of its own per device, so that copies in both directions, and small ones beside large
ones, overlap. Copies release the GIL. Vendors differ in whom they ask about their devices, and why there are none.

Which way host memory takes: pinned memory of :meth:`CuPyDriver.host_alloc` goes straight, in one asynchronous copy;
small pageable copies are left to the library, in one call; large ones are striped over the staging crew
(:mod:`gpurt.backends.cupy.staging`). What is large, a calibration tells (:mod:`gpurt.backends.cupy.copy_tuning`),
which is kept for other processes where the driver is given a file for it (:mod:`gpurt.backends.cupy.tuning_file`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Final

from gpurt.backends.cupy import copy_tuning, staging
from gpurt.backends.cupy.copy_tuning import LARGEST, CopyTuning
from gpurt.backends.cupy.devices import Contexts, CuPyDevices
from gpurt.backends.cupy.host_copies import HostCopies
from gpurt.backends.cupy.kernels import CuPyKernels
from gpurt.backends.cupy.lanes import CuPyLanes
from gpurt.backends.cupy.peers import Peers
from gpurt.backends.cupy.pinned import PinnedMemory
from gpurt.backends.cupy.runtime import DEVICE_TO_DEVICE, LOST_STATUSES, out_of_memory
from gpurt.backends.cupy.tuning_file import TuningFile
from gpurt.errors import DeviceLost, GPUError, OutOfMemory
from gpurt.types import Capabilities, GPUDevice

log = logging.getLogger("gpurt.cupy")

CHUNK_BYTES: Final = 1 << 30
"""What the shell hands over at a time, 20 to 27 ms at 40 to 54 GB/s: a cancelled copy goes on that long at most. At
each border between two the crew runs out and starts again, 0.5 to 1.4 ms; with 512 MiB a copy loses a tenth."""


class CuPyDriver(CuPyDevices):
    """The shared part; a vendor's driver adds its name, the hooks of :class:`CuPyDevices`, and ``telemetry``.

    A memory token is the device address, an int. Any thread may call anything: each call selects its device.

    Args:
        tunings: where calibrations are kept beyond the process, or None for nowhere.
    """

    capabilities = Capabilities(
        threading="queue",
        p2p=True,
        cuda_pointers=True,
        loads_files=hasattr(os, "preadv"),
        pins_memory=True,
        # cudaMalloc with cudaFree takes 5 µs to 2 ms, the device waiting for both.
        pool_bytes=1 << 30,
        alignment_bytes=1,
        chunk_bytes=CHUNK_BYTES,
        telemetry=frozenset(
            {
                "memory_total_bytes",
                "memory_used_bytes",
                "memory_free_bytes",
                "temperature_c",
                "power_w",
                "clock_mhz",
                "utilization_percent",
            }
        ),
    )

    def __init__(self, contexts: Contexts, tunings: TuningFile | None = None) -> None:
        super().__init__(contexts)
        language = frozenset({"hip" if self.hip else "cuda"})
        self.capabilities = self.capabilities.model_copy(update={"kernels": language})
        self._tunings = tunings
        self._lanes = CuPyLanes(self.select)
        self._kernels = CuPyKernels(self.select, self._lanes.on_stream)
        self._host = HostCopies(self._lanes.on_stream)
        self._peers = Peers(self.name, self.select, contexts.retain)

    def attach(self, index: int) -> None:
        """Does nothing: a thread that only reads sensors must not cost a context (hundreds of MB of the device).

        The thread's stream, and with the first of all the context, are made by the first call that needs them.
        """

    def detach(self, index: int) -> None:
        self._lanes.leave(index, self._runtime)

    def alloc(self, index: int, nbytes: int) -> int:
        return self.select(index).malloc(nbytes)

    def free(self, index: int, mem: int) -> None:
        self.select(index).free(mem)

    def write(self, index: int, mem: int, offset: int, src: memoryview) -> None:
        self._host.copy("write", index, mem + offset, src)
        self._keep_tuning(index, len(src))

    def read(self, index: int, mem: int, offset: int, dst: memoryview) -> None:
        self._host.copy("read", index, mem + offset, dst)
        self._keep_tuning(index, len(dst))

    def load(self, index: int, mem: int, offset: int, fd: int, file_offset: int, nbytes: int) -> int:
        """Fill ``mem[offset:offset + nbytes]`` from the open file ``fd``; returns bytes.

        Fewer than ``nbytes`` only at the end of the file; what was there is on the device then. The file's position
        stays where it is. With ``O_DIRECT``, offsets and sizes must be multiples of the file's block size.

        Raises:
            OSError: the file cannot be read. Part of the range may have been written.
        """
        return self._host.load(index, mem + offset, fd, file_offset, nbytes)

    def copy(
        self, src_index: int, src: int, src_offset: int, dst_index: int, dst: int, dst_offset: int, nbytes: int
    ) -> None:
        """On one device and between peers directly; otherwise through the host (:mod:`gpurt.backends.cupy.bounce`)."""
        source, target = src + src_offset, dst + dst_offset
        if src_index != dst_index and not self._peers.reach(src_index, dst_index):
            _, stream = self._lanes.on_stream(src_index)
            self._lanes.bounce(src_index).copy(src_index, source, stream, dst_index, target, nbytes)
            return
        runtime, stream = self._lanes.on_stream(src_index)
        if src_index == dst_index:
            runtime.memcpyAsync(target, source, nbytes, DEVICE_TO_DEVICE, stream)
        else:
            runtime.memcpyPeerAsync(target, dst_index, source, src_index, nbytes, stream)
        runtime.streamSynchronize(stream)

    def peer_access(self, src_index: int, dst_index: int) -> bool | None:
        """Whether copies from ``src_index`` reach ``dst_index`` directly; None before the first. Never waits."""
        return True if src_index == dst_index else self._peers.known(src_index, dst_index)

    def pointer(self, index: int, mem: int) -> int:
        return mem

    def compile(self, index: int, source: str, name: str) -> int:
        return self._kernels.compile(index, source, name)

    def launch(
        self, index: int, kernel: int, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        self._kernels.launch(index, kernel, grid, block, args)

    def sync(self, index: int) -> None:
        self.select(index).deviceSynchronize()

    def host_alloc(self, nbytes: int) -> PinnedMemory:
        """``nbytes`` (> 0) of pinned host memory, for copies of every device. Takes about 0.5 s per GiB: keep it.

        ``write`` and ``read`` know it by its address and copy it straight, at the link's own speed.
        """
        return self._host.pinned.allocate(self._any_device(), nbytes)

    def host_memory(self, block: PinnedMemory) -> memoryview:
        """The memory as a writable ``memoryview`` of unsigned bytes."""
        return block.view()

    def host_free(self, block: PinnedMemory) -> None:
        """Give it back. While a view of it exists, or an array over one, it stays as it is."""
        self._host.pinned.free(self._any_device(), block)

    def calibrate(self, index: int) -> CopyTuning:
        """Measure from which size on pageable copies are striped. Takes about 50 ms, and needs 32 MiB of the device.

        Happens by itself at the first large copy, unless :meth:`use_tuning` came before or the file knows the device.
        """
        tuning = self._host.calibrate(index)
        self._keep_tuning(index)
        return tuning

    def use_tuning(self, index: int, tuning: CopyTuning) -> None:
        """Take what was measured earlier on this device and host. Ignored if the crew has another size now."""
        copy_tuning.known(self._runtime)[index] = tuning
        if self._tunings is not None:
            self._tunings.skip(index, tuning)

    def close(self) -> None:
        self._peers.forget()
        try:
            self._kernels.close()
            if self._host.pinned.unviewed:
                self._host.pinned.sweep(self._any_device())
            self._host.close()
        finally:
            if self._tunings is not None:
                self._tunings.close()
            self._contexts.release()

    def classify(self, exc: Exception) -> type[GPUError] | None:
        if self._runtime is not None and isinstance(exc, self._runtime.CUDARuntimeError):
            if out_of_memory(self._runtime, exc):
                return OutOfMemory
            return DeviceLost if getattr(exc, "status", None) in LOST_STATUSES else None
        # cupy.cuda.memory.OutOfMemoryError is a MemoryError.
        return super().classify(exc)

    # Inside

    def opened(self, devices: Sequence[GPUDevice]) -> None:
        """Take what is kept of the devices. Reads a file."""
        if self._tunings is not None:
            self._tunings.open(devices, copy_tuning.known(self._runtime), staging.crew_size())

    def _keep_tuning(self, index: int, nbytes: int = LARGEST) -> None:
        """After a copy of so many bytes, which may have caused a calibration."""
        if self._tunings is not None and nbytes >= copy_tuning.SIZES[0]:
            self._tunings.note(index)

    def _any_device(self) -> Any:
        """Select a device whose context exists, the first if there is none: pinning needs one, no matter which."""
        return self.select(self.recent)
