"""What a benchmark returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Unit = Literal["GB/s", "MiB", "µs", "ms", "s"]
"""GB/s are 10^9 bytes per second. More GB/s are better; of everything else, less is."""


class Skipped(Exception):
    """This topic cannot be measured on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """gpurt's figure, next to the best ordinary way (``peer``) and to what the machine can do (``ceiling``).

    All figures come from the same run and are of the same unit.
    """

    topic: str
    name: str
    unit: Unit
    ours: float
    peer: float | None = None
    peer_name: str = ""
    ceiling: float | None = None
    ceiling_name: str = ""
    others: Mapping[str, float] = field(default_factory=dict[str, float])
    """More ordinary ways by name, such as ``torch`` where it is installed."""
    target: float | None = None
    """The bound that gpurt promises for its own figure."""
    least_of_peer: float | None = None
    """The bound that gpurt promises for ``of_peer``."""
    least_of_ceiling: float | None = None
    """The bound that gpurt promises for ``of_ceiling``."""

    @property
    def more_is_better(self) -> bool:
        return self.unit == "GB/s"

    @property
    def of_peer(self) -> float | None:
        """How good ours is beside the peer: 1 is as good, 2 is twice as fast."""
        return self._ratio(self.peer)

    @property
    def of_ceiling(self) -> float | None:
        """The share of the ceiling that ours reaches."""
        return self._ratio(self.ceiling)

    @property
    def on_target(self) -> bool | None:
        """Whether every promise is kept; None where there is none, or nothing to hold it against."""
        kept: list[bool] = []
        if self.target is not None:
            kept.append(self.ours >= self.target if self.more_is_better else self.ours <= self.target)
        for least, ratio in ((self.least_of_peer, self.of_peer), (self.least_of_ceiling, self.of_ceiling)):
            if least is not None and ratio is not None:
                kept.append(ratio >= least)
        return all(kept) if kept else None

    def _ratio(self, other: float | None) -> float | None:
        if not other or not self.ours:
            return None
        return self.ours / other if self.more_is_better else other / self.ours

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "of_peer": self.of_peer,
            "of_ceiling": self.of_ceiling,
            "on_target": self.on_target,
        }


def size_name(nbytes: int) -> str:
    """``4 KiB``, ``1 GiB``: whole numbers of the largest unit that fits."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"
