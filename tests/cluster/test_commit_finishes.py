"""A commit ends with every node following the plan, or with nobody following it, or with everybody who watches being
told who does not: whichever command is lost, whoever is started again and when, with a loader or without.

Every combination is tried, in virtual time. What must hold is read off the nodes themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from gpurt.cluster.assignment import Assignment, assignments_of
from gpurt.cluster.commit_result import CommitResult
from gpurt.cluster.committer import PlacementCommitter
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import NoAnswer
from gpurt.cluster.fence import Fence
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.node_assignments import NodeAssignments
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.promises import Promises
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.records import PlanTroubleKind
from gpurt.cluster.shards import ShardState
from gpurt.cluster.view import MasterView
from gpurt.placement import PlanVersion
from tests.cluster.plans import Loader, plan
from tests.cluster.support import HOST_A, device, result
from tests.cluster.virtual_time import VirtualLoop

PLAN = plan(("a/GPU-a", 0, 4), ("b/GPU-b", 4, 8))
VERSION = PlanVersion(term=1, n=1)
PARTS = assignments_of(PLAN, VERSION)
COMMANDS = range(4)
"""Two offers, two activations."""
LATE_S = 3.0
SETTLED_S = 60.0


class KeptFence(Fence):
    """What a node has promised outlives its process, without a disk."""

    def __init__(self, kept: dict[str, Promises], node: str) -> None:
        super().__init__()
        self._kept, self._node = kept, node

    async def load(self) -> None:
        self._promises = self._kept.get(self._node, Promises())

    async def _keep(self, promises: Promises) -> None:
        self._kept[self._node] = promises


class Slow(Loader):
    """It takes a second."""

    async def load(self, assignment: Assignment) -> None:
        await super().load(assignment)
        await asyncio.sleep(1.0)


@dataclass(frozen=True)
class Case:
    restart: tuple[int, Literal["before", "after"], str, Literal["dies", "leaves"]] | None = None
    """At which command, on which side of it, which node, and how it ends."""
    loader: Literal["present", "late", "never"] = "present"
    """Of the node that is started again."""
    lost: tuple[int, Literal["request", "answer"]] | None = None
    crash: tuple[int, Literal["before", "after"]] | None = None
    """At which command the master ends; another one starts a second later."""


class Watcher:
    def __init__(self, loop: VirtualLoop, bus: InProcessBus) -> None:
        self.engine = InProcessEngine(bus)
        self.view = MasterView(clock=loop.time)
        self.task = loop.create_task(self._watch())

    async def _watch(self) -> None:
        await self.engine.start()
        await ClusterObserver(self.engine, self.view).run()


class Commit:
    """One commit on two nodes, with the faults of one case."""

    def __init__(self, loop: VirtualLoop, case: Case) -> None:
        self.loop, self.case, self.bus = loop, case, InProcessBus("test")
        self.kept: dict[str, Promises] = {}
        self.starts = itertools.count(1)
        self.nodes: dict[str, tuple[NodePublisher, NodeAssignments, InProcessEngine]] = {}
        self.watcher = Watcher(loop, self.bus)
        self.tasks = [self.watcher.task]
        self.seen = itertools.count()
        self.crashed = False
        self.accepted: set[str] = set()
        """Nodes whose acceptance of the offer has come to the master."""
        for name in PARTS:
            loop.complete(self.start(name, "present"))
        self.new_master()
        loop.settle()

    def new_master(self) -> None:
        self.master = Watcher(self.loop, self.bus)
        self.committer = PlacementCommitter(self.master.engine, self.master.view)
        self.running = [self.master.task, self.loop.create_task(self.committer.run())]
        self.command, self.master.engine.command = self.master.engine.command, self._command  # type: ignore[method-assign]

    async def start(self, name: str, loader: str) -> None:
        engine = InProcessEngine(self.bus)
        await engine.start()
        fence = KeptFence(self.kept, name)
        publisher = NodePublisher(engine, name, host=HOST_A, epoch=Epoch(next(self.starts), "0" * 32), fence=fence)
        assignments = NodeAssignments(publisher)
        self.nodes[name] = publisher, assignments, engine
        if loader == "present":
            assignments.use(Slow())
        elif loader == "late":
            self.loop.call_later(LATE_S, lambda: assignments.use(Slow()))
        await publisher.start(result(device(f"GPU-{name}")))

    async def restart(self, name: str, how: str) -> None:
        publisher, assignments, engine = self.nodes[name]
        await assignments.aclose()
        if how == "leaves":
            await publisher.leave()
        await engine.close()
        await self.start(name, self.case.loader)

    async def _command(self, node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        step = json.loads(payload)["step"]
        number = next(self.seen) if step in ("offer", "activate") else -1
        await self._at(number, "before")
        if self.case.lost == (number, "request"):
            await asyncio.sleep(timeout)
            raise NoAnswer("the request was lost")
        answer = await self.command(node, payload, timeout=timeout)
        await self._at(number, "after")
        if self.case.lost == (number, "answer"):
            await asyncio.sleep(timeout)
            raise NoAnswer("the answer was lost")
        if step == "offer" and json.loads(answer)["accepted"]:
            self.accepted.add(node)
        return answer

    async def _at(self, number: int, side: str) -> None:
        restart = self.case.restart
        if restart is not None and restart[:2] == (number, side):
            # Of its own: the master's end does not keep a node from starting.
            self.restarting = self.loop.create_task(self.restart(*restart[2:]))
            await asyncio.shield(self.restarting)
        if self.case.crash == (number, side):
            self.crashed = True
            for task in self.running:
                task.cancel()
            self.committing.cancel()
            self.loop.call_later(1.0, self.new_master)
            await asyncio.Event().wait()

    def run(self) -> None:
        try:
            self.committing = self.loop.create_task(self.committer.commit(PLAN, VERSION))
            self.loop.advance(SETTLED_S)
            self.check()
        finally:
            # The nodes, then whoever watches.
            for _, assignments, engine in self.nodes.values():
                self.loop.complete(assignments.aclose())
                self.loop.complete(engine.close())
            self.loop.end(*self.running, *self.tasks, self.committing)

    # What must hold

    def follows(self, name: str) -> bool:
        _, assignments, _ = self.nodes[name]
        shard = assignments.placement().shard("llama")
        return assignments.assignment("llama") == PARTS[name] and shard is not None and shard.state is ShardState.LOADED

    def check(self) -> None:
        following = {name for name in self.nodes if self.follows(name)}
        others = self.nodes.keys() - following
        holds = {name for name in self.nodes if self.nodes[name][1].assignment("llama") is not None}
        outcome: CommitResult | None = None if self.crashed else self.committing.result()
        for watcher in (self.watcher, self.master):
            troubles = watcher.view.snapshot().plan_troubles
            if following and others:
                (trouble,) = troubles
                assert trouble.kind is PlanTroubleKind.NOT_FOLLOWED
                assert trouble.nodes.keys() == others, "half followed, and not everybody is told by whom"
                assert trouble.since <= self.loop.time() - 5
            else:
                assert troubles == (), "nothing is wrong"
        if outcome is None:
            return
        assert outcome.committed == (self.accepted == PARTS.keys()), "decided without everybody, or not with everybody"
        if not outcome.committed:
            assert holds == set(), "a plan that was called off is followed"
            assert self.committer.not_following("llama") == {}
            return
        said = self.committer.not_following("llama")
        assert said.keys() == others, "its own master does not say who does not follow"
        if self.case.loader != "never":
            assert others == set(), "nothing is in the way, and a node has not got its part"
        for each in said.values():
            assert "nobody loads models" in each.message
            assert each.since <= self.loop.time() - 5


def cases() -> Iterator[Case]:
    yield Case()
    sides: list[Literal["before", "after"]] = ["before", "after"]
    losses: list[tuple[int, Literal["request", "answer"]]] = [
        (number, what) for number in COMMANDS for what in ("request", "answer")
    ]
    crashes = [(number, side) for number in COMMANDS for side in sides]
    for lost in losses:
        yield Case(lost=lost)
    for crash in crashes:
        yield Case(crash=crash)
        yield from (Case(crash=crash, lost=lost) for lost in losses)
    for number, side, node, how, loader in itertools.product(
        COMMANDS, sides, PARTS, ("dies", "leaves"), ("present", "late", "never")
    ):
        restarted = (number, side, node, how)
        yield Case(restarted, loader)  # type: ignore[arg-type]
        yield from (Case(restarted, loader, lost=lost) for lost in losses)  # type: ignore[arg-type]
        yield from (Case(restarted, loader, crash=crash) for crash in crashes)  # type: ignore[arg-type]


ALL = list(cases())


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def _try(loop: VirtualLoop, chosen: list[Case], run: Callable[[Case], None] | None = None) -> None:
    for case in chosen:
        try:
            Commit(loop, case).run()
        except BaseException as exc:
            exc.add_note(repr(case))
            raise


def test_a_commit_ends_whatever_goes_wrong(loop: VirtualLoop) -> None:
    """Every 29th case: a prime, so that all values of each part are among them."""
    _try(loop, ALL[::29])


@pytest.mark.wide
@pytest.mark.parametrize("block", range(8))
def test_a_commit_ends_whatever_goes_wrong_in_every_case(loop: VirtualLoop, block: int) -> None:
    _try(loop, ALL[block::8])
