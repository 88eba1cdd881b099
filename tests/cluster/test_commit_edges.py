"""Commits that are cancelled, contradict one another, or lose their bus in the midst."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpurt.cluster.commit_result import CommitStatus
from gpurt.cluster.committer import PlacementCommitter
from gpurt.cluster.errors import BusClosed, NoAnswer
from gpurt.cluster.link_survey import survey_links
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.shards import MAX_STAGES, ShardState
from gpurt.placement import InvalidPlan, Plan
from tests.cluster.conftest import InProcess
from tests.cluster.plans import plan
from tests.cluster.support import until
from tests.cluster.test_assignments import BOTH, Cluster, v

pytestmark = pytest.mark.wide


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    bus = InProcess(False)
    made = Cluster(bus, tmp_path)
    made.engine = await bus.observer()
    made.committer = PlacementCommitter(made.engine, made.view, answer_s=2.0)
    ready = asyncio.Event()
    observer = ClusterObserver(made.engine, made.view)
    tasks = [asyncio.create_task(observer.run(ready.set)), asyncio.create_task(made.committer.run())]
    await ready.wait()
    yield made
    for node in made.nodes.values():
        await node.assignments.aclose()
    for task in tasks:
        task.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await task
    await bus.aclose()


class Held:
    """Commands of one step to some nodes wait until they are let through."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: str, *nodes: str) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        command = cluster.engine.command

        async def slow(node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
            if node in nodes and json.loads(payload).get("step") == step and not self.go.is_set():
                self.reached.set()
                await self.go.wait()
            return await command(node, payload, timeout=timeout)

        monkeypatch.setattr(cluster.engine, "command", slow)


async def test_a_commit_that_is_cancelled_after_its_decision_holds_everywhere(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.node("n1")
    await cluster.node("n2")
    held = Held(cluster, monkeypatch, "activate", "n2")
    commit = asyncio.create_task(cluster.committer.commit(plan(*BOTH), v(1)))
    await held.reached.wait()
    await cluster.loaded("n1", v(1))
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    held.go.set()
    assert cluster.committer.committed("llama") == v(1)
    await cluster.loaded("n2", v(1))


async def test_a_load_that_something_inside_it_cancelled_has_failed(cluster: Cluster) -> None:
    """Nobody has called the plan off: it does not stay loading for ever, and may be asked for again."""
    one = await cluster.node("n1")
    one.loader.error = asyncio.CancelledError()
    assert (await cluster.committer.commit(plan(BOTH[0]), v(1))).committed
    await until(lambda: cluster.shard("n1") and cluster.shard("n1").state is ShardState.FAILED, "the failure")
    assert cluster.shard("n1").message == "CancelledError"
    one.loader.error = None
    assert (await cluster.committer.commit(plan(BOTH[0]), v(1))).committed
    await cluster.loaded("n1", v(1))


async def test_another_plan_of_a_decided_version_is_offered_to_nobody(cluster: Cluster) -> None:
    await cluster.node("n1")
    two = await cluster.node("n2")
    assert (await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 4)), v(5))).committed
    for version in (v(5), v(3)):
        outcome = await cluster.committer.commit(plan(("n2/GPU-n2-0", 0, 4)), version)
        assert outcome.status is CommitStatus.ABORTED
        assert outcome.answers == {}
        assert "plan (1, 5) was decided on" in outcome.message
    assert two.publisher.fence.promised("llama") is None
    assert cluster.committer.committed("llama") == v(5)
    await cluster.loaded("n1", v(5))


@pytest.mark.parametrize("later", [1, 2])
async def test_a_plan_that_was_overtaken_between_its_phases_is_called_off(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """By a later plan, or by another one of the same version."""
    one, two = await cluster.node("n1"), await cluster.node("n2")
    held = Held(cluster, monkeypatch, "offer", "n1")
    first = asyncio.create_task(cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 4)), v(1)))
    await held.reached.wait()
    assert (await cluster.committer.commit(plan(("n2/GPU-n2-0", 0, 4)), v(later))).committed
    held.go.set()
    outcome = await first
    assert outcome.status is CommitStatus.ABORTED
    assert outcome.answers["n1"].accepted
    assert outcome.conflict is not None
    await cluster.loaded("n2", v(later))
    assert one.loader.calls == []
    assert len(two.loader.calls) == 1
    assert cluster.committer.committed("llama") == v(later)


@pytest.mark.parametrize(
    "wrong",
    [
        plan(("n1/", 0, 4)),
        plan(("n1/" + "x" * 5000, 0, 4)),
        plan(("/x", 0, 4)),
        plan(("*/x", 0, 4)),
        plan(("a b/x", 0, 4)),
        plan(("n1/x", 0, 4), model=""),
        plan(("n1/x", 0, 4), model="x" * 5000),
        plan(("n1/x", 0, 4), ("n1/x", 4, 6)),
        plan(*((f"n1/{n}", n, n + 1) for n in range(MAX_STAGES + 1))),
    ],
    ids=["no key", "long key", "no node", "wildcard", "space", "no model", "long model", "twice", "stages"],
)
async def test_a_plan_that_no_node_can_be_told_is_no_plan(cluster: Cluster, wrong: Plan) -> None:
    with pytest.raises(InvalidPlan):
        await cluster.committer.commit(wrong, v(1))


async def test_a_bus_that_is_closed_in_the_midst_leaves_no_task_behind(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.node("n3")
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def command(node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        if node == "n1":
            await waiting.wait()
            raise BusClosed("closed meanwhile")
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(cluster.engine, "command", command)
    with pytest.raises(BusClosed):
        await cluster.committer.commit(plan(*BOTH), v(1))
    assert ended.is_set()
    waiting.clear()
    ended.clear()
    links = NodeLinks(endpoint="tcp://127.0.0.1:1")
    picture = cluster.view.snapshot()
    there = picture.nodes["n3"].model_copy(update={"links": links})
    picture = picture.model_copy(update={"nodes": {"n3": there}})
    with pytest.raises(BusClosed):
        await survey_links(cluster.engine, picture, [("n1", "n3"), ("n2", "n3")])
    assert ended.is_set()


async def test_a_node_that_starts_again_while_its_old_run_answers_is_sent_its_part(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old run's word that it follows the plan is none about the new one."""
    node = await cluster.node("n1")
    command, answered, go = cluster.engine.command, asyncio.Event(), asyncio.Event()
    activations = 0

    async def late(name: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        nonlocal activations
        if json.loads(payload).get("step") != "activate":
            return await command(name, payload, timeout=timeout)
        activations += 1
        if activations == 1:
            raise NoAnswer("lost on its way")
        answer = await command(name, payload, timeout=timeout)
        if activations == 2:
            answered.set()
            await go.wait()
        return answer

    monkeypatch.setattr(cluster.engine, "command", late)
    assert (await cluster.committer.commit(plan(BOTH[0]), v(1))).unconfirmed
    await answered.wait()
    await node.stop()
    again = await cluster.node("n1")
    assert again.assignments.assignment("llama") is None
    await until(lambda: cluster.shard("n1") is None, "the new run, which holds nothing")
    go.set()
    await cluster.loaded("n1", v(1))
    assert [each.version for each in again.loader.calls] == [v(1)]
