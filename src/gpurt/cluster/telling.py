"""What a view tells of its records as they come out of each other, to those who watch it: made only when there are
some."""

from __future__ import annotations

from collections.abc import Mapping

from gpurt.cluster.changes import BUFFER_CHANGES, Change, ChangeFeed, ChangeKind, Changes
from gpurt.cluster.news import moves_alone, of_device, updated
from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.record_changes import device_change
from gpurt.cluster.records import DeviceRecord, NodeRecord
from gpurt.cluster.shards import NodePlacement, placement_changes


class Telling:
    def __init__(self) -> None:
        self._feed = ChangeFeed()

    def open(self, limit: int = BUFFER_CHANGES) -> Changes:
        """For one consumer, who may be ``limit`` changes behind."""
        return self._feed.open(limit)

    @property
    def watched(self) -> bool:
        return self._feed.watched

    def post(
        self,
        kind: ChangeKind,
        node: str | None,
        device: str | None = None,
        *,
        message: str | None = None,
        minor: bool = False,
    ) -> None:
        if self._feed.watched:
            self._feed.post(Change(kind, node, device, message, minor=minor))

    def node_updated(self, before: NodeRecord, after: NodeRecord) -> None:
        if self._feed.watched:
            said = updated(before, after)
            self.post(ChangeKind.NODE_UPDATED, after.node, message=said, minor=said is None)

    def device(
        self,
        kind: ChangeKind,
        node: str,
        key: str,
        before: DeviceRecord | None,
        after: DeviceRecord,
        why: str | None = None,
    ) -> None:
        """``why``: in the node's own words."""
        if self._feed.watched:
            minor = kind is ChangeKind.DEVICE_UPDATED and moves_alone(before, after)
            if why is None or kind is ChangeKind.DEVICE_UPDATED:
                why = of_device(before, after)
            self.post(kind, node, key, message=why, minor=minor)

    def devices(self, node: str, before: Mapping[str, DeviceRecord], after: Mapping[str, DeviceRecord]) -> None:
        for key in before.keys() - after.keys():
            self.post(ChangeKind.DEVICE_REMOVED, node, key, message="its node no longer lists it")
        for key, record in after.items():
            # One that is another only by what its node is: that is told of the node.
            if (old := before.get(key)) is None or record.device != old.device:
                self.device(device_change(old, record), node, key, old, record)

    def placement(self, node: str, before: NodePlacement, after: NodePlacement) -> None:
        if (said := placement_changes(before, after)) is not None:
            self.post(ChangeKind.NODE_PLACEMENT, node, message=said)

    def links(self, node: str, before: NodeLinks, after: NodeLinks) -> None:
        if before.measured != after.measured:
            self.post(ChangeKind.NODE_LINKS, node, message=f"{len(after.measured)} links measured")
