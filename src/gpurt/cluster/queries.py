"""Questions that schedulers ask about a cluster, over one snapshot of the master's view. Pure: no I/O, no clock.

Nodes may share a machine, and devices may share memory. What is one piece of memory is counted once: devices of one
host with one ``memory_pool_id``, and one card that several nodes of its host list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gpurt.cluster.records import ClusterSnapshot, DeviceRecord, NodeRecord, NodeState
from gpurt.health.evidence import SEVERITY
from gpurt.types import DeviceState, GPUDevice

_AT_BEST: Final = {
    NodeState.SUSPECT: DeviceState.SUSPECT,
    NodeState.UNKNOWN: DeviceState.SUSPECT,
    NodeState.LOST: DeviceState.LOST,
    NodeState.LEFT: DeviceState.REMOVED,
}
"""What a device is, however well it was when its node was heard last."""
_NUMBERED: Final = re.compile(r"(\d{1,4})\.(\d{1,4})")


MemoryKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """One device of one node."""

    node: str
    key: str
    """Within the node: the stable id."""
    host: str
    """Fingerprint of the machine."""
    device: GPUDevice
    health: DeviceState
    """What is believed of it, its node's state taken in: on a node that is lost nothing is healthy."""
    available: bool
    """Work may be placed on it now."""

    @property
    def usable_bytes(self) -> int | None:
        """What can be allocated on it; None where nobody knows."""
        return self.device.memory_usable_bytes

    @property
    def memory(self) -> MemoryKey:
        """See :func:`memory_key`."""
        return memory_key(self.host, self.node, self.key, self.device)


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """One piece of memory and the devices that allocate from it."""

    devices: tuple[ClusterDevice, ...]
    usable_bytes: int | None
    """The most that one of the devices may have; None where none of them tells."""


@dataclass(frozen=True, slots=True)
class UsableMemory:
    """Memory of several devices together."""

    usable_bytes: int
    """Of those that tell; each piece of memory once."""
    unknown: int
    """Pieces of memory of which nobody tells; they count nothing in ``usable_bytes``."""


def health_of(node: NodeRecord, device: GPUDevice) -> DeviceState:
    """The state of a device, with that of its node taken in."""
    limit = _AT_BEST.get(node.state)
    if limit is None:
        return device.state
    # A state that this version does not know has no place in the order; that the node is away is known.
    known = device.state if device.state in SEVERITY else DeviceState.HEALTHY
    return max(known, limit, key=SEVERITY.index)


def memory_key(host: str, node: str, key: str, device: GPUDevice) -> MemoryKey:
    """Names the memory that a device allocates from: devices with equal ones share it."""
    if device.memory_pool_id is not None:
        return host, "pool", device.memory_pool_id
    if device.identity is not None and device.identity.stable:
        return host, "device", device.identity.key
    return host, "node", f"{node} {key}"


def cluster_devices(snapshot: ClusterSnapshot) -> tuple[ClusterDevice, ...]:
    """Every device of every node, the unavailable ones too, by node and then in the node's order of preference."""
    return tuple(
        _device(node, key, record) for _, node in sorted(snapshot.nodes.items()) for key, record in node.devices.items()
    )


