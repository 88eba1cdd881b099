"""Plans become what nodes do: at all of them or at none, in the order of their versions, and also after restarts."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpurt.cluster import committer as committer_module
from gpurt.cluster.assignment import Assignment, Refusal, assignments_of
from gpurt.cluster.bus import MAX_COMMAND_BYTES, EventEngine
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.commands import Assign, Step, request_drain, request_rediscovery, send_assignment
from gpurt.cluster.commit_result import CommitStatus
from gpurt.cluster.committer import PlacementCommitter, latest_version
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import ClusterError, NoAnswer
from gpurt.cluster.fence import Fence
from gpurt.cluster.node_assignments import NodeAssignments
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.promises import PromiseFile
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.records import NodeState
from gpurt.cluster.shards import ShardState
from gpurt.cluster.view import MasterView
from gpurt.placement import InvalidPlan, PlanVersion, ResidentRange, devices_from_view
from gpurt.types import DeviceState
from tests.cluster.conftest import Bus, InProcess
from tests.cluster.plans import Loader, plan
from tests.cluster.support import HOST_A, device, result, until

pytestmark = pytest.mark.wide


def v(n: int, term: int = 1) -> PlanVersion:
    return PlanVersion(term=term, n=n)


class Node:
    """A worker with two devices of 79 GiB, ``GPU-<name>-0`` and ``-1``."""

    def __init__(self, name: str, engine: EventEngine, registry: Path, counter: int) -> None:
        self.name, self.engine, self.loader = name, engine, Loader()
        fence = Fence(PromiseFile(registry, "test", name))
        self.publisher = NodePublisher(engine, name, host=HOST_A, epoch=Epoch.new(counter), fence=fence)
        self.assignments = NodeAssignments(self.publisher)
        self.assignments.use(self.loader)

    async def start(self) -> None:
        await self.publisher.start(result(*(device(f"GPU-{self.name}-{index}", index) for index in range(2))))

    async def stop(self) -> None:
        await self.assignments.aclose()
        await self.publisher.leave()


class Cluster:
    """A master with its committer, and nodes."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus, self.folder = bus, folder
        self.view = MasterView()
        self.engine: EventEngine
        self.committer: PlacementCommitter
        self.nodes: dict[str, Node] = {}
        self.starts = 0

    async def node(self, name: str, *, loads: bool = True) -> Node:
        """Started, or started again after ``stop``."""
        self.starts += 1
        before = self.nodes.get(name)
        engine = await self.bus.node() if before is None else before.engine
        node = self.nodes[name] = Node(name, engine, self.folder / f"{name}.json", self.starts)
        if not loads:
            node.assignments.use(None)
        await node.start()
        await until(lambda: self.state(name) is NodeState.HEALTHY, f"node {name}")
        return node

    def state(self, name: str) -> NodeState | None:
        record = self.view.node(name)
        return None if record is None else record.state

    def shard(self, name: str, instance: str = "llama") -> Any:
        record = self.view.node(name)
        return None if record is None else record.placement.shard(instance)

    async def loaded(self, name: str, version: PlanVersion, instance: str = "llama") -> None:
        def there() -> bool:
            shard = self.shard(name, instance)
            return shard is not None and (shard.version, shard.state) == (version, ShardState.LOADED)

        await until(there, f"plan {version} at {name}")


