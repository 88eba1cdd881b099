"""One repair by numbers: what of a plan survives on the devices that there are, and what can be made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.building import build_instance
from gpurt.placement.constraints import Constraints, ObjectiveKind
from gpurt.placement.devices import PlacementDevice, ResidentRange
from gpurt.placement.holdings import Holdings
from gpurt.placement.instance import Floats, Instance
from gpurt.placement.paths import Step
from gpurt.placement.plan import Plan, Stage
from gpurt.placement.spec import ModelSpec
from gpurt.placement.survivors import Kept, Survivors
from gpurt.placement.topology import Topology
from gpurt.placement.valuation import keeps_rules, path_bottleneck, path_cost

_SPARE_UNITS: Final = 40
"""Spare units that are put between survivors, the most promising ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan by numbers: seconds of the objective without movement, and bytes to load."""

    value: float
    bytes: float
    steps: tuple[Step, ...]


class RepairSearch:
    """``devices``: those looked at, the plan's own first, in the order of its stages and ranks."""

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        devices: Sequence[PlacementDevice],
        topology: Topology,
        constraints: Constraints,
        holdings: Holdings,
        kind: ObjectiveKind,
    ) -> None:
        self.plan = plan
        self.kind = kind
        placed = plan.resident()
        self.devices = [with_placed(device, model, placed.get(device.id)) for device in devices]
        self.instance: Instance = build_instance(
            model,
            self.devices,
            topology,
            # Movement is counted here, share by share: with its price, the arrays would be a hundred times larger.
            constraints.model_copy(update={"movement_seconds_per_byte": 0.0}),
        )
        self._class_of = {
            self.instance.devices[index].id: kind for kind, group in enumerate(self.instance.members) for index in group
        }
        self._number = {unit.classes: index for index, unit in enumerate(self.instance.units)}
        self.kept: list[Kept] = []
        self.lost = 0
        """Layers whose stage is gone, or that no longer fit where they are."""
        self._survive()
        self.moved = self._moved(model, holdings)

    def _survive(self) -> None:
        instance = self.instance
        for stage in self.plan.stages:
            unit = self._unit(stage)
            most = 0
            if unit is not None:
                most = next(
                    (
                        count
                        for count in range(stage.layers, 0, -1)
                        if any(
                            _fits(instance, unit, start, start + count)
                            for start in range(stage.start, stage.end - count + 1)
                        )
                    ),
                    0,
                )
            self.lost += stage.layers - most
            if unit is not None and most:
                self.kept.append(Kept(unit, stage.start, stage.end))

    def _unit(self, stage: Stage) -> int | None:
        return self._number.get(tuple(sorted(self._class_of.get(name, -1) for name in stage.devices)))

    def steps_of(self, stages: Sequence[Stage]) -> tuple[Step, ...] | None:
        """Stages on these devices by numbers; None where one uses a group that is not among the units."""
        steps: list[Step] = []
        for stage in stages:
            unit = self._unit(stage)
            if unit is None:
                return None
            steps.append(Step(unit, stage.start, stage.end))
        return tuple(steps)

    def _moved(self, model: ModelSpec, holdings: Holdings) -> Floats:
        instance = self.instance
        moved = np.zeros((instance.size, instance.layers + 1))
        weights = np.array([layer.weight_bytes for layer in model.layers], dtype=np.float64)
        moved[:, 1:] = np.cumsum(weights)
        for row, unit in enumerate(instance.units):
            group = [
                instance.devices[instance.members[kind][unit.classes[:place].count(kind)]].id
                for place, kind in enumerate(unit.classes)
            ]
            if any(holdings.holds(name) for name in group):
                moved[row, 1:] = np.cumsum(holdings.missing(group))
        return moved

    def candidate(self, steps: tuple[Step, ...]) -> Candidate:
        value = 0.0
        if self.kind is not ObjectiveKind.THROUGHPUT:
            value += path_cost(self.instance, steps)
        if self.kind is not ObjectiveKind.LATENCY:
            value += path_bottleneck(self.instance, steps)
        moved = sum(float(self.moved[step.unit, step.end] - self.moved[step.unit, step.start]) for step in steps)
        return Candidate(value, moved, steps)

    def unchanged(self) -> Candidate | None:
        """The former plan, where it still keeps every rule."""
        if self.lost:
            return None
        steps = tuple(Step(kept.unit, kept.start, kept.end) for kept in self.kept)
        if not keeps_rules(self.instance, steps):
            return None
        if self.instance.constraints.same_backend and self._backends(steps) > 1:
            return None
        found = self.candidate(steps)
        return found if np.isfinite(found.value) else None

    def around(
        self, price: float, *, skip: int, loose: bool = False, limit: float = np.inf, slowest: float = np.inf
    ) -> Candidate | None:
        """The cheapest plan around the survivors, of which ``skip`` in a row may be left out.

        ``price``: seconds per byte that has to be loaded; ``loose``: what is left out may be put in elsewhere, or form
        other groups; ``limit``: only a plan that costs less with its loading; ``slowest``: no stage and no hand-over
        takes longer.
        """
        instance = self.instance if np.isinf(slowest) else self.instance.restricted(slowest)
        if not instance.size:
            return None
        steps = Survivors(instance, self.kept, self._spares(loose), self.moved, skip=skip).best(price, limit)
        if steps is None or (instance.constraints.same_backend and self._backends(steps) > 1):
            return None
        return self.candidate(steps)

    def _backends(self, steps: Sequence[Step]) -> int:
        return len({self.instance.units[step.unit].backend for step in steps})

    def _spares(self, loose: bool) -> NDArray[np.intp]:
        """Units that no survivor is part of: the fastest per layer, with the ways there and back, and the largest."""
        instance = self.instance
        own = set[int]() if loose else {kind for kept in self.kept for kind in instance.units[kept.unit].classes}
        units = np.array(
            [row for row, unit in enumerate(instance.units) if own.isdisjoint(unit.classes)], dtype=np.intp
        )
        if len(units) <= _SPARE_UNITS:
            return units
        middle = instance.layers // 2
        inner = np.minimum(instance.cost.row(middle)[units], instance.cost.first[units])
        count = np.arange(inner.shape[1], dtype=np.float64)
        need = max(1, min(self.lost, inner.shape[1] - 1))
        ways = np.zeros(len(units))
        if self.kept:
            ends = np.array([kept.unit for kept in self.kept], dtype=np.intp)
            hop = instance.hop_at(middle)
            ways = hop[ends[:, None], units].min(axis=0) + hop[units[:, None], ends].min(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            each: Floats = (inner[:, 1 : need + 1] + ways[:, None]) / count[1 : need + 1]
        best = np.where(np.isfinite(each), each, np.inf).min(axis=1)
        largest = np.where(np.isfinite(inner), count, 0).max(axis=1)
        order = np.lexsort((units, best))[: _SPARE_UNITS * 3 // 4]
        rest = np.setdiff1d(np.lexsort((best, -largest)), order, assume_unique=True)
        rest = rest[np.lexsort((best[rest], -largest[rest]))][: _SPARE_UNITS - len(order)]
        return units[np.sort(np.concatenate([order, rest]))]


def with_placed(device: PlacementDevice, model: ModelSpec, placed: range | None) -> PlacementDevice:
    """With what the plan put on it, so that the solver tells it from devices that are otherwise alike."""
    if placed is None:
        return device
    piece = ResidentRange(model=model.name, start=placed.start, end=placed.stop)
    return device.model_copy(update={"resident": (*device.resident, piece)})


def _fits(instance: Instance, unit: int, start: int, end: int) -> bool:
    width = instance.cost.inner.shape[2] - 1
    if end - start > width and not (start == 0 and end == instance.layers):
        return False
    return bool(np.isfinite(instance.time.value(unit, start, end, instance.layers)))
