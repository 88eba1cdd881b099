"""Ledger: what every device has given out, and the limits on it.

Bytes are reserved when an allocation is submitted, not when it succeeds, so that concurrent calls cannot overshoot
a limit together. Thread-safe: undone and detached allocations are settled on lane threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpurt.errors import OutOfMemory


@dataclass(slots=True)
class Usage:
    """Accounting of one device since ``initialize``. Bytes and counts of what users asked for."""

    limit_bytes: int | None = None
    current_bytes: int = 0
    current_count: int = 0
    reserved_bytes: int = 0
    """Asked for and not yet there."""
    peak_bytes: int = 0
    total_bytes: int = 0
    total_count: int = 0

    @property
    def committed_bytes(self) -> int:
        """What counts against the limit: live and reserved."""
        return self.current_bytes + self.reserved_bytes


@dataclass(slots=True)
class Ledger:
    """Usage by device id."""

    _usage: dict[str, Usage] = field(default_factory=dict[str, Usage])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, limits: Mapping[str, int | None]) -> None:
        """Start afresh for these devices. A limit of None leaves the decision to the library."""
        with self._lock:
            self._usage = {device_id: Usage(limit_bytes=limit) for device_id, limit in limits.items()}

    def usage(self, device_id: str) -> Usage:
        """A snapshot of one device's accounting."""
        with self._lock:
            usage = self._usage[device_id]
            return Usage(
                usage.limit_bytes,
                usage.current_bytes,
                usage.current_count,
                usage.reserved_bytes,
                usage.peak_bytes,
                usage.total_bytes,
                usage.total_count,
            )

    def reserve(self, device_id: str, nbytes: int) -> None:
        """Set ``nbytes`` aside. Follow with ``commit`` or ``cancel``.

        Raises:
            OutOfMemory: the limit would be exceeded; nothing is reserved.
        """
        with self._lock:
            usage = self._usage[device_id]
            limit, committed = usage.limit_bytes, usage.committed_bytes
            if limit is not None and committed + nbytes > limit:
                raise OutOfMemory(
                    f"{nbytes:,} bytes do not fit the limit of {limit:,}, of which {committed:,} are taken",
                    device_id=device_id,
                    requested_bytes=nbytes,
                    free_bytes=limit - committed,
                    limit_bytes=limit,
                    pooled_bytes=0,
                    hint="free handles, allocate less, or raise memory_limit (GPURT_MEMORY_LIMIT, if that set it)",
                )
            usage.reserved_bytes += nbytes
            if committed + nbytes > usage.peak_bytes:
                usage.peak_bytes = committed + nbytes

    def commit(self, device_id: str, nbytes: int) -> None:
        """A reservation became an allocation."""
        with self._lock:
            usage = self._usage[device_id]
            usage.reserved_bytes -= nbytes
            usage.current_bytes += nbytes
            usage.current_count += 1
            usage.total_bytes += nbytes
            usage.total_count += 1

    def cancel(self, device_id: str, nbytes: int) -> None:
        """A reservation came to nothing."""
        with self._lock:
            self._usage[device_id].reserved_bytes -= nbytes

    def release(self, device_id: str, nbytes: int) -> None:
        """An allocation is gone."""
        with self._lock:
            usage = self._usage[device_id]
            usage.current_bytes -= nbytes
            usage.current_count -= 1
