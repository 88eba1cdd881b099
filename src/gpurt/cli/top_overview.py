"""What ``gpurt top`` shows, as values: nodes and devices with what they measure. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpurt.cluster.monitoring import REFRESH_S
from gpurt.cluster.queries import (
    ClusterDevice,
    MemoryKey,
    cluster_devices,
    devices_by_health,
    memory_of,
    nodes_by_state,
    usable_memory,
)
from gpurt.cluster.readings import DeviceReadings
from gpurt.cluster.records import ClusterSnapshot, NodeRecord, NodeState
from gpurt.health.evidence import SEVERITY
from gpurt.telemetry.reading import reason_words
from gpurt.types import DeviceState

STALE_S: Final = 2 * REFRESH_S
"""Older readings are marked. A node repeats what has not changed every :data:`REFRESH_S`; one message may be lost."""


def no_values(_: str) -> Mapping[str, int]:
    """Nothing of any node was refused."""
    return {}


ReadingsOf = Callable[[str], Mapping[str, DeviceReadings]]
"""What the devices of a node measure, by device key."""


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device."""

    found: ClusterDevice
    readings: DeviceReadings | None

    @property
    def stale(self) -> bool:
        """Its readings are too old to be taken for the present. Of one without readings nothing is."""
        return self.readings is not None and self.readings.age_s > STALE_S

    @property
    def health(self) -> DeviceState:
        """What is believed of it, or how it answered last where that is worse."""
        believed = self.found.health
        contact = DeviceState(self.readings.contact) if self.readings is not None else DeviceState.UNKNOWN
        if contact not in SEVERITY or believed not in SEVERITY:
            return believed
        return max(believed, contact, key=SEVERITY.index)

    @property
    def marks(self) -> tuple[str, ...]:
        """``simulated``, ``stale``, and the health where it is not well."""
        marks = (("simulated", self.found.device.simulated), ("stale", self.stale))
        health = () if self.health is DeviceState.HEALTHY else (self.health.value,)
        return (*(mark for mark, holds in marks if holds), *health)

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        device, told = self.found.device, self.readings
        return {
            "device": self.found.key,
            "device_id": device.device_id,
            "name": device.name,
            "vendor": device.vendor,
            "backend": device.backend,
            "kind": device.kind,
            "simulated": device.simulated,
            "health": self.health,
            "available": self.found.available,
            "memory_bytes": device.memory_bytes,
            "memory_usable_bytes": device.memory_usable_bytes,
            "memory_used_bytes": told and told.memory_used_bytes,
            "utilization_percent": told and told.utilization_percent,
            "temperature_c": told and told.temperature_c,
            "power_w": told and told.power_w,
            "throttled": told and told.throttled,
            "unavailable": dict(told.unavailable) if told else {},
            "contact": told and told.contact,
            "age_s": told and round(told.age_s, 3),
            "stale": self.stale,
        }


@dataclass(frozen=True, slots=True)
class NodeLines:
    """One node and its devices."""

    node: NodeRecord
    state_s: float
    """How long it has been in its state."""
    conflict: bool
    """Two processes use its name."""
    devices: tuple[DeviceLine, ...]
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    """How often it said something beyond all limits, by field."""

    @property
    def name(self) -> str:
        return self.node.node

    @property
    def worst(self) -> DeviceState:
        """Of its devices."""
        known = (line.health for line in self.devices if line.health in SEVERITY)
        return max(known, key=SEVERITY.index, default=DeviceState.HEALTHY)

    @property
    def rank(self) -> tuple[int, str]:
        """Those that need somebody first, those that have left last."""
        if self.node.state is NodeState.LEFT:
            return 2, self.name
        well = self.node.state is NodeState.HEALTHY and self.worst is DeviceState.HEALTHY and not self.conflict
        return int(well), self.name

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "node": self.name,
            "state": self.node.state,
            "state_s": round(self.state_s, 3),
            "draining": self.node.draining,
            "conflict": self.conflict,
            "hostname": self.node.host.hostname,
            "discovery_status": self.node.discovery_status,
            "refused": dict(self.refused),
            "devices": [line.document() for line in self.devices],
        }


