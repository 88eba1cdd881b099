"""Bare OpenCL through pyopencl: ``enqueue_copy``."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from gpurt.benchmarks.library_raw import LibraryRaw
from gpurt.benchmarks.raw import Blocking, Direction, Way, bytes_of
from gpurt.sources.opencl_identity import usable_devices
from gpurt.sources.opencl_properties import read_opencl
from gpurt.sources.opencl_query import query_opencl


class RawOpenCL(LibraryRaw):
    copy_name = "enqueue_copy"

    def writer(self, src: memoryview) -> Blocking:
        return partial(self._copy, self._buffer, bytes_of(src))

    def reader(self, dst: memoryview) -> Blocking:
        return partial(self._copy, bytes_of(dst), self._buffer)

    def allocations(self, nbytes: int) -> list[Way]:
        return [Way("cl.Buffer, release", lambda: self._made_buffer(nbytes).release())]

    def synchronize(self) -> None:
        self._queue.finish()

    def _open(self) -> None:
        import numpy as np

        self._buffers: list[Any] = []
        cl: Any = importlib.import_module("pyopencl")
        self._cl = cl
        found = usable_devices(read_opencl(query_opencl(cl)))[self.index]
        device = cl.get_platforms()[found.platform_index].get_devices()[found.index]
        self._context = cl.Context([device])
        self._queue = cl.CommandQueue(self._context)
        self._copy = partial(cl.enqueue_copy, self._queue, is_blocking=True)
        self._buffer = self._kept_buffer()
        self._copy(self._buffer, np.ones(self.nbytes, np.uint8))
        if not self.on_host:
            # Page-locked, in every driver that has such memory.
            pinned = self._kept_buffer(cl.mem_flags.ALLOC_HOST_PTR)
            flags = cl.map_flags.READ | cl.map_flags.WRITE
            self._pinned: Any = cl.enqueue_map_buffer(self._queue, pinned, flags, 0, self.nbytes, np.uint8)[0]

    def _close(self) -> None:
        self._pinned = None
        while self._buffers:
            self._buffers.pop().release()

    def _within(self, nbytes: int) -> Way:
        copy, queue, buffer = self._cl.enqueue_copy, self._queue, self._buffer

        def within() -> None:
            copy(queue, buffer, buffer, src_offset=0, dst_offset=nbytes, byte_count=nbytes).wait()

        return Way(self.copy_name, within)

    @property
    def _best_name(self) -> str:
        return "pinned, enqueue_copy"

    def _best(self, direction: Direction, host: memoryview) -> Blocking:
        pinned = self._pinned[: len(host)]
        to, of = (self._buffer, pinned) if direction == "to device" else (pinned, self._buffer)
        return partial(self._copy, to, of)

    def _kept_buffer(self, flags: int = 0) -> Any:
        self._buffers.append(self._made_buffer(self.nbytes, flags))
        return self._buffers[-1]

    def _made_buffer(self, nbytes: int, flags: int = 0) -> Any:
        return self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE | flags, nbytes)
