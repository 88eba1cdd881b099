"""Devices as a grid with named axes, for programs that split work along them: replicas, pipeline stages, tensors.

The ranks of a mesh are what ``torch.distributed`` counts: row by row, the last axis fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import floor, prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.arguments import all_of_kind, check_count, check_kind
from gpurt.placement.device_arguments import given_devices
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.requirements import PROCESSORS
from gpurt.placement.topology import Topology, check_names
from gpurt.placement.words import counted, size_words
from gpurt.printable import shortened

PAYLOAD: Final = 1 << 20
"""Bytes by whose time two ways are compared: the sums of one layer for a few hundred tokens."""

_STEPS: Final = 20_000
"""Groups that are taken in search of pipelines in which each stage reaches the next: well under a second."""


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
        InvalidPlacementInput: there is no device, or something else is among them.
    """
    devices = all_of_kind(devices, PlacementDevice, "devices")
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
            told = shortened(repr(axis))
            raise InvalidPlacementInput(f"the mesh has no axis {told}, only {', '.join(self.axes)}", field="axis")
        check_count(rank, "rank", least=0, most=len(self.devices) - 1)
        place: list[Any] = list(np.unravel_index(rank, self.shape))
        place[self.axes.index(axis)] = slice(None)
        return tuple(int(each) for each in self.ranks[tuple(place)])

    def shares(self, total: int) -> tuple[int, ...]:
        """``total`` pieces, such as samples of a batch, over the ranks in proportion to their arithmetic rates.

        By the largest remainder, so that they add up; of equal remainders the lower rank's comes first.

        Raises:
            InvalidPlacementInput: ``total`` is negative or no integer.
        """
        check_count(total, "total", least=0)
        # Fractions: no rounding of large numbers, and rates whose sum is beyond floating point.
        rates = [Fraction(device.compute_flops) for device in self.devices]
        unit = Fraction(int(total)) / sum(rates)
        exact = [rate * unit for rate in rates]
        whole = [floor(each) for each in exact]
        order = sorted(range(len(exact)), key=lambda rank: whole[rank] - exact[rank])
        for rank in order[: int(total) - sum(whole)]:
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
    solver's question; a grid has equal stages. Of devices that share their memory one is taken.

    Args:
        topology: None: links as they are usual within a node, a zone and between zones.
        data: replicas, each a whole pipeline.
        pipeline: stages of a pipeline.
        tensor: devices of a stage.

    Raises:
        InvalidPlacementInput: an argument is of another kind, an axis has no device, there is no device, one is there
            twice, the topology names one that is not there, there are not that many devices or such groups, or there is
            no way between stages.
    """
    for axis, size in (("data", data), ("pipeline", pipeline), ("tensor", tensor)):
        check_count(size, axis, least=1)
    found, topology = _distinct(devices, topology)
    grid = f"data {data} x pipeline {pipeline} x tensor {tensor}"
    if len(found) < data * pipeline * tensor:
        shared = ", those that share their memory counted once" if len(found) < len(devices) else ""
        raise InvalidPlacementInput(
            f"{grid} takes {counted(data * pipeline * tensor, 'device')}, and there {_are(len(found))}{shared}",
            field="devices",
        )
    seconds = _slower(topology.dense(found).seconds(PAYLOAD))
    groups = _tensor_groups(found, seconds, tensor)
    if len(groups) < data * pipeline:
        raise InvalidPlacementInput(
            f"{grid} takes {counted(data * pipeline, 'group')} of {counted(tensor, 'device')} that are of one node and "
            f"backend and reach each other, and there {_are(len(groups))}",
            field="devices",
        )
    groups.sort(key=lambda group: (-min(found[index].compute_flops for index in group), group))
    at = np.array(groups)
    ways = seconds[at[:, None, :, None], at[None, :, None, :]].max(axis=(2, 3))
    order = [index for group in _pipelines(ways, data, pipeline) for index in groups[group]]
    axes, shape = ("data", "pipeline", "tensor"), (data, pipeline, tensor)
    return _mesh(axes, shape, [found[index] for index in order], topology)


def create_cross_vendor_mesh(devices: Sequence[PlacementDevice], topology: Topology | None = None) -> DeviceMesh:
    """All devices along one axis, like ones side by side: see ``groups`` and ``shares`` of the mesh.

    Of devices that share their memory one is taken.

    Raises:
        InvalidPlacementInput: an argument is of another kind, there is no device, one is there twice, or the topology
            names one that is not there.
    """
    found, topology = _distinct(devices, topology)
    found.sort(key=lambda device: (device.vendor, device.backend, device.node, device.id))
    return _mesh(("device",), (len(found),), found, topology)


def _are(number: int) -> str:
    return f"is {number:,}" if number == 1 else f"are {number:,}"


def _distinct(devices: Sequence[PlacementDevice], topology: Topology | None) -> tuple[list[PlacementDevice], Topology]:
    """Sorted by id; of those that share their memory the accelerator with the most. And the links."""
    topology = Topology() if topology is None else topology
    check_kind(topology, Topology, "topology")
    devices = given_devices(devices)
    if not devices:
        raise InvalidPlacementInput("there is no device", field="devices")
    check_names(topology, devices)
    best: dict[tuple[str, ...], PlacementDevice] = {}
    for device in sorted(devices, key=lambda each: (each.kind in PROCESSORS, -each.budget_bytes, each.id)):
        pool = device.memory_pool_id
        best.setdefault((device.id,) if pool is None else (device.node, pool), device)
    found = sorted(best.values(), key=lambda device: device.id)
    return found, topology.within(found)


def _slower(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(seconds, seconds.T)


def _tensor_groups(
    devices: Sequence[PlacementDevice], seconds: NDArray[np.float64], size: int
) -> list[tuple[int, ...]]:
    """As many groups as there are in each node and backend: the fastest device left, with those nearest to it. One
    that does not reach enough others is in none."""

    def rank(index: int) -> tuple[float, int, int]:
        return -devices[index].compute_flops, -devices[index].budget_bytes, index

    members: dict[tuple[str, str], list[int]] = {}
    for index, device in enumerate(devices):
        members.setdefault((device.node, device.backend), []).append(index)
    groups: list[tuple[int, ...]] = []
    for left in members.values():
        left.sort(key=rank)
        while len(left) >= size:
            group = [left.pop(0)]
            for _ in range(size - 1):
                far = [max(float(seconds[index, other]) for other in group) for index in left]
                nearest = int(np.argmin(far))
                if not np.isfinite(far[nearest]):
                    break
                group.append(left.pop(nearest))
            if len(group) == size:
                groups.append(tuple(group))
            else:
                left += group[1:]
                left.sort(key=rank)
    return groups


def _pipelines(ways: NDArray[np.float64], data: int, pipeline: int) -> list[int]:
    """Groups for ``data`` pipelines, one after the other: of the first ones by the nearest, from the first one on.

    Where that comes to an end, other groups and other beginnings are tried, up to a number of steps.
    """
    count = data * pipeline
    for among in dict.fromkeys((count, len(ways))):
        path: list[int] = []
        open_choices: list[Iterator[int]] = []
        for _ in range(_STEPS):
            if len(path) == count:
                return path
            if len(open_choices) == len(path):
                taken = set(path)
                left = [group for group in range(among) if group not in taken]
                if len(path) % pipeline:
                    here = ways[path[-1]]
                    left = sorted((group for group in left if np.isfinite(here[group])), key=lambda each: here[each])
                open_choices.append(iter(left))
            group = next(open_choices[-1], None)
            if group is not None:
                path.append(group)
                continue
            open_choices.pop()
            if not path:
                break
            path.pop()
    raise InvalidPlacementInput(
        f"no {counted(data, 'pipeline')} of {counted(pipeline, 'stage')} found in which each stage has a way to the "
        "next: too few links",
        field="topology",
    )


def _mesh(
    axes: tuple[str, ...], shape: tuple[int, ...], devices: Sequence[PlacementDevice], topology: Topology
) -> DeviceMesh:
    assert prod(shape) == len(devices)
    links = topology.dense(devices)
    latency = _slower(links.latency)
    bandwidth = np.minimum(links.bandwidth, links.bandwidth.T)
    bandwidth[~np.isfinite(latency)] = 0.0
    return DeviceMesh(axes, shape, tuple(devices), latency, bandwidth)
