"""Devices as a grid with named axes, for programs that split work along them: replicas, pipeline stages, tensors.

The ranks of a mesh are what ``torch.distributed`` counts: row by row, the last axis fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.queries import PROCESSORS
from gpurt.placement.topology import Topology
from gpurt.placement.words import counted, size_words

PAYLOAD: Final = 1 << 20
"""Bytes by whose time two ways are compared: the sums of one layer for a few hundred tokens."""


class Communication(StrEnum):
    """Which library carries collective operations between some devices."""

    NCCL = "nccl"
    RCCL = "rccl"
    GLOO = "gloo"
    """Through host memory: whatever is not all NVIDIA's or all AMD's."""
    MIXED = "mixed"
    """Each group of like devices by its own library, gloo between the groups."""


_NATIVE: Final[Mapping[str, Communication]] = {"cuda": Communication.NCCL, "rocm": Communication.RCCL}
"""By the backend of the devices. Everything else meets in host memory."""


def communication_of(devices: Sequence[PlacementDevice]) -> Communication:
    """
    Raises:
        InvalidPlacementInput: there is no device.
    """
    kinds = {_NATIVE.get(device.backend, Communication.GLOO) for device in devices}
    if not kinds:
        raise InvalidPlacementInput("there is no device", field="devices")
    return kinds.pop() if len(kinds) == 1 else Communication.MIXED


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """Distinct devices in a grid."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    devices: tuple[PlacementDevice, ...]
    """By rank."""
    latency_seconds: NDArray[np.float64]
    """Between ranks, of the slower direction, so that it is symmetric; 0 on the diagonal, infinite without a way."""
    bandwidth: NDArray[np.float64]
    """Bytes/s, likewise; infinite on the diagonal, 0 without a way."""

    @property
    def ranks(self) -> NDArray[np.intp]:
        """The grid of ranks: the ``mesh`` of a ``torch.distributed.device_mesh.DeviceMesh``."""
        return np.arange(len(self.devices)).reshape(self.shape)

    @property
    def communication(self) -> Communication:
        return communication_of(self.devices)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of like devices (vendor and backend), each group in order: one library serves all of it."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, device in enumerate(self.devices):
            found.setdefault((device.vendor, device.backend), []).append(rank)
        return tuple(map(tuple, found.values()))

    def along(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one along one axis alone, itself included, in order.

        Raises:
            InvalidPlacementInput: there is no such axis or rank.
        """
        if axis not in self.axes:
            raise InvalidPlacementInput(f"{axis!r} is none of {', '.join(self.axes)}", field="axis")
        if not 0 <= rank < len(self.devices):
            raise InvalidPlacementInput(f"{rank} is no rank of {len(self.devices)}", field="rank")
        place: list[Any] = list(np.unravel_index(rank, self.shape))
        place[self.axes.index(axis)] = slice(None)
        return tuple(int(each) for each in self.ranks[tuple(place)])

    def shares(self, total: int) -> tuple[int, ...]:
        """``total`` pieces, such as samples of a batch, over the ranks in proportion to their arithmetic rates.

        By the largest remainder, so that they add up; of equal remainders the lower rank's comes first.

        Raises:
            InvalidPlacementInput: ``total`` is negative.
        """
        if total < 0:
            raise InvalidPlacementInput(f"{total} is negative", field="total")
        rates = [device.compute_flops for device in self.devices]
        exact = [total * rate / sum(rates) for rate in rates]
        whole = [int(each) for each in exact]
        order = sorted(range(len(exact)), key=lambda rank: whole[rank] - exact[rank])
        for rank in order[: total - sum(whole)]:
            whole[rank] += 1
        return tuple(whole)

    def explain(self) -> str:
        """The grid in a line, and one for every rank."""
        grid = " x ".join(f"{size} {axis}" for size, axis in zip(self.shape, self.axes, strict=True))
        lines = [f"{grid}: {counted(len(self.devices), 'device')}, {self.communication.value} between them"]
        for rank, device in enumerate(self.devices):
            place = ", ".join(
                f"{axis} {int(index)}"
                for axis, index in zip(self.axes, np.unravel_index(rank, self.shape), strict=True)
            )
            lines.append(f"rank {rank} ({place}): {device.id}, {device.backend}, {size_words(device.budget_bytes)}")
        return "\n".join(lines)


def create_device_mesh(
    devices: Sequence[PlacementDevice],
    topology: Topology | None = None,
    *,
    data: int = 1,
    pipeline: int = 1,
    tensor: int = 1,
) -> DeviceMesh:
    """A grid with the axes ``data``, ``pipeline``, ``tensor``.

    The devices of one tensor group are of one node and backend, those with the best ways between them together. The
    fastest groups are taken, and neighbours along a pipeline are close. Which layers a stage should have is the
    solver's question; a grid has equal stages.

    Raises:
        InvalidPlacementInput: an axis has no device, a device is there twice, there are not that many such groups, or
            there is no way between stages.
    """
    for axis, size in (("data", data), ("pipeline", pipeline), ("tensor", tensor)):
        if size < 1:
            raise InvalidPlacementInput(f"{size} is not positive", field=axis)
    found = _distinct(devices)
    seconds = _slower((topology or Topology()).dense(found).seconds(PAYLOAD))
    groups = _tensor_groups(found, seconds, tensor)
    if len(groups) < data * pipeline:
        raise InvalidPlacementInput(
            f"{data * pipeline} groups of {counted(tensor, 'device')} of one node and backend are needed, there are "
            f"{len(groups)}",
            field="devices",
        )
    groups.sort(key=lambda group: (-min(found[index].compute_flops for index in group), group))
    left = groups[: data * pipeline]
    order: list[int] = []
    for _ in range(data):
        here = left.pop(0)
        order += here
        for _ in range(pipeline - 1):
            ways = [float(seconds[np.ix_(here, group)].max()) for group in left]
            nearest = int(np.argmin(ways))
            if not np.isfinite(ways[nearest]):
                raise InvalidPlacementInput(f"there is no way on from {found[here[0]].id}", field="topology")
            here = left.pop(nearest)
            order += here
    axes, shape = ("data", "pipeline", "tensor"), (data, pipeline, tensor)
    return _mesh(axes, shape, [found[index] for index in order], topology)


def create_cross_vendor_mesh(devices: Sequence[PlacementDevice], topology: Topology | None = None) -> DeviceMesh:
    """All devices along one axis, like ones side by side: see ``groups`` and ``shares`` of the mesh.

    Of devices that share their memory one is taken.

    Raises:
        InvalidPlacementInput: there is no device, or one is there twice.
    """
    found = sorted(_distinct(devices), key=lambda device: (device.vendor, device.backend, device.node, device.id))
    if not found:
        raise InvalidPlacementInput("there is no device", field="devices")
    return _mesh(("device",), (len(found),), found, topology)


def _distinct(devices: Sequence[PlacementDevice]) -> list[PlacementDevice]:
    """Sorted by id; of those that share their memory the accelerator with the most."""
    if len({device.id for device in devices}) < len(devices):
        raise InvalidPlacementInput("a device is there twice", field="devices")
    best: dict[tuple[str, ...], PlacementDevice] = {}
    for device in sorted(devices, key=lambda each: (each.kind in PROCESSORS, -each.budget_bytes, each.id)):
        pool = device.memory_pool_id
        best.setdefault((device.id,) if pool is None else (device.node, pool), device)
    return sorted(best.values(), key=lambda device: device.id)


def _slower(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(seconds, seconds.T)


def _tensor_groups(
    devices: Sequence[PlacementDevice], seconds: NDArray[np.float64], size: int
) -> list[tuple[int, ...]]:
    """As many groups as there are in each node and backend: the fastest device left, with those nearest to it."""
    members: dict[tuple[str, str], list[int]] = {}
    for index, device in enumerate(devices):
        members.setdefault((device.node, device.backend), []).append(index)
    groups: list[tuple[int, ...]] = []
    for left in members.values():
        left.sort(key=lambda index: (-devices[index].compute_flops, -devices[index].budget_bytes, index))
        while len(left) >= size:
            group = [left.pop(0)]
            while len(group) < size:
                nearest = min(left, key=lambda index: max(float(seconds[index, other]) for other in group))
                left.remove(nearest)
                group.append(nearest)
            groups.append(tuple(group))
    return groups


def _mesh(
    axes: tuple[str, ...], shape: tuple[int, ...], devices: Sequence[PlacementDevice], topology: Topology | None
) -> DeviceMesh:
    assert prod(shape) == len(devices)
    links = (topology or Topology()).dense(devices)
    latency = _slower(links.latency)
    bandwidth = np.minimum(links.bandwidth, links.bandwidth.T)
    bandwidth[~np.isfinite(latency)] = 0.0
    return DeviceMesh(axes, shape, tuple(devices), latency, bandwidth)
