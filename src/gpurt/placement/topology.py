"""How long bytes take from one device to another. Directed; what nobody measured is of a class and marked estimated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, field_serializer, field_validator, model_validator

from gpurt.placement.arguments import all_of_kind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.record import LEAST_RATE, MOST_SECONDS, PlacementRecord


class Locality(StrEnum):
    NODE = "node"
    ZONE = "zone"
    WIDE = "wide"
    """Different zones."""


class LinkClass(PlacementRecord):
    """What is assumed of a link that nobody measured."""

    latency_seconds: float = Field(ge=0, le=MOST_SECONDS)
    bandwidth: float = Field(ge=LEAST_RATE)
    """Bytes/s."""


DEFAULT_CLASSES: Final[Mapping[Locality, LinkClass]] = {
    Locality.NODE: LinkClass(latency_seconds=10e-6, bandwidth=12e9),
    Locality.ZONE: LinkClass(latency_seconds=200e-6, bandwidth=1.1e9),
    Locality.WIDE: LinkClass(latency_seconds=20e-3, bandwidth=30e6),
}
"""PCIe 3.0 x16 through host memory; 10 Gb/s Ethernet in one room; a good line between sites."""


class Link(PlacementRecord):
    """What was measured in one direction between two devices, or between two nodes (device ids or node names)."""

    source: str = Field(min_length=1)
    target: str = Field(min_length=1)
    latency_seconds: float = Field(ge=0, le=MOST_SECONDS)
    bandwidth: float = Field(ge=LEAST_RATE)
    """Bytes/s."""
    estimated: bool = False
    transport: str | None = None
    """``nvlink pcie rdma tcp``; only shown."""


class LinkTable(PlacementRecord):
    """All links between some devices or nodes at once, row = source: for large clusters.

    Infinite latency means that there is no way; NaN means that nobody measured it. Rows of devices or nodes that are
    not there are passed over.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    names: tuple[str, ...]
    latency_seconds: NDArray[np.float64]
    bandwidth: NDArray[np.float64]

    @field_validator("latency_seconds", "bandwidth", mode="before")
    @classmethod
    def _array(cls, value: Any) -> Any:
        array = np.array(value, dtype=np.float64)
        array.flags.writeable = False
        return array

    @field_serializer("latency_seconds", "bandwidth")
    def _lists(self, value: NDArray[np.float64]) -> list[list[float | str]]:
        # JSON has no number for infinity, and null would turn "no way" into "nobody measured it".
        return [[number if math.isfinite(number) else str(number) for number in row] for row in value.tolist()]

    @model_validator(mode="after")
    def _shape(self) -> Self:
        size = len(self.names)
        if self.latency_seconds.shape != (size, size) or self.bandwidth.shape != (size, size):
            raise InvalidPlacementInput(f"{size} names need two arrays of {size} x {size}", field="names")
        if len(set(self.names)) != size:
            raise InvalidPlacementInput("they are not unique", field="names")
        if (self.latency_seconds < 0).any():
            raise InvalidPlacementInput("one is negative", field="latency_seconds")
        if (np.isfinite(self.latency_seconds) & (self.latency_seconds > MOST_SECONDS)).any():
            raise InvalidPlacementInput(f"one is above {MOST_SECONDS:g} seconds", field="latency_seconds")
        if (self.bandwidth <= 0).any():
            raise InvalidPlacementInput("one is not positive", field="bandwidth")
        if (self.bandwidth < LEAST_RATE).any():
            raise InvalidPlacementInput(f"one is below {LEAST_RATE:g} bytes a second", field="bandwidth")
        return self


