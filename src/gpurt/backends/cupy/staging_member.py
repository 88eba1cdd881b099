"""One thread of the staging crew and its two pinned buffers."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from gpurt.backends.cupy.runtime import HOST_ALLOC_PORTABLE, STREAM_NON_BLOCKING, out_of_memory

if TYPE_CHECKING:
    from gpurt.backends.cupy.transfer import Transfer

STRIPE_BYTES: Final = 4 << 20
"""Size of a pinned buffer, the largest stripe. Measured with 12 threads, 1 GiB to the device: 1 MiB 19 GB/s, 2 MiB 37,
4 MiB 46, 8 MiB 37. Smaller ones pay for the GIL, larger ones leave the cache."""

log = logging.getLogger("gpurt.staging")


class Member:
    """``work`` is the thread: take a stripe into one buffer while the other one's copy runs.

    Args:
        choose: names a transfer with stripes to take for thread ``number``, or None.
        rest: blocks until there may be more; False at the end.
    """

    def __init__(
        self,
        number: int,
        runtime: Any,
        choose: Callable[[int], Transfer | None],
        rest: Callable[[], bool],
    ) -> None:
        self.runtime = runtime
        self._number = number
        self._choose = choose
        self._rest = rest
        self._selected: int | None = None
        self._slots: list[Slot] = []

    def work(self, index: int, reports: SimpleQueue[BaseException | None]) -> None:
        """The thread. Reports None once it has its buffers, or why it has not."""
        try:
            self.select(index)
            for _ in range(2):
                self._slots.append(Slot(self))
        except Exception as exc:
            self._free()
            if not out_of_memory(self.runtime, exc):
                reports.put(exc)
                return
            failure = MemoryError("no more host memory can be pinned")
            failure.__cause__ = exc
            reports.put(failure)
            return
        reports.put(None)
        try:
            self._serve()
        finally:
            self._free()

    def select(self, index: int) -> None:
        """Make device ``index`` the thread's own."""
        if index != self._selected:
            self.runtime.setDevice(index)
            self._selected = index

    def _serve(self) -> None:
        slot, other = self._slots
        while True:
            slot.finish()
            transfer = self._choose(self._number)
            if transfer is None:
                other.finish()
                if not self._rest():
                    return
                continue
            # Before a stripe is taken, or a device that hangs would keep one of another device's.
            other.leave(transfer.index)
            try:
                stripe = transfer.stripes.popleft()
            except IndexError:  # other threads were quicker
                continue
            slot.begin(transfer, *stripe)
            del transfer  # or an idle thread would keep the last one
            slot, other = other, slot

    def _free(self) -> None:
        for slot in self._slots:
            try:
                slot.free()
            except Exception:  # of a lost device, say; the thread ends either way
                log.warning("a staging buffer could not be given back", exc_info=True)
        self._slots.clear()


class Slot:
    """A pinned buffer, and the stripe that is in it.

    Each buffer has a stream of its own on every device, so that waiting for it does not wait for the other one.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._runtime = member.runtime
        self._streams: dict[int, int] = {}
        self._stripe: tuple[Transfer, int, int] | None = None
        self.address: int = self._runtime.hostAlloc(STRIPE_BYTES, HOST_ALLOC_PORTABLE)
        self.view = memoryview((ctypes.c_ubyte * STRIPE_BYTES).from_address(self.address))

    def begin(self, transfer: Transfer, start: int, size: int) -> None:
        """Start a stripe; the slot is empty. An error becomes the transfer's."""
        try:
            transfer.begin(self, start, size)
        except BaseException as exc:
            transfer.fail(exc)
            transfer.settle()
        else:
            self._stripe = transfer, start, size

    def finish(self) -> None:
        """Wait for the stripe and settle it. An error becomes the transfer's."""
        if self._stripe is None:
            return
        (transfer, start, size), self._stripe = self._stripe, None
        try:
            transfer.end(self, start, size)
        except BaseException as exc:
            transfer.fail(exc)
        transfer.settle()

    def leave(self, index: int) -> None:
        """Finish the stripe if it is on another device than ``index``."""
        if self._stripe is not None and self._stripe[0].index != index:
            self.finish()

    # For transfers

    def copy(self, index: int, target: int, source: int, size: int, kind: int) -> None:
        """Queue a copy on device ``index``."""
        self._member.select(index)
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = self._runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)
        self._runtime.memcpyAsync(target, source, size, kind, stream)

    def synchronize(self, index: int) -> None:
        """Wait for what was queued on device ``index``, if anything was."""
        stream = self._streams.get(index)
        if stream is not None:
            self._member.select(index)
            self._runtime.streamSynchronize(stream)

    def free(self) -> None:
        self.view.release()
        self._runtime.freeHost(self.address)
        for index, stream in self._streams.items():
            self._member.select(index)
            self._runtime.streamDestroy(stream)
