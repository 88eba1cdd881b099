"""Copies between two devices without a direct path: through host memory, both halves of the way at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gpurt.backends.cupy.runtime import (
    DEVICE_TO_HOST,
    HOST_ALLOC_PORTABLE,
    HOST_TO_DEVICE,
    STREAM_NON_BLOCKING,
    address_of,
    out_of_memory,
    plain_buffer,
)

BOUNCE_BYTES: Final = 4 << 20
"""Size of each of a bounce's two buffers: with 4 MiB the cost of a synchronisation is some hundredths of the copy's."""


class Bounce:
    """Two buffers, pinned, or plain where no more can be pinned, and the streams out of them. Of one lane thread.

    These streams are not the lane's own: they are gone with the buffers, when the lane leaves the source device.

    Args:
        runtime: CuPy's runtime module; the thread has selected a device.
        select: makes a device the calling thread's.
    """

    def __init__(self, runtime: Any, select: Callable[[int], Any]) -> None:
        self._runtime = runtime
        self._select = select
        self._streams: dict[tuple[int, int], int] = {}
        self._plain: Any = None
        try:
            self._address: int = runtime.hostAlloc(2 * BOUNCE_BYTES, HOST_ALLOC_PORTABLE)
        except runtime.CUDARuntimeError as exc:
            if not out_of_memory(runtime, exc):
                raise
            self._plain = plain_buffer(2 * BOUNCE_BYTES)
            self._address = address_of(self._plain)

    def copy(self, src_index: int, source: int, src_stream: int, dst_index: int, target: int, nbytes: int) -> None:
        """Returns when the bytes are there, and after an error when nothing of the copy is under way any more."""
        runtime = self._runtime
        outgoing = [self._stream(dst_index, turn) for turn in range(2)]
        try:
            for turn, start in enumerate(range(0, nbytes, BOUNCE_BYTES)):
                size = min(BOUNCE_BYTES, nbytes - start)
                buffer, stream = self._address + turn % 2 * BOUNCE_BYTES, outgoing[turn % 2]
                self._select(dst_index)
                runtime.streamSynchronize(stream)  # what was in this buffer has left
                self._select(src_index)
                runtime.memcpyAsync(buffer, source + start, size, DEVICE_TO_HOST, src_stream)
                runtime.streamSynchronize(src_stream)
                self._select(dst_index)
                runtime.memcpyAsync(target + start, buffer, size, HOST_TO_DEVICE, stream)
        finally:
            self._select(dst_index)
            for stream in outgoing:
                runtime.streamSynchronize(stream)

    def free(self) -> None:
        if self._plain is None:
            self._runtime.freeHost(self._address)
        for (index, _), stream in self._streams.items():
            self._runtime.setDevice(index)
            self._runtime.streamDestroy(stream)

    def _stream(self, index: int, turn: int) -> int:
        stream = self._streams.get((index, turn))
        if stream is None:
            self._select(index)
            stream = self._streams[index, turn] = self._runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)
        return stream
