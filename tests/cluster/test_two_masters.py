"""Two masters at once: everybody who watches sees it and says it, and one plan is withdrawn."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from rich.console import Console

from gpurt.cli.cluster_table import change_line, cluster_table
from gpurt.cli.master import change_document
from gpurt.cluster.assignment import assignments_of
from gpurt.cluster.changes import Change, ChangeKind
from gpurt.cluster.commands import Step, send_assignment, withdraw_plan
from gpurt.cluster.committer import PlacementCommitter
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.plan_troubles import SETTLE_S
from gpurt.cluster.records import PlanTroubleKind
from gpurt.cluster.shards import NodePlacement, ShardReport, ShardState
from gpurt.cluster.view import HUB_GRACE_S, MasterView
from gpurt.placement import PlanVersion
from tests.cluster.plans import plan
from tests.cluster.support import FakeClock, device, snapshot, until
from tests.cluster.test_assignments import Cluster, cluster, v  # noqa: F401

pytestmark = pytest.mark.wide

A = plan(("n1/GPU-n1-0", 0, 4), ("n2/GPU-n2-0", 4, 8))
B = plan(("n3/GPU-n3-0", 0, 4), ("n4/GPU-n4-0", 4, 8))


class Other:
    """A second master, that watches through an engine of its own."""

    def __init__(self, cluster: Cluster) -> None:  # noqa: F811
        self.cluster, self.view = cluster, MasterView()
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Other:
        engine, ready = await self.cluster.bus.node(), asyncio.Event()
        self.tasks.append(asyncio.create_task(ClusterObserver(engine, self.view).run(ready.set)))
        self.committer = PlacementCommitter(engine, self.view, answer_s=2.0, name="other")
        self.tasks.append(asyncio.create_task(self.committer.run()))
        await ready.wait()
        await until(lambda: len(self.view.snapshot().available_devices) == 8, "all nodes")
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self.tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def four(cluster: Cluster) -> None:  # noqa: F811
    for name in ("n1", "n2", "n3", "n4"):
        await cluster.node(name)


def held(cluster: Cluster) -> dict[str, PlanVersion | None]:  # noqa: F811
    shards = {name: node.assignments.placement().shard("llama") for name, node in cluster.nodes.items()}
    return {name: shard and shard.version for name, shard in shards.items()}


async def test_of_two_plans_of_one_version_on_other_nodes_one_is_withdrawn_and_all_say_so(
    cluster: Cluster,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    await four(cluster)
    async with Other(cluster) as other:
        watched = [cluster.view.changes(), other.view.changes()]
        one, two = await asyncio.gather(
            cluster.committer.commit(A, v(1)),
            other.committer.commit(B, v(1)),
        )
        assert one.committed
        assert two.committed
        names = {assignments_of(each, v(1)).popitem()[1].plan: nodes for each, nodes in ((A, "12"), (B, "34"))}
        stays = names[min(names)]
        kept, gone = [f"n{n}" for n in stays], [f"n{n}" for n in "1234" if n not in stays]
        await until(lambda: all(held(cluster)[name] is None for name in gone), "one is withdrawn")
        for name in kept:
            await cluster.loaded(name, v(1))
        loser = (cluster.committer, other.committer)[stays == "12"]
        await until(lambda: loser.committed("llama") is None, "its master gives it up")
        await until(
            lambda: not (cluster.view.snapshot().plan_troubles or other.view.snapshot().plan_troubles), "the end"
        )
        for changes in watched:
            changes.close()
            said = [each async for each in changes]
            troubles = [each.message or "" for each in said if each.kind is ChangeKind.PLAN_TROUBLE]
            assert any("two masters of term 1" in each and "which is to be withdrawn" in each for each in troubles)
            assert ChangeKind.PLAN_TROUBLE_OVER in [each.kind for each in said]
    assert "two masters of term 1 have decided on" in caplog.text
    # What was withdrawn does not come back, and the next plan of either goes everywhere.
    assert (await cluster.committer.commit(plan(*(("n1/GPU-n1-0", 0, 4), ("n3/GPU-n3-0", 4, 8))), v(2))).committed
    for name in ("n1", "n3"):
        await cluster.loaded(name, v(2))
    await until(lambda: held(cluster) == {"n1": v(2), "n2": None, "n3": v(2), "n4": None}, "the next plan")


async def test_the_later_of_two_plans_takes_the_nodes_of_the_earlier(cluster: Cluster) -> None:  # noqa: F811
    await four(cluster)
    async with Other(cluster) as other:
        one, two = await asyncio.gather(cluster.committer.commit(A, v(1)), other.committer.commit(B, v(1, term=2)))
        assert one.committed
        assert two.committed
        wanted = {"n1": None, "n2": None, "n3": v(1, term=2), "n4": v(1, term=2)}
        await until(lambda: held(cluster) == wanted, "the later one")
        await until(lambda: cluster.committer.committed("llama") is None, "the earlier master gives up")
        assert other.committer.not_following("llama") == {}


async def test_one_node_that_says_it_follows_another_master_does_not_end_a_plan(cluster: Cluster) -> None:  # noqa: F811
    """It is named, and the others are served on."""
    one, two = await cluster.node("n1"), await cluster.node("n2")
    both = plan(("n1/GPU-n1-0", 0, 4), ("n2/GPU-n2-0", 4, 8))
    assert (await cluster.committer.commit(both, v(1))).committed
    await cluster.loaded("n1", v(1))
    await cluster.loaded("n2", v(1))
    later = assignments_of(plan(("n2/GPU-n2-1", 0, 8)), v(7, term=9))["n2"]
    await send_assignment(cluster.engine, "n2", later, Step.ACTIVATE)
    await until(lambda: "n2" in cluster.committer.not_following("llama"), "it is named")
    assert cluster.committer.not_following("llama")["n2"].reason == "stale_term"
    await one.stop()
    await cluster.node("n1")
    await cluster.loaded("n1", v(1))
    assert cluster.committer.committed("llama") == v(1)
    assert len(two.loader.calls) == 2


async def test_what_is_withdrawn_is_that_plan_alone(cluster: Cluster) -> None:  # noqa: F811
    one = await cluster.node("n1")
    both = plan(("n1/GPU-n1-0", 0, 8))
    assert (await cluster.committer.commit(both, v(1))).committed
    await cluster.loaded("n1", v(1))
    mine = assignments_of(both, v(1))["n1"]
    assert mine.plan is not None
    for version, name in ((v(1), "another"), (v(2), mine.plan)):
        assert (await withdraw_plan(cluster.engine, "n1", "llama", version, name)).accepted
    assert one.assignments.assignment("llama") == mine
    cluster.committer.forget("llama")
    assert (await withdraw_plan(cluster.engine, "n1", "llama", v(1), mine.plan)).accepted
    await until(lambda: held(cluster) == {"n1": None}, "it lets go")
    again = await send_assignment(cluster.engine, "n1", mine, Step.ACTIVATE)
    assert again.reason == "stale_version"


async def test_a_node_without_a_loader_gets_its_part_with_it(
    cluster: Cluster,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has accepted, is started again before it is told to begin, and has no loader for a while."""
    await cluster.node("n1")
    await cluster.node("n2")
    both = plan(("n1/GPU-n1-0", 0, 4), ("n2/GPU-n2-0", 4, 8))
    every = cluster.committer._all  # pyright: ignore[reportPrivateUsage]

    async def restarted(parts: Any, step: Step) -> Any:
        answers = await every(parts, step)
        if step is Step.OFFER:
            await cluster.nodes["n1"].stop()
            await cluster.node("n1", loads=False)
        return answers

    monkeypatch.setattr(cluster.committer, "_all", restarted)
    outcome = await cluster.committer.commit(both, v(1))
    assert outcome.committed
    assert list(outcome.not_following) == ["n1"]
    assert "nobody loads models" in outcome.message
    await cluster.loaded("n2", v(1))
    assert list(cluster.committer.not_following("llama")) == ["n1"]
    one = cluster.nodes["n1"]
    one.assignments.use(one.loader)
    await cluster.loaded("n1", v(1))
    await until(lambda: cluster.committer.not_following("llama") == {}, "it follows")


