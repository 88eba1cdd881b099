"""How a large copy is cut. A cancelled one goes on to the end of its piece: pieces are short in time, not in bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

PIECE_S: Final = 0.05
"""What a piece may take, going by the one before it."""

FIRST_BYTES: Final = 4 << 20
"""Size of the first piece, which tells how fast this memory is: touched memory takes 8 to 12 GB/s a thread, fresh
memory a tenth of that, because every page of it is a fault first."""

UNCUT_BYTES: Final = 64 << 20
"""Up to here there is one piece: 40 ms even in fresh memory."""


def pieces(
    nbytes: int,
    most: int,
    alignment: int = 1,
    *,
    paced: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterable[tuple[int, int]]:
    """``(start, stop)`` of every piece, in order; copy each before asking for the next.

    Args:
        most: bytes of the largest piece; rounded down to ``alignment``, but not to nothing.
        paced: begin small and cut what follows by the time that it took. For memory that the host copies by itself:
            one call then is one ``memcpy``, and the C library writes past the caches only in long ones (here from 232
            MiB on, 11 against 8.5 GB/s). Without it all pieces are of ``most`` bytes.
    """
    if nbytes <= UNCUT_BYTES and nbytes <= most:
        return ((0, nbytes),)
    most = max(alignment, most - most % alignment)
    first = min(most, max(alignment, FIRST_BYTES - FIRST_BYTES % alignment))
    if paced:
        return _paced(nbytes, first, most, alignment, clock)
    return ((start, min(start + most, nbytes)) for start in range(0, nbytes, most))


def _paced(nbytes: int, first: int, most: int, alignment: int, clock: Callable[[], float]) -> Iterator[tuple[int, int]]:
    start, size = 0, first
    while start < nbytes:
        stop = min(start + size, nbytes)
        began = clock()
        yield start, stop
        size = int((stop - start) * PIECE_S / max(clock() - began, 1e-9))
        size = min(most, max(first, size - size % alignment))
        start = stop
