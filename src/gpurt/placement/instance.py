"""The inputs as arrays: what every stage would cost, what every hand-over would cost, what may not be.

A *class* is a set of devices of one node that nothing tells apart: same properties, same links. A *unit* is what one
stage may run on: one device of a class, or a tensor-parallel group given by how many devices of which classes. Solvers
count units and never name devices of a class, so that equal plans under other names are one plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import LinkMatrix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Unit:
    """What one stage may run on."""

    classes: tuple[int, ...]
    """Class of each member, ascending."""
    node: str
    backend: str

    @property
    def size(self) -> int:
        return len(self.classes)


@dataclass(frozen=True, slots=True)
class Windows:
    """Value of a stage of ``n`` layers, by unit; infinite where it may not be.

    ``inner[u, s, n]`` for layers ``s`` to ``s + n`` with layers before and after; the middle axis has length 1 where
    the position does not matter. ``first[u, n]`` starts at layer 0, ``last[u, n]`` ends at the last layer and
    ``whole[u]`` holds all layers.
    """

    inner: Floats
    first: Floats
    last: Floats
    whole: Floats

    def row(self, start: int) -> Floats:
        """``[u, n]`` of inner stages that start there."""
        return self.inner[:, start if self.inner.shape[1] > 1 else 0, :]

    def value(self, unit: int, start: int, end: int, layers: int) -> float:
        if start == 0:
            return float(self.whole[unit] if end == layers else self.first[unit, end])
        if end == layers:
            return float(self.last[unit, end - start])
        return float(self.row(start)[unit, end - start])

    def masked(self, keep: Windows, limit: float) -> Windows:
        """Infinite where the value of ``keep`` exceeds ``limit``."""
        return Windows(
            np.where(keep.inner <= limit, self.inner, np.inf),
            np.where(keep.first <= limit, self.first, np.inf),
            np.where(keep.last <= limit, self.last, np.inf),
            np.where(keep.whole <= limit, self.whole, np.inf),
        )

    def of(self, units: NDArray[np.intp]) -> Windows:
        return Windows(self.inner[units], self.first[units], self.last[units], self.whole[units])


@dataclass(frozen=True, slots=True)
class Instance:
    """A placement problem as arrays."""

    model: ModelSpec
    constraints: Constraints
    devices: tuple[PlacementDevice, ...]
    """Those that passed the filters."""
    links: LinkMatrix
    members: tuple[tuple[int, ...], ...]
    """Devices of each class."""
    units: tuple[Unit, ...]
    uses: Ints
    """``[u, c]``: devices of class c in unit u."""
    available: Ints
    """Devices of each class."""
    rows: Ints
    """``[u, r]``: what a stage on u takes of each limit: devices of the classes first, then the linear rules. A rule
    that asks for at least so much is written with negative signs."""
    limits: Ints
    node: NDArray[np.intp]
    """Number of the node of each unit."""
    slope: Floats
    """Seconds per layer where all layers are alike, else NaN."""
    head: Floats
    """Seconds of the head where the unit is the last one."""
    cost: Windows
    """What the objective counts: time, and movement where that has a price."""
    time: Windows
    """Seconds."""
    hop: Floats
    """``[k, u, v]``: hand-over from u to v at boundaries of kind k."""
    back: Floats
    """``[u, v]``: from the last stage u to the first stage v."""
    boundary: NDArray[np.intp]
    """Kind of the boundary after ``s`` layers."""
    complete: bool
    """Every unit that the rules allow is in; else bounds do not hold for plans with other groups."""
    removed: tuple[tuple[str, str], ...] = field(default=())
    """Devices left out, each with the rule that did it."""

    @property
    def layers(self) -> int:
        return self.model.layer_count

    @property
    def size(self) -> int:
        return len(self.units)

    @property
    def movable(self) -> bool:
        """Stages cost the same wherever they start."""
        return self.cost.inner.shape[1] == 1

    @property
    def classes(self) -> int:
        return len(self.members)

    def hop_at(self, start: int) -> Floats:
        return self.hop[self.boundary[start]]

    def restricted(self, limit: float, timed: Instance | None = None) -> Instance:
        """Without stages and links that take longer than ``limit`` seconds; ``timed``: whose times count."""
        timed = timed or self
        return replace(
            self,
            cost=self.cost.masked(timed.time, limit),
            time=self.time.masked(timed.time, limit),
            hop=np.where(timed.hop <= limit, self.hop, np.inf),
            back=np.where(timed.back <= limit, self.back, np.inf),
        )

    def movement_only(self) -> Instance:
        """The same problem where only movement costs."""

        def extra(cost: Floats, time: Floats) -> Floats:
            return np.where(np.isfinite(cost), cost - np.where(np.isfinite(time), time, 0.0), np.inf)

        cost, time = self.cost, self.time
        return replace(
            self,
            cost=Windows(
                extra(cost.inner, time.inner),
                extra(cost.first, time.first),
                extra(cost.last, time.last),
                extra(cost.whole, time.whole),
            ),
            hop=np.where(np.isfinite(self.hop), 0.0, np.inf),
            back=np.where(np.isfinite(self.back), 0.0, np.inf),
        )

    def of(self, units: NDArray[np.intp]) -> Instance:
        """With these units only."""
        return replace(
            self,
            units=tuple(self.units[unit] for unit in map(int, units)),
            uses=self.uses[units],
            rows=self.rows[units],
            node=self.node[units],
            slope=self.slope[units],
            head=self.head[units],
            cost=self.cost.of(units),
            time=self.time.of(units),
            hop=self.hop[:, units[:, None], units[None, :]],
            back=self.back[units[:, None], units[None, :]],
        )