@dataclass(frozen=True, slots=True)
class Overview:
    """A cluster at one moment, in the order in which it is shown."""

    nodes: tuple[NodeLines, ...]
    conflicts: tuple[str, ...]
    """For people."""

    @property
    def devices(self) -> tuple[DeviceLine, ...]:
        return tuple(line for node in self.nodes for line in node.devices)

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = [line.found for line in self.devices]
        available = [each for each in found if each.available]
        return {
            "nodes_by_state": nodes_by_state(ClusterSnapshot(nodes={node.name: node.node for node in self.nodes})),
            "devices_by_health": devices_by_health(found),
            "devices_available": len(available),
            "memory_usable_bytes": usable_memory(available).usable_bytes,
            "nodes": [node.document() for node in self.nodes],
            "conflicts": self.conflicts,
        }


def overview(
    snapshot: ClusterSnapshot, readings: ReadingsOf, now: float, refused: Callable[[str], Mapping[str, int]] = no_values
) -> Overview:
    """
    Args:
        now: on the clock of the view.
        refused: what of a node's was refused, by field.
    """
    lines: dict[str, list[DeviceLine]] = {name: [] for name in snapshot.nodes}
    told = {name: readings(name) for name in snapshot.nodes}
    for found in cluster_devices(snapshot):
        lines[found.node].append(DeviceLine(found, told[found.node].get(found.key)))
    contested = {conflict.node for conflict in snapshot.conflicts}
    nodes = [
        NodeLines(node, max(0.0, now - node.state_since), name in contested, tuple(lines[name]), refused(name))
        for name, node in snapshot.nodes.items()
    ]
    nodes.sort(key=lambda node: node.rank)
    return Overview(tuple(nodes), tuple(conflict.message for conflict in snapshot.conflicts))


@dataclass(frozen=True, slots=True)
class Sum:
    """A figure over several devices."""

    value: float | None
    """Of those that tell; None where none does."""
    complete: bool
    """All of them tell."""


def memory_used(lines: Iterable[DeviceLine]) -> Sum:
    """What is in use, of each piece of memory once."""
    parts = ((line.found.memory, line.readings and line.readings.memory_used_bytes) for line in lines)
    return _memory(parts)


def memory_usable(lines: Iterable[DeviceLine]) -> Sum:
    """What can be allocated, of each piece of memory once."""
    return _memory((line.found.memory, line.found.usable_bytes) for line in lines)


def power(lines: Iterable[DeviceLine]) -> Sum:
    """Watts of all together."""
    return _sum(None if line.readings is None else line.readings.power_w for line in lines)


def why_none(lines: Iterable[DeviceLine], metric: str) -> str:
    """In place of a figure that none of them tells: the reason, where it is one; ``?`` where nothing is known."""
    found = {reason_words(line.readings.unavailable.get(metric)) if line.readings else None for line in lines}
    return (found.pop() or "?") if len(found) == 1 else "?"


def names(lines: Iterable[DeviceLine]) -> str:
    """``8x H100, 2x A100``, the commonest first."""
    counts = Counter(line.found.device.name for line in lines)
    return ", ".join(name if count == 1 else f"{count}× {name}" for name, count in counts.most_common())  # noqa: RUF001


def _memory(parts: Iterable[tuple[MemoryKey, int | None]]) -> Sum:
    known = list(parts)
    memory = memory_of(known)
    return Sum(memory.usable_bytes if any(size is not None for _, size in known) else None, memory.unknown == 0)


def _sum(values: Iterable[float | None]) -> Sum:
    listed = list(values)
    told = [value for value in listed if value is not None]
    return Sum(sum(told) if told else None, len(told) == len(listed))