@pytest.fixture
async def cluster(bus: Bus, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(bus, tmp_path)
    made.engine = await bus.observer()
    observer = ClusterObserver(made.engine, made.view)
    made.committer = PlacementCommitter(made.engine, made.view, answer_s=2.0)
    ready = asyncio.Event()
    tasks = [asyncio.create_task(observer.run(ready.set)), asyncio.create_task(made.committer.run())]
    await ready.wait()
    yield made
    for node in made.nodes.values():
        await node.assignments.aclose()
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


BOTH = (("n1/GPU-n1-0", 0, 4), ("n2/GPU-n2-0+n2/GPU-n2-1", 4, 10))


async def test_a_plan_is_loaded_everywhere_and_seen(cluster: Cluster) -> None:
    one, two = await cluster.node("n1"), await cluster.node("n2")
    changes = cluster.view.changes()
    outcome = await cluster.committer.commit(plan(*BOTH), v(1))
    assert outcome.status is CommitStatus.COMMITTED, outcome.message
    assert set(outcome.answers) == {"n1", "n2"}
    for node in ("n1", "n2"):
        await cluster.loaded(node, v(1))
    (mine,), (others,) = one.loader.calls, two.loader.calls
    assert (mine.model, mine.version, mine.layer_count) == ("llama", v(1), 10)
    assert [(stage.start, stage.end) for stage in mine.stages] == [(0, 4)]
    (stage,) = others.stages
    assert [each.device for each in stage.devices] == ["GPU-n2-0", "GPU-n2-1"]
    assert [each.weight_bytes for each in stage.devices] == [3 << 30, 3 << 30]
    picture = cluster.view.snapshot()
    assert picture.resident == {
        ("n1", "GPU-n1-0"): (ResidentRange(model="llama", start=0, end=4),),
        ("n2", "GPU-n2-0"): (ResidentRange(model="llama", start=4, end=10),),
        ("n2", "GPU-n2-1"): (ResidentRange(model="llama", start=4, end=10),),
    }
    placed = {
        each.id: each.resident for each in devices_from_view(picture.available_devices, resident=picture.resident)
    }
    assert placed["n1/GPU-n1-0"] == (ResidentRange(model="llama", start=0, end=4),)
    assert placed["n1/GPU-n1-1"] == ()
    assert picture.held_bytes("llama")["n2", "GPU-n2-0"] == 3 << 30
    assert picture.held_bytes("other") == {}
    full = {key: each.model_copy(update={"memory_available": 0}) for key, each in picture.available_devices.items()}
    room = {each.id: each.usable_bytes for each in devices_from_view(full, held=picture.held_bytes("llama"))}
    assert (room["n1/GPU-n1-0"], room["n1/GPU-n1-1"]) == (4 << 30, 0)
    assert latest_version(picture, "llama") == cluster.committer.committed("llama") == v(1)
    assert latest_version(picture, "other") is None
    changes.close()
    told = [change.message for change in [c async for c in changes] if change.kind is ChangeKind.NODE_PLACEMENT]
    assert "llama loaded under plan (1, 1)" in told


async def test_the_same_commit_again_loads_nothing_again(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    for _ in range(3):
        outcome = await cluster.committer.commit(plan(BOTH[0]), v(1))
        assert outcome.committed
    await cluster.loaded("n1", v(1))
    assert len(one.loader.calls) == 1
    again = await cluster.committer.commit(plan(BOTH[0]), v(1))
    assert again.answers["n1"].acknowledgement is not None
    assert again.answers["n1"].acknowledgement.state is ShardState.LOADED


async def test_one_refusal_calls_the_whole_off(cluster: Cluster) -> None:
    one, two = await cluster.node("n1"), await cluster.node("n2")
    assert (await cluster.committer.commit(plan(*BOTH), v(1))).committed
    await cluster.loaded("n1", v(1))
    await cluster.loaded("n2", v(1))
    greedy = plan(("n1/GPU-n1-0", 0, 2), ("n2/GPU-n2-0", 2, 202))
    outcome = await cluster.committer.commit(greedy, v(2))
    assert outcome.status is CommitStatus.ABORTED
    refusal = outcome.refused["n2"]
    assert (refusal.reason, refusal.device) == (Refusal.NOT_ENOUGH_MEMORY, "GPU-n2-0")
    # It has 79 GiB free, and 3 GiB of the plan that would be replaced.
    assert refusal.short_bytes == (200 - 79 - 3) << 30
    assert "not_enough_memory" in outcome.message
    assert outcome.answers["n1"].accepted
    for node in (one, two):
        assert len(node.loader.calls) == 1
        held = node.assignments.assignment("llama")
        assert held is not None
        assert held.version == v(1)
    assert cluster.committer.committed("llama") == v(1)
    # The number is spent: nothing that was offered under it may come back as something else.
    assert (await cluster.committer.commit(plan(*BOTH), v(3))).committed


async def test_a_node_that_is_not_there_calls_the_whole_off(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    outcome = await cluster.committer.commit(plan(*BOTH), v(1))
    assert outcome.status is CommitStatus.ABORTED
    assert outcome.unconfirmed == ("n2",)
    assert outcome.refused == {}
    assert one.loader.calls == []
    assert cluster.shard("n1") is None
    assert one.assignments.placement().shards == ()


@pytest.mark.parametrize("damage", ["unknown", "lost", "no loader", "draining"])
async def test_what_a_node_refuses(cluster: Cluster, damage: str) -> None:
    one = await cluster.node("n1")
    wanted, reason = "GPU-n1-0", Refusal.DEVICE_UNAVAILABLE
    if damage == "unknown":
        wanted, reason = "GPU-x", Refusal.UNKNOWN_DEVICE
    elif damage == "lost":
        lost = device("GPU-n1-0").model_copy(update={"state": DeviceState.LOST, "usable": False})
        await one.publisher.publish_snapshot(result(lost))
    elif damage == "no loader":
        one.assignments.use(None)
        reason = Refusal.NO_LOADER
    else:
        await request_drain(cluster.engine, "n1", term=1)
        reason = Refusal.DRAINING
    outcome = await cluster.committer.commit(plan((f"n1/{wanted}", 0, 1)), v(1))
    assert outcome.refused["n1"].reason is reason
    assert one.loader.calls == []


async def test_a_later_plan_replaces_what_is_being_loaded(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    one.loader.gate.clear()
    assert (await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 8)), v(1))).committed
    await until(lambda: one.loader.running, "the first load")
    assert (await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 4)), v(2))).committed
    await until(lambda: len(one.loader.calls) == 2, "the second load")
    assert [each.version for each in one.loader.cancelled] == [v(1)]
    assert cluster.view.snapshot().resident == {}
    one.loader.gate.set()
    await cluster.loaded("n1", v(2))


