"""What a backend is doing now, and has done: its lanes, and the bytes that it has copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Direction = Literal["host_to_device", "device_to_host", "device_to_device", "file_to_device"]


@dataclass(frozen=True, slots=True)
class LaneActivity:
    """One lane at one moment."""

    name: str
    """``cuda:0:h2d``: unique within the process."""
    calls: int
    """Handed to the lane and not done, the one in the driver included."""
    held: int
    """Waiting for a place in the lane."""
    running_s: float | None
    """How long the present call has been in the driver, which is what the hang clock looks at; None between calls."""


class CopiedBytes:
    """Bytes of copies that were completed, by device id and direction. Never less than before; used on one thread."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, Direction], int] = {}

    def add(self, device_id: str, direction: Direction, nbytes: int) -> None:
        key = device_id, direction
        self._bytes[key] = self._bytes.get(key, 0) + nbytes

    def totals(self) -> Mapping[tuple[str, Direction], int]:
        """A copy."""
        return dict(self._bytes)


@runtime_checkable
class ReportsActivity(Protocol):
    """A backend that tells what it is doing. Neither method waits; both are for the backend's own loop."""

    def lanes(self) -> Sequence[LaneActivity]: ...

    def copied_bytes(self) -> Mapping[tuple[str, Direction], int]:
        """By device id and direction, since the backend was made."""
        ...
