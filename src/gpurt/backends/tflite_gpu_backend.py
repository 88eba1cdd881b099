"""GPUs of phones, and others, through TFLite: memory that is the tensors of tiny models.

A memory token is a list of chunks (:mod:`gpurt.backends.chunked`), because a tensor has one size, the runtime's calls
have no offset, and hold the GIL. Which runtime, and whether it really uses a GPU, :mod:`gpurt.backends.tflite.loading`
finds out; no call of this driver leaves anything queued. TFLite lists no devices and measures no memory: there is one
device, named as the operating system names the chip, and what may be allocated is what the host has, which is the same
memory on a phone.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from gpurt.backend import GPUBackend
from gpurt.backends.chunked import chunk_sizes, links, pieces
from gpurt.backends.host_budget import HostBudget
from gpurt.backends.host_heap import give_back_freed
from gpurt.driver import Driver
from gpurt.errors import GPUError, OutOfMemory
from gpurt.platforms import Platform, current_platform
from gpurt.runtime.backend import DriverBackend
from gpurt.sources import host
from gpurt.types import Capabilities, DeviceIdentity, DeviceKind, GPUDevice, Telemetry

if TYPE_CHECKING:
    from gpurt.backends.tflite.runtime import Accelerator, Chunk, ImportModule, TensorRuntime

_OUT_OF_MEMORY: Final = "Failed to allocate"
"""What LiteRT says in a ``RuntimeError``."""
_KEPT_BYTES: Final = 8 << 20
"""How much freed memory may stay with the C library, which would keep all of it: chunks are small for it."""
_SENSORS: Final = ("memory_reserved_bytes", "temperature_c", "power_w", "clock_mhz", "utilization_percent")
_MEMORY: Final = ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes")


class TensorMemory(NamedTuple):
    """An allocation. ``cost_bytes`` is what it takes of the host's memory."""

    chunks: list[Chunk]
    cost_bytes: int


class _Life(NamedTuple):
    """From ``open`` to ``close``."""

    runtime: TensorRuntime
    budget: HostBudget
    cost: int
    """Bytes of the host's memory that a byte of a tensor takes."""


class TFLiteGPUDriver(Driver):
    """One device: the GPU that a TFLite runtime finds, or with ``accelerator="cpu"`` the same on the processor.

    Args:
        accelerator: ``"gpu"``; ``"cpu"`` gives a device of kind ``software``, for tests. Neuronal processors give no
            memory to anybody, so there is no third.
        delegate: path or name of the GPU delegate's shared library, for runtimes that need one (``tflite_runtime``,
            TensorFlow); None is ``libtensorflowlite_gpu_delegate``.
        platform: None is this one.
        root: where ``/proc``, ``/dev`` and Android's ``build.prop`` are read from.
        import_module: imports the runtime's modules.
    """

    name: ClassVar[str] = "tflite"
    capabilities = Capabilities(
        threading="backend", chunk_bytes=8 << 20, unified_memory=True, telemetry=frozenset(_MEMORY)
    )

    def __init__(
        self,
        *,
        accelerator: Accelerator = "gpu",
        delegate: str | None = None,
        platform: Platform | None = None,
        root: Path = Path("/"),
        import_module: ImportModule = importlib.import_module,
    ) -> None:
        if accelerator not in ("gpu", "cpu"):
            raise ValueError(f"TFLite gives out memory of a gpu or a cpu, not of {accelerator!r}")
        self._accelerator: Accelerator = accelerator
        self._platform: Platform | None = platform
        self._delegate, self._root, self._import = delegate, root, import_module
        self._life: _Life | None = None
        self._freed_bytes = 0

    def open(self) -> Sequence[GPUDevice]:
        from gpurt.backends.tflite.loading import load

        platform: Platform = self._platform or current_platform()
        runtime = load(self._accelerator, platform=platform, import_module=self._import, delegate=self._delegate)
        try:
            device = self._describe(platform, runtime)
            # Only now: what the runtime itself takes of the host's memory was not given out.
            budget = HostBudget(self.name, root=self._root)
            self._life = _Life(runtime, budget, _cost(runtime, device.unified_memory))
        except BaseException:
            runtime.close()
            raise
        self.capabilities = type(self).capabilities.model_copy(
            update={
                "unified_memory": device.unified_memory,
                "telemetry": frozenset(_MEMORY if device.unified_memory else ()),
            }
        )
        return (device,)

    def attach(self, index: int) -> None:
        """Does nothing: there is one thread, and one device."""

    def alloc(self, index: int, nbytes: int) -> TensorMemory:
        runtime, budget, factor = self._opened
        whole, rest = divmod(nbytes, runtime.chunk_bytes)
        held = whole * runtime.chunk_bytes + (runtime.capacity(rest) if rest else 0)
        cost = held * factor
        budget.take(index, cost)
        chunks: list[Chunk] = []
        try:
            for size in chunk_sizes(held, runtime.chunk_bytes):
                chunks.append(runtime.chunk(size))
        except BaseException:
            self.free(index, TensorMemory(chunks, cost))
            raise
        return TensorMemory(chunks, cost)

    def free(self, index: int, mem: TensorMemory) -> None:
        try:
            while mem.chunks:
                mem.chunks.pop().free()
        finally:
            self._opened.budget.give_back(index, mem.cost_bytes)
            self._freed_bytes += mem.cost_bytes
            if self._freed_bytes >= _KEPT_BYTES:
                self.trim(index)

    def trim(self, index: int) -> int:
        """Gives memory of freed chunks back to the system; returns how many bytes they were."""
        freed, self._freed_bytes = self._freed_bytes, 0
        if freed:
            give_back_freed()
        return freed

    def write(self, index: int, mem: TensorMemory, offset: int, src: memoryview) -> None:
        import numpy as np

        source = np.frombuffer(src, np.uint8)
        for chunk, start, nbytes, at in pieces(offset, len(src), self._opened.runtime.chunk_bytes):
            mem.chunks[chunk].write(start, source[at : at + nbytes])

    def read(self, index: int, mem: TensorMemory, offset: int, dst: memoryview) -> None:
        import numpy as np

        target = np.frombuffer(dst, np.uint8)
        for chunk, start, nbytes, at in pieces(offset, len(dst), self._opened.runtime.chunk_bytes):
            mem.chunks[chunk].read(start, target[at : at + nbytes])

    def copy(
        self,
        src_index: int,
        src: TensorMemory,
        src_offset: int,
        dst_index: int,
        dst: TensorMemory,
        dst_offset: int,
        nbytes: int,
    ) -> None:
        """Through host memory, a chunk at a time: no runtime copies between tensors."""
        import numpy as np

        chunk_bytes = self._opened.runtime.chunk_bytes
        bounce = np.empty(min(nbytes, chunk_bytes), np.uint8)
        for link in links(src_offset, dst_offset, nbytes, chunk_bytes, chunk_bytes):
            part = bounce[: link.nbytes]
            src.chunks[link.src_chunk].read(link.src_start, part)
            dst.chunks[link.dst_chunk].write(link.dst_start, part)

    def sync(self, index: int) -> None:
        """Does nothing: each call is over when it returns."""

    def telemetry(self, index: int) -> Telemetry:
        if not self.capabilities.unified_memory:
            return Telemetry(unavailable=dict.fromkeys(sorted((*_MEMORY, *_SENSORS)), "unsupported"))
        total, free = self._opened.budget.reading(index)
        return Telemetry(
            memory_total_bytes=total,
            memory_used_bytes=total - free,
            memory_free_bytes=free,
            unavailable=dict.fromkeys(sorted(_SENSORS), "unsupported"),
        )

    def close(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            life.runtime.close()

    def classify(self, exc: Exception) -> type[GPUError] | None:
        if isinstance(exc, RuntimeError) and _OUT_OF_MEMORY in str(exc):
            return OutOfMemory
        return super().classify(exc)

    # Inside

    @property
    def _opened(self) -> _Life:
        assert self._life is not None, "the driver is not open"
        return self._life

    def _describe(self, platform: Platform, runtime: TensorRuntime) -> GPUDevice:
        from gpurt.backends.tflite.soc import chip, has_gpu_node

        cpu = host.cpu_info(self._root)
        # Dawn may take a software Vulkan, and TFLite would not say so.
        software = self._accelerator == "cpu" or (platform == "linux" and not has_gpu_node(self._root))
        name, vendor = (f"TFLite on {cpu.name}", cpu.vendor) if software else chip(platform, self._root)
        unified = software or platform in ("android", "ios") or (platform == "darwin" and vendor == "apple")
        kind = DeviceKind.INTEGRATED_GPU if unified else DeviceKind.GPU
        memory, fingerprint = host.memory_budget(self._root), host.host_fingerprint(self._root)
        return GPUDevice(
            device_id=f"{self.name}:0",
            name=name,
            vendor=vendor,
            backend=self.name,
            compute_capability=None,
            memory_bytes=memory.total_bytes if unified else None,
            memory_available=memory.usable_bytes if unified else None,
            compute_units=host.cpu_count(self._root) if software else None,
            tensor_core_count=None,
            max_threads_per_block=None,
            clock_rate_mhz=None,
            bandwidth_gbps=None,
            support_level="full" if runtime.accelerated and not software else "partial",
            driver_version=f"{runtime.name} {runtime.version}" if runtime.version else runtime.name,
            backend_name=runtime.name,
            identity=DeviceIdentity(key=f"{self.name}-{self._accelerator}:{fingerprint}"),
            kind=DeviceKind.SOFTWARE if software else kind,
            memory_usable_bytes=memory.usable_bytes // _cost(runtime, unified),
            memory_usable_source=memory.source,
            memory_pool_id=f"host:{fingerprint}" if unified else None,
            unified_memory=unified,
            backends=(self.name,),
        )


def _cost(runtime: TensorRuntime, unified: bool) -> int:
    """Of tensors that are not in host memory the runtime keeps a copy there, which is the GPU's memory, too, where both
    share it."""
    return 2 if unified and not runtime.on_host else 1


class TFLiteGPUBackend(DriverBackend):
    """:class:`TFLiteGPUDriver` as a backend. Other ``options`` are those of :class:`DriverBackend`."""

    def __init__(self, *, accelerator: Accelerator = "gpu", delegate: str | None = None, **options: Any) -> None:
        super().__init__(TFLiteGPUDriver(accelerator=accelerator, delegate=delegate), **options)


def create() -> GPUBackend:
    """What the factory calls."""
    return TFLiteGPUBackend()