async def test_what_stays_is_resident_while_the_rest_is_loaded(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 8), ("n1/GPU-n1-1", 8, 10)), v(1))
    await cluster.loaded("n1", v(1))
    one.loader.gate.clear()
    await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 5), ("n1/GPU-n1-1", 5, 10)), v(2))
    await until(lambda: cluster.shard("n1").version == v(2), "the second plan")
    held = {layers.device: (layers.start, layers.end) for layers in cluster.shard("n1").resident}
    assert held == {"GPU-n1-0": (0, 5), "GPU-n1-1": (8, 10)}
    one.loader.gate.set()
    await cluster.loaded("n1", v(2))


async def test_a_load_that_fails_is_told_and_tried_again_on_request(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    one.loader.error = OSError("the disk is gone")
    assert (await cluster.committer.commit(plan(BOTH[0]), v(1))).committed
    await until(lambda: cluster.shard("n1") and cluster.shard("n1").state is ShardState.FAILED, "the failure")
    assert cluster.shard("n1").message == "the disk is gone"
    assert cluster.shard("n1").resident == ()
    one.loader.error = None
    assert (await cluster.committer.commit(plan(BOTH[0]), v(1))).committed
    await cluster.loaded("n1", v(1))


async def test_a_node_outside_the_new_plan_lets_go(cluster: Cluster) -> None:
    await cluster.node("n1")
    two = await cluster.node("n2")
    await cluster.committer.commit(plan(*BOTH), v(1))
    await cluster.loaded("n2", v(1))
    assert (await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 10)), v(2))).committed
    await until(lambda: cluster.shard("n2") is None, "the release")
    assert two.loader.calls[-1].stages == ()
    # And what it has promised is not forgotten with it, even where its master has forgotten.
    cluster.committer.forget("llama")
    outcome = await cluster.committer.commit(plan(*BOTH), v(1))
    assert {each.reason for each in outcome.refused.values()} == {Refusal.STALE_VERSION}