@pytest.mark.parametrize("news", ["device", "loader"])
async def test_a_part_that_could_not_be_loaded_is_tried_again_at_news_that_may_help(
    cluster: Cluster,  # noqa: F811
    news: str,
) -> None:
    from tests.cluster.support import result

    one = await cluster.node("n1")
    one.loader.error = OSError("no room")
    assert (await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 4)), v(1))).committed
    await until(lambda: "n1" in cluster.committer.not_following("llama"), "it is said")
    assert cluster.committer.not_following("llama")["n1"].message == "it could not load its part: no room"
    assert len(one.loader.calls) == 1, "nobody tries again and again"
    one.loader.error = None
    if news == "loader":
        one.assignments.use(one.loader)
    else:
        lost = device("GPU-n1-1", 1, state="lost", usable=False)
        await one.publisher.publish_snapshot(result(device("GPU-n1-0"), lost))
    await cluster.loaded("n1", v(1))
    await until(lambda: cluster.committer.not_following("llama") == {}, "it follows")


async def test_a_device_that_is_back_gets_its_part(
    cluster: Cluster,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.cluster.support import result

    await cluster.node("n1")
    every = cluster.committer._all  # pyright: ignore[reportPrivateUsage]

    async def broken(parts: Any, step: Step) -> Any:
        answers = await every(parts, step)
        if step is Step.OFFER:
            await cluster.nodes["n1"].stop()
            again = await cluster.node("n1")
            await again.publisher.publish_snapshot(result(device("GPU-n1-0", state="lost", usable=False)))
        return answers

    monkeypatch.setattr(cluster.committer, "_all", broken)
    outcome = await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 4)), v(1))
    assert outcome.refused["n1"].reason == "device_unavailable"
    await until(lambda: cluster.committer._sending != {}, "the refusal")  # pyright: ignore[reportPrivateUsage]
    await cluster.nodes["n1"].publisher.publish_snapshot(result(device("GPU-n1-0")))
    await cluster.loaded("n1", v(1))


