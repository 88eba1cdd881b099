"""Commits that are cancelled, contradict one another, or lose their bus in the midst."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpurt.cluster.committer import PlacementCommitter
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.shards import ShardState
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
