"""Sizes, times and lists as placement says them to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_SIZES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_TIMES: Final = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def size_words(size: int) -> str:
    """In the largest unit in which it is one or more: ``17.3 GiB``."""
    for unit, scale in _SIZES:
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def time_words(seconds: float) -> str:
    """With three digits: ``41.3 ms``."""
    for unit, scale in _TIMES:
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return "0 s" if seconds == 0 else f"{seconds / 1e-6:.2g} µs"


def counted(number: int, noun: str) -> str:
    """``1 device``, ``1,024 devices``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def span_words(least: int, most: int | None) -> str:
    """``2 at least``, ``2 to 4``."""
    return f"{least:,} at least" if most is None else f"{least:,} to {most:,}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names in their order; of many the first, and how many follow."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
