"""From which size on a copy of pageable memory is worth striping: measured, never guessed."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

SIZES: Final = (8 << 20, 16 << 20, 32 << 20)
"""What a calibration measures, in bytes. Below, striping loses: 4 MiB 7 to 9 GB/s against 8 to 13 on an H100."""

LARGEST: Final = SIZES[-1]

MARGIN: Final = 0.85
"""Striped must take at most this share of the plain copy's time: it keeps more CPUs busy."""

ROUNDS: Final = 3
BUDGET_S: Final = 0.015
"""For one direction. Where it runs out, as it does on a slow link, larger sizes count as the last one measured."""

REVISION: Final = 1
"""Of how copies are striped. Raise it with every change that moves the thresholds: what is kept counts no more then."""

Copy = Callable[[int], None]
"""Copies so many bytes."""


@dataclass(frozen=True, slots=True)
class CopyTuning:
    """How one device's copies of pageable memory are done. ``dataclasses.asdict`` of it is JSON, and back.

    ``*_min_bytes`` is the smallest copy that is striped, None where plain copies are as fast at every size.
    """

    threads: int
    """Size of the crew that was measured; the figures mean nothing for another."""
    write_min_bytes: int | None
    read_min_bytes: int | None


def smallest_worth_striping(plain: Copy, striped: Copy, clock: Callable[[], float] = time.perf_counter) -> int | None:
    """Measure both, and return the size from which ``striped`` wins, or None."""
    deadline = clock() + BUDGET_S
    smallest: int | None = None
    for size in SIZES:
        # In turns, so that neither alone has the bytes in its cache.
        pairs = [(_seconds(plain, size, clock), _seconds(striped, size, clock)) for _ in range(ROUNDS)]
        plain_s, striped_s = (min(figures) for figures in zip(*pairs, strict=True))
        if striped_s > MARGIN * plain_s:
            smallest = None
        elif smallest is None:
            smallest = size
        else:
            break  # won twice in a row: it only gets better from here
        if clock() > deadline:
            break
    return smallest


def _seconds(copy: Copy, size: int, clock: Callable[[], float]) -> float:
    started = clock()
    copy(size)
    return clock() - started


_known: weakref.WeakKeyDictionary[Any, dict[int, CopyTuning]] = weakref.WeakKeyDictionary()


def known(runtime: Any) -> dict[int, CopyTuning]:
    """What this process knows, by device index; indexes never change meaning within a process."""
    return _known.setdefault(runtime, {})
