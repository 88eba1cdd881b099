"""PlacementCommitter: a plan becomes what the nodes do, at all of them or at none.

In two phases. Every node of the plan is offered its part; each checks it and promises to follow no earlier plan. Only
when all have accepted is the plan decided, and activated everywhere. From then on it holds: a node that is away just
then, or is started again later, is sent its part once more. Before that, one node that refuses or does not answer is
enough to call the whole off, and the nodes go on under the plan before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

from gpurt.cluster.assignment import Assignment, Refusal, assignments_of, release_of
from gpurt.cluster.bus import EventEngine
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.commands import Step, send_assignment
from gpurt.cluster.commit_result import CommitResult, CommitStatus, NodeAnswer
from gpurt.cluster.errors import BusClosed, ClusterError, NoAnswer
from gpurt.cluster.groups import single, together
from gpurt.cluster.records import ClusterSnapshot, NodeState
from gpurt.cluster.terms import believed_version
from gpurt.cluster.view import MasterView
from gpurt.placement.plan import Plan
from gpurt.placement.version import PlanVersion

ANSWER_S: Final = 10.0
"""For one node and one step. Only a new promise is written to the node's disk before the answer."""
QUESTIONS: Final = 32
"""Nodes that are spoken to at once."""
AGAIN_FIRST_S: Final = 0.2
AGAIN_LONGEST_S: Final = 5.0
"""Between two attempts to reach a node that is there and does not answer, or has no loader yet."""

_NEWS: Final = frozenset(
    {ChangeKind.NODE_JOINED, ChangeKind.NODE_BACK, ChangeKind.NODE_UPDATED, ChangeKind.NODE_PLACEMENT}
)
_log = logging.getLogger("gpurt.cluster.committer")


@dataclass(slots=True)
class _Decided:
    version: PlanVersion
    parts: Mapping[str, Assignment]
    """By node."""
    release: Assignment
    """For every other node that holds something of the instance."""

    def part(self, node: str) -> Assignment:
        return self.parts.get(node, self.release)


