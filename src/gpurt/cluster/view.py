"""MasterView: the cluster as a fold of snapshots, events and membership. No I/O, no tasks, no wall clock.

Whoever feeds it (:class:`gpurt.cluster.observer.ClusterObserver`) gives each node's events once and in order. A
view is rebuilt from the nodes themselves, so a master that starts again needs nothing of the one before.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from gpurt.cluster.changes import BUFFER_CHANGES, ChangeKind, Changes
from gpurt.cluster.device_data import DeviceData
from gpurt.cluster.envelope import Envelope, EventKind
from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.errors import MalformedEvent
from gpurt.cluster.log_limit import LimitedLog
from gpurt.cluster.message_limits import Refusals
from gpurt.cluster.news import back, joined, silent, summary_of
from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.plan_troubles import PlanTroubles, doubt
from gpurt.cluster.record_changes import (
    EventData,
    available,
    changed,
    device_change,
    offered_again,
    position_of,
    record_of,
    same_device,
    text_of,
)
from gpurt.cluster.records import ClusterSnapshot, Conflict, NodeRecord, NodeState
from gpurt.cluster.shards import NodePlacement
from gpurt.cluster.state import NodeFields, NodeSnapshot, device_keys, parse_snapshot
from gpurt.cluster.telling import Telling

GRACE_S: Final = 2.0
"""From suspect to lost: as long as the bus takes to notice a silent peer."""
HUB_GRACE_S: Final = 10.0
"""From the return of the hub until a node that has not come back with it is lost: it tries every second, and a thousand
take some seconds."""
MAX_NODES: Final = 4096
MAX_DEVICES: Final = 4096
"""Per node."""

_KINDS: Final = {kind.value: kind for kind in EventKind}
_DEVICE_KINDS: Final = frozenset(
    {EventKind.DEVICE_ADDED, EventKind.DEVICE_UPDATED, EventKind.DEVICE_REMOVED, EventKind.DEVICE_HEALTH}
)
_GONE: Final = frozenset({NodeState.LOST, NodeState.LEFT})

_log = logging.getLogger("gpurt.cluster.view")


class MasterView:
    """
    Args:
        grace_s: seconds between suspect and lost.
        clock: the receiver's monotonic clock; no clock of a node is ever believed.
        max_nodes: past it, those that are gone for longest are forgotten; where none is, new ones are refused.
    """

    def __init__(
        self,
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        max_nodes: int = MAX_NODES,
    ) -> None:
        self.grace_s = grace_s
        self.clock = clock
        self.ignored: Counter[str] = Counter()
        """Events not understood: ``unknown_type``, ``malformed``, ``unknown_node``, ``too_many``; and events and
        snapshots that lie before what is known already: ``stale``."""
        self.refusals = Refusals(clock)
        """What nodes have said that is beyond all limits, of whatever kind of message."""
        self._warnings = LimitedLog(_log, clock=clock)
        self._max_nodes = max_nodes
        self._nodes: dict[str, NodeRecord] = {}
        self._up: set[str] = set()
        self._suspects: set[str] = set()
        self._unknown: set[str] = set()
        self._hub_away = False
        self._hub_back_at = 0.0
        self._left: dict[str, Position] = {}
        """Where a node's goodbye stands. It is of that run alone."""
        self._returning: set[str] = set()
        """Nodes that have left and show a token again, of a run that is not known yet."""
        self._unseen: set[str] = set()
        """Nodes that have left before their first answer came."""
        self._conflicts: dict[str, Conflict] = {}
        self._plans = PlanTroubles(self._nodes)
        self._doubted: set[str] = set()
        """Nodes whose term was said not to count."""
        self._telling = Telling()

    # Questions

    def snapshot(self) -> ClusterSnapshot:
        """The present picture; later changes do not touch it."""
        return ClusterSnapshot.model_construct(
            nodes=dict(self._nodes), conflicts=tuple(self._conflicts.values()), plan_troubles=self._plans.said
        )

    def node(self, name: str) -> NodeRecord | None:
        return self._nodes.get(name)

    def conflict(self, name: str) -> Conflict | None:
        return self._conflicts.get(name)

    def changes(self, limit: int = BUFFER_CHANGES) -> Changes:
        """What changes from this call on, for one consumer of this loop, who may be ``limit`` changes behind."""
        return self._telling.open(limit)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` must be called next, on ``clock``."""
        due = [self._nodes[name].state_since + self.grace_s for name in self._suspects]
        if self._unknown and not self._hub_away:
            due.append(self._hub_back_at + HUB_GRACE_S)
        if self._plans.due is not None:
            due.append(self._plans.due)
        return min(due, default=None)

    @property
    def plans_due(self) -> float | None:
        """The same for plans alone: after an event, it is all that can be due."""
        return self._plans.due

    # The fold

    def apply_snapshot(self, snapshot: NodeSnapshot, *, sole: bool = False) -> bool:
        """Replace all that is known of the node. False: refused, as a conflict or for want of room.

        The node is healthy only while its token is there (``node_up`` comes first): a snapshot may have been
        under way when its node died.

        One that was taken before what is known already changes nothing.

        ``sole``: the snapshot is known to come from the only live process of that name, so its run is the present one
        whatever its number. Otherwise a run with an earlier number changes nothing, and one of another host than that
        of a healthy node is a conflict.
        """
        name = snapshot.node
        old = self._nodes.get(name)
        if old is None and not self._make_room(name):
            return False
        if old is not None and _before(snapshot, old, sole=sole):
            self.ignored["stale"] += 1
            return True
        if (
            old is not None
            and not sole
            and old.state is NodeState.HEALTHY
            and old.host.fingerprint != snapshot.host.fingerprint
        ):
            self.report_conflict(snapshot)
            return False
        self._settle_conflict(snapshot)
        state = self._state_after(old, snapshot)
        healthy = state is NodeState.HEALTHY
        same_state = old is not None and old.state is state
        record = record_of(
            snapshot,
            tuple(device_keys(snapshot.gpu_devices[:MAX_DEVICES]).items()),
            state=state,
            since=old.state_since if old is not None and same_state else self.clock(),
        )
        self._nodes[name] = record
        self._note_suspicion(record)
        self._note_plans(old, record)
        if old is None:
            self._telling.post(ChangeKind.NODE_JOINED, name, message=joined(record))
        elif healthy and not same_state:
            self._telling.post(ChangeKind.NODE_BACK, name, message=back(old, record, self.clock()))
        elif summary_of(old) != summary_of(record):
            self._telling.node_updated(old, record)
        self._telling.devices(name, old.devices if old else {}, record.devices)
        self._telling.placement(name, old.placement if old else NodePlacement(), record.placement)
        self._telling.links(name, old.links if old else NodeLinks(), record.links)
        return True

    def apply_event(self, event: Envelope) -> bool:
        """Fold one event in. An event that is not understood is counted and only moves the node's position; one that
        lies before what is known already changes nothing.

        False: the news was too large for an event, or is of a later run, so a snapshot of the node is needed.
        """
        record = self._nodes.get(event.nodeid)
        if record is None:
            self.ignored["unknown_node"] += 1
            return True
        if event.nodeepoch != record.epoch:
            if Epoch.parse(event.nodeepoch) > Epoch.parse(record.epoch):
                return False
            self.ignored["stale"] += 1
            return True
        if int(event.nodeseq) <= record.seq:
            self.ignored["stale"] += 1
            return True
        kind = _KINDS.get(event.type)
        try:
            if kind is not None and kind in _DEVICE_KINDS:
                self._fold_device(kind, record, event)
                return True
            self._nodes[record.node] = record = changed(record, **position_of(event))
            if kind is not None:
                return self._fold(kind, record, event)
            self.ignored["unknown_type"] += 1
            return True
        except MalformedEvent as exc:
            self._warnings.warning(record.node, "ignored: event %s of node %s: %s", event.id[:200], record.node, exc)
        self.ignored["malformed"] += 1
        self._nodes[record.node] = changed(record, **position_of(event))
        return True

    def node_up(self, name: str) -> None:
        """The node's token is there. It becomes healthy with its snapshot or with ``node_answered``: the token
        alone may be of a new run, which need not have the devices of the old one."""
        self._up.add(name)
        self._unseen.discard(name)
        record = self._nodes.get(name)
        if record is not None and record.state is NodeState.LEFT:
            self._returning.add(name)

    def goodbye(self, name: str) -> Position | None:
        """Where the node's latest goodbye stands; None: it has said none."""
        return self._left.get(name)

    def node_answered(self, name: str, epoch: str) -> None:
        """A process has answered a question that was put after its token had come. When it is the run that is known and
        has said no goodbye, it is back."""
        record = self._nodes.get(name)
        if record is None or record.epoch != epoch or name not in self._up:
            return
        goodbye = self._left.get(name)
        ended = record.state is NodeState.LEFT and goodbye is not None and str(goodbye.epoch) == epoch
        if record.state is not NodeState.HEALTHY and not ended:
            self._enter(record, NodeState.HEALTHY, ChangeKind.NODE_BACK, back(record, record, self.clock()))

    def node_down(self, name: str, *, left: bool = False) -> None:
        """The node's token is gone; ``left``: it said that it would be."""
        was_up = name in self._up
        self._up.discard(name)
        returning = name in self._returning
        self._returning.discard(name)
        record = self._nodes.get(name)
        if record is None:
            if left and len(self._unseen) < self._max_nodes:
                self._unseen.add(name)
        elif left:
            self._enter_left(record)
        elif self._hub_away:
            return  # its token has ended here, with the connection of who looks
        elif record.state is NodeState.HEALTHY or returning or (record.state is NodeState.UNKNOWN and was_up):
            self._enter(record, NodeState.SUSPECT, ChangeKind.NODE_SUSPECT, "its connection ended")

    def hub_away(self) -> None:
        """Nobody can be heard: every node that was there, or was just missed, is unknown until the hub is back."""
        self._hub_away = True
        self._up.clear()
        for record in tuple(self._nodes.values()):
            there = record.state in (NodeState.HEALTHY, NodeState.SUSPECT) or record.node in self._returning
            if there:
                self._enter(record, NodeState.UNKNOWN, ChangeKind.NODE_UNKNOWN, "the hub is away")

    def hub_back(self) -> None:
        """Nodes can be heard again, and come back one by one; those that do not within ``HUB_GRACE_S`` are lost. Also
        where the hub was away so shortly that nobody was told of it."""
        if not self._hub_away:
            self.hub_away()
        self._hub_away = False
        self._hub_back_at = self.clock()

    def tick(self) -> None:
        """Give up the suspects whose grace is over, and say what is wrong about plans."""
        now = self.clock()
        if self._unknown and not self._hub_away and self._hub_back_at + HUB_GRACE_S <= now:
            for record in [self._nodes[name] for name in self._unknown]:
                self._enter(record, NodeState.LOST, ChangeKind.NODE_LOST, "it did not come back with the hub")
        for record in [self._nodes[name] for name in self._suspects]:
            if record.state_since + self.grace_s <= now:
                self._enter(record, NodeState.LOST, ChangeKind.NODE_LOST, silent(record, now))
        if self._plans.due is not None and self._plans.due <= now:
            for trouble, is_there in self._plans.look(now, self.snapshot().term):
                _log.log(
                    logging.ERROR if is_there else logging.INFO, "%s%s", "" if is_there else "over: ", trouble.message
                )
                kind = ChangeKind.PLAN_TROUBLE if is_there else ChangeKind.PLAN_TROUBLE_OVER
                self._telling.post(kind, None, message=trouble.message)

    def report_conflict(self, refused: NodeSnapshot) -> None:
        """``refused`` is of a live process that uses the name of another live one."""
        kept = self._nodes.get(refused.node)
        if kept is None:
            return
        conflict = Conflict(
            node=refused.node,
            kept=kept.host,
            refused=refused.host,
            refused_epoch=refused.epoch,
            refused_devices=tuple(device_keys(refused.gpu_devices)),
        )
        if self._conflicts.get(refused.node) == conflict:
            return
        self._conflicts[refused.node] = conflict
        _log.error("%s", conflict.message)
        self._telling.post(ChangeKind.CONFLICT, refused.node, message=conflict.message)

    def end_conflict(self, name: str) -> None:
        """Only one process uses the name any more."""
        if self._conflicts.pop(name, None) is not None:
            self._telling.post(ChangeKind.CONFLICT_OVER, name, message="one process alone uses the name now")

    # Inside

    def _fold(self, kind: EventKind, record: NodeRecord, event: Envelope) -> bool:
        data = event.document()
        if kind is EventKind.NODE_SNAPSHOT:
            if event.data is None:
                return False
            snapshot = parse_snapshot(data, node=record.node, refusals=self.refusals)
            if snapshot.position != event.position:
                raise MalformedEvent(f"event {event.id[:200]}: its snapshot is of another position")
            return self.apply_snapshot(snapshot, sole=True)
        if kind is EventKind.NODE_LEAVING:
            self._leave(record)
            return True
        # Everything that can be wrong is looked at before anything is changed.
        said = EventData(record.node, data, self.refusals)
        fields = said.fields
        if kind in (EventKind.BACKEND_SELECTED, EventKind.BACKEND_FAILED):
            reports = {r.name: r for r in record.reports}
            if (report := said.report) is not None:
                reports[report.name] = report
            self._store(record, fields, reports=tuple(reports.values()))
            return True
        if kind is EventKind.NODE_PLACEMENT:
            placement = said.placement
            self._store(record, fields, placement=placement)
            self._note_plans(record, self._nodes[record.node])
            self._telling.placement(record.node, record.placement, placement)
            return True
        links = said.links
        self._store(record, fields, links=links)
        self._telling.links(record.node, record.links, links)
        return True

    def _fold_device(self, kind: EventKind, record: NodeRecord, event: Envelope) -> None:
        data = event.data
        if isinstance(data, DeviceData):
            device, fields, why = data.device, data.fields, text_of(data.reason)
        else:
            said = EventData(record.node, data or {}, self.refusals)
            device, fields, why = None, said.fields, text_of(said.data.get("reason"))
        key = event.subject
        if not key:
            raise MalformedEvent(f"event {event.id[:200]}: {kind} without a subject")
        devices = dict(record.devices)
        previous, current = devices.get(key), None
        if kind is EventKind.DEVICE_REMOVED:
            devices.pop(key, None)
            change = ChangeKind.DEVICE_REMOVED if previous else None
        else:
            if previous is None and len(devices) >= MAX_DEVICES:
                self.ignored["too_many"] += 1
                self._nodes[record.node] = changed(record, **position_of(event))
                return
            if device is None:
                device = EventData(record.node, event.document(), self.refusals).device
            devices[key] = current = available(device, offered=record.offers_devices)
            change = None if same_device(previous, current) else device_change(previous, current)
        self._store(record, fields, devices=devices, **position_of(event))
        if change is not None and current is not None:
            self._telling.device(change, record.node, key, previous, current, why)
        elif change is not None:
            self._telling.post(change, record.node, key, message=why)

    def _store(self, record: NodeRecord, fields: NodeFields | None, **changes: Any) -> None:
        """Replace the node's record, in one copy: copies are what an event costs most."""
        told = "reports" in changes and changes["reports"] != record.reports
        if fields is not None:
            before = vars(record)
            news = {name: value for name, value in vars(fields).items() if value != before[name]}
            changes |= news
            told = told or bool(news)
        after = changed(record, **changes)
        if "draining" in changes:
            after = offered_again(after)
        self._nodes[record.node] = after
        if told:
            self._telling.node_updated(record, after)

    def _leave(self, record: NodeRecord) -> None:
        self._left[record.node] = Position(Epoch.parse(record.epoch), record.seq)
        self._enter_left(record)

    def _enter_left(self, record: NodeRecord) -> None:
        """By its goodbye, or by the end of its token, or by both in either order. The token does not say of which run
        it was, so that its end holds only until there is a token again."""
        if record.state is not NodeState.LEFT:
            self._enter(record, NodeState.LEFT, ChangeKind.NODE_LEFT, "it said goodbye")

    def _enter(self, record: NodeRecord, state: NodeState, kind: ChangeKind, message: str) -> None:
        self._nodes[record.node] = offered_again(changed(record, state=state, state_since=self.clock()))
        self._note_suspicion(self._nodes[record.node])
        self._note_plans(record, self._nodes[record.node])
        self._telling.post(kind, record.node, message=message)

    def _note_plans(self, before: NodeRecord | None, after: NodeRecord) -> None:
        old, new = (None if before is None else before.placement), after.placement
        if before is None or before.state is not after.state or old != new:
            self._plans.node_changed(before, after, self.clock())
        if new.term and (old is None or old.term != new.term):
            self._note_doubt(after.node)

    def _note_doubt(self, name: str) -> None:
        """Said once, until its term counts."""
        why = doubt(self._nodes, name)
        if why is None:
            self._doubted.discard(name)
        elif name not in self._doubted:
            self._doubted.add(name)
            _log.warning("node %s: %s", name, why)
            self._telling.post(ChangeKind.TERM_DOUBTED, name, message=why)

    def _note_suspicion(self, record: NodeRecord) -> None:
        if record.state is not NodeState.LEFT:
            self._returning.discard(record.node)
        for state, names in ((NodeState.SUSPECT, self._suspects), (NodeState.UNKNOWN, self._unknown)):
            if record.state is state:
                names.add(record.node)
            else:
                names.discard(record.node)

    def _state_after(self, old: NodeRecord | None, snapshot: NodeSnapshot) -> NodeState:
        up = snapshot.node in self._up
        goodbye = self._left.get(snapshot.node)
        if goodbye is not None and old is not None and old.state is NodeState.LEFT:
            # Up to the goodbye, it was taken just before; a later one of that run is of a publisher that has joined
            # again, and another run has said no goodbye.
            epoch, seq = snapshot.position
            up = up and (epoch != goodbye.epoch or seq > goodbye.seq)
        if up:
            return NodeState.HEALTHY
        if old is None and snapshot.node in self._unseen:
            self._unseen.discard(snapshot.node)
            return NodeState.LEFT
        if self._hub_away and (old is None or old.state is NodeState.HEALTHY):
            return NodeState.UNKNOWN
        return NodeState.SUSPECT if old is None or old.state is NodeState.HEALTHY else old.state

    def _make_room(self, name: str) -> bool:
        if len(self._nodes) < self._max_nodes:
            return True
        gone = min((r for r in self._nodes.values() if r.state in _GONE), key=lambda r: r.state_since, default=None)
        if gone is None:
            self.ignored["too_many"] += 1
            _log.error("node %s is refused: the view holds %d live nodes already", name, self._max_nodes)
            return False
        del self._nodes[gone.node]
        self._doubted.discard(gone.node)
        self._plans.node_changed(gone, None, self.clock())
        self._left.pop(gone.node, None)
        self._returning.discard(gone.node)
        why = f"it was {gone.state} for longest, and there is room for {self._max_nodes} nodes"
        self._telling.post(ChangeKind.NODE_FORGOTTEN, gone.node, message=why)
        return True

    def _settle_conflict(self, snapshot: NodeSnapshot) -> None:
        conflict = self._conflicts.get(snapshot.node)
        if conflict is not None and conflict.refused_epoch == snapshot.epoch:
            self.end_conflict(snapshot.node)


def _before(snapshot: NodeSnapshot, known: NodeRecord, *, sole: bool) -> bool:
    """The snapshot was taken before what is known of its node. Who lives is the present run, where that is known."""
    if snapshot.epoch == known.epoch:
        return snapshot.seq < known.seq
    return not sole and snapshot.position.epoch < Epoch.parse(known.epoch)
