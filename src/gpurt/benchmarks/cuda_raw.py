"""Bare CUDA through CuPy's runtime binding: what gpurt's copies are compared with. Blocking; needs a GPU.

As a program (``python -m gpurt.benchmarks.cuda_raw init|memory``) it prints one JSON object, so that a start of
CUDA can be timed in a process that had none.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

HOST_TO_DEVICE: Final = 1  # cudaMemcpyKind
DEVICE_TO_HOST: Final = 2
NON_BLOCKING: Final = 1  # cudaStreamNonBlocking


def load_runtime() -> Any:
    """CuPy's runtime module.

    Raises:
        ImportError: CuPy is not installed.
    """
    import cupy  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return cupy.cuda.runtime  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def init_seconds() -> dict[str, float]:
    """Seconds to import CuPy and to make the first context of this process."""
    started = time.perf_counter()
    runtime = load_runtime()
    imported = time.perf_counter()
    runtime.setDevice(0)
    runtime.free(0)  # the documented no-op that makes the context
    return {"import_s": imported - started, "context_s": time.perf_counter() - imported}


class RawCopies:
    """Buffers of ``nbytes`` on device 0 and, pageable and pinned, on the host; and the plain copies between them.

    A context manager, because pinned memory belongs to the machine.
    """

    def __init__(self, nbytes: int) -> None:
        import numpy as np

        self.nbytes = nbytes
        self.runtime = load_runtime()
        self.runtime.setDevice(0)
        self.pageable = np.ones(nbytes, np.uint8)
        self.device: int = self.runtime.malloc(nbytes)
        self.pinned: int = self.runtime.hostAlloc(nbytes, 0)
        self.stream: int = self.runtime.streamCreateWithFlags(NON_BLOCKING)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.runtime.setDevice(0)
        self.runtime.streamDestroy(self.stream)
        self.runtime.freeHost(self.pinned)
        self.runtime.free(self.device)

    def pageable_copy(self, kind: int) -> None:
        """One ``cudaMemcpy``, as ``cupy.asarray`` and ``tensor.to("cuda")`` do."""
        self._copy(self.pageable.ctypes.data, kind, lambda to, of: self.runtime.memcpy(to, of, self.nbytes, kind))

    def pinned_copy(self, kind: int) -> None:
        """One asynchronous copy of pinned memory: the fastest that the link goes."""

        def copy(to: int, of: int) -> None:
            self.runtime.memcpyAsync(to, of, self.nbytes, kind, self.stream)
            self.runtime.streamSynchronize(self.stream)

        self._copy(self.pinned, kind, copy)

    def _copy(self, host: int, kind: int, copy: Callable[[int, int], None]) -> None:
        self.runtime.setDevice(0)
        copy(*self._sides(kind, host))

    def _sides(self, kind: int, host: int) -> tuple[int, int]:
        """Target and source."""
        return (self.device, host) if kind == HOST_TO_DEVICE else (host, self.device)


class RawWire(RawCopies):
    """The same for any size up to ``nbytes``, from any thread, and to memory of the caller's."""

    def memcpy(self, kind: int, nbytes: int) -> None:
        self._memcpy(kind, nbytes, self.pageable.ctypes.data)

    def memcpy_and_wait(self, kind: int, nbytes: int) -> None:
        """``cudaMemcpy`` to the device returns when the source may be reused, before the bytes are there."""
        self.memcpy(kind, nbytes)
        self.runtime.streamSynchronize(0)

    def read_into(self, target: memoryview) -> None:
        """One ``cudaMemcpy`` into ``target``."""
        import numpy as np

        self._memcpy(DEVICE_TO_HOST, len(target), np.frombuffer(target, np.uint8).ctypes.data)

    def straight(self, kind: int, nbytes: int, stream: int | None = None) -> None:
        """One asynchronous copy of pinned memory."""
        stream = self.stream if stream is None else stream
        self.runtime.setDevice(0)
        self.runtime.memcpyAsync(*self._sides(kind, self.pinned), nbytes, kind, stream)
        self.runtime.streamSynchronize(stream)

    def straight_on_own_stream(self, kind: int) -> None:
        self.runtime.setDevice(0)
        stream = self.runtime.streamCreateWithFlags(NON_BLOCKING)
        self.straight(kind, self.nbytes, stream)
        self.runtime.streamDestroy(stream)

    def straight_many(self, nbytes: int) -> None:
        """``nbytes`` to the device, a multiple of the buffers' size."""
        for _ in range(nbytes // self.nbytes):
            self.straight(HOST_TO_DEVICE, self.nbytes)

    def _memcpy(self, kind: int, nbytes: int, host: int) -> None:
        self.runtime.setDevice(0)
        self.runtime.memcpy(*self._sides(kind, host), nbytes, kind)


def memory_operations(nbytes: int = 256 << 20, rounds: int = 5) -> dict[str, float]:
    """Allocation in µs, copies in GB/s."""
    with RawCopies(nbytes) as raw:

        def allocate_and_free() -> None:
            raw.runtime.free(raw.runtime.malloc(nbytes))

        figures = {"allocate_free_us": _median_seconds(allocate_and_free, rounds) * 1e6}
        for name, kind in (("h2d", HOST_TO_DEVICE), ("d2h", DEVICE_TO_HOST)):
            for memory, copy in (("pageable", raw.pageable_copy), ("pinned", raw.pinned_copy)):
                took = _median_seconds(lambda copy=copy, kind=kind: copy(kind), rounds)
                figures[f"{name}_{memory}_gb_s"] = nbytes / took / 1e9
    return figures


def _median_seconds(call: Callable[[], None], rounds: int) -> float:
    call()
    figures: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        figures.append(time.perf_counter() - started)
    return statistics.median(figures)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"init": init_seconds, "memory": memory_operations}[sys.argv[1]]()))
