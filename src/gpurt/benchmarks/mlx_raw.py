"""Bare MLX: an array's own memory through its ``memoryview``, which is the quickest way in and out of it."""

from __future__ import annotations

import importlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from gpurt.backends.metal.memory import make_block
from gpurt.backends.metal.streams import give_back_stream, take_stream
from gpurt.benchmarks.library_raw import LibraryRaw
from gpurt.benchmarks.raw import Way
from gpurt.types import DeviceKind

if TYPE_CHECKING:
    from gpurt.benchmarks.raw import Bytes


class RawMLX(LibraryRaw):
    copy_name = "np.copyto, memoryview of mx.array"
    host_share = 0  # the array is the only memory
    _stream: Any = None

    def synchronize(self) -> None:
        with self._lock:
            self._mx.synchronize(self._stream)

    def allocations(self, nbytes: int) -> list[Way]:
        return [Way("mx.zeros, mx.eval", partial(self._block, nbytes))]

    def _open(self) -> None:
        self._lock = threading.Lock()
        mx = self._mx = importlib.import_module("mlx.core")
        self._on: Any = mx.cpu if self.device.kind is DeviceKind.SOFTWARE else mx.gpu
        self._stream = take_stream(mx, self._on)

    def _close(self) -> None:
        # The array goes with the last view of it.
        if self._stream is not None:
            give_back_stream(self._on, self._stream)
            self._stream = None

    def _made_memory(self) -> Bytes:
        memory = self._block(self.nbytes).bytes
        assert memory is not None
        return memory

    def _within(self, nbytes: int) -> Way:
        import numpy as np

        return Way(self.copy_name, partial(np.copyto, self._memory[nbytes : 2 * nbytes], self._memory[:nbytes]))

    def _block(self, nbytes: int) -> Any:
        with self._lock:
            return make_block(self._mx, self._stream, nbytes)
