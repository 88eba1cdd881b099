"""The links of a cluster as placement takes them. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpurt.cluster.peer_links import PeerLink
from gpurt.cluster.records import ClusterSnapshot, NodeState
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.topology import DEFAULT_CLASSES, Link, LinkClass, Locality, Topology

EVERY_PAIR: Final = 8
"""Up to so many nodes, every ordered pair is measured."""
NEAR: Final = 2
FAR: Final = 1
"""Above, from each node: so many ways to nodes of its own zone, and to those of others."""


def topology_from_view(snapshot: ClusterSnapshot, devices: Sequence[PlacementDevice]) -> Topology:
    """What the nodes have measured between themselves, among the nodes of ``devices``; everything else is of a class.

    A way that was measured in the other direction only is taken to be the same, and marked estimated. The class of
    ways within a zone, or between zones, is the median of what was measured of it, where something was; what is of a
    class is always marked estimated. Between devices of one node nothing is measured here.

    Args:
        devices: as ``devices_from_view`` gives them; their zones decide the class.
    """
    zones = {device.node: device.zone for device in devices}
    measured: dict[tuple[str, str], PeerLink] = {
        (name, link.peer): link
        for name, node in snapshot.nodes.items()
        if name in zones
        for link in node.links.measured
        if link.peer in zones and link.peer != name
    }
    links = [_link(source, target, link, estimated=False) for (source, target), link in measured.items()]
    links += [
        _link(target, source, link, estimated=True)
        for (source, target), link in measured.items()
        if (target, source) not in measured
    ]
    return Topology(links=tuple(links), classes=_classes(measured, zones))


def pairs_to_measure(
    snapshot: ClusterSnapshot, *, zones: Mapping[str, str] | None = None, seed: int = 0
) -> tuple[tuple[str, str], ...]:
    """Ordered pairs of healthy nodes that let others measure: all of few nodes, of many a sample of each class.

    Args:
        zones: by node, as for ``devices_from_view``.
        seed: of the sample; the same one for the same nodes gives the same pairs.
    """
    nodes = sorted(
        name
        for name, node in snapshot.nodes.items()
        if node.state is NodeState.HEALTHY and node.links.endpoint is not None
    )
    if len(nodes) <= EVERY_PAIR:
        return tuple((a, b) for a in nodes for b in nodes if a != b)
    chooser = random.Random(seed)
    where = zones or {}
    pairs: list[tuple[str, str]] = []
    for source in nodes:
        near = [each for each in nodes if each != source and where.get(each) == where.get(source)]
        far = [each for each in nodes if where.get(each) != where.get(source)]
        chosen = chooser.sample(near, min(NEAR, len(near))) + chooser.sample(far, min(FAR, len(far)))
        pairs += [(source, target) for target in chosen]
    return tuple(pairs)


def _link(source: str, target: str, link: PeerLink, *, estimated: bool) -> Link:
    return Link(
        source=source,
        target=target,
        latency_seconds=link.round_trip_s / 2,
        bandwidth=link.bandwidth,
        estimated=estimated,
        transport="tcp",
    )


def _classes(
    measured: Mapping[tuple[str, str], PeerLink], zones: Mapping[str, str]
) -> dict[Locality, LinkClass | None]:
    classes: dict[Locality, LinkClass | None] = dict(DEFAULT_CLASSES)
    same = [link for (a, b), link in measured.items() if zones[a] == zones[b]]
    other = [link for (a, b), link in measured.items() if zones[a] != zones[b]]
    for locality, links in ((Locality.ZONE, same), (Locality.WIDE, other)):
        if links:
            classes[locality] = _median(links)
    return classes


def _median(links: Iterable[PeerLink]) -> LinkClass:
    links = tuple(links)
    return LinkClass(
        latency_seconds=statistics.median(link.round_trip_s / 2 for link in links),
        bandwidth=statistics.median(link.bandwidth for link in links),
    )
