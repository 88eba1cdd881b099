"""The smallest honest driver: two devices in byte arrays. Shows what a Driver is, and takes tiny chunks."""

from __future__ import annotations

import threading as threads
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from gpurt.driver import Driver
from gpurt.types import Capabilities, DeviceKind, GPUDevice, Telemetry

CAPACITY = 2 << 30


class ReferenceDriver(Driver):
    name: ClassVar[str] = "reference"

    def __init__(self, threading: Literal["backend", "device", "queue"] = "queue", chunk_bytes: int = 1 << 20) -> None:
        self.capabilities = Capabilities(
            threading=threading,
            p2p=True,
            host_visible=True,
            chunk_bytes=chunk_bytes,
            telemetry=frozenset({"memory_total_bytes", "memory_free_bytes"}),
        )
        self.used = [0, 0]
        self._lock = threads.Lock()

    def open(self) -> Sequence[GPUDevice]:
        self.used = [0, 0]
        return [
            GPUDevice(
                device_id=f"reference:{index}",
                name="Reference",
                vendor="gpurt",
                backend="reference",
                compute_capability=None,
                memory_bytes=CAPACITY,
                memory_available=CAPACITY,
                compute_units=None,
                tensor_core_count=0,
                max_threads_per_block=None,
                clock_rate_mhz=None,
                bandwidth_gbps=None,
                support_level="full",
                driver_version=None,
                backend_name="bytearray",
                kind=DeviceKind.CPU,
                simulated=True,
            )
            for index in range(2)
        ]

    def attach(self, index: int) -> None: ...

    def alloc(self, index: int, nbytes: int) -> bytearray:
        with self._lock:
            if self.used[index] + nbytes > CAPACITY:
                raise MemoryError(f"{nbytes} bytes do not fit")
            self.used[index] += nbytes
        return bytearray(nbytes)

    def free(self, index: int, mem: bytearray) -> None:
        with self._lock:
            self.used[index] -= len(mem)
        mem.clear()  # fails while anybody has the memory exported

    def write(self, index: int, mem: bytearray, offset: int, src: memoryview) -> None:
        memoryview(mem)[offset : offset + len(src)] = src

    def read(self, index: int, mem: bytearray, offset: int, dst: memoryview) -> None:
        dst[:] = memoryview(mem)[offset : offset + len(dst)]

    def copy(
        self,
        src_index: int,
        src: bytearray,
        src_offset: int,
        dst_index: int,
        dst: bytearray,
        dst_offset: int,
        nbytes: int,
    ) -> None:
        memoryview(dst)[dst_offset : dst_offset + nbytes] = memoryview(src)[src_offset : src_offset + nbytes]

    def sync(self, index: int) -> None: ...

    def telemetry(self, index: int) -> Telemetry:
        free = CAPACITY - self.used[index]
        return Telemetry(memory_total_bytes=CAPACITY, memory_free_bytes=free, memory_used_bytes=self.used[index])

    def close(self) -> None: ...

    def host_view(self, index: int, mem: Any) -> memoryview:
        return memoryview(mem)
