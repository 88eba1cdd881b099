"""What the CPU driver may still give out: the host's budget, and a limit for each device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpurt.backends.host_budget import HostBudget


class CPUBudget(HostBudget):
    """The host's budget with a limit for each device.

    Args:
        limit: bytes per device, or None.
        taken: bytes of a device that count against the limit where somebody else keeps to it; None: this does.
    """

    def __init__(
        self, name: str, *, limit: int | None, devices: int, root: Path, taken: Callable[[int], int] | None
    ) -> None:
        self._limit, self._taken = limit, taken
        super().__init__(name, devices=devices, root=root)

    def reading(self, index: int) -> tuple[int, int]:
        total, free = super().reading(index)
        if self._limit is None:
            return total, free
        if self._taken is not None:
            free = min(free, max(0, self._limit - self._taken(index)))
        return min(total, self._limit), min(free, self._limit)

    def _free(self, index: int, *, fresh: bool = False) -> int:
        free = super()._free(index, fresh=fresh)
        if self._limit is None or self._taken is not None:
            return free
        return min(free, self._limit - self._given[index])
