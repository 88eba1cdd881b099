"""Which of several adapters to take when nobody says, from what is known without opening any of them. Pure.

Opening every adapter to choose one takes seconds; the one that is chosen is opened first, and the next if it fails.
"""

from __future__ import annotations

from typing import Final

from gpurt.types import DeviceKind

_PLACES: Final = {
    DeviceKind.GPU: 0,
    DeviceKind.INTEGRATED_GPU: 1,
    DeviceKind.ACCELERATOR: 3,
    DeviceKind.UNKNOWN: 3,
    DeviceKind.CPU: 4,
    DeviceKind.SOFTWARE: 4,
}
_VIRTUAL: Final = 2

NEVER_BY_ITSELF: Final = frozenset({DeviceKind.SOFTWARE, DeviceKind.CPU})
"""Taken on explicit request only: the host's processor pretending to be a GPU."""


def rank(kind: DeviceKind, *, virtual: bool = False, memory_bytes: int | None = None) -> tuple[int, int]:
    """Sorts before those that are less wanted: discrete, integrated, virtual, unknown, software; then more memory."""
    place = _PLACES[kind]
    if virtual and place < _VIRTUAL:
        place = _VIRTUAL
    return place, -(memory_bytes or 0)
