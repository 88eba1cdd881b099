"""Rates that take a kernel: reading memory and arithmetic, for backends that run kernels in a language we have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from gpurt.backend import GPUBackend
from gpurt.calibration import sources
from gpurt.calibration.rate import ROUND_S, Clock, rate
from gpurt.errors import BackendClosed, DeviceLost, GPUError, WrongLoop
from gpurt.runtime.lane import off_loop
from gpurt.types import DeviceKind, GPUDevice, Kernel, MemoryHandle

if TYPE_CHECKING:
    import numpy as np

BLOCK: Final = 256
GPU_BLOCKS: Final = 8
"""Of each compute unit: 2,048 threads, the most that one of NVIDIA's holds."""
CPU_BLOCKS: Final = 128
"""Of each core: 32,768 threads of the index space, fewer of which are not worth a thread of the host."""
UNKNOWN_UNITS: Final = 16
FIRST_ITERATIONS: Final = 4
MOST_ITERATIONS: Final = 1 << 22

FATAL: Final = (BackendClosed, WrongLoop, DeviceLost)
"""What ends a calibration; every other error costs one figure."""


def language_of(backend: GPUBackend) -> str | None:
    """A language that both the backend and :mod:`gpurt.calibration.sources` have."""
    return next((each for each in sorted(backend.capabilities.kernels) if each in sources.SOURCES), None)


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate per second, or why there is none."""

    value: float | None
    note: str | None = None


class Arithmetic:
    """The kernels of one device.

    Args:
        memory: at least 4 KiB, overwritten at the beginning.
        clock: seconds.
    """

    def __init__(self, backend: GPUBackend, device: GPUDevice, memory: MemoryHandle, clock: Clock) -> None:
        self._backend, self._device, self._memory, self._clock = backend, device, memory, clock
        self._language = language_of(backend)
        self._block = min(BLOCK, device.max_threads_per_block or BLOCK)

    async def read(self, source: MemoryHandle) -> Figure:
        """Bytes/s at which a kernel reads ``source``."""
        threads = source.size_bytes // (sources.WORD_BYTES * sources.WORDS)
        blocks = threads // self._block
        if blocks == 0:
            return Figure(None, f"too little memory is free to be read by a kernel: {source.size_bytes:,} bytes")
        words = blocks * self._block * sources.WORDS

        async def measured(kernel: Kernel, np: Any) -> float:
            args = (source, self._memory, np.uint64(words))
            return await rate(
                self._clock,
                words * sources.WORD_BYTES,
                lambda: self._launch(kernel, blocks, args),
                idle=lambda: self._launch(kernel, 1, (source, self._memory, np.uint64(1))),
            )

        return await self._figure(sources.READ, sources.SOURCES, measured)

    async def multiply_add(self) -> Figure:
        """FLOP/s in single precision."""
        return await self._figure(sources.ADD, sources.SOURCES, partial(self._busy, sources.FLOPS))

    async def multiply_matrices(self) -> Figure:
        """FLOP/s of matrix units in bfloat16; of a processor there is nothing to say."""
        if self._device.kind is DeviceKind.CPU:
            return Figure(None)
        if self._language is not None:
            capability = (self._device.compute_capability or "").partition(".")[0]
            known = self._language in sources.MATRIX_SOURCES and capability.isdigit()
            if not known or int(capability) < sources.MATRIX_CAPABILITY:
                return Figure(None, f"matrix units are measured on NVIDIA from {sources.MATRIX_CAPABILITY}.0 on only")
        return await self._figure(sources.MATRICES, sources.MATRIX_SOURCES, partial(self._busy, sources.MATRIX_FLOPS))

    async def _busy(self, flops: int, kernel: Kernel, np: Any) -> float:
        """With as many iterations as take the time of a round, so that the call itself is no part of it."""
        units = self._device.compute_units or UNKNOWN_UNITS
        blocks = units * (CPU_BLOCKS if self._language == "c" else GPU_BLOCKS)
        threads, iterations = blocks * self._block, FIRST_ITERATIONS
        await self._launch(kernel, blocks, (self._memory, np.uint32(iterations)))
        while True:
            # The best of three: one that was kept waiting would end the search too early.
            seconds = min([await self._seconds(kernel, blocks, np.uint32(iterations)) for _ in range(3)])
            if seconds >= ROUND_S / 2 or iterations >= MOST_ITERATIONS:
                break
            # At most eightfold at a time: of a short launch, most is the way there and back.
            iterations = min(MOST_ITERATIONS, iterations * max(2, min(8, round(ROUND_S / seconds))))
        args = (self._memory, np.uint32(iterations))
        return await rate(self._clock, threads * iterations * flops, lambda: self._launch(kernel, blocks, args))

    async def _seconds(self, kernel: Kernel, blocks: int, iterations: np.uint32) -> float:
        started = self._clock()
        await self._launch(kernel, blocks, (self._memory, iterations))
        return max(self._clock() - started, 1e-9)

    async def _launch(self, kernel: Kernel, blocks: int, args: Sequence[MemoryHandle | np.generic]) -> None:
        await self._backend.launch(kernel, blocks, self._block, args)

    async def _figure(
        self, name: str, texts: Mapping[str, str], measure: Callable[[Kernel, Any], Awaitable[float]]
    ) -> Figure:
        if self._language is None:
            return Figure(None, f"{self._backend.name} runs no kernels of ours: {name} is not measured")
        try:
            kernel = await self._backend.compile(self._device.device_id, texts[self._language], name)
            return Figure(await measure(kernel, await off_loop("calibration", lambda: import_module("numpy"))))
        except FATAL:
            raise
        except GPUError as exc:
            return Figure(None, f"{name}: {exc.message}")