def find_devices(
    snapshot: ClusterSnapshot,
    *,
    available: bool | None = True,
    nodes: Iterable[str] | None = None,
    vendor: str | None = None,
    backend: str | None = None,
    kinds: Iterable[str] | None = None,
    health: Iterable[DeviceState] | None = None,
    capability: str | None = None,
    min_capability: str | None = None,
    min_usable_bytes: int | None = None,
    simulated: bool | None = None,
    where: Callable[[ClusterDevice], bool] | None = None,
) -> tuple[ClusterDevice, ...]:
    """The devices that fit, those with the most usable memory first, and those that do not tell it last; of equals by
    node and key, so that every caller gets the same order. A condition that is None is none; where several values are
    taken, one alone will do.

    Args:
        available: True: work may be placed on it; False: it may not.
        vendor: ``nvidia amd intel apple …``.
        backend: one of those that show the device (``cuda``), not only the preferred one.
        kinds: :class:`gpurt.types.DeviceKind` ``gpu igpu cpu …``.
        health: states, those of nodes taken in.
        capability: exactly this ``compute_capability``; features after a colon (``gfx942:sramecc+``) do not count.
        min_capability: at least this one, for those that are numbers (``"8.0"``); all others do not fit.
        min_usable_bytes: a device that does not tell its usable memory does not fit.
        where: anything else.

    Raises:
        ValueError: ``min_capability`` is no ``MAJOR.MINOR``, or ``min_usable_bytes`` negative.
    """
    least = None if min_capability is None else _numbers(min_capability)
    if min_capability is not None and least is None:
        raise ValueError(f"min_capability must have the form MAJOR.MINOR, not {min_capability!r}")
    if min_usable_bytes is not None and min_usable_bytes < 0:
        raise ValueError(f"min_usable_bytes must not be negative: {min_usable_bytes}")
    among = {
        name: None if wanted is None else frozenset((wanted,) if isinstance(wanted, str) else wanted)
        for name, wanted in (("node", nodes), ("kind", kinds), ("health", health))
    }

    def fits(found: ClusterDevice) -> bool:
        device = found.device
        own = device.compute_capability or ""
        numbers, usable = _numbers(own), found.usable_bytes
        return (
            (available is None or found.available is available)
            and (among["node"] is None or found.node in among["node"])
            and (vendor is None or device.vendor == vendor)
            and (backend is None or backend in (device.backend, *device.backends))
            and (among["kind"] is None or device.kind in among["kind"])
            and (among["health"] is None or found.health in among["health"])
            and (capability is None or own.partition(":")[0] == capability.partition(":")[0])
            and (least is None or (numbers is not None and numbers >= least))
            and (min_usable_bytes is None or (usable is not None and usable >= min_usable_bytes))
            and (simulated is None or device.simulated is simulated)
            and (where is None or where(found))
        )

    return tuple(sorted(filter(fits, cluster_devices(snapshot)), key=_rank))


def memory_pools(devices: Iterable[ClusterDevice]) -> tuple[MemoryPool, ...]:
    """Every piece of memory that the devices allocate from, once each; in the order of ``find_devices``."""
    members: dict[MemoryKey, list[ClusterDevice]] = {}
    for device in devices:
        members.setdefault(device.memory, []).append(device)
    pools = (
        MemoryPool(
            tuple(sorted(group, key=_rank)),
            max((each.usable_bytes for each in group if each.usable_bytes is not None), default=None),
        )
        for group in members.values()
    )
    return tuple(sorted(pools, key=lambda pool: _rank(pool.devices[0])))


def usable_memory(devices: Iterable[ClusterDevice]) -> UsableMemory:
    """What can be allocated on the devices together."""
    return memory_of((device.memory, device.usable_bytes) for device in devices)


def memory_of(parts: Iterable[tuple[MemoryKey, int | None]]) -> UsableMemory:
    """What several pieces of memory have together: of those that are named more than once, the most that was told."""
    sizes: dict[MemoryKey, int | None] = {}
    for key, size in parts:
        before = sizes.get(key)
        sizes[key] = size if before is None else max(before, size or 0)
    told = [size for size in sizes.values() if size is not None]
    return UsableMemory(sum(told), len(sizes) - len(told))


def nodes_by_state(snapshot: ClusterSnapshot) -> dict[NodeState, int]:
    """How many nodes are in each state; every state is there."""
    counts = Counter(node.state for node in snapshot.nodes.values())
    return {state: counts[state] for state in NodeState}


def devices_by_health(devices: Iterable[ClusterDevice]) -> dict[DeviceState, int]:
    """How many devices are in each state, those of their nodes taken in; every state is there."""
    counts = Counter(device.health for device in devices)
    return {state: counts[state] for state in DeviceState}


def _device(node: NodeRecord, key: str, record: DeviceRecord) -> ClusterDevice:
    return ClusterDevice(
        node.node, key, node.host.fingerprint, record.device, health_of(node, record.device), record.available
    )


def _rank(device: ClusterDevice) -> tuple[int, str, str]:
    size = device.usable_bytes
    return 1 if size is None else -size, device.node, device.key


def _numbers(capability: str) -> tuple[int, int] | None:
    match = _NUMBERED.fullmatch(capability)
    return None if match is None else (int(match[1]), int(match[2]))