async def test_two_instances_of_one_model(cluster: Cluster) -> None:
    await cluster.node("n1")
    for name, key in (("a", "GPU-n1-0"), ("b", "GPU-n1-1")):
        assert (await cluster.committer.commit(plan((f"n1/{key}", 0, 4)), v(1), instance=name)).committed
        await cluster.loaded("n1", v(1), name)
    assert {shard.instance for shard in cluster.view.snapshot().nodes["n1"].placement.shards} == {"a", "b"}


# Fencing


async def test_versions_are_followed_upwards_only(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    assert (await cluster.committer.commit(plan(BOTH[0]), v(5))).committed
    await cluster.loaded("n1", v(5))
    for version, made in ((v(4), plan(BOTH[0])), (v(5), plan(("n1/GPU-n1-1", 0, 4)))):
        cluster.committer.forget("llama")  # which would not even offer it
        outcome = await cluster.committer.commit(made, version)
        assert outcome.refused["n1"].reason is Refusal.STALE_VERSION
    assert len(one.loader.calls) == 1
    assert (await cluster.committer.commit(plan(BOTH[0]), v(1, term=2))).committed


async def test_a_master_that_was_replaced_learns_by_whom(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    newer = PlacementCommitter(cluster.engine, cluster.view)
    assert (await newer.commit(plan(BOTH[0]), v(1, term=7))).committed
    outcome = await cluster.committer.commit(plan(BOTH[0]), v(9, term=6))
    assert outcome.status is CommitStatus.ABORTED
    assert outcome.superseded_by == 7
    for command in (
        request_rediscovery(cluster.engine, "n1", term=6),
        request_drain(cluster.engine, "n1", term=6),
    ):
        with pytest.raises(ClusterError, match="term 6 refused: a master of term 7"):
            await command
    assert cluster.state("n1") is NodeState.HEALTHY
    assert len(one.loader.calls) == 1
    await until(lambda: cluster.view.snapshot().nodes["n1"].placement.term == 7, "the term")


async def test_a_node_that_starts_again_remembers_what_it_promised(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    await cluster.committer.commit(plan(BOTH[0]), v(3, term=4))
    await cluster.loaded("n1", v(3, term=4))
    cluster.committer.forget("llama")
    await one.stop()
    again = await cluster.node("n1")
    assert again.publisher.fence.term == 4
    old = await send_assignment(cluster.engine, "n1", part(v(9, term=3)), Step.OFFER)
    assert (old.accepted, old.reason, old.term) == (False, Refusal.STALE_TERM, 4)
    earlier = await send_assignment(cluster.engine, "n1", part(v(2, term=4)), Step.ACTIVATE)
    assert earlier.reason is Refusal.STALE_VERSION
    other = await send_assignment(cluster.engine, "n1", part(v(3, term=4), end=7), Step.ACTIVATE)
    assert other.reason is Refusal.STALE_VERSION
    same = await send_assignment(cluster.engine, "n1", part(v(3, term=4)), Step.ACTIVATE)
    assert same.accepted
    await cluster.loaded("n1", v(3, term=4))


def part(version: PlanVersion, end: int = 4) -> Assignment:
    return assignments_of(plan(("n1/GPU-n1-0", 0, end)), version)["n1"]


async def test_a_node_that_starts_again_is_sent_its_part_again(cluster: Cluster) -> None:
    one, two = await cluster.node("n1"), await cluster.node("n2")
    await cluster.committer.commit(plan(*BOTH), v(1))
    await cluster.loaded("n1", v(1))
    await cluster.loaded("n2", v(1))
    await one.stop()
    await until(lambda: cluster.state("n1") is NodeState.LEFT, "the goodbye")
    assert ("n1", "GPU-n1-0") not in cluster.view.snapshot().resident
    again = await cluster.node("n1")
    await cluster.loaded("n1", v(1))
    assert [each.version for each in again.loader.calls] == [v(1)]
    assert len(two.loader.calls) == 1


async def test_a_node_that_was_away_at_the_decision_gets_its_part_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts the offer and is deaf to the activation."""
    one = await cluster.node("n1")
    command, deaf = cluster.engine.command, asyncio.Event()

    async def lossy(node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        if json.loads(payload).get("step") == "activate" and not deaf.is_set():
            deaf.set()
            raise ClusterError("lost on its way")
        return await command(node, payload, timeout=timeout)

    monkeypatch.setattr(cluster.engine, "command", lossy)
    outcome = await cluster.committer.commit(plan(BOTH[0]), v(1))
    assert outcome.committed
    assert outcome.unconfirmed == ("n1",)
    await cluster.loaded("n1", v(1))
    assert len(one.loader.calls) == 1


async def test_an_offer_that_was_called_off_does_not_keep_the_plan_before_from_being_sent_again(
    cluster: Cluster,
) -> None:
    """The later version was promised, and was never decided."""
    one = await cluster.node("n1")
    await cluster.committer.commit(plan(BOTH[0]), v(1))
    await cluster.loaded("n1", v(1))
    assert not (await cluster.committer.commit(plan(*BOTH), v(2))).committed
    await one.stop()
    await until(lambda: cluster.state("n1") is NodeState.LEFT, "the goodbye")
    await cluster.node("n1")
    await cluster.loaded("n1", v(1))
    # But the number is spent, and what was followed later is not followed by what came before.
    assert (await send_assignment(cluster.engine, "n1", part(v(2), end=3), Step.OFFER)).reason is Refusal.STALE_VERSION
    assert (await cluster.committer.commit(plan(BOTH[0]), v(3))).committed
    for step in (Step.OFFER, Step.ACTIVATE):
        assert (await send_assignment(cluster.engine, "n1", part(v(1)), step)).reason is Refusal.STALE_VERSION


async def test_a_node_that_never_heard_that_an_offer_was_called_off_lets_go_all_the_same(cluster: Cluster) -> None:
    """It has nothing then, and says so: one that seems to hold a part would be told to let go of it for ever."""
    for name in ("n1", "n2"):
        await cluster.node(name)
    assert (await cluster.committer.commit(plan(*BOTH), v(1))).committed
    await cluster.loaded("n2", v(1))
    offer = assignments_of(plan(*BOTH), v(3))["n2"]
    assert (await send_assignment(cluster.engine, "n2", offer, Step.OFFER)).accepted
    assert (await cluster.committer.commit(plan(("n1/GPU-n1-0", 0, 10)), v(2))).committed
    await until(lambda: cluster.shard("n2") is None, "n2 lets go")
    assert (await cluster.committer.commit(plan(*BOTH), v(4))).committed
    await cluster.loaded("n2", v(4))


async def test_a_node_that_starts_again_gets_its_part_once_it_can_load(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker is heard before it has opened its devices, and that it has is no news that it tells."""
    monkeypatch.setattr(committer_module, "AGAIN_FIRST_S", 0.001)
    monkeypatch.setattr(committer_module, "AGAIN_LONGEST_S", 0.01)
    one = await cluster.node("n1")
    assert (await cluster.committer.commit(plan(BOTH[0]), v(1))).committed
    await cluster.loaded("n1", v(1))
    await one.stop()
    again = await cluster.node("n1", loads=False)
    refused = "node n1 refuses plan (1, 1) of llama: nobody loads models on this node yet"
    await until(lambda: refused in caplog.text, "the refusals")
    again.assignments.use(again.loader)
    await cluster.loaded("n1", v(1))
    assert len(again.loader.calls) == 1
    assert caplog.text.count(refused) == 1, "not at each attempt"
    assert caplog.text.count("plan (1, 1) of llama is refused") == 1, "nor at the node"


async def test_a_node_that_ends_takes_nothing_more(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    one.loader.gate.clear()
    await cluster.committer.commit(plan(BOTH[0]), v(1))
    await until(lambda: one.loader.running, "the load")
    await one.assignments.aclose()
    assert [each.version for each in one.loader.cancelled] == [v(1)]
    outcome = await cluster.committer.commit(plan(BOTH[0]), v(2))
    assert outcome.refused["n1"].reason is Refusal.NO_LOADER


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 22))])
async def test_whatever_is_lost_on_the_way_every_node_ends_with_what_was_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Commands or their answers are lost or doubled, old ones come again, nodes are started again. No node ever loads
    what was not decided, and in the end each follows the last plan that was."""
    monkeypatch.setattr(committer_module, "AGAIN_FIRST_S", 0.001)
    bus = InProcess(False)
    made = Cluster(bus, tmp_path)
    made.engine = await bus.observer()
    observer, ready = ClusterObserver(made.engine, made.view), asyncio.Event()
    made.committer = PlacementCommitter(made.engine, made.view)
    chance, command, faults = random.Random(seed), made.engine.command, [True]
    recorded: list[tuple[str, bytes]] = []

    async def faulty(node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        recorded.append((node, payload))
        kind = chance.random() if faults[0] else 1.0
        if kind < 0.15:
            raise NoAnswer("lost on its way")
        answer = await command(node, payload, timeout=timeout)
        if kind < 0.3:
            raise NoAnswer("the answer was lost")
        if kind < 0.5:
            with suppress(ClusterError):  # somebody else's copy; its node may be away
                await command(*chance.choice(recorded))
        return answer

    monkeypatch.setattr(made.engine, "command", faulty)
    tasks = [asyncio.create_task(observer.run(ready.set)), asyncio.create_task(made.committer.run())]
    await ready.wait()
    names = ["n1", "n2", "n3"]
    decided: dict[PlanVersion, dict[str, Assignment]] = {}
    loaded: list[tuple[str, Assignment]] = []
    for name in names:
        await made.node(name)
    for number in range(1, 31):
        chosen = chance.sample(names, chance.randint(1, 3))
        stages = [(f"{node}/GPU-{node}-{chance.randint(0, 1)}", 2 * i, 2 * i + 2) for i, node in enumerate(chosen)]
        outcome = await made.committer.commit(plan(*stages), v(number))
        if outcome.committed:
            decided[v(number)] = assignments_of(plan(*stages), v(number))
        if chance.random() < 0.2:
            name = chance.choice(names)
            loaded += [(name, each) for each in made.nodes[name].loader.calls]
            await made.nodes[name].stop()
            await made.node(name)
    faults[0] = False
    last = max(decided)
    for name in names:
        wanted = decided[last].get(name)

        def right(name: str = name, wanted: Assignment | None = wanted) -> bool:
            follows = made.nodes[name].assignments.assignment("llama")
            shard = made.shard(name)
            if wanted is None:
                return shard is None
            return follows == wanted and shard is not None and shard.state is ShardState.LOADED

        await until(right, f"plan {last} at {name}")
    loaded += [(name, each) for name, node in made.nodes.items() for each in node.loader.calls]
    for name, each in loaded:
        assert each.version in decided, "loaded what was not decided"
        parts = decided[each.version]
        assert each == parts[name] if name in parts else not each.stages
    assert len(decided) >= 3
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await bus.aclose()


# Draining


async def test_a_draining_node_is_not_offered_and_stays_so_over_a_restart(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    await cluster.committer.commit(plan(BOTH[0]), v(1))
    await cluster.loaded("n1", v(1))
    changes = cluster.view.changes()
    await request_drain(cluster.engine, "n1", term=1)
    await until(lambda: not cluster.view.snapshot().available_devices, "the draining")
    picture = cluster.view.snapshot()
    assert picture.nodes["n1"].draining
    assert picture.nodes["n1"].state is NodeState.HEALTHY
    assert picture.resident, "what lies there stays"
    # News of a device does not bring it back.
    await one.publisher.publish_snapshot(result(device("GPU-n1-0"), device("GPU-new", 1)))
    await until(lambda: ("n1", "GPU-new") in cluster.view.snapshot().devices, "the new device")
    assert not cluster.view.snapshot().available_devices
    changes.close()
    assert any(
        "draining: it takes no new placements" in (change.message or "") for change in [c async for c in changes]
    )
    await one.stop()
    await cluster.node("n1")
    assert not cluster.view.snapshot().available_devices
    await request_drain(cluster.engine, "n1", term=1, draining=False)
    await until(lambda: len(cluster.view.snapshot().available_devices) == 2, "the end of the draining")


# What no master of ours would send


@pytest.mark.parametrize(
    "change",
    [
        {"term": 8},
        {"term": "1"},
        {"term": True},
        {"term": -1},
        {"term": 2**64},
        {"step": "explode"},
        {"assignment": None},
        {"command": "assign", "assignment": {"instance": "x"}},
    ],
)
async def test_a_forged_command_is_refused_and_changes_nothing(cluster: Cluster, change: dict[str, Any]) -> None:
    one = await cluster.node("n1")
    command = Assign(term=1, step=Step.ACTIVATE, assignment=part(v(1))).model_dump(mode="json") | change
    with pytest.raises(ClusterError, match="command"):
        await cluster.engine.command("n1", json.dumps(command).encode())
    assert one.loader.calls == []
    assert one.publisher.fence.term == 0


async def test_replayed_commands_do_nothing(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    recorded = [
        Assign(term=1, step=step, assignment=part(v(n))).model_dump_json().encode()
        for n in (1, 2)
        for step in (Step.OFFER, Step.ACTIVATE)
    ]
    for payload in recorded:
        await cluster.engine.command("n1", payload)
    await cluster.loaded("n1", v(2))
    seen = len(one.loader.calls)
    answers = [json.loads(await cluster.engine.command("n1", payload)) for payload in recorded]
    assert [answer["accepted"] for answer in answers] == [False, False, True, True]
    assert {answer["reason"] for answer in answers[:2]} == {"stale_version"}
    abort = Assign(term=1, step=Step.ABORT, assignment=part(v(2)))
    await cluster.engine.command("n1", abort.model_dump_json().encode())
    held = one.assignments.assignment("llama")
    assert held is not None
    assert held.version == v(2)
    assert len(one.loader.calls) == seen


async def test_an_oversized_command_is_refused_on_both_sides(cluster: Cluster) -> None:
    one = await cluster.node("n1")
    payload = Assign(term=1, step=Step.ACTIVATE, assignment=part(v(1))).model_dump_json().encode()
    with pytest.raises(ClusterError, match="over the limit"):
        await cluster.engine.command("n1", payload + b" " * MAX_COMMAND_BYTES)
    assert one.loader.calls == []
    many = plan(*((f"n1/GPU-{'x' * 200}-{index}", index, index + 1) for index in range(400)))
    outcome = await cluster.committer.commit(many, v(1))
    assert outcome.status is CommitStatus.ABORTED
    assert "over the limit of 65536 bytes" in outcome.answers["n1"].message


def test_a_plan_whose_devices_are_of_another_node_is_no_plan() -> None:
    mixed = plan(("n1/GPU-a+n2/GPU-b", 0, 4))
    with pytest.raises(InvalidPlan) as caught:
        assignments_of(mixed, v(1))
    assert caught.value.where == "n2/GPU-b"
