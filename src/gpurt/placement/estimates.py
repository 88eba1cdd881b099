"""How long one operation takes on one device, by its speeds: an estimate, and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpurt.placement.arguments import check_count, check_kind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.record import MOST_COUNT
from gpurt.placement.requirements import TFLOPS
from gpurt.placement.words import time_words


@dataclass(frozen=True, slots=True)
class PerformanceEstimate:
    """Seconds of one matrix product by the roofline model: as long as the slower of arithmetic and memory takes.

    Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009).
    """

    flops: float
    """2 m n k: a multiplication and an addition for every term."""
    bytes_moved: int
    """Both operands read and the result written once."""
    compute_seconds: float
    memory_seconds: float
    estimated: frozenset[str]
    """Speeds of the device that it rests on and that nobody measured (``compute_flops``, ``memory_bandwidth``)."""

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def limited_by(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    @property
    def tflops(self) -> float:
        """Rate at which it would run."""
        return self.flops / self.seconds / TFLOPS

    def explain(self) -> str:
        """One sentence, with what is not known."""
        slower, other = time_words(self.seconds), time_words(min(self.compute_seconds, self.memory_seconds))
        rest = "memory" if self.limited_by == "compute" else "compute"
        known = f"; not measured: {', '.join(sorted(self.estimated))}" if self.estimated else ""
        return f"{slower}, limited by {self.limited_by} ({rest} takes {other}){known}"


def get_performance_estimate(
    device: PlacementDevice, *, m: int, n: int, k: int, element_bytes: int = 2
) -> PerformanceEstimate:
    """For the product of an m x k and a k x n matrix.

    Raises:
        InvalidPlacementInput: it is no device, or an extent or the size of an element is no positive integer, or
            larger than 2^31 - 1.
    """
    check_kind(device, PlacementDevice, "device")
    for field, value in (("m", m), ("n", n), ("k", k), ("element_bytes", element_bytes)):
        check_count(value, field, least=1, most=MOST_COUNT)
    flops = 2.0 * m * n * k
    moved = (m * k + k * n + m * n) * element_bytes
    return PerformanceEstimate(
        flops=flops,
        bytes_moved=moved,
        compute_seconds=flops / device.compute_flops,
        memory_seconds=moved / device.memory_bandwidth,
        estimated=device.estimated & {"compute_flops", "memory_bandwidth"},
    )