class PlacementCommitter:
    """
    Args:
        engine: started by the caller, and closed by the caller.
        view: what nodes hold; kept true by an observer.
        answer_s: seconds for one node and one step.
    """

    def __init__(self, engine: EventEngine, view: MasterView, *, answer_s: float = ANSWER_S) -> None:
        self._engine, self._view, self._answer_s = engine, view, answer_s
        self._decided: dict[str, _Decided] = {}
        self._sending: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._overtaken: set[tuple[str, str]] = set()
        """There was news of the node while it was sent to: what it answers may be of an earlier run of it."""
        self._due: set[str] = set()
        self._some_due = asyncio.Event()

    def committed(self, instance: str) -> PlanVersion | None:
        """The version that this master has decided on last."""
        decided = self._decided.get(instance)
        return None if decided is None else decided.version

    async def commit(self, plan: Plan, version: PlanVersion, *, instance: str | None = None) -> CommitResult:
        """Make ``plan`` what the nodes do. The same plan under the same version again does no harm.

        Nodes that hold parts of the instance and are not in the plan let go of them after it was decided. Cancelled
        before the decision, the offers that were made stay behind; they bind nobody to anything but to no earlier plan.
        Cancelled after it, the plan holds all the same: ``run`` sends what has not been heard yet.

        Args:
            version: later than every one before of this instance (``latest_version(…).next(term=…)``); its term is
                this master's.
            instance: which copy of the model; None: the model is placed once.

        Returns:
            Who answered what. ``ABORTED``: nothing has changed anywhere; ``conflict`` says where this master itself has
            decided on a later plan, or another one of this version. ``COMMITTED``: decided; ``unconfirmed`` nodes
            get their part as soon as they can be reached, while ``run`` runs.

        Raises:
            InvalidPlan: device names do not fit nodes, or a part is beyond what a node takes. BusClosed: the engine is
                not started, or was closed meanwhile.
        """
        parts = assignments_of(plan, version, instance=instance)
        name = instance or plan.model
        decided = _Decided(version, parts, release_of(plan, version, instance=instance))
        conflict, offered = self._conflict(name, decided), dict[str, NodeAnswer]()
        if conflict is None:
            offered = await self._all(parts, Step.OFFER)
            conflict = self._conflict(name, decided)  # another commit may have been faster
        if conflict is not None or not all(answer.accepted for answer in offered.values()):
            to_forget = {node: parts[node] for node, answer in offered.items() if not answer.refused}
            await self._all(to_forget, Step.ABORT)
            result = CommitResult(
                instance=name, version=version, status=CommitStatus.ABORTED, answers=offered, conflict=conflict
            )
            _log.warning("%s", result.message)
            return result
        before = self._decided.get(name)
        self._decided[name] = decided
        earlier: Iterable[str] = () if before is None else before.parts
        others = _holders(self._view.snapshot(), name, earlier) - parts.keys()
        unheard: Iterable[str] = (*parts, *sorted(others))
        try:
            activated = await self._all({node: decided.part(node) for node in unheard}, Step.ACTIVATE)
            result = CommitResult(instance=name, version=version, status=CommitStatus.COMMITTED, answers=activated)
            unheard = result.unconfirmed
        finally:
            # It is decided, whatever becomes of the caller.
            self._due.update(unheard)
            self._some_due.set()
        _log.info("%s", result.message)
        if result.superseded_by is not None and self._decided.get(name) is decided:
            self.forget(name)
        return result

    def forget(self, instance: str) -> None:
        """Send nobody the plan of this instance any more: it is not this master's any longer."""
        self._decided.pop(instance, None)

    async def run(self) -> None:
        """Until cancelled: send nodes their part again that have not confirmed it, or that have lost it because they
        were started again. A node that refuses it is left alone until there is news of it, but for one that has no
        loader yet: a worker is heard before it has opened its devices.

        Raises:
            BusClosed: the engine was closed.
        """
        changes = self._view.changes()
        try:
            async with asyncio.TaskGroup() as group:
                self._check(group, self._view.snapshot().nodes)
                group.create_task(self._check_due(group), name="gpurt-cluster-assign-due")
                async for change in changes:
                    if change.kind is ChangeKind.MISSED:
                        self._check(group, self._view.snapshot().nodes)
                    elif change.node is not None and change.kind in _NEWS:
                        self._check(group, (change.node,))
        except BaseExceptionGroup as failed:
            raise single(failed) from None
        finally:
            changes.close()

    # Inside

    def _conflict(self, instance: str, plan: _Decided) -> str | None:
        """Why ``plan`` cannot be decided on any more."""
        before = self._decided.get(instance)
        if before is not None and plan.version < before.version:
            return f"plan {before.version} was decided on, which is later"
        if before is not None and plan.version == before.version and plan != before:
            return f"another plan {before.version} was decided on"
        return None

    async def _all(self, parts: Mapping[str, Assignment], step: Step) -> dict[str, NodeAnswer]:
        questions = asyncio.Semaphore(QUESTIONS)

        async def one(node: str, part: Assignment) -> NodeAnswer:
            async with questions:
                return await self._send(node, part, step)

        answers = await together(one(node, part) for node, part in parts.items())
        return dict(zip(parts, answers, strict=True))

    async def _send(self, node: str, part: Assignment, step: Step) -> NodeAnswer:
        try:
            acknowledgement = await send_assignment(self._engine, node, part, step, timeout=self._answer_s)
        except BusClosed:
            raise
        except NoAnswer as exc:
            return NodeAnswer(message=exc.message)
        except ClusterError as exc:
            return NodeAnswer(failed=True, message=exc.message)
        return NodeAnswer(acknowledgement=acknowledgement, message=acknowledgement.message)

    async def _check_due(self, group: asyncio.TaskGroup) -> None:
        """Nodes that a commit has left without an answer; no news of them need come."""
        while True:
            await self._some_due.wait()
            self._some_due.clear()
            due, self._due = self._due, set()
            self._check(group, due)

    def _check(self, group: asyncio.TaskGroup, nodes: Iterable[str]) -> None:
        for node, (instance, decided) in product(nodes, self._decided.items()):
            if (instance, node) in self._sending:
                self._overtaken.add((instance, node))
            elif self._misses(node, instance, decided):
                task = group.create_task(self._send_until_heard(node, instance), name=f"gpurt-cluster-assign-{node}")
                self._sending[instance, node] = task
                task.add_done_callback(partial(self._sent, (instance, node)))

    def _sent(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._sending[key]
        if key in self._overtaken:
            self._overtaken.remove(key)
            self._due.add(key[1])
            self._some_due.set()

    def _misses(self, node: str, instance: str, decided: _Decided) -> bool:
        """The node is there and does not follow the plan that was decided."""
        record = self._view.node(node)
        if record is None or record.state is not NodeState.HEALTHY:
            return False
        shard = record.placement.shard(instance)
        if shard is None:
            return node in decided.parts
        return shard.version < decided.version

    async def _send_until_heard(self, node: str, instance: str) -> None:
        pause, said = AGAIN_FIRST_S, False
        while (decided := self._decided.get(instance)) is not None and self._misses(node, instance, decided):
            answer = await self._send(node, decided.part(node), Step.ACTIVATE)
            if self._decided.get(instance) is not decided:
                continue  # a later plan meanwhile
            if answer.accepted:
                return
            if answer.refused and answer.reason is Refusal.NO_LOADER:
                # That there is one now is no news that a node tells. For a moment it is nothing to complain of.
                if not said and pause >= AGAIN_LONGEST_S:
                    said = True
                    _log.warning(
                        "node %s refuses plan %s of %s: %s; it is asked again (gpurt worker --weights PATH loads, "
                        "or in code worker.assignments.use)",
                        *(node, decided.version, instance, answer.message),
                    )
            elif answer.refused:
                _log.warning("node %s refuses plan %s of %s: %s", node, decided.version, instance, answer.message)
                if answer.reason in (Refusal.STALE_TERM, Refusal.STALE_VERSION):
                    self.forget(instance)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, AGAIN_LONGEST_S)


def latest_version(snapshot: ClusterSnapshot, instance: str) -> PlanVersion | None:
    """The latest plan of ``instance`` that a node follows; None: none does. A master that starts anew continues behind
    it. A version that a single node names, far beyond all others, does not count, nor one of a term that does not."""
    shards = (node.placement.shard(instance) for node in snapshot.nodes.values())
    return believed_version((shard.version for shard in shards if shard is not None), snapshot.term)


def _holders(snapshot: ClusterSnapshot, instance: str, earlier: Iterable[str]) -> set[str]:
    """Healthy nodes that hold parts of it, or were given some (``earlier``) and have not told yet. One that is away is
    not waited for: it is told when it is back."""
    given = set(earlier)
    return {
        name
        for name, node in snapshot.nodes.items()
        if node.state is NodeState.HEALTHY and (name in given or node.placement.shard(instance) is not None)
    }
