"""How much host memory a driver may still give out whose devices are the host itself.

Linux grants more than there is and kills the process once it is touched, and libraries that allocate from the host pass
that on: a driver asks here first. What it has given out counts whether or not it has been touched.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from gpurt.sources import host

_FRESH_S: Final = 0.1  # reading /proc and the cgroups takes 0.2 ms


class HostBudget:
    """Of one driver; any thread. ``devices`` share the host equally.

    Args:
        name: the driver's, for messages.
        root: where ``/proc`` and ``/sys`` are read from.
    """

    def __init__(self, name: str, *, devices: int = 1, root: Path = Path("/")) -> None:
        self._name, self._count, self._root = name, devices, root
        self._lock = threading.Lock()
        self._resident_before: int | None = None
        self._share, self._total = 0, 0
        self.reset()

    def reset(self) -> None:
        """Nothing is given out: the driver opens. Reads no files, which the others do."""
        with self._lock:
            self._given = [0] * self._count
            self._resident_before, self._read_at = None, float("-inf")

    def take(self, index: int, nbytes: int) -> None:
        """Count an allocation on device ``index``; :meth:`give_back` it if it fails after all.

        Raises:
            MemoryError: there is not so much.
        """
        with self._lock:
            # An old reading may be too small, or too large by what others have taken since: 0.1 s of it is accepted.
            if nbytes > self._free(index) and nbytes > (free := self._free(index, fresh=True)):
                raise MemoryError(
                    f"{nbytes:,} bytes asked for on {self._name}:{index}, and {max(0, free):,} of this host's memory "
                    "are free for it; free handles, allocate less, or raise the container's limit"
                )
            self._given[index] += nbytes

    def give_back(self, index: int, nbytes: int) -> None:
        with self._lock:
            self._given[index] -= nbytes

    def reading(self, index: int) -> tuple[int, int]:
        """Total and free bytes of device ``index``: as of 0.1 s ago at most, less what was given out since. Pages that
        are freed and taken again do not come back to what Linux calls available in between, so a new look would not
        show that they are taken."""
        with self._lock:
            free = self._free(index)
            return self._total, min(self._total, max(0, free))

    def _free(self, index: int, *, fresh: bool = False) -> int:
        """Below 0 when there is less than there was. Under the lock."""
        now = time.monotonic()
        if fresh or now - self._read_at > _FRESH_S:
            memory, resident = host.memory_budget(self._root), host.resident_bytes()
            if self._resident_before is None:
                self._resident_before = resident
            # What our allocations have touched is no longer available to anybody, but it is ours to count.
            ours = min(max(0, resident - self._resident_before), sum(self._given))
            self._share = min(memory.total_bytes, memory.available_bytes + ours) // self._count
            self._total, self._read_at = memory.total_bytes // self._count, now
        return self._share - self._given[index]