async def test_a_node_that_is_gone_is_named_until_it_is_back(cluster: Cluster) -> None:  # noqa: F811
    one = await cluster.node("n1")
    assert (await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 4)), v(1))).committed
    await cluster.loaded("n1", v(1))
    await one.stop()
    await until(lambda: "n1" in cluster.committer.not_following("llama"), "it is named")
    assert cluster.committer.not_following("llama")["n1"].message == "the node is left"
    await cluster.node("n1")
    await until(lambda: cluster.committer.not_following("llama") == {}, "it is back")
    await cluster.loaded("n1", v(1))


# What observers make of what nodes say


class Watched:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.view = MasterView(clock=self.clock)
        self.changes = self.view.changes()
        self.seq = 0

    def node(self, name: str, *shards: ShardReport, term: int = 1, **fields: Any) -> None:
        self.seq += 1
        self.view.node_up(name)
        placement = NodePlacement(term=term, shards=shards, **fields)
        self.view.apply_snapshot(snapshot(device(), node=name, seq=self.seq, placement=placement), sole=True)
        self.view.tick()

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.view.tick()

    @property
    def said(self) -> list[tuple[PlanTroubleKind, dict[str, str]]]:
        return [(each.kind, dict(each.nodes)) for each in self.view.snapshot().plan_troubles]


def shard(n: int = 1, name: str = "x", nodes: Sequence[str] = (), term: int = 1, **fields: Any) -> ShardReport:
    fields = {"state": ShardState.LOADED, **fields}
    return ShardReport(
        instance="llama", model="llama", version=v(n, term=term), plan=name, master="m", nodes=tuple(nodes), **fields
    )


async def changes_of(watched: Watched) -> AsyncIterator[Change]:
    watched.changes.close()
    async for change in watched.changes:
        yield change


