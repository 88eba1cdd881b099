"""What device memory must hold while many operations on it are under way, some of which are cancelled or fail.

Effects on one allocation happen in submission order, so the model changes when an operation is submitted. A write that
is cancelled or fails leaves its range unknown, which is only seen later, when reads and copies of that range may be
under way already: so each byte range remembers the writes that it came from until they have ended well, copies hand
that memory on, and a read is judged by what became of them in the end.
"""

from __future__ import annotations

from enum import Enum, auto

from gpurt.types import MemoryHandle


class Fate(Enum):
    PENDING = auto()
    DONE = auto()
    UNKNOWN = auto()
    """Cancelled or failed: the range may hold old bytes, new ones, or some of both."""


class Write:
    """One write or copy under way, and what became of it."""

    __slots__ = ("fate",)

    def __init__(self, fate: Fate = Fate.PENDING) -> None:
        self.fate = fate


Doubt = tuple[int, int, Write]
"""From, to (bytes), and the write that decides whether the model is right there. Doubts may overlap."""


class Slot:
    """One allocation and what it must hold."""

    __slots__ = ("_content", "_doubts", "handle", "size")

    def __init__(self, handle: MemoryHandle) -> None:
        self.handle = handle
        self.size = handle.size_bytes
        self._content = bytearray(self.size)
        # Fresh memory holds anything.
        self._doubts: list[Doubt] = [(0, self.size, Write(Fate.UNKNOWN))]

    def write(self, start: int, content: memoryview) -> Write:
        """``content`` is being written. Settle the result's fate when that has ended."""
        end = start + len(content)
        write = Write()
        self._content[start:end] = content
        self._forget(start, end)
        self._doubts.append((start, end, write))
        return write

    def copy(self, start: int, source: Slot, source_start: int, size: int) -> Write:
        """A range of ``source``, which may be this slot, is being copied here."""
        end, shift = start + size, start - source_start
        write = Write()
        inherited = [(a + shift, b + shift, doubt) for a, b, doubt in source.doubts(source_start, source_start + size)]
        self._content[start:end] = source._content[source_start : source_start + size]
        self._forget(start, end)
        self._doubts += inherited
        self._doubts.append((start, end, write))
        return write

    def expect(self, start: int, size: int) -> Expected:
        """What a read that is submitted now must bring."""
        return Expected(bytes(self._content[start : start + size]), start, self.doubts(start, start + size))

    def doubts(self, start: int, end: int) -> list[Doubt]:
        """Those inside a range, cut to it."""
        return [
            (max(a, start), min(b, end), write)
            for a, b, write in self._doubts
            if a < end and b > start and write.fate is not Fate.DONE
        ]

    def _forget(self, start: int, end: int) -> None:
        """What was in this range does not matter any more; nor do writes that have ended well."""
        kept: list[Doubt] = []
        for a, b, write in self._doubts:
            if write.fate is Fate.DONE:
                continue
            if b <= start or a >= end:
                kept.append((a, b, write))
                continue
            if a < start:
                kept.append((a, start, write))
            if b > end:
                kept.append((end, b, write))
        self._doubts = kept


class Expected:
    """What a read must bring, as far as it is known."""

    __slots__ = ("_content", "_doubts", "_start")

    def __init__(self, content: bytes, start: int, doubts: list[Doubt]) -> None:
        self._content = content
        self._start = start
        self._doubts = doubts

    @property
    def pending(self) -> bool:
        """A write before the read has ended, and its caller has not been told yet."""
        return any(write.fate is Fate.PENDING for _, _, write in self._doubts)

    @property
    def known(self) -> bool:
        """All of it."""
        return all(write.fate is Fate.DONE for _, _, write in self._doubts)

    def difference(self, actual: bytes | bytearray) -> str | None:
        """What is wrong with the bytes that came, or None."""
        expected: bytes | bytearray = self._content
        if actual == expected:
            return None
        if len(actual) != len(expected):
            return f"{len(actual):,} bytes came instead of {len(expected):,}"
        if self._doubts:
            expected = bytearray(expected)
            for a, b, write in self._doubts:
                if write.fate is Fate.UNKNOWN:
                    expected[a - self._start : b - self._start] = actual[a - self._start : b - self._start]
            if actual == expected:
                return None
        wrong = [at for at in range(len(actual)) if actual[at] != expected[at]]
        return f"{len(wrong):,} of {len(actual):,} bytes are wrong, the first at {self._start + wrong[0]:,}"
