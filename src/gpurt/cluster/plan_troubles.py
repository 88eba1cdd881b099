"""PlanTroubles: plans that nodes follow only in part, or two of which contradict each other, as any observer sees it.

Nodes say which plan they follow, and which nodes that plan has. So whoever watches sees what its master may not live to
see: a node of the plan that does not follow it, and two plans of one instance at once. While a plan takes the place of
another both are true for a moment; what stays so for :data:`SETTLE_S` is said. No I/O, no tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpurt.cluster.records import NodeRecord, NodeState, PlanTrouble, PlanTroubleKind
from gpurt.cluster.shards import ShardReport, ShardState
from gpurt.cluster.terms import TERM_STEP, believed, believed_version
from gpurt.placement.version import PlanVersion

SETTLE_S: Final = 5.0
"""How long a plan may take to reach its nodes before those that do not follow it are named."""
NAMED: Final = 16
"""Nodes that a message names; it says how many more there are."""
MAX_INSTANCES: Final = 4096
"""Instances that are watched; each node may name 64."""

_FOLLOWING: Final = frozenset({NodeState.HEALTHY, NodeState.UNKNOWN})
"""Nodes that are taken to follow what they have said last. Nothing later can be known of a node that is unknown because
the hub is away."""


@dataclass(slots=True)
class _Watched:
    """One trouble of one instance: seen, and said once it has lasted."""

    since: float
    trouble: PlanTrouble
    said: bool = False


@dataclass(slots=True)
class PlanTroubles:
    """
    Args:
        nodes: what is known of each node now; the view's own.
    """

    nodes: Mapping[str, NodeRecord]
    _holders: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By instance: nodes that say that they hold something of it."""
    _expected: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By node: instances whose latest plan has it."""
    _watched: dict[tuple[str, PlanTroubleKind], _Watched] = field(
        default_factory=dict[tuple[str, PlanTroubleKind], _Watched]
    )
    _changed: set[str] = field(default_factory=set[str])
    due: float | None = None
    """When ``look`` has something to do; None: not before the next change."""

    @property
    def said(self) -> tuple[PlanTrouble, ...]:
        return tuple(each.trouble for each in self._watched.values() if each.said)

    def node_changed(self, before: NodeRecord | None, after: NodeRecord | None, now: float) -> None:
        """A node holds other things, or is in another state."""
        known = after or before
        if known is None:
            return
        name = known.node
        was = {shard.instance for shard in before.placement.shards} if before is not None else set[str]()
        holds = {shard.instance for shard in after.placement.shards} if after is not None else set[str]()
        for instance in was - holds:
            self._holders.get(instance, set()).discard(name)
        for instance in holds:
            if instance in self._holders or len(self._holders) < MAX_INSTANCES:
                self._holders.setdefault(instance, set()).add(name)
        touched = was | holds | self._expected.get(name, set())
        if touched:
            self._changed |= touched
            self.due = now

    def look(self, now: float, term: int) -> Iterator[tuple[PlanTrouble, bool]]:
        """What is to be said now: a trouble, and whether it has come (or is another now) or is over.

        Args:
            term: the latest that counts.
        """
        changed, self._changed, self.due = self._changed, set(), None
        for instance in sorted(changed):
            found = {each.kind: each for each in self._troubles(instance, term)}
            for kind in PlanTroubleKind:
                key = instance, kind
                known, trouble = self._watched.get(key), found.get(kind)
                if trouble is None:
                    if known is not None:
                        del self._watched[key]
                        if known.said:
                            yield known.trouble, False
                elif known is None:
                    self._watched[key] = _Watched(now, trouble.model_copy(update={"since": now}))
                elif trouble.nodes != known.trouble.nodes or trouble.message != known.trouble.message:
                    known.trouble = trouble.model_copy(update={"since": known.since})
                    if known.said:
                        yield known.trouble, True
        for (_, kind), each in self._watched.items():
            if each.said:
                continue
            # Two plans of one version are never right, and so not waited for.
            at = each.since + (0.0 if kind is PlanTroubleKind.TWO_MASTERS else SETTLE_S)
            if at <= now:
                each.said = True
                yield each.trouble, True
            elif self.due is None or at < self.due:
                self.due = at

    # Inside

    def _troubles(self, instance: str, term: int) -> Iterator[PlanTrouble]:
        shards = {name: shard for name in self._holders.get(instance, ()) if (shard := self._shard(name, instance))}
        there = {name: shard for name, shard in shards.items() if self.nodes[name].state in _FOLLOWING}
        if not shards:
            self._holders.pop(instance, None)
        latest = believed_version((shard.version for shard in (there or shards).values()), term)
        if latest is None:
            self._expect(instance, ())
            return
        plans = sorted({shard.plan for shard in there.values() if shard.version == latest and shard.plan is not None})
        if len(plans) > 1:
            yield self._two_masters(instance, latest, plans, there)
        # The one with the lower name stays, as the masters have it.
        present = plans[0] if plans else None
        of_plan = [s for s in shards.values() if s.version == latest and s.plan in (present, None)]
        expected = sorted({node for shard in of_plan for node in shard.nodes})
        self._expect(instance, expected)
        others = {
            name: f"follows plan {shard.version}{_of(shard)}"
            + ("" if shard.version < latest else ", which no other node names and does not count")
            for name, shard in sorted(there.items())
            if shard.version != latest
        }
        lacking = {name: why for name in expected if (why := self._why(name, instance, latest, present)) is not None}
        if lacking:
            yield PlanTrouble(
                instance=instance,
                kind=PlanTroubleKind.NOT_FOLLOWED,
                nodes=lacking,
                message=f"plan {latest} of {instance} is not followed by {_listed(lacking)}",
            )
        others = {name: why for name, why in others.items() if name not in lacking}
        if others:
            yield PlanTrouble(
                instance=instance,
                kind=PlanTroubleKind.TWO_PLANS,
                nodes=others,
                message=f"{instance} is held under more than one plan: beside {latest}, {_listed(others)}",
            )

    def _two_masters(
        self, instance: str, version: PlanVersion, plans: list[str], there: Mapping[str, ShardReport]
    ) -> PlanTrouble:
        nodes = {
            name: f"plan {shard.plan}{_of(shard)}{'' if shard.plan == plans[0] else ', which is to be withdrawn'}"
            for name, shard in sorted(there.items())
            if shard.version == version and shard.plan is not None
        }
        return PlanTrouble(
            instance=instance,
            kind=PlanTroubleKind.TWO_MASTERS,
            nodes=nodes,
            message=(
                f"two masters of term {version.term} have decided on different plans {version} of {instance}: "
                f"{_listed(nodes)}"
            ),
        )

    def _shard(self, name: str, instance: str) -> ShardReport | None:
        record = self.nodes.get(name)
        return None if record is None else record.placement.shard(instance)

    def _expect(self, instance: str, nodes: Iterable[str]) -> None:
        wanted = set(nodes)
        for name, instances in tuple(self._expected.items()):
            if instance in instances and name not in wanted:
                instances.discard(instance)
                if not instances:
                    del self._expected[name]
        for name in wanted:
            self._expected.setdefault(name, set()).add(instance)

    def _why(self, name: str, instance: str, version: PlanVersion, plan: str | None) -> str | None:
        """Why a node of the plan does not follow it; None: it does."""
        record = self.nodes.get(name)
        if record is None:
            return "it was never seen"
        if record.state not in _FOLLOWING:
            return f"it is {record.state}"
        shard = record.placement.shard(instance)
        if shard is None:
            why = "it holds nothing of it"
            if record.placement.loader is False:
                return f"{why}, and nobody loads models there"
            return f"{why}, and is draining" if record.draining else why
        if shard.version != version or (plan is not None and shard.plan not in (None, plan)):
            return f"it follows plan {shard.version}{_of(shard)}"
        return (
            f"its load has failed: {shard.message or 'no reason given'}" if shard.state is ShardState.FAILED else None
        )


def doubt(nodes: Mapping[str, NodeRecord], name: str) -> str | None:
    """Why the term that a node names does not count; None: it does."""
    terms = [record.placement.term for record in nodes.values()]
    latest, named = believed(terms, TERM_STEP), nodes[name].placement.term
    if named <= latest:
        return None
    return (
        f"it names term {named}, far beyond {latest}, the latest that counts, and no master goes on from there; if a "
        f"wrong master has told it so: gpurt cluster reset-term {name} --term {latest}"
    )


def _of(shard: ShardReport) -> str:
    return f" of {shard.master}" if shard.master else ""


def _listed(nodes: Mapping[str, str]) -> str:
    said = [f"{name} ({why})" for name, why in list(nodes.items())[:NAMED]]
    more = len(nodes) - len(said)
    return ", ".join(said) + (f" and {more} more" if more else "")
