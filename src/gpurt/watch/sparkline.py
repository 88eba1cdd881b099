"""A series of values as one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII: Final = "_.-:=+*#"
"""For terminals that have no blocks."""
GAP: Final = " "
"""Where there was no value: never the lowest one, which is a value."""


def sparkline(
    values: Sequence[float | None], width: int, *, low: float, high: float | None = None, ticks: str = BLOCKS
) -> str:
    """The last ``width`` values, oldest first, as long as there are any.

    Args:
        low, high: values of the lowest and the highest tick; None takes the highest value shown. What is beyond is
            shown as the last tick on its side.
    """
    shown = values[-width:] if width > 0 else ()
    top = high if high is not None else max((value for value in shown if value is not None), default=low)
    span = top - low
    if span <= 0:
        return "".join(GAP if value is None else ticks[0] for value in shown)
    last = len(ticks) - 1
    return "".join(
        GAP if value is None else ticks[min(last, max(0, round((value - low) / span * last)))] for value in shown
    )


def ticks_for(encoding: str | None) -> str:
    """The finest ticks that an output of this encoding can show."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS
