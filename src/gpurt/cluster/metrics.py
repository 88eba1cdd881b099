"""The metrics of a master. Nodes tell their own: here are sums, so that a cluster of any size has as many series."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Final

from gpurt.cluster.master import Master
from gpurt.cluster.message_limits import Refusals
from gpurt.cluster.queries import MemoryKey, health_of, memory_key, memory_of, nodes_by_state
from gpurt.cluster.records import ClusterSnapshot, NodeState
from gpurt.cluster.sequence import Counters, Resync
from gpurt.telemetry.exporter import Families
from gpurt.telemetry.metrics import Family
from gpurt.types import DeviceState

REFUSED_NODES: Final = 32
"""A cluster of any size has as many series."""
STEP_NODES: Final = 32
"""Nodes that are looked at before other tasks get their turn."""

_OUTCOMES: Final = tuple(field.name for field in fields(Counters))
_SNAPSHOTS: Final = "snapshots"
_counts: Final = attrgetter(*_OUTCOMES)
_NOTHING: Final[tuple[int, ...]] = _counts(Counters())


class MasterMetrics:
    """Metrics of the cluster ``cluster``, also before the master listens: then only that nothing is known."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._master: Master | None = None
        self._seen: dict[str, tuple[int, ...]] = {}
        """Counters of each node when they were looked at last."""
        self._before = _NOTHING
        """Of nodes that the master has forgotten, or has begun to count afresh."""

    def watch(self, master: Master) -> None:
        """The master listens."""
        self._master = master

    async def take(self) -> Families:
        """For a :class:`gpurt.telemetry.exporter.MetricsServer`."""
        master = self._master
        snapshot = ClusterSnapshot(nodes={}) if master is None else master.observer.view.snapshot()
        told: list[Family] = []
        if master is not None:
            told = [*self._events(master, snapshot), *await _readings(master, snapshot)]
        listening = Family("gpurt_cluster_master_listening", "gauge", "1 once workers can connect, else 0.")
        listening.add(int(master is not None), cluster=self._cluster)
        return lambda: [listening, *_nodes(snapshot), *_devices(snapshot), *told]

    def _events(self, master: Master, snapshot: ClusterSnapshot) -> list[Family]:
        observer, totals = master.observer, self._totals(master, snapshot)
        events = Family("gpurt_cluster_events", "counter", "Events of nodes by what became of them.")
        snapshots = Family("gpurt_cluster_snapshots", "counter", "Snapshots of nodes that were applied.")
        for outcome, count in totals.items():
            if outcome == _SNAPSHOTS:
                snapshots.add(count)
            else:
                events.add(count, outcome=outcome)
        resyncs = Family("gpurt_cluster_resyncs", "counter", "Snapshots that were asked for; gap: events were missing.")
        for reason in Resync:
            resyncs.add(observer.resyncs[reason], reason=reason)
        dropped = Family("gpurt_cluster_dropped", "counter", "How often the master was too slow for a node's events.")
        dropped.add(observer.dropped)
        refused = Family("gpurt_cluster_readings_refused", "counter", "Messages that were no readings.")
        refused.add(master.board.refused)
        return [
            events,
            snapshots,
            resyncs,
            dropped,
            _counted("gpurt_cluster_rejected", "What was refused before it was read.", observer.rejected),
            _counted("gpurt_cluster_ignored", "Events that were not understood.", observer.view.ignored),
            refused,
            *_refusals(observer.view.refusals),
        ]

    def _totals(self, master: Master, snapshot: ClusterSnapshot) -> dict[str, int]:
        """What became of the events of all nodes, those that are forgotten included: never less than before."""
        rows: list[tuple[int, ...]] = [_NOTHING]
        for name in snapshot.nodes.keys() | self._seen.keys():
            now, last = _counts(master.observer.counters(name)), self._seen.get(name, _NOTHING)
            if now != last:
                if any(new < old for new, old in zip(now, last, strict=True)):
                    self._before = tuple(map(sum, zip(self._before, last, strict=True)))
                self._seen[name] = now
            if now == _NOTHING and name not in snapshot.nodes:
                self._seen.pop(name, None)
            rows.append(now)
        totals = map(sum, zip(self._before, *rows, strict=True))
        return dict(zip(_OUTCOMES, totals, strict=True))


