"""One striped copy: what is to be moved, and how far it is."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpurt.backends.cupy.runtime import DEVICE_TO_HOST, HOST_TO_DEVICE

if TYPE_CHECKING:
    from gpurt.backends.cupy.staging_member import Slot


def cut(nbytes: int, stripe: int, threads: int) -> deque[tuple[int, int]]:
    """``(start, size)`` of every stripe, in order.

    The last two stripes' worth of every thread, and copies that are no longer than that, go in halves: there are
    enough for every thread then (16 MiB by 8 threads: 24 GB/s with 2 MiB stripes, 18 with 4). Smaller ones cost
    more turns at the GIL than they gain.
    """
    whole_end = nbytes - 2 * threads * stripe
    stripes: deque[tuple[int, int]] = deque()
    start = 0
    while start < nbytes:
        size = min(stripe if start < whole_end else max(1, stripe // 2), nbytes - start)
        stripes.append((start, size))
        start += size
    return stripes


class Transfer:
    """``nbytes`` at ``address`` on device ``index``, in stripes.

    Each stripe passes a staging thread twice: ``begin`` starts it, ``end`` waits for the device. Stripes are taken
    from :attr:`stripes` (a deque: ``popleft`` is atomic), and every one is settled once.
    """

    def __init__(self, index: int, address: int, stripes: deque[tuple[int, int]]) -> None:
        self.index = index
        self.address = address
        self.stripes = stripes
        self.left = len(stripes)
        """Stripes that are not settled."""
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Lock()
        if stripes:
            self._done.acquire()

    def begin(self, slot: Slot, start: int, size: int) -> None:
        raise NotImplementedError

    def end(self, slot: Slot, start: int, size: int) -> None:
        slot.synchronize(self.index)

    def settle(self, stripes: int = 1) -> None:
        with self._lock:
            self.left -= stripes
            done = stripes > 0 and self.left == 0
        if done:
            self._done.release()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and give up what has not begun."""
        with self._lock:
            if self._error is None:
                self._error = error
        self.settle(len(self._withdraw()))

    def finish_with(self, plain: Callable[[int, int], None]) -> None:
        """Do with ``plain(start, size)`` what has not begun."""
        withdrawn = self._withdraw()
        try:
            for start, size in withdrawn:
                plain(start, size)
        except BaseException as exc:
            self.fail(exc)
        self.settle(len(withdrawn))

    def wait(self, timeout: float) -> bool:
        """Until every stripe is settled; False after ``timeout`` seconds."""
        return self._done.acquire(timeout=timeout)

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or frame and traceback keep each other, and the caller's buffer

    def _withdraw(self) -> list[tuple[int, int]]:
        withdrawn: list[tuple[int, int]] = []
        while True:
            try:
                withdrawn.append(self.stripes.popleft())
            except IndexError:
                return withdrawn


class Upload(Transfer):
    """From host memory at ``host``."""

    def __init__(self, index: int, address: int, host: int, stripes: deque[tuple[int, int]]) -> None:
        super().__init__(index, address, stripes)
        self._host = host

    def begin(self, slot: Slot, start: int, size: int) -> None:
        ctypes.memmove(slot.address, self._host + start, size)
        slot.copy(self.index, self.address + start, slot.address, size, HOST_TO_DEVICE)


class Download(Transfer):
    """To host memory at ``host``."""

    def __init__(self, index: int, address: int, host: int, stripes: deque[tuple[int, int]]) -> None:
        super().__init__(index, address, stripes)
        self._host = host

    def begin(self, slot: Slot, start: int, size: int) -> None:
        slot.copy(self.index, slot.address, self.address + start, size, DEVICE_TO_HOST)

    def end(self, slot: Slot, start: int, size: int) -> None:
        slot.synchronize(self.index)
        ctypes.memmove(self._host + start, slot.address, size)


class FileLoad(Transfer):
    """From the open file ``fd``, beginning at ``file_offset``. :attr:`loaded` tells how much there was."""

    def __init__(self, index: int, address: int, fd: int, file_offset: int, stripes: deque[tuple[int, int]]) -> None:
        super().__init__(index, address, stripes)
        self.loaded = sum(stripes[-1]) if stripes else 0
        """Bytes that were there, counted from the beginning; fewer than asked for only at the end of the file."""
        self._fd = fd
        self._file_offset = file_offset
        self._loaded_lock = threading.Lock()

    def begin(self, slot: Slot, start: int, size: int) -> None:
        if got := self.read(slot.view[:size], start):
            slot.copy(self.index, self.address + start, slot.address, got, HOST_TO_DEVICE)

    def read(self, target: memoryview, start: int) -> int:
        """Fill ``target`` with what is in the file ``start`` bytes on, without the GIL; returns bytes.

        The file's position stays where it is.
        """
        done = 0
        while done < len(target):
            got = os.preadv(self._fd, [target[done:]], self._file_offset + start + done)
            if not got:
                with self._loaded_lock:
                    self.loaded = min(self.loaded, start + done)
                break
            done += got
        return done
