"""Copies between the host and devices, each the fastest way for its memory and its size."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from gpurt.backends.cupy import copy_tuning
from gpurt.backends.cupy.copy_tuning import LARGEST, CopyTuning, smallest_worth_striping
from gpurt.backends.cupy.pinned import PinnedHost
from gpurt.backends.cupy.runtime import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    address_of,
    bytes_array,
    out_of_memory,
    plain_buffer,
)
from gpurt.backends.cupy.staging import Crew, join_crew, leave_crew
from gpurt.backends.cupy.staging_member import STRIPE_BYTES
from gpurt.backends.cupy.transfer import Download, FileLoad, Upload, cut

Direction = Literal["write", "read"]

_KINDS: Final[dict[Direction, int]] = {"write": HOST_TO_DEVICE, "read": DEVICE_TO_HOST}

log = logging.getLogger("gpurt.cupy")


class HostCopies:
    """Of one driver; any thread. Nothing is made before the first large copy, or the first load.

    Args:
        on_stream: gives the runtime, the device selected, and the calling thread's stream on it.
    """

    def __init__(self, on_stream: Callable[[int], tuple[Any, int]]) -> None:
        self.pinned = PinnedHost()
        self._on_stream = on_stream
        self._lock = threading.Lock()
        self._crew: Crew | None = None
        self._runtime: Any = None
        """Of the crew."""

    def copy(self, direction: Direction, index: int, address: int, host: memoryview) -> None:
        """Between ``host`` and the device memory at ``address``; returns when ``host`` may be reused."""
        place, nbytes = _place(host), len(host)
        if nbytes < copy_tuning.SIZES[0] or self.pinned.contains(place, nbytes):
            self._plain(direction, index, address, place, nbytes)
            return
        crew = self._joined(index)
        tuning = self.tuning(index)
        smallest = tuning.write_min_bytes if direction == "write" else tuning.read_min_bytes
        if smallest is None or nbytes < smallest:
            self._plain(direction, index, address, place, nbytes)
        else:
            self._striped(crew, direction, index, address, place, nbytes)

    def load(self, index: int, address: int, fd: int, file_offset: int, nbytes: int) -> int:
        """Fill device memory from an open file, through the crew's pinned buffers.

        Returns bytes, counted from the beginning: fewer than asked for only at the end of the file.

        Raises:
            OSError: it cannot be read.
        """
        crew = self._joined(index)
        stripes = cut(nbytes, STRIPE_BYTES, crew.size)
        if not stripes:
            return 0
        transfer = FileLoad(index, address, fd, file_offset, stripes)

        def plain(start: int, size: int) -> None:
            buffer = plain_buffer(size)
            if got := transfer.read(memoryview(buffer), start):
                self._plain("write", index, address + start, address_of(buffer), got)

        if crew.size:
            crew.run(transfer, plain)
        else:
            for start, size in stripes:
                plain(start, size)
        return transfer.loaded

    def tuning(self, index: int) -> CopyTuning:
        """What is known of the device in this process, measured now if nothing is."""
        crew = self._joined(index)
        with self._lock:
            tuning = copy_tuning.known(self._runtime).get(index)
            if tuning is not None and tuning.threads == crew.size:
                return tuning
            try:
                return self._measure(crew, index)
            except self._runtime.CUDARuntimeError as exc:
                if not out_of_memory(self._runtime, exc):
                    raise
        log.info("device %d is too full to measure copies on: for now they are striped from %d bytes", index, LARGEST)
        return CopyTuning(crew.size, LARGEST, LARGEST)

    def calibrate(self, index: int) -> CopyTuning:
        """Measure anew."""
        crew = self._joined(index)
        with self._lock:
            return self._measure(crew, index)

    def close(self) -> None:
        """Leave the crew; the last driver of the process ends it."""
        with self._lock:
            crew, self._crew = self._crew, None
            if crew is not None:
                leave_crew(self._runtime)

    def _measure(self, crew: Crew, index: int) -> CopyTuning:
        tuning = CopyTuning(0, None, None)
        if crew.size:
            runtime, _ = self._on_stream(index)
            host = plain_buffer(LARGEST)
            host.fill(0)  # or page faults would be measured
            device = runtime.malloc(LARGEST)
            try:
                write, read = (
                    smallest_worth_striping(
                        partial(self._plain, direction, index, device, address_of(host)),
                        partial(self._striped, crew, direction, index, device, address_of(host)),
                    )
                    for direction in _KINDS
                )
            finally:
                runtime.free(device)
            tuning = CopyTuning(crew.size, write, read)
        copy_tuning.known(self._runtime)[index] = tuning
        log.info("copies on device %d: %s", index, tuning)
        return tuning

    def _joined(self, index: int) -> Crew:
        with self._lock:
            if self._crew is None:
                self._runtime, _ = self._on_stream(index)
                self._crew = join_crew(self._runtime, index)
            return self._crew

    def _striped(self, crew: Crew, direction: Direction, index: int, address: int, place: int, nbytes: int) -> None:
        transfer = (Upload if direction == "write" else Download)(
            index, address, place, cut(nbytes, STRIPE_BYTES, crew.size)
        )
        crew.run(
            transfer,
            lambda start, size: self._plain(direction, index, address + start, place + start, size),
        )

    def _plain(self, direction: Direction, index: int, address: int, place: int, nbytes: int) -> None:
        """One call of the library; pinned memory goes at the link's speed so."""
        runtime, stream = self._on_stream(index)
        target, source = (address, place) if direction == "write" else (place, address)
        runtime.memcpyAsync(target, source, nbytes, _KINDS[direction], stream)
        runtime.streamSynchronize(stream)


def _place(host: memoryview) -> int:
    """Where ``host`` (not empty) is; it stays there as long as the caller holds it."""
    if host.readonly:  # which ctypes refuses
        return address_of(bytes_array(host))
    return ctypes.addressof(ctypes.c_char.from_buffer(host))  # 0.2 µs; by way of an array 3 µs