class Topology(PlacementRecord):
    """The links. Of two entries for a pair, that between devices wins over that between nodes, both over classes."""

    links: tuple[Link, ...] = ()
    table: LinkTable | None = None
    cut: frozenset[tuple[str, str]] = frozenset()
    """Directed pairs (devices or nodes) between which there is no way."""
    classes: Mapping[Locality, LinkClass | None] = Field(default_factory=lambda: dict(DEFAULT_CLASSES))
    """None: unmeasured links of that class do not exist."""

    @classmethod
    def unconnected(cls, links: Sequence[Link] = ()) -> Self:
        """Only these links exist; devices of one node reach each other as the class says.

        Raises:
            InvalidPlacementInput: one is no link.
        """
        return cls(
            links=all_of_kind(links, Link, "links"),
            classes={Locality.NODE: DEFAULT_CLASSES[Locality.NODE], Locality.ZONE: None, Locality.WIDE: None},
        )

    def within(self, devices: Sequence[PlacementDevice]) -> Topology:
        """Without the entries of devices and nodes that are not among these.

        Raises:
            InvalidPlacementInput: one is no device.
        """
        devices = all_of_kind(devices, PlacementDevice, "devices")
        known = {device.id for device in devices} | {device.node for device in devices}
        return self.model_copy(
            update={
                "table": self.table if self.table is not None and known.intersection(self.table.names) else None,
                "links": tuple(link for link in self.links if link.source in known and link.target in known),
                "cut": frozenset(pair for pair in self.cut if pair[0] in known and pair[1] in known),
            }
        )

    def dense(self, devices: Sequence[PlacementDevice]) -> LinkMatrix:
        """Latency and bandwidth of every ordered pair of these devices.

        Raises:
            InvalidPlacementInput: one is no device.
        """
        return _dense(self, all_of_kind(devices, PlacementDevice, "devices"))


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Row = source, column = target. The diagonal is 0 seconds and infinite bandwidth."""

    latency: NDArray[np.float64]
    """Seconds; infinite where there is no way."""
    bandwidth: NDArray[np.float64]
    """Bytes/s."""
    estimated: NDArray[np.bool_]

    def of(self, rows: Sequence[int]) -> LinkMatrix:
        """The links among some of the devices, by their places."""
        pairs = np.ix_(rows, rows)
        return LinkMatrix(self.latency[pairs], self.bandwidth[pairs], self.estimated[pairs])

    def seconds(self, payload_bytes: float) -> NDArray[np.float64]:
        """Time to hand over so many bytes; infinite where no number is as large."""
        with np.errstate(over="ignore"):
            return self.latency + payload_bytes / self.bandwidth


def _dense(topology: Topology, devices: Sequence[PlacementDevice]) -> LinkMatrix:
    node_ids = {name: index for index, name in enumerate(dict.fromkeys(device.node for device in devices))}
    zone_ids = {name: index for index, name in enumerate(dict.fromkeys(device.zone for device in devices))}
    node = np.array([node_ids[device.node] for device in devices], dtype=np.intp)
    zone = np.array([zone_ids[device.zone] for device in devices], dtype=np.intp)
    size = len(devices)
    latency = np.full((size, size), np.inf)
    bandwidth = np.ones((size, size))
    same_node = node[:, None] == node[None, :]
    same_zone = zone[:, None] == zone[None, :]
    for locality, where in (
        (Locality.WIDE, ~same_zone & ~same_node),
        (Locality.ZONE, same_zone & ~same_node),
        (Locality.NODE, same_node),
    ):
        assumed = topology.classes.get(locality)
        if assumed is not None:
            np.copyto(latency, assumed.latency_seconds, where=where)
            np.copyto(bandwidth, assumed.bandwidth, where=where)
    estimated = np.ones((size, size), dtype=np.bool_)
    index = {device.id: position for position, device in enumerate(devices)}
    members: dict[str, list[int]] = {}
    for position, device in enumerate(devices):
        members.setdefault(device.node, []).append(position)

    def block(name: str) -> list[int]:
        return [index[name]] if name in index else members.get(name, [])

    if topology.table is not None:
        _apply_table(topology.table, node, node_ids, index, latency, bandwidth, estimated)
    # Node entries first, so that what is known of the devices themselves has the last word.
    by_width = sorted(topology.links, key=lambda link: (link.source in index) + (link.target in index))
    for link in by_width:
        rows, columns = block(link.source), block(link.target)
        for row in rows:
            latency[row, columns] = link.latency_seconds
            bandwidth[row, columns] = link.bandwidth
            estimated[row, columns] = link.estimated
    for source, target in topology.cut:
        for row in block(source):
            latency[row, block(target)] = np.inf
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    np.fill_diagonal(estimated, False)
    return LinkMatrix(latency, bandwidth, estimated)


def _apply_table(
    table: LinkTable,
    node: NDArray[np.intp],
    node_ids: Mapping[str, int],
    index: Mapping[str, int],
    latency: NDArray[np.float64],
    bandwidth: NDArray[np.float64],
    estimated: NDArray[np.bool_],
) -> None:
    """Fill in a table of devices or of nodes; what it does not say keeps its class."""
    # A device may have the name of its node, which then has no other: a table that fits both means the same.
    of_devices = sum(name in index for name in table.names) >= sum(name in node_ids for name in table.names)
    places = index if of_devices else node_ids
    row_of = np.full(len(places), -1, dtype=np.intp)
    for row, name in enumerate(table.names):
        if name in places:
            row_of[places[name]] = row
    if not of_devices:
        row_of = row_of[node]
    pair = np.ix_(row_of, row_of)
    given, rate = table.latency_seconds[pair], table.bandwidth[pair]
    said = (row_of[:, None] >= 0) & (row_of[None, :] >= 0) & ~np.isnan(given) & ~np.isnan(rate)
    if not of_devices:
        said &= node[:, None] != node[None, :]
    np.copyto(latency, given, where=said)
    np.copyto(bandwidth, rate, where=said)
    estimated &= ~said


def check_names(topology: Topology, devices: Sequence[PlacementDevice]) -> None:
    """Raise :class:`InvalidPlacementInput` for an entry whose end is neither a device nor a node of these.

    A misspelt name would otherwise be a link that silently keeps its class. Where entries of nodes that have left are
    expected, say so with :meth:`Topology.within`.
    """
    known = {device.id for device in devices} | {device.node for device in devices}
    if topology.table is not None and not known.intersection(topology.table.names):
        raise InvalidPlacementInput("none of them is a device or node that is there", field="topology.table.names")
    for position, link in enumerate(topology.links):
        for end in ("source", "target"):
            name = getattr(link, end)
            if name not in known:
                raise InvalidPlacementInput(
                    f"unknown device or node {name!r}", field=f"topology.links.{position}.{end}"
                )
    for pair in sorted(topology.cut):
        for name in pair:
            if name not in known:
                raise InvalidPlacementInput(f"unknown device or node {name!r}", field="topology.cut")