def test_a_node_of_the_plan_that_does_not_follow_is_named_with_the_reason() -> None:
    watched = Watched()
    watched.node("a", shard(nodes="abcd"))
    watched.node("b", loader=False)
    watched.node("c", shard(nodes="abcd", state=ShardState.FAILED, message="no disk"))
    watched.later(SETTLE_S - 0.1)
    assert watched.said == []
    assert watched.view.deadline is not None
    watched.later(0.2)
    ((kind, nodes),) = watched.said
    assert kind is PlanTroubleKind.NOT_FOLLOWED
    assert nodes == {
        "b": "it holds nothing of it, and nobody loads models there",
        "c": "its load has failed: no disk",
        "d": "it was never seen",
    }
    watched.node("b", shard(nodes="abcd", state=ShardState.LOADING))
    watched.node("c", shard(nodes="abcd"))
    assert watched.said == [(PlanTroubleKind.NOT_FOLLOWED, {"d": "it was never seen"})]
    watched.node("d", shard(nodes="abcd"))
    assert watched.said == []
    watched.view.node_down("b")
    watched.later(10)
    assert watched.said == []
    watched.later(SETTLE_S)
    assert watched.said == [(PlanTroubleKind.NOT_FOLLOWED, {"b": "it is lost"})]


def test_while_one_plan_takes_the_place_of_another_nothing_is_said() -> None:
    watched = Watched()
    for name in "abc":
        watched.node(name, shard(1, "x", "abc"))
    for step, name in enumerate("abc"):
        watched.later(1)
        watched.node(name, shard(2, "y", "abc"))
        assert watched.said == [], step
    watched.later(60)
    assert watched.said == []


def test_while_the_hub_is_away_nothing_is_said_of_plans_that_was_not_said_before() -> None:
    watched = Watched()
    for plan_of_b in (None, shard(nodes="ab")):
        watched.node("a", shard(nodes="ab"))
        watched.node("b", *(() if plan_of_b is None else (plan_of_b,)))
        watched.later(SETTLE_S)
        said = watched.said
        assert said == ([] if plan_of_b else [(PlanTroubleKind.NOT_FOLLOWED, {"b": "it holds nothing of it"})])
        watched.view.hub_away()
        for _ in range(3):
            watched.later(SETTLE_S)
            assert watched.said == said
        watched.view.hub_back()
    watched.node("a", shard(nodes="ab"))
    watched.later(HUB_GRACE_S)
    watched.later(SETTLE_S)
    assert watched.said == [(PlanTroubleKind.NOT_FOLLOWED, {"b": "it is lost"})]


def test_an_earlier_plan_that_stays_beside_the_latest_is_named() -> None:
    watched = Watched()
    watched.node("a", shard(1, "x", "a", term=1))
    watched.node("b", shard(1, "y", "b", term=2), term=2)
    watched.later(SETTLE_S)
    assert watched.said == [(PlanTroubleKind.TWO_PLANS, {"a": "follows plan (1, 1) of m"})]


def test_a_plan_that_a_liar_names_is_not_the_latest() -> None:
    watched = Watched()
    watched.node("a", shard(1, "x", "ab"))
    watched.node("b", shard(1, "x", "ab"))
    watched.node("evil", shard(1, "0", "ab", term=2**62), term=2**62)
    watched.later(SETTLE_S)
    ((kind, nodes),) = watched.said
    assert kind is PlanTroubleKind.TWO_PLANS
    assert list(nodes) == ["evil"]
    assert "does not count" in nodes["evil"]


async def test_people_and_programs_are_told(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with caplog.at_level(logging.INFO, "gpurt.cluster.view"):
        watched.node("a", shard(1, "x", "a"))
        watched.node("b", shard(1, "y", "b"))
        message = (
            "two masters of term 1 have decided on different plans (1, 1) of llama: a (plan x of m), "
            "b (plan y of m, which is to be withdrawn)"
        )
        assert [each.message for each in watched.view.snapshot().plan_troubles] == [message]
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(cluster_table(watched.view.snapshot()))
        assert message[:60] in console.export_text()
        watched.node("b")
    assert [each.getMessage() for each in caplog.records] == [message, f"over: {message}"]
    seen = watched.view.snapshot()
    said = [each async for each in changes_of(watched) if each.kind.value.startswith("plan_")]
    assert [change_line(each, seen) for each in said] == [f"plan trouble {message}", f"plan trouble over {message}"]
    assert change_document(said[0], seen) | {"change": "plan_trouble", "message": message} == change_document(
        said[0], seen
    )
