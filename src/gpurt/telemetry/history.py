"""The last readings of a device: for sparklines, and for figures over a window of time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpurt.telemetry.reading import METRICS, Sample


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Of the values within a window. Percentiles are by nearest rank: each is a value that was read."""

    count: int
    minimum: float
    maximum: float
    mean: float
    p50: float
    p95: float


class History:
    """Samples of one device, the newest ``maximum`` of them."""

    def __init__(self, maximum: int) -> None:
        self._samples: deque[Sample] = deque(maxlen=maximum)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def __len__(self) -> int:
        return len(self._samples)

    def series(self, metric: str) -> tuple[float | None, ...]:
        """Values of one metric, or of ``memory_percent``, oldest first; None where there was none.

        Raises:
            KeyError: no such metric.
        """
        return tuple(_value(sample, metric) for sample in self._samples)

    def stats(self, metric: str, since: float) -> WindowStats | None:
        """Over the samples asked for at ``since`` or later; None when none of them has a value.

        Raises:
            KeyError: no such metric.
        """
        values = [_value(sample, metric) for sample in self._samples if sample.at >= since]
        return window_stats([value for value in values if value is not None])


def window_stats(values: Sequence[float]) -> WindowStats | None:
    """Figures of ``values``, or None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return WindowStats(
        count=len(ordered),
        minimum=ordered[0],
        maximum=ordered[-1],
        mean=math.fsum(ordered) / len(ordered),
        p50=_nearest_rank(ordered, 50),
        p95=_nearest_rank(ordered, 95),
    )


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _value(sample: Sample, metric: str) -> float | None:
    if metric == "memory_percent":
        return sample.memory_percent
    if metric not in METRICS:
        raise KeyError(metric)
    return sample.values.get(metric)
