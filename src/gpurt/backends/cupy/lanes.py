"""What each lane thread has of each device: a stream, and buffers for copies to devices without a direct path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpurt.backends.cupy.bounce import Bounce
from gpurt.backends.cupy.runtime import STREAM_NON_BLOCKING


class CuPyLanes(threading.local):
    """Of one driver. Everything here is about the calling thread.

    Args:
        select: makes a device the calling thread's, and gives the runtime.
    """

    def __init__(self, select: Callable[[int], Any]) -> None:
        self._select = select
        self._streams: dict[int, int] = {}
        self._bounces: dict[int, Bounce] = {}

    def on_stream(self, index: int) -> tuple[Any, int]:
        """The runtime, with ``index`` selected, and the thread's stream on it."""
        runtime = self._select(index)
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)
        return runtime, stream

    def bounce(self, index: int) -> Bounce:
        """The thread's buffers for copies from device ``index`` through the host."""
        bounce = self._bounces.get(index)
        if bounce is None:
            bounce = self._bounces[index] = Bounce(self._select(index), self._select)
        return bounce

    def leave(self, index: int, runtime: Any) -> None:
        """Give back what the thread has of a device.

        May come after the driver's end, hence no ``select``: the runtime and its contexts outlive that, our hold does
        not.
        """
        bounce = self._bounces.pop(index, None)
        stream = self._streams.pop(index, None)
        try:
            if bounce is not None:
                bounce.free()
        finally:
            if stream is not None:
                runtime.setDevice(index)
                runtime.streamDestroy(stream)
