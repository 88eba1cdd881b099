"""The table of live handles, and the checks that stand between a user's arguments and a vendor library.

Most libraries abort the process on a bad handle or range, so nothing reaches them that was not checked here: type,
generation, liveness, device, bounds, alignment.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from gpurt.errors import InvalidHandle, OutOfRange
from gpurt.runtime.allocator import Block
from gpurt.runtime.order import Chain
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.lease import Lease


_MOST_BITS: Final = 128


class Allocation(Chain):
    """A live allocation: the handle that users hold, the block behind it, and the order of what happens to it."""

    __slots__ = ("_views", "block", "delivered", "exported", "handle", "index", "token")

    def __init__(self, handle: MemoryHandle, block: Block, delivered: bool) -> None:
        self.tail = None
        self.handle = handle
        self.block = block
        self.index = block.index
        self.token = block.token
        self.delivered = delivered
        """Its user has the handle; until then it is only reserved in the ledger."""
        self.exported = False
        """Another library had its device address, and may have work queued on it that we know nothing of."""
        self._views: Sequence[Lease] = ()

    @property
    def open_views(self) -> int:
        """Views, and arrays made from them, that still look into this memory."""
        if not self._views:
            return 0
        self._views = tuple(view for view in self._views if view.in_use)
        return len(self._views)

    def add_view(self, view: Lease) -> None:
        self._views = (*self._views, view)

    def when_unviewed(self, callback: Callable[[], object]) -> None:
        """Call back, on any thread, when one of the views of now is in use no more: look then whether all are."""
        for view in self._views[:1]:
            view.when_unused(callback)

    def end_undelivered(self) -> None:
        """Close views that never reached their users, whose event loop is closed: their tasks may live on for ever."""
        for view in self._views:
            if not view.delivered:
                view.close()


class HandleTable:
    """Live allocations of one opening, by handle. Lanes add, the event loop's thread and the one that closes take out;
    each allocation is taken out once."""

    def __init__(self) -> None:
        # Random, so that a handle of another instance, process or run is refused instead of hitting a neighbour.
        self.generation = secrets.randbits(63)
        self._ids = itertools.count(1)
        self._live: dict[int, Allocation] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(list(self._live.values()))

    def add(self, device_id: str, size_bytes: int, block: Block, *, delivered: bool = False) -> Allocation:
        number = next(self._ids)
        handle = MemoryHandle(number, device_id, size_bytes, self.generation)
        allocation = self._live[number] = Allocation(handle, block, delivered)
        return allocation

    def get(self, handle: MemoryHandle) -> Allocation:
        """The live allocation that ``handle`` names.

        Raises:
            InvalidHandle: and says which kind of wrong it is.
        """
        if not isinstance(handle, MemoryHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidHandle(f"{type(handle).__name__} is not a MemoryHandle")
        if handle.generation != self.generation:
            raise InvalidHandle(
                "the handle belongs to another backend instance, process or run", device_id=str(handle.device_id)
            )
        try:
            allocation = self._live.get(handle.handle_id)
        except TypeError as exc:
            raise InvalidHandle(f"the handle is malformed: {exc}", device_id=str(handle.device_id)) from exc
        if allocation is None:
            raise InvalidHandle("the handle was freed already", device_id=str(handle.device_id))
        if allocation.handle is not handle and allocation.handle != handle:
            raise InvalidHandle("the handle was tampered with", device_id=str(handle.device_id))
        return allocation

    def find(self, handle: MemoryHandle) -> Allocation | None:
        """The allocation of a handle that this table made, or None when it is dead."""
        return self._live.get(handle.handle_id)

    def remove(self, allocation: Allocation) -> bool:
        """The handle is dead. False: it was already, and somebody else frees the memory."""
        return self._live.pop(allocation.handle.handle_id, None) is not None


def whole_number(value: object, what: str) -> int:
    """``value`` as an int; NumPy integers are welcome, booleans and floats are not.

    Raises:
        OutOfRange: not an integer.
    """
    if isinstance(value, bool):
        raise OutOfRange(f"{what} must be an integer, not bool")
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise OutOfRange(f"{what} must be an integer, not {type(value).__name__}") from None
    if number.bit_length() > _MOST_BITS:
        raise OutOfRange(f"{what} is beyond any memory: {brief(number)}")
    return number


def brief(value: object) -> str:
    """``value`` for a message, whatever it is: Python refuses to print integers of many thousands of digits."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)[:80]


def check_range(allocation: Allocation, offset: object, size: object, alignment: int) -> tuple[int, int]:
    """Offset and size of a range inside an allocation, in bytes.

    Raises:
        OutOfRange: negative, past the end, or not aligned as the library needs it.
    """
    total = allocation.handle.size_bytes
    if type(offset) is int and type(size) is int and alignment == 1 and offset >= 0 <= size <= total - offset:
        return offset, size  # what nearly every call is, in a quarter of the time
    start, count = whole_number(offset, "offset_bytes"), whole_number(size, "size_bytes")
    if start < 0 or count < 0 or start + count > total:
        raise OutOfRange(
            f"{count:,} bytes at offset {start:,} are not inside the allocation of {total:,} bytes",
            device_id=allocation.handle.device_id,
        )
    if alignment > 1 and (start % alignment or (count % alignment and start + count != total)):
        raise OutOfRange(
            f"this library needs offsets and sizes in multiples of {alignment} bytes; got {count:,} at {start:,}",
            device_id=allocation.handle.device_id,
        )
    return start, count
