"""What lies where under a plan, share by share, and what another plan would have to load.

A member of a tensor-parallel group holds its share of every layer: the ``rank``-th of as many equal pieces as the group
has members. So a device that leaves a group of four for one of two has some of what it needs, and not all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.instance import Floats
from gpurt.placement.plan import Plan, Stage
from gpurt.placement.spec import ModelSpec

_NOTHING = 1e-9
"""Share of a layer below which a difference is rounding."""


@dataclass(frozen=True, slots=True)
class _Held:
    start: int
    end: int
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Movement:
    """What it takes to come from what lies on the devices to a plan."""

    layers: tuple[int, ...]
    """Those of which some device has to load a part."""
    bytes: Mapping[str, int]
    """Weights that each device has to load; devices that load nothing are left out."""

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def seconds(self, devices: Mapping[str, PlacementDevice], load_bandwidth: float) -> float:
        """Until the last device has loaded: all load at once, each at its own ``load_bandwidth``, or at the one given
        where it is not known."""
        return max(
            (count / (devices[name].load_bandwidth or load_bandwidth) for name, count in self.bytes.items()),
            default=0.0,
        )


class Holdings:
    """The weights of one model on devices: what ``plan`` put there, and whole layers that devices tell of besides."""

    def __init__(self, model: ModelSpec, plan: Plan | None, devices: Iterable[PlacementDevice]) -> None:
        self.weights = np.array([layer.weight_bytes for layer in model.layers], dtype=np.float64)
        self._placed: dict[str, _Held] = {}
        for stage in plan.stages if plan is not None else ():
            for rank, name in enumerate(stage.devices):
                self._placed[name] = _Held(stage.start, stage.end, rank, len(stage.devices))
        self._reported = {
            device.id: [piece for piece in device.resident if piece.model == model.name]
            for device in devices
            if device.resident
        }

    def holds(self, device: str) -> bool:
        return device in self._placed or bool(self._reported.get(device))

    def missing(self, group: Sequence[str]) -> Floats:
        """``[l]``: bytes of layer l that a group, in the order of its ranks, would have to load."""
        size = len(group)
        total = np.zeros(len(self.weights))
        for rank, name in enumerate(group):
            total += self._missing_share(name, rank, size)
        return np.where(total > _NOTHING, total * self.weights, 0.0)

    def movement(self, stages: Iterable[Stage]) -> Movement:
        moved: set[int] = set()
        loads: dict[str, int] = {}
        for stage in stages:
            for rank, name in enumerate(stage.devices):
                share = self._missing_share(name, rank, len(stage.devices))[stage.start : stage.end]
                lacking = np.flatnonzero(share > _NOTHING)
                if len(lacking):
                    moved.update((lacking + stage.start).tolist())
                    loads[name] = int(np.ceil((share * self.weights[stage.start : stage.end])[lacking].sum()))
        return Movement(tuple(sorted(moved)), loads)

    def _missing_share(self, name: str, rank: int, size: int) -> Floats:
        lacks = np.full(len(self.weights), 1.0 / size)
        for piece in self._reported.get(name, ()):
            lacks[piece.start : piece.end] = 0.0
        held = self._placed.get(name)
        if held is not None:
            # What it reports of the layers that the plan gave it are the shares that the plan gave it.
            overlap = min((rank + 1) / size, (held.rank + 1) / held.size) - max(rank / size, held.rank / held.size)
            lacks[held.start : held.end] = 1.0 / size - max(0.0, overlap)
        return lacks


def whole_bytes(model: ModelSpec) -> float:
    """Bytes of a layer on average: what movement is measured in where layers are. 1 where they have none to move."""
    return sum(layer.weight_bytes for layer in model.layers) / model.layer_count or 1.0
