"""Rules as placement says them to people."""

from __future__ import annotations

from collections.abc import Iterable

from gpurt.placement.constraints import DomainLimit, Pin
from gpurt.placement.words import counted, listed


def layers_words(start: int, end: int) -> str:
    """``layer 3``, ``layers 3 to 5``; ``end`` is exclusive."""
    return f"layer {start}" if end - start == 1 else f"layers {start} to {end - 1}"


def pin_words(pin: Pin) -> str:
    """``the pin of layers 3 to 5 to a, b``."""
    return f"the pin of {layers_words(pin.start, pin.end)} to {listed(sorted(pin.devices | pin.nodes))}"


def limit_words(limit: DomainLimit) -> str:
    """``at most 2 stages per zone``."""
    return f"at most {counted(limit.stages, 'stage')} per {limit.domain}"


def joined(parts: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
