"""Apple's GPUs through MLX: memory that the host addresses as well, so that a copy is a ``memcpy``.

An allocation is an evaluated array of MLX's, written and read through its buffer. Streams of MLX belong to threads,
hence one thread for everything. The same class runs on MLX's CPU device, where there is no GPU, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from gpurt.backend import GPUBackend
from gpurt.backends.host_copy import copy_host
from gpurt.backends.metal import host as metal_host
from gpurt.backends.metal.host import Computer
from gpurt.backends.metal.memory import Block, Budget, CpuBudget, GpuBudget, drop_block, make_block
from gpurt.backends.metal.streams import give_back_stream, take_stream
from gpurt.driver import Driver
from gpurt.errors import DeviceLost, GPUError, OutOfMemory
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.apple_query import Run
from gpurt.sources.apple_tools import run_tool
from gpurt.types import Capabilities, GPUDevice, Telemetry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_OUT_OF_MEMORY: Final = (
    "[metal::malloc] Attempting to allocate",
    "[metal::malloc] Resource limit",
    "Unable to allocate",
    "CallbackErrorOutOfMemory",
)
"""Texts of MLX's ``RuntimeError``: a buffer over the largest, too many buffers, no memory, a failed command buffer."""

_LOST: Final = ("CallbackErrorSubmissionsIgnored", "CallbackErrorDeviceRemoved")
"""``MTLCommandBufferError`` 4 and 11 in the texts of command buffers: the system lets this process use the GPU no more;
the GPU is gone."""


class MetalDriver(Driver):
    """The GPU of an Apple-silicon Mac, or MLX without one.

    Args:
        device: ``gpu``, or ``cpu``: MLX on the host's processor, a software device, which runs on Linux as well.
        root: where ``/proc``, ``/sys`` and ``/etc`` are read from.
        computer: default: the one that this is.
        run: asks macOS's tools.
        mx: default: the module ``mlx.core``.
    """

    name: ClassVar[str] = metal_host.BACKEND
    capabilities = Capabilities(
        threading="backend",
        host_visible=True,
        unified_memory=True,
        pools_memory=True,
        # As for the host's memory: in shorter copies the C library does not write past the caches.
        chunk_bytes=256 << 20,
        telemetry=frozenset(
            {"memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"},
        ),
    )

    inline_copy_bytes = 1 << 20
    """A copy is a ``memcpy`` that MLX knows nothing of: 30 to 100 µs."""

    def __init__(
        self,
        device: Literal["gpu", "cpu"] = "gpu",
        *,
        root: Path = Path("/"),
        computer: Computer | None = None,
        run: Run = run_tool,
        mx: Any = None,
    ) -> None:
        if device not in ("gpu", "cpu"):
            raise ValueError(f"device must be 'gpu' or 'cpu', not {device!r}")
        self._on_gpu = device == "gpu"
        self._root, self._computer, self._run, self._given_mx = root, computer, run, mx
        self._mx: Any = None
        self._device: Any = None
        self._stream: Any = None
        self._budget: Budget

    def open(self) -> Sequence[GPUDevice]:
        computer = self._computer or Computer.this()
        if self._on_gpu:
            metal_host.check_computer(computer)
        mx = self._mx = metal_host.load_mlx(computer) if self._given_mx is None else self._given_mx
        record = self._open_gpu(mx) if self._on_gpu else self._open_cpu(mx)
        self._device = mx.gpu if self._on_gpu else mx.cpu
        self._stream = take_stream(mx, self._device)
        return (record,)

    def attach(self, index: int) -> None: ...

    def alloc(self, index: int, nbytes: int) -> Block:
        self._budget.take(nbytes)
        try:
            return make_block(self._mx, self._stream, nbytes)
        except BaseException:
            self._budget.give_back(nbytes)
            raise

    def free(self, index: int, mem: Block) -> None:
        # On a GPU MLX keeps the buffer, which takes no time.
        try:
            drop_block(self._mx, self._stream, mem, unmaps=not self._on_gpu)
        finally:
            self._budget.give_back(mem.nbytes)

    def write(self, index: int, mem: Block, offset: int, src: memoryview) -> None:
        import numpy as np

        copy_host(_part(mem, offset, len(src)), np.frombuffer(src, np.uint8))

    def read(self, index: int, mem: Block, offset: int, dst: memoryview) -> None:
        import numpy as np

        copy_host(np.frombuffer(dst, np.uint8), _part(mem, offset, len(dst)))

    def copy(
        self, src_index: int, src: Block, src_offset: int, dst_index: int, dst: Block, dst_offset: int, nbytes: int
    ) -> None:
        import numpy as np

        np.copyto(_part(dst, dst_offset, nbytes), _part(src, src_offset, nbytes))

    def sync(self, index: int) -> None:
        self._mx.synchronize(self._stream)

    def telemetry(self, index: int) -> Telemetry:
        memory = self._budget.reading()
        missing = ("temperature_c", "power_w", "clock_mhz", "utilization_percent")
        return Telemetry(
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.reserved - memory.free,
            memory_free_bytes=memory.free,
            memory_reserved_bytes=memory.reserved,
            unavailable=dict.fromkeys(missing, "unsupported"),  # macOS tells root alone; MLX tells nobody
        )

    def close(self) -> None:
        if self._stream is not None:
            give_back_stream(self._device, self._stream)
            self._stream = None

    def classify(self, exc: Exception) -> type[GPUError] | None:
        if isinstance(exc, RuntimeError):
            text = str(exc)
            if any(sign in text for sign in _OUT_OF_MEMORY):
                return OutOfMemory
            if any(sign in text for sign in _LOST):
                return DeviceLost
        return super().classify(exc)

    def trim(self, index: int) -> int:
        before: int = self._mx.get_cache_memory()
        self._mx.clear_cache()
        return max(0, before - self._mx.get_cache_memory())

    def host_view(self, index: int, mem: Block) -> memoryview:
        return _part(mem, 0, mem.nbytes).data

    def _open_gpu(self, mx: Any) -> GPUDevice:
        inventory, gpu = metal_host.inspect_gpu(mx, self._run)
        if gpu.memory_total_bytes is None or gpu.working_set_bytes is None:
            self._budget = CpuBudget(mx, self.name, self._root)  # nobody tells the GPU's share
        else:
            self._budget = GpuBudget(mx, gpu.memory_total_bytes, gpu.working_set_bytes, self._root)
        self.capabilities = self.capabilities.model_copy(update={"max_allocation_bytes": gpu.max_buffer_bytes})
        return metal_host.gpu_record(mx, inventory, gpu, self._root, self._budget.reading().free)

    def _open_cpu(self, mx: Any) -> GPUDevice:
        self._budget = CpuBudget(mx, self.name, self._root)
        return metal_host.cpu_record(mx, self._root)


def _part(mem: Block, offset: int, nbytes: int) -> NDArray[np.uint8]:
    assert mem.bytes is not None, "used after free"
    return mem.bytes[offset : offset + nbytes]


class MetalBackend(DriverBackend):
    """Apple's GPU; ``options`` are those of :class:`DriverBackend`.

    Args:
        device: as for :class:`MetalDriver`.
    """

    def __init__(self, *, device: Literal["gpu", "cpu"] = "gpu", **options: Any) -> None:
        super().__init__(MetalDriver(device), **options)


def create() -> GPUBackend:
    """What the factory calls."""
    return MetalBackend()