def _nodes(snapshot: ClusterSnapshot) -> list[Family]:
    nodes = Family("gpurt_cluster_nodes", "gauge", "Nodes by state.")
    for state, count in nodes_by_state(snapshot).items():
        nodes.add(count, state=state)
    draining = Family("gpurt_cluster_nodes_draining", "gauge", "Healthy nodes that take no new placements.")
    draining.add(sum(node.draining and node.state is NodeState.HEALTHY for node in snapshot.nodes.values()))
    conflicts = Family("gpurt_cluster_name_conflicts", "gauge", "Node names that two live processes use.")
    conflicts.add(len(snapshot.conflicts))
    return [nodes, draining, conflicts]


def _devices(snapshot: ClusterSnapshot) -> list[Family]:
    # Without an object for each device: a large cluster's would have the collector of garbage look at everything.
    states: Counter[DeviceState] = Counter()
    ready: Counter[bool] = Counter()
    parts: dict[bool, list[tuple[MemoryKey, int | None]]] = {False: [], True: []}
    for name, node in snapshot.nodes.items():
        for key, record in node.devices.items():
            device = record.device
            states[health_of(node, device)] += 1
            if record.available:
                ready[device.simulated] += 1
                memory = memory_key(node.host.fingerprint, name, key, device)
                parts[device.simulated].append((memory, device.memory_usable_bytes))
    health = Family("gpurt_cluster_devices", "gauge", "Devices by health, that of their nodes taken in.")
    for state in DeviceState:
        health.add(states[state], health=state)
    available = Family("gpurt_cluster_devices_available", "gauge", "Devices on which work may be placed.")
    usable = Family(
        "gpurt_cluster_memory_usable_bytes", "gauge", "What can be allocated on them, shared memory once.", "bytes"
    )
    for simulated in (False, True):
        available.add(ready[simulated], simulated=str(simulated).lower())
        usable.add(memory_of(parts[simulated]).usable_bytes, simulated=str(simulated).lower())
    return [health, available, usable]


async def _readings(master: Master, snapshot: ClusterSnapshot) -> list[Family]:
    silent = Family("gpurt_cluster_devices_without_readings", "gauge", "Available devices that have told no readings.")
    oldest = Family(
        "gpurt_cluster_oldest_reading_age_seconds",
        "gauge",
        "Age of the oldest reading of an available device.",
        "seconds",
    )
    missing, ages = 0, list[float]()
    for position, node in enumerate(snapshot.nodes.values()):
        if position % STEP_NODES == STEP_NODES - 1:
            await asyncio.sleep(0)
        told = master.board.readings(node.node) if node.state is NodeState.HEALTHY else {}
        for key, record in node.devices.items():
            if record.available and key in told:
                ages.append(told[key].age_s)
            else:
                missing += record.available
    silent.add(missing)
    if ages:
        oldest.add(max(ages))
    return [silent, oldest]


def _refusals(refusals: Refusals) -> list[Family]:
    fields = Family("gpurt_cluster_refused_values", "counter", "Values of nodes beyond all limits, by field.")
    for name, count in sorted(refusals.by_field.items()):
        fields.add(count, field=name)
    nodes = Family(
        "gpurt_cluster_refused_values_of_node", "counter", f"The same by node; the {REFUSED_NODES} nodes with most."
    )
    counts = Counter({node: sum(refusals.of(node).values()) for node in refusals.nodes})
    for node, count in sorted(counts.most_common(REFUSED_NODES)):
        nodes.add(count, node=node)
    return [fields, nodes]


def _counted(name: str, text: str, counts: Mapping[str, int]) -> Family:
    family = Family(name, "counter", text)
    for reason, count in sorted(counts.items()):
        family.add(count, reason=reason)
    return family
