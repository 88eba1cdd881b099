"""What a backend may offer beyond :class:`gpurt.backend.GPUBackend`, for the rooms above: accounts of its memory, what
its lanes are doing, memory that is freed later, a limit set from outside. A :class:`gpurt.DriverBackend` offers all of
it; a natively asynchronous backend may leave any of it out, and is asked by ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from gpurt.types import GPUDevice, MemoryHandle, Telemetry

Direction = Literal["host_to_device", "device_to_host", "device_to_device", "file_to_device"]

MemoryLimit = Callable[[GPUDevice], int | None]
"""Bytes that may be allocated on a device, or None for as many as it has."""


@dataclass(slots=True)
class Usage:
    """Accounting of one device since ``initialize``. Bytes and counts of what users asked for."""

    limit_bytes: int | None = None
    current_bytes: int = 0
    current_count: int = 0
    reserved_bytes: int = 0
    """Asked for and not yet there."""
    peak_bytes: int = 0
    """Most that was live at one time."""
    total_bytes: int = 0
    total_count: int = 0

    @property
    def committed_bytes(self) -> int:
        """What counts against the limit: live and reserved."""
        return self.current_bytes + self.reserved_bytes


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One device's pool since ``initialize``."""

    limit_bytes: int
    """Most that is kept; 0 where pooling is off."""
    cached_bytes: int
    cached_count: int
    peak_cached_bytes: int
    hits: int
    misses: int
    """Allocations that the library had to make."""
    evicted_bytes: int
    """Given back to the library by ``trim`` or because memory was short elsewhere."""


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


@runtime_checkable
class ReportsMemory(Protocol):
    """A backend that keeps accounts of each device's memory. Neither method waits; on the backend's own loop."""

    def memory_usage(self, device_id: str) -> Usage:
        """
        Raises:
            BackendClosed, DeviceNotFound.
        """
        ...

    def pool_statistics(self, device_id: str) -> PoolStatistics:
        """
        Raises:
            BackendClosed, DeviceNotFound, DeviceLost.
        """
        ...


@runtime_checkable
class ReportsActivity(Protocol):
    """A backend that tells what it is doing. Neither method waits; both are for the backend's own loop."""

    def lanes(self) -> Sequence[LaneActivity]: ...

    def copied_bytes(self) -> Mapping[tuple[str, Direction], int]:
        """Bytes of completed copies by device id and direction, since the backend was made."""
        ...


@runtime_checkable
class ReportsTelemetry(Protocol):
    """A backend that reads every metric of a device in one call."""

    async def get_telemetry(self, device_id: str) -> Telemetry: ...


@runtime_checkable
class FreesWhenUnviewed(Protocol):
    """A backend that frees an allocation by itself once no view of it is in use."""

    def free_when_unviewed(self, handle: MemoryHandle) -> None:
        """Returns at once; until the last view is gone, the allocation is live.

        Raises:
            InvalidHandle, BackendClosed, WrongLoop.
        """
        ...


@runtime_checkable
class LimitsMemory(Protocol):
    """A backend to which an operator's limit can be given before it is initialised."""

    def limit_memory(self, limit: MemoryLimit) -> None: ...


@runtime_checkable
class KnowsPeers(Protocol):
    """A backend whose copies between devices may go directly, and which knows whether they do."""

    def peer_access(self, src_device_id: str, dst_device_id: str) -> bool | None:
        """Whether copies from the one device reach the other directly; None before the first, or where nothing tells.
        Does not wait."""
        ...
