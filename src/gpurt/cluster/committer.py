"""PlacementCommitter: a plan becomes what the nodes do, at all of them or at none.

In two phases. Every node of the plan is offered its part; each checks it and promises to follow no earlier plan. Only
when all have accepted is the plan decided, and activated everywhere. From then on it holds: a node that does not follow
it, whatever the reason, is sent its part again at any news that may have changed that, and is named with the reason for
as long as it does not. Before that, one node that refuses or does not answer is enough to call the whole off, and the
nodes go on under the plan before.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Final

from gpurt.cluster.assignment import Assignment, Refusal, assignments_of, release_of
from gpurt.cluster.bus import EventEngine
from gpurt.cluster.changes import Change, ChangeKind
from gpurt.cluster.commands import Step, send_assignment, withdraw_plan
from gpurt.cluster.commit_result import CommitResult, CommitStatus, NodeAnswer, NotFollowing
from gpurt.cluster.errors import BusClosed, ClusterError, NoAnswer
from gpurt.cluster.groups import single, together
from gpurt.cluster.records import ClusterSnapshot, NodeState
from gpurt.cluster.shards import ShardState
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
REFUSED_S: Final = 30.0
"""Between two attempts at a node that refuses for another reason, where nothing is heard of it meanwhile: that it has
free memory again is no news."""

_MAY_LOAD: Final = frozenset(
    {
        ChangeKind.NODE_JOINED,
        ChangeKind.NODE_BACK,
        ChangeKind.DEVICE_ADDED,
        ChangeKind.DEVICE_HEALTH,
        ChangeKind.DEVICE_REMOVED,
    }
)
"""News after which a part that could not be loaded may be."""
_NEWS: Final = _MAY_LOAD | {
    ChangeKind.NODE_UPDATED,
    ChangeKind.NODE_PLACEMENT,
    ChangeKind.NODE_SUSPECT,
    ChangeKind.NODE_LOST,
    ChangeKind.NODE_LEFT,
    ChangeKind.NODE_FORGOTTEN,
}
"""News after which a node may follow a plan that it did not follow, or the other way round."""
_OVERRULED: Final = frozenset({Refusal.STALE_TERM, Refusal.STALE_VERSION})

_log = logging.getLogger("gpurt.cluster.committer")


@dataclass(slots=True)
class _Decided:
    version: PlanVersion
    parts: Mapping[str, Assignment]
    """By node."""
    release: Assignment
    """For every other node that holds something of the instance."""
    lacking: dict[str, NotFollowing] = field(default_factory=dict[str, NotFollowing], compare=False)
    """Nodes that do not follow it."""

    def part(self, node: str) -> Assignment:
        return self.parts.get(node, self.release)


@dataclass(slots=True)
class _Sending:
    task: asyncio.Task[None]
    news: asyncio.Event
    """There was news of the node: what it answers may be of an earlier run of it, or it may answer something else."""


class PlacementCommitter:
    """
    Args:
        engine: started by the caller, and closed by the caller.
        view: what nodes hold; kept true by an observer.
        answer_s: seconds for one node and one step.
        name: of this master, for people who read which of two has sent a plan; None: a random one.
    """

    def __init__(
        self, engine: EventEngine, view: MasterView, *, answer_s: float = ANSWER_S, name: str | None = None
    ) -> None:
        self._engine, self._view, self._answer_s = engine, view, answer_s
        self.name = name or f"master-{secrets.token_hex(4)}"
        self._decided: dict[str, _Decided] = {}
        self._sending: dict[tuple[str, str], _Sending] = {}
        self._due: set[str] = set()
        self._some_due = asyncio.Event()
        self._withdrawn: set[tuple[str, str, str]] = set()
        """Instance, plan and node of what is being withdrawn."""

    def committed(self, instance: str) -> PlanVersion | None:
        """The version that this master has decided on last."""
        decided = self._decided.get(instance)
        return None if decided is None else decided.version

    def not_following(self, instance: str) -> dict[str, NotFollowing]:
        """Nodes that do not do what was decided on last, each since when and why; kept true by ``run``."""
        decided = self._decided.get(instance)
        return {} if decided is None else dict(decided.lacking)

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
            decided on a later plan, or another one of this version. ``COMMITTED``: decided; nodes that do not follow
            it yet (``refused``, ``unconfirmed``) get their part as soon as they can be reached and can take it, while
            ``run`` runs, and are in ``not_following`` until then.

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
        undone: Iterable[str] = (*parts, *sorted(others))
        try:
            activated = await self._all({node: decided.part(node) for node in undone}, Step.ACTIVATE)
            result = CommitResult(instance=name, version=version, status=CommitStatus.COMMITTED, answers=activated)
            undone = [node for node, answer in activated.items() if not answer.accepted]
            for node in undone:
                self._note(name, decided, node, activated[node].message, activated[node].reason)
        finally:
            # It is decided, whatever becomes of the caller.
            self._due.update(undone)
            self._some_due.set()
        _log.info("%s", result.message)
        self._give_up_if_overruled(name, decided)
        return result

    def forget(self, instance: str) -> None:
        """Send nobody the plan of this instance any more: it is not this master's any longer."""
        self._decided.pop(instance, None)

    async def run(self) -> None:
        """Until cancelled: see to it that every node does what was decided. One that has not confirmed its part, has
        lost it because it was started again, or has refused it is sent it again: at news of the node or its devices,
        every few seconds while it does not answer or has no loader yet (a worker is heard before it has opened its
        devices), and every half minute otherwise. Of two plans of one version, by two masters of one term, the one
        with the lower ``plan`` stays, and its master withdraws the other.

        Raises:
            BusClosed: the engine was closed.
        """
        changes = self._view.changes()
        try:
            async with asyncio.TaskGroup() as group:
                self._check(group, self._view.snapshot().nodes)
                group.create_task(self._check_due(group), name="gpurt-cluster-assign-due")
                async for change in changes:
                    self._heard(group, change)
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
            acknowledgement = await send_assignment(
                self._engine, node, part, step, master=self.name, timeout=self._answer_s
            )
        except BusClosed:
            raise
        except NoAnswer as exc:
            return NodeAnswer(message=exc.message)
        except ClusterError as exc:
            return NodeAnswer(failed=True, message=exc.message)
        return NodeAnswer(acknowledgement=acknowledgement, message=acknowledgement.message)

    def _heard(self, group: asyncio.TaskGroup, change: Change) -> None:
        if change.kind is ChangeKind.MISSED:
            self._check(group, self._view.snapshot().nodes)
        elif change.node is None or change.minor:
            return
        elif change.kind in _NEWS:
            self._check(group, (change.node,), change.kind)

    async def _check_due(self, group: asyncio.TaskGroup) -> None:
        """Nodes that a commit has left without their part; no news of them need come."""
        while True:
            await self._some_due.wait()
            self._some_due.clear()
            due, self._due = self._due, set()
            self._check(group, due)

    def _check(self, group: asyncio.TaskGroup, nodes: Iterable[str], news: ChangeKind | None = None) -> None:
        for node, (instance, decided) in product(nodes, tuple(self._decided.items())):
            self._withdraw_rival(group, node, instance, decided)
            failed = self._has_failed(node, instance, decided)
            if (known := self._sending.get((instance, node))) is not None:
                known.news.set()
            elif self._misses(node, instance, decided) or (failed is not None and news in _MAY_LOAD):
                heard = asyncio.Event()
                work = self._send_until_heard(node, instance, heard, again=failed is not None)
                task = group.create_task(work, name=f"gpurt-cluster-assign-{node}")
                self._sending[instance, node] = _Sending(task, heard)
                task.add_done_callback(partial(self._sent, (instance, node)))
            elif node in decided.parts and (state := self._state(node)) not in (NodeState.HEALTHY, NodeState.UNKNOWN):
                self._note(instance, decided, node, f"the node is {state or 'not known any more'}", None)
            elif failed is not None:
                self._note(instance, decided, node, f"it could not load its part: {failed}", None)
            elif self._follows(node, instance, decided):
                self._note_followed(instance, decided, node)

    def _sent(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._sending.pop(key).news.is_set():
            self._due.add(key[1])
            self._some_due.set()

    def _state(self, node: str) -> NodeState | None:
        record = self._view.node(node)
        return None if record is None else record.state

    def _misses(self, node: str, instance: str, decided: _Decided) -> bool:
        """The node is there and does not follow the plan that was decided."""
        record = self._view.node(node)
        if record is None or record.state is not NodeState.HEALTHY:
            return False
        shard = record.placement.shard(instance)
        if shard is None:
            return node in decided.parts
        return shard.version < decided.version or (node in decided.parts and shard.version > decided.version)

    def _follows(self, node: str, instance: str, decided: _Decided) -> bool:
        record = self._view.node(node)
        shard = None if record is None else record.placement.shard(instance)
        if record is None or record.state is not NodeState.HEALTHY:
            return False
        if node not in decided.parts:
            return shard is None
        return shard is not None and (shard.version, shard.plan) == (decided.version, decided.release.plan)

    def _has_failed(self, node: str, instance: str, decided: _Decided) -> str | None:
        """Why the node, which follows the plan, could not load its part; None: it could, or does not follow."""
        record = self._view.node(node)
        shard = None if record is None else record.placement.shard(instance)
        if shard is None or shard.version != decided.version or shard.state is not ShardState.FAILED:
            return None
        return shard.message or "no reason was given"

    def _note(self, instance: str, decided: _Decided, node: str, why: str, reason: Refusal | None) -> None:
        known = decided.lacking.get(node)
        since = self._view.clock() if known is None else known.since
        decided.lacking[node] = NotFollowing(since=since, reason=reason, message=why)
        if known is None or (known.reason, known.message) != (reason, why):
            _log.info("node %s does not follow plan %s of %s: %s", node, decided.version, instance, why)

    def _note_followed(self, instance: str, decided: _Decided, node: str) -> None:
        known = decided.lacking.pop(node, None)
        if known is not None:
            seconds = max(0.0, self._view.clock() - known.since)
            _log.info("node %s follows plan %s of %s, after %.1f s", node, decided.version, instance, seconds)

    async def _send_until_heard(self, node: str, instance: str, news: asyncio.Event, *, again: bool) -> None:
        """
        Args:
            again: also where the node follows the plan, once: it could not load its part.
        """
        pause, said = AGAIN_FIRST_S, False
        while (decided := self._decided.get(instance)) is not None and (again or self._misses(node, instance, decided)):
            again = False
            news.clear()
            answer = await self._send(node, decided.part(node), Step.ACTIVATE)
            if self._decided.get(instance) is not decided:
                continue  # a later plan meanwhile
            if answer.accepted:
                if not news.is_set():
                    self._note_followed(instance, decided, node)
                return
            self._note(instance, decided, node, answer.message, answer.reason)
            if answer.reason in _OVERRULED:
                _log.warning("node %s refuses plan %s of %s: %s", node, decided.version, instance, answer.message)
                self._give_up_if_overruled(instance, decided)
                return
            if answer.refused and answer.reason is not Refusal.NO_LOADER:
                if not said:
                    said = True
                    _log.warning("node %s refuses plan %s of %s: %s", node, decided.version, instance, answer.message)
                longest = REFUSED_S
            else:
                # A node says when it has a loader, but for older ones. For a moment it is nothing to complain of.
                if answer.refused and not said and pause >= AGAIN_LONGEST_S:
                    said = True
                    _log.warning(
                        "node %s refuses plan %s of %s: %s; it is asked again (gpurt worker --weights PATH loads, "
                        "or in code worker.assignments.use)",
                        *(node, decided.version, instance, answer.message),
                    )
                longest = AGAIN_LONGEST_S
            with suppress(TimeoutError):
                async with asyncio.timeout(longest if longest == REFUSED_S else pause):
                    await news.wait()
            pause = AGAIN_FIRST_S if news.is_set() else min(2 * pause, longest)

    def _give_up_if_overruled(self, instance: str, decided: _Decided) -> None:
        """Where every node of the plan has promised to follow a later one, it is not this master's any more. One node
        that says so is only named: it may lie."""
        overruled = {node for node, each in decided.lacking.items() if each.reason in _OVERRULED}
        if overruled >= decided.parts.keys() and self._decided.get(instance) is decided:
            _log.warning(
                "plan %s of %s is given up: all of its nodes have promised to follow another one",
                *(decided.version, instance),
            )
            self.forget(instance)

    # Two masters of one term

    def _withdraw_rival(self, group: asyncio.TaskGroup, node: str, instance: str, decided: _Decided) -> None:
        """The node follows another plan of the very version that was decided on here: two masters have one term. The
        plan with the lower name stays, so that both masters, and everybody who watches, know which."""
        record = self._view.node(node)
        shard = None if record is None else record.placement.shard(instance)
        mine = decided.release.plan
        if shard is None or shard.version != decided.version or shard.plan in (None, mine) or mine is None:
            return
        assert shard.plan is not None
        key = instance, shard.plan, node
        if shard.plan < mine or key in self._withdrawn:
            return
        _log.error(
            "two masters of term %d have decided on plans %s of %s: %s, which stays, and %s of %s on node %s, which is "
            "withdrawn; see to it that each master has a term of its own",
            *(
                decided.version.term,
                decided.version,
                instance,
                mine,
                shard.plan,
                shard.master or "an unnamed master",
                node,
            ),
        )
        self._withdrawn.add(key)
        task = group.create_task(self._withdraw(node, instance, decided, shard.plan), name="gpurt-cluster-withdraw")
        task.add_done_callback(lambda _: self._withdrawn.discard(key))

    async def _withdraw(self, node: str, instance: str, decided: _Decided, plan: str) -> None:
        pause = AGAIN_FIRST_S
        while self._decided.get(instance) is decided and self._state(node) is NodeState.HEALTHY:
            try:
                answer = await withdraw_plan(
                    self._engine, node, instance, decided.version, plan, timeout=self._answer_s
                )
            except BusClosed:
                raise
            except ClusterError as exc:
                _log.info("plan %s of %s could not be withdrawn at node %s: %s", plan, instance, node, exc.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, AGAIN_LONGEST_S)
                continue
            if not answer.accepted:
                _log.warning(
                    "node %s does not let plan %s of %s be withdrawn: %s", node, plan, instance, answer.message
                )
            return


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
