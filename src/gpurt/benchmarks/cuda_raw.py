"""Bare CUDA (and HIP) through CuPy's runtime binding: what gpurt's copies are compared with. Blocking; needs a GPU.

As a program (``python -m gpurt.benchmarks.cuda_raw init|memory``) it prints one JSON object, so that a start of
CUDA can be timed in a process that had none.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from gpurt.backends.cupy.runtime import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_ALLOC_PORTABLE,
    HOST_TO_DEVICE,
    STREAM_NON_BLOCKING,
    address_of,
    bytes_array,
    import_runtime,
)
from gpurt.benchmarks.raw import Blocking, Direction, Raw, Way

_LARGEST_PINNED: Final = 1 << 30
"""Pinning takes 0.4 to 0.5 s per GiB; more than this is copied in pieces, queued without a pause."""

_KINDS: Final[dict[Direction, int]] = {"to device": HOST_TO_DEVICE, "from device": DEVICE_TO_HOST}


class RawCUDA(Raw):
    """Device ``index`` by the runtime's own calls, and ``second`` if copies across are wanted."""

    host_share = 1
    device_share = 1

    def __init__(self, nbytes: int, index: int, second: int | None = None) -> None:
        super().__init__(nbytes)
        self.index = index
        self.second = second
        self._made = ExitStack()
        self._pool: Any = None

    def open(self) -> None:
        runtime = self.runtime = import_runtime()
        prefix = "hip" if runtime.is_hip else "cuda"
        self.copy_name = f"{prefix}Memcpy"
        self.ceiling_name = f"pinned, {prefix}MemcpyAsync"
        if self.second is not None:
            runtime.setDevice(self.second)
            self._there: int = runtime.malloc(self.nbytes // 2)
            self._made.callback(runtime.free, self._there)
            self._there_stream: int = runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)
            self._made.callback(self._destroy, self.second, self._there_stream)
        runtime.setDevice(self.index)
        self._here: int = runtime.malloc(self.nbytes)
        self._made.callback(runtime.free, self._here)
        self._pinned_bytes = min(self.nbytes, _LARGEST_PINNED)
        self._pinned: int = runtime.hostAlloc(self._pinned_bytes, HOST_ALLOC_PORTABLE)
        self._made.callback(runtime.freeHost, self._pinned)
        self._streams: list[int] = []
        for _ in range(2):
            self._streams.append(runtime.streamCreateWithFlags(STREAM_NON_BLOCKING))
            self._made.callback(self._destroy, self.index, self._streams[-1])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.free_all_blocks()
            self._pool = None
        if hasattr(self, "runtime"):
            self.runtime.setDevice(self.index)
        self._made.close()

    def writer(self, src: memoryview) -> Blocking:
        """One ``cudaMemcpy``, as ``cupy.asarray`` and ``tensor.to("cuda")`` do. It returns when ``src`` may be reused,
        for small copies before the bytes are there."""
        return self._memcpy("to device", src)

    def reader(self, dst: memoryview) -> Blocking:
        return self._memcpy("from device", dst)

    def fastest(self, direction: Direction, host: memoryview, total: int | None = None) -> Blocking:
        """Asynchronous copies of pinned memory, one for up to 1 GiB."""
        size, piece = len(host) if total is None else total, min(len(host), self._pinned_bytes)

        def copy() -> None:
            self.runtime.setDevice(self.index)
            done = 0
            while done < size:
                offset = done % self.nbytes
                part = min(piece, size - done, self.nbytes - offset)
                self._queue(direction, part, offset, 0, self._streams[0])
                done += part
            self.runtime.streamSynchronize(self._streams[0])

        return copy

    def both_ways(self, host: memoryview) -> Blocking:
        half = len(host) // 2
        step = min(half, self._pinned_bytes // 2)

        def copy() -> None:
            self.runtime.setDevice(self.index)
            for start in range(0, half, step):
                part = min(step, half - start)
                self._queue("to device", part, start, 0, self._streams[0])
                self._queue("from device", part, half + start, step, self._streams[1])
            for stream in self._streams:
                self.runtime.streamSynchronize(stream)

        return copy

    def device_copies(self, nbytes: int, *, across: bool) -> tuple[Way | None, Way]:
        runtime, stream = self.runtime, self._streams[0]

        def within() -> None:
            runtime.setDevice(self.index)
            runtime.memcpyAsync(self._here + nbytes, self._here, nbytes, DEVICE_TO_DEVICE, stream)
            runtime.streamSynchronize(stream)

        if not across:
            return None, Way("cudaMemcpyAsync", within)

        def direct() -> None:
            runtime.setDevice(self.index)
            runtime.memcpyPeerAsync(self._there, self.second, self._here, self.index, nbytes, stream)
            runtime.streamSynchronize(stream)

        def staged() -> None:
            for start in range(0, nbytes, self._pinned_bytes):
                part = min(self._pinned_bytes, nbytes - start)
                runtime.setDevice(self.index)
                self._queue("from device", part, start, 0, stream)
                runtime.streamSynchronize(stream)
                runtime.setDevice(self.second)
                runtime.memcpyAsync(self._there + start, self._pinned, part, HOST_TO_DEVICE, self._there_stream)
                runtime.streamSynchronize(self._there_stream)

        return Way("through pinned memory", staged), Way("cudaMemcpyPeerAsync", direct)

    def allocations(self, nbytes: int) -> list[Way]:
        runtime = self.runtime

        def plain() -> None:
            runtime.setDevice(self.index)
            runtime.free(runtime.malloc(nbytes))

        ways = [Way("hipMalloc, hipFree" if runtime.is_hip else "cudaMalloc, cudaFree", plain)]
        try:
            cupy: Any = importlib.import_module("cupy")
        except ImportError:
            return ways
        if self._pool is None:
            self._pool = cupy.cuda.MemoryPool()
        pool = self._pool

        def pooled() -> None:
            runtime.setDevice(self.index)
            pool.malloc(nbytes)  # its block goes back with the last reference

        return [*ways, Way("CuPy's pool", pooled)]

    def synchronize(self) -> None:
        self.runtime.setDevice(self.index)
        self.runtime.deviceSynchronize()

    def _memcpy(self, direction: Direction, host: memoryview) -> Blocking:
        array, kind = bytes_array(host), _KINDS[direction]
        to, of = self._sides(direction, 0, address_of(array))

        def copy() -> None:
            self.runtime.setDevice(self.index)
            self.runtime.memcpy(to, of, array.nbytes, kind)

        return copy

    def _queue(self, direction: Direction, nbytes: int, offset: int, pinned_offset: int, stream: int) -> None:
        sides = self._sides(direction, offset, self._pinned + pinned_offset)
        self.runtime.memcpyAsync(*sides, nbytes, _KINDS[direction], stream)

    def _destroy(self, index: int, stream: int) -> None:
        self.runtime.setDevice(index)
        # What a failed call has queued may still use memory that is freed next.
        self.runtime.streamSynchronize(stream)
        self.runtime.streamDestroy(stream)

    def _sides(self, direction: Direction, offset: int, host: int) -> tuple[int, int]:
        """Target and source."""
        device = self._here + offset
        return (device, host) if direction == "to device" else (host, device)


def init_seconds() -> dict[str, float]:
    """Seconds to import CuPy and to make the first context of this process."""
    started = time.perf_counter()
    runtime: Any = importlib.import_module("cupy").cuda.runtime
    imported = time.perf_counter()
    runtime.setDevice(0)
    runtime.free(0)  # the documented no-op that makes the context
    return {"import_s": imported - started, "context_s": time.perf_counter() - imported}


def memory_operations(nbytes: int = 256 << 20, rounds: int = 5) -> dict[str, float]:
    """Allocation in µs, copies in GB/s."""
    import numpy as np

    host = np.ones(nbytes, np.uint8).data
    raw = RawCUDA(nbytes, 0)
    try:
        raw.open()
        median = partial(_median_seconds, rounds=rounds)
        figures = {"allocate_free_us": median(raw.allocations(nbytes)[0].call) * 1e6}
        copies: dict[str, Blocking] = {
            "h2d_pageable": raw.writer(host),
            "h2d_pinned": raw.fastest("to device", host),
            "d2h_pageable": raw.reader(host),
            "d2h_pinned": raw.fastest("from device", host),
        }
        return figures | {f"{name}_gb_s": nbytes / median(copy) / 1e9 for name, copy in copies.items()}
    finally:
        raw.close()


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
