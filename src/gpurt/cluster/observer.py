"""ClusterObserver: the task that keeps a :class:`MasterView` true.

It takes events and membership from an engine, puts each node's events in order, asks nodes for snapshots where
something is missing, and runs the clocks. Nodes are asked one by one, so that a node that hangs delays only its
own answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gpurt.cluster.bus import (
    BusItem,
    EventEngine,
    EventReceived,
    EventRefused,
    EventsDropped,
    HubAway,
    HubBack,
    NodeDown,
    NodeUp,
    StateReply,
)
from gpurt.cluster.envelope import Envelope, decode
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import BusClosed, BusUnavailable, MalformedEvent
from gpurt.cluster.groups import single
from gpurt.cluster.log_limit import LimitedLog
from gpurt.cluster.message_limits import PIECEMEAL_BYTES, Refusals
from gpurt.cluster.records import NodeState
from gpurt.cluster.sequence import Counters, NodeSequence, Resync, Step
from gpurt.cluster.state import NodeSnapshot, decode_snapshot
from gpurt.cluster.view import MAX_NODES, MasterView
from gpurt.runtime.lane import off_loop

RESYNC_INTERVAL_S: Final = 60.0
"""Between two regular checks of a node, ± 10 %."""
CONFLICT_INTERVAL_S: Final = 2.0
"""The same while its name is used twice: the end of either process shows nowhere else."""
SNAPSHOT_TIMEOUT_S: Final = 2.0
SPACING_S: Final = 0.1
"""Least time between two questions to one node, whatever goes wrong there; doubled up to 2 s while it is silent."""
READING_SHARE: Final = 10.0
"""Times as long as it took to read an answer, the node is left alone."""
QUESTIONS: Final = 16
"""Nodes that are asked at once."""
HELD_EQUAL_S: Final = 0.05
"""By so much may two answers to one question to be apart for having been given one after the other."""
EARLY: Final = 0.02
"""Share of that interval by which a check may be early, so that those of many nodes are found due together."""
BURST: Final = 64
"""Items taken before other tasks get their turn: 64 events take about 2 ms."""

PATIENT: Final = (Resync.JOINED, Resync.ANTI_ENTROPY)
"""After a mere reconnection the bus repeats the events themselves; a snapshot would only hide them."""
UNREPEATED: Final = (Resync.OVERFLOW, Resync.NOTICE)

_log = logging.getLogger("gpurt.cluster.observer")

_Step = Step[Envelope, NodeSnapshot]
_Answer = tuple[StateReply, NodeSnapshot]


@dataclass(slots=True)
class _Node:
    sequence: NodeSequence[Envelope, NodeSnapshot]
    up: bool = False
    tokens: int = 0
    """How often a token of it has come: an answer to a question of before may be of an earlier run."""
    wanted: Resync | None = None
    """A snapshot is wanted; asked for as soon as a question may be put."""
    asking: bool = False
    next_check: float = field(default=float("inf"))


class ClusterObserver:
    """
    Args:
        engine: started by the caller, and closed by the caller.
        view: kept true as long as ``run`` runs; at its end every node is what it was last.
        resync_interval_s: seconds between regular checks of a node.
    """

    def __init__(
        self,
        engine: EventEngine,
        view: MasterView,
        *,
        resync_interval_s: float = RESYNC_INTERVAL_S,
        snapshot_timeout_s: float = SNAPSHOT_TIMEOUT_S,
        on_event: Callable[[Envelope], None] | None = None,
    ) -> None:
        self.view = view
        self.rejected: Counter[str] = Counter()
        """Per reason: ``oversized`` and ``malformed`` events, ``malformed_snapshot``, ``too_many_nodes``."""
        self.resyncs: Counter[str] = Counter()
        """Snapshots asked for, per reason (:class:`gpurt.cluster.sequence.Resync`)."""
        self.dropped = 0
        """How often this process was too slow for the events of a node."""
        self._engine = engine
        self._resync_interval_s = resync_interval_s
        self._snapshot_timeout_s = snapshot_timeout_s
        self._on_event = on_event
        self._nodes: dict[str, _Node] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next = float("inf")
        """When the clocks have something to do next, at the earliest."""
        self._jitter = random.Random()
        self._warnings = LimitedLog(_log, clock=view.clock)

    def counters(self, node: str) -> Counters:
        """What became of the events of ``node``; all 0 for one that was never seen."""
        known = self._nodes.get(node)
        return known.sequence.counters if known else Counters()

    async def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Until cancelled, or until the engine is closed. ``on_ready`` is called once no event can be missed.

        Raises:
            BusClosed, BusUnavailable: from the engine.
        """
        subscription = await self._engine.subscribe()
        # Nobody has watched until now. Each node that is there is told in a moment, and is back at once; one that
        # went away meanwhile is told by nobody.
        self._nodes = {name: _Node(known.sequence) for name, known in self._nodes.items()}
        self._rearm = asyncio.Event()
        for name in self.view.snapshot().nodes:
            self.view.node_down(name)
        self._remind(self.view.deadline)
        try:
            async with asyncio.TaskGroup() as group:
                self._questions = asyncio.Semaphore(QUESTIONS)
                self._group = group
                self._spawn(self._run_clocks(), "gpurt-cluster-clocks")
                if on_ready is not None:
                    on_ready()
                taken = 0
                async for item in subscription:
                    self._take(item)
                    taken += 1
                    if taken % BURST == 0:
                        await asyncio.sleep(0)  # items that are there already do not suspend this task
                # The engine was closed under us.
                for task in tuple(self._tasks):
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise single(failed) from None
        finally:
            await subscription.aclose()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What comes in

    def _take(self, item: BusItem) -> None:
        if isinstance(item, HubAway):
            self.view.hub_away()
            return
        if isinstance(item, HubBack):
            self.view.hub_back()
            self._remind(self.view.deadline)
            return
        known = self._known(item.node)
        if known is None:
            return
        match item:
            case EventReceived():
                self._event(item, known)
            case EventRefused():
                self.rejected["oversized"] += 1
                self._warnings.warning(item.node, "ignored: event of node %s of %d bytes", item.node, item.size_bytes)
            case EventsDropped():
                self.dropped += 1
                self._want(item.node, known, Resync.OVERFLOW)
            case NodeUp():
                known.up = True
                known.tokens += 1
                known.sequence.another_token()
                self.view.node_up(item.node)
                self._want(item.node, known, Resync.JOINED)
            case NodeDown():
                known.up = False
                known.next_check = float("inf")
                self.view.node_down(item.node, left=item.left)
                self._remind(self.view.deadline)

    def _event(self, item: EventReceived, known: _Node) -> None:
        try:
            event = decode(item.payload, node=item.node, refusals=self.view.refusals)
        except MalformedEvent as exc:
            # Its position is unknown. If it had one, the next event shows a hole, and a snapshot closes that.
            self.rejected["malformed"] += 1
            self._warnings.warning(item.node, "ignored: %s", exc)
            return
        step = known.sequence.event(event.position, event, len(item.payload))
        if step.resync is Resync.OLD_EPOCH:  # once, until the node has answered: a whole run may be repeated
            self._warnings.warning(
                item.node, "ignored: event %s, which is of an earlier run of the node", event.id[:200]
            )
        self._do(item.node, known, step)

    def _do(self, name: str, known: _Node, step: _Step) -> None:
        if step.snapshot is not None:
            self.view.apply_snapshot(step.snapshot, sole=True)
            self._remind(self.view.deadline)
        for event in step.events:
            if not self.view.apply_event(event):
                self._want(name, known, Resync.NOTICE)
            if self._on_event is not None:
                self._on_event(event)
        if step.resync is not None:
            self._want(name, known, step.resync)
        self._remind(self.view.plans_due)
        self._remind(known.sequence.deadline)

    def _known(self, name: str) -> _Node | None:
        known = self._nodes.get(name)
        if known is not None:
            return known
        if len(self._nodes) >= 2 * MAX_NODES:
            gone = next((old for old, node in self._nodes.items() if not node.up and not node.asking), None)
            if gone is None:
                self.rejected["too_many_nodes"] += 1
                return None
            del self._nodes[gone]
        known = self._nodes[name] = _Node(NodeSequence(clock=self.view.clock))
        return known

    # Clocks

    async def _run_clocks(self) -> None:
        while True:
            self._rearm.clear()
            if self._next <= self.view.clock():
                self._tick()
            timeout = None if self._next == float("inf") else max(0.0, self._next - self.view.clock())
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._rearm.wait()

    def _remind(self, at: float | None) -> None:
        """Have the clocks look at everything at ``at``. All nodes are looked at only when one is due: with every new
        deadline it would cost more the more nodes there are."""
        if at is not None and at < self._next:
            self._next = at
            self._rearm.set()

    def _tick(self) -> None:
        """Do what is due."""
        now = self.view.clock()
        self._next = float("inf")
        self.view.tick()
        self._remind(self.view.deadline)
        for name, known in tuple(self._nodes.items()):
            due = known.sequence.deadline
            if due is not None and due <= now:
                self._do(name, known, known.sequence.expire())
                due = known.sequence.deadline
            if known.next_check <= now + EARLY * self._resync_interval_s:
                self._want(name, known, Resync.ANTI_ENTROPY)
            self._remind(due)
            self._remind(known.next_check)

    # Snapshots

    def _want(self, name: str, known: _Node, reason: Resync) -> None:
        if reason is Resync.JOINED and known.asking and known.sequence.position is None:
            return  # the question that is under way is the one
        known.next_check = float("inf")
        # A regular check must not hide that something is missing, nor a token that came what no bus repeats.
        if known.wanted in (None, Resync.ANTI_ENTROPY) or (known.wanted is Resync.JOINED and reason in UNREPEATED):
            known.wanted = reason
        if not known.asking:
            known.asking = True
            self._spawn(self._ask(name, known), f"gpurt-cluster-snapshot-{name}")

    async def _ask(self, name: str, known: _Node) -> None:
        """Put questions to one node until nothing is wanted of it any more."""
        pause = SPACING_S
        try:
            while (reason := known.wanted) is not None:
                known.wanted = None
                self.resyncs[reason] += 1
                tokens = known.tokens
                try:
                    async with self._questions:
                        known.sequence.question()
                        replies = await self._engine.snapshot(name, timeout=self._snapshot_timeout_s)
                except BusClosed:
                    return
                except BusUnavailable as exc:
                    _log.warning("node %s could not be asked for its snapshot: %s", name, exc)
                    replies = ()
                begun = self.view.clock()
                answers = await self._read(name, replies)
                spent = self.view.clock() - begun
                if tokens != known.tokens and self._not_there(name):
                    # Its token came after the question: the answer may be the last word of the run before.
                    known.wanted = known.wanted or Resync.JOINED
                elif self._answered(name, known, answers, reason):
                    pause = SPACING_S
                elif known.up:
                    known.wanted = known.wanted or reason
                    pause = min(2 * pause, 2.0)
                if known.wanted is not None:
                    # What takes long to read takes a tenth of this process's time at most.
                    await asyncio.sleep(max(pause, READING_SHARE * spent))
        finally:
            known.asking = False
        if known.up:
            interval = self._resync_interval_s * self._jitter.uniform(0.9, 1.1)
            if self.view.conflict(name) is not None:
                interval = min(interval, CONFLICT_INTERVAL_S)
            known.next_check = self.view.clock() + interval
            self._remind(known.next_check)

    def _not_there(self, name: str) -> bool:
        record = self.view.node(name)
        return record is not None and record.state is not NodeState.HEALTHY

    async def _read(self, name: str, replies: tuple[StateReply, ...]) -> tuple[_Answer, ...]:
        """Those that are snapshots; large ones are read on a thread."""
        answers: list[_Answer] = []
        for reply in replies:
            refused = Refusals(self.view.clock, log=False)
            read = partial(decode_snapshot, reply.payload, node=name, refusals=refused)
            try:
                large = len(reply.payload) > PIECEMEAL_BYTES
                answers.append((reply, await off_loop("snapshot", read) if large else read()))
            except MalformedEvent as exc:
                self.rejected["malformed_snapshot"] += 1
                self._warnings.warning(name, "ignored: %s", exc)
            self.view.refusals.add(name, refused.of(name))
        return tuple(answers)

    def _answered(self, name: str, known: _Node, answers: tuple[_Answer, ...], reason: Resync) -> bool:
        snapshots: dict[Epoch, NodeSnapshot] = {}
        held: dict[Epoch, float] = {}
        for reply, snapshot in answers:
            epoch, seq = snapshot.position
            held[epoch] = max(reply.held_s, held.get(epoch, 0.0))
            if epoch not in snapshots or seq > snapshots[epoch].seq:
                snapshots[epoch] = snapshot
        if not snapshots:
            return False
        ended = self.view.goodbye(name)
        if ended is not None and len(snapshots) > 1:
            # A run that has just said goodbye may still answer beside the one that follows it.
            snapshots = {
                epoch: each for epoch, each in snapshots.items() if epoch != ended.epoch or each.seq > ended.seq
            }
        # One that answers alone is the present run, whatever its number: the run before it is gone. Of several that
        # live, the process that has held the name for longest keeps it, also where this observer has believed another
        # one: to a master that has just been started, or whose hub has, either may have come first. Within the time of
        # an answer they are equal, and the earlier run is kept, so that every master chooses alike.
        longest = max(held[epoch] for epoch in snapshots)
        kept = snapshots.pop(min(epoch for epoch in snapshots if held[epoch] >= longest - HELD_EQUAL_S))
        self.view.node_answered(name, kept.epoch)
        self._remind(self.view.plans_due)
        self._do(name, known, known.sequence.snapshot(kept.position, kept, patient=reason in PATIENT))
        for epoch, snapshot in snapshots.items():
            known.sequence.refuse(epoch)
            self.view.report_conflict(snapshot)
        if not snapshots:
            self.view.end_conflict(name)
        return True
