"""The view is a fold: snapshots, events and membership in, the cluster out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpurt.cluster.changes import Change, ChangeKind, Changes
from gpurt.cluster.envelope import EventKind, make_event
from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.records import NodeState
from gpurt.cluster.view import MasterView
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport, DeviceState
from tests.cluster.support import E1, E2, HOST_A, HOST_B, FakeClock, device, snapshot


class Fold:
    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.view = MasterView(clock=self.clock, **options)
        self._changes = self.view.changes()
        self.seq = 0

    def join(self, *devices: Any, node: str = "n1", epoch: Epoch = E1, **fields: Any) -> bool:
        self.view.node_up(node)
        fields = {"seq": self.seq if epoch == E1 else 0, **fields}
        return self.view.apply_snapshot(snapshot(*devices, node=node, epoch=epoch, **fields), sole=True)

    def event(self, kind: str, *, node: str = "n1", subject: str | None = None, **data: Any) -> bool:
        self.seq += 1
        position = Position(E1, self.seq)
        return self.view.apply_event(
            make_event(kind, cluster="c", node=node, position=position, subject=subject, data=data or None)
        )

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.view.tick()

    async def said(self) -> list[tuple[str, str | None]]:
        said: list[tuple[str, str | None]] = []
        try:
            async with asyncio.timeout(0):
                async for change in self._changes:
                    said.append((change.kind.value, change.device or change.node))
        except TimeoutError:
            return said
        return said

    @property
    def record(self) -> Any:
        return self.view.node("n1")


async def test_a_node_joins_with_its_devices() -> None:
    fold = Fold()
    fold.join(device(), device("GPU-b", 1, usable=False), gpu_backend="cuda", primary_gpu_device_id="cuda:0")
    assert await fold.said() == [("node_joined", "n1"), ("device_added", "GPU-a"), ("device_added", "GPU-b")]
    picture = fold.view.snapshot()
    assert list(picture.devices) == [("n1", "GPU-a"), ("n1", "GPU-b")]
    assert list(picture.available_devices) == [("n1", "GPU-a")]
    assert (fold.record.gpu_backend, fold.record.primary_gpu_device_id) == ("cuda", "cuda:0")
    fold.join(device(), device("GPU-b", 1, usable=False), gpu_backend="cuda", primary_gpu_device_id="cuda:0")
    assert await fold.said() == []


async def test_equal_device_names_of_two_nodes_are_two_devices() -> None:
    fold = Fold()
    fold.join(device("same"), node="n1")
    fold.join(device("same"), node="n2", host=HOST_B)
    assert list(fold.view.snapshot().devices) == [("n1", "same"), ("n2", "same")]


async def test_device_events() -> None:
    fold = Fold()
    fold.join(device())
    await fold.said()
    summary = {"gpu_backend": "cuda", "primary_gpu_device_id": "cuda:0", "gpu_discovery_timestamp": "2026-01-01"}
    fold.event(EventKind.DEVICE_ADDED, subject="GPU-b", device=device("GPU-b", 1).model_dump(mode="json"))
    sick = device("GPU-b", 1, state=DeviceState.LOST, usable=False)
    fold.event(EventKind.DEVICE_HEALTH, subject="GPU-b", device=sick.model_dump(mode="json"), reason="Xid 79")
    assert list(fold.view.snapshot().available_devices) == [("n1", "GPU-a")]
    fold.view.apply_event(
        make_event(
            EventKind.DEVICE_UPDATED,
            cluster="c",
            node="n1",
            position=Position(E1, 3),
            subject="GPU-a",
            data={"device": device(clock_rate_mhz=1000).model_dump(mode="json"), "node": summary},
        )
    )
    fold.seq = 3
    fold.event(EventKind.DEVICE_REMOVED, subject="GPU-b")
    fold.event(EventKind.DEVICE_REMOVED, subject="GPU-b")
    assert await fold.said() == [
        ("device_added", "GPU-b"),
        ("device_health", "GPU-b"),
        ("node_updated", "n1"),
        ("device_updated", "GPU-a"),
        ("device_removed", "GPU-b"),
    ]
    assert list(fold.record.devices) == ["GPU-a"]
    assert {name: getattr(fold.record, name) for name in summary} == summary
    assert (fold.record.epoch, fold.record.seq) == (str(E1), 5)


async def test_suspect_at_once_lost_after_the_grace_back_with_the_snapshot() -> None:
    fold = Fold(grace_s=2.0)
    fold.join(device())
    await fold.said()
    fold.view.node_down("n1")
    assert fold.record.state is NodeState.SUSPECT
    assert fold.view.snapshot().available_devices == {}
    assert list(fold.record.devices) == ["GPU-a"]
    fold.later(1.9)
    assert fold.record.state is NodeState.SUSPECT
    fold.later(0.2)
    assert fold.record.state is NodeState.LOST
    assert list(fold.record.devices) == ["GPU-a"]
    fold.view.node_up("n1")
    assert fold.record.state is NodeState.LOST
    fold.join(device(), epoch=E2)
    assert fold.record.state is NodeState.HEALTHY
    assert list(fold.view.snapshot().available_devices) == [("n1", "GPU-a")]
    assert await fold.said() == [
        ("node_suspect", "n1"),
        ("node_lost", "n1"),
        ("node_back", "n1"),
    ], "what its node's state does to a device, the node's change says"


@pytest.mark.parametrize("goodbye_first", [True, False])
async def test_a_node_that_leaves_is_never_suspect(goodbye_first: bool) -> None:
    fold = Fold()
    fold.join(device())
    await fold.said()
    steps = [lambda: fold.event(EventKind.NODE_LEAVING), lambda: fold.view.node_down("n1", left=True)]
    for step in steps if goodbye_first else reversed(steps):
        step()
    assert fold.record.state is NodeState.LEFT
    assert await fold.said() == [("node_left", "n1")]
    fold.view.node_up("n1")
    fold.join(device(), epoch=E2)
    assert fold.record.state is NodeState.HEALTHY


async def test_the_same_run_is_back_when_it_answers() -> None:
    fold = Fold()
    fold.join(device())
    fold.view.node_down("n1")
    fold.view.node_answered("n1", str(E1))
    assert fold.record.state is NodeState.SUSPECT  # an answer that was under way when the node died
    fold.view.node_up("n1")
    fold.view.node_answered("n1", str(E2))
    assert fold.record.state is NodeState.SUSPECT
    fold.view.node_answered("n1", str(E1))
    assert fold.record.state is NodeState.HEALTHY
    fold.later(60)
    assert fold.record.state is NodeState.HEALTHY


async def test_a_rejoined_node_keeps_no_device_that_it_does_not_have() -> None:
    fold = Fold()
    fold.join(device(), device("GPU-b", 1))
    fold.view.node_down("n1")
    fold.later(5)
    await fold.said()
    fold.join(device("GPU-c"), epoch=E2)
    assert list(fold.record.devices) == ["GPU-c"]
    said = await fold.said()
    assert said[0] == ("node_back", "n1")
    assert sorted(said[1:]) == [("device_added", "GPU-c"), ("device_removed", "GPU-a"), ("device_removed", "GPU-b")]


async def test_a_snapshot_of_a_dead_node_does_not_revive_it() -> None:
    fold = Fold()
    fold.join(device())
    fold.view.node_down("n1")
    fold.view.apply_snapshot(snapshot(device(), seq=1), sole=True)
    assert fold.record.state is NodeState.SUSPECT
    assert fold.view.snapshot().available_devices == {}
    fold.later(2)
    assert fold.record.state is NodeState.LOST


async def test_a_node_that_says_goodbye_has_left_and_is_not_lost() -> None:
    fold = Fold()
    fold.join(device())
    fold.event(EventKind.NODE_LEAVING)
    fold.view.apply_snapshot(snapshot(device()), sole=True)
    fold.view.node_down("n1")
    fold.later(60)
    assert fold.record.state is NodeState.LEFT
    assert fold.view.snapshot().available_devices == {}
    fold.join(device(), epoch=E2)
    assert fold.record.state is NodeState.HEALTHY


async def test_only_the_receivers_monotonic_clock_counts() -> None:
    """Time stamps of a node whose wall clock is an hour ahead age nothing."""
    fold = Fold()
    fold.join(device(), gpu_discovery_timestamp="2036-01-01T00:00:00+00:00")
    fold.event("com.example.tick")
    fold.later(1)
    assert fold.record.state is NodeState.HEALTHY
    assert fold.view.deadline is None


@pytest.mark.parametrize(
    ("kind", "subject", "data", "counter"),
    [
        ("com.example.new.v9", None, {"x": 1}, "unknown_type"),
        (EventKind.DEVICE_ADDED, None, {"device": {}}, "malformed"),
        (EventKind.DEVICE_ADDED, "GPU-b", {"device": {"name": 7}}, "malformed"),
        (EventKind.DEVICE_ADDED, "GPU-b", None, "malformed"),
        (EventKind.DEVICE_UPDATED, "GPU-a", {"device": device().model_dump(mode="json"), "node": 7}, "malformed"),
        (EventKind.NODE_SNAPSHOT, None, {"node": "n1"}, "malformed"),
        (EventKind.NODE_SNAPSHOT, None, snapshot(node="n2", seq=1).document(), "malformed"),
        (EventKind.NODE_SNAPSHOT, None, snapshot(seq=9).document(), "malformed"),
        (EventKind.BACKEND_FAILED, None, {"report": {"name": "cuda"}}, "malformed"),
    ],
)
async def test_what_is_not_understood_only_moves_the_position(
    kind: str, subject: str | None, data: dict[str, Any] | None, counter: str
) -> None:
    fold = Fold()
    fold.join(device())
    before = fold.record
    event = make_event(kind, cluster="c", node="n1", position=Position(E1, 1), subject=subject, data=data)
    assert fold.view.apply_event(event)
    assert fold.view.ignored == {counter: 1}
    assert fold.record.seq == 1
    assert fold.record.model_copy(update={"seq": 0}) == before


async def test_news_too_large_for_an_event_asks_for_the_snapshot() -> None:
    fold = Fold()
    fold.join(device())
    assert not fold.event(EventKind.NODE_SNAPSHOT)


async def test_two_hosts_with_one_name_are_a_conflict() -> None:
    fold = Fold()
    fold.join(device("GPU-a"), host=HOST_A)
    await fold.said()
    assert not fold.view.apply_snapshot(snapshot(device("GPU-z"), host=HOST_B, epoch=E2))
    assert list(fold.record.devices) == ["GPU-a"]
    conflict = fold.view.conflict("n1")
    assert conflict is not None
    assert (conflict.kept, conflict.refused, conflict.refused_devices) == (HOST_A, HOST_B, ("GPU-z",))
    for word in ("'n1'", "alpha", "beta", "GPU-z", "another name"):
        assert word in conflict.message
    assert not fold.view.apply_snapshot(snapshot(device("GPU-z"), host=HOST_B, epoch=E2))
    assert await fold.said() == [("conflict", "n1")]
    # The first has died: the second is no longer a second.
    assert fold.view.apply_snapshot(snapshot(device("GPU-z"), host=HOST_B, epoch=E2), sole=True)
    assert fold.view.conflict("n1") is None
    assert list(fold.record.devices) == ["GPU-z"]
    assert ("conflict_over", "n1") in await fold.said()


async def test_a_replaced_machine_may_take_the_name_of_a_lost_one() -> None:
    fold = Fold()
    fold.join(device("GPU-a"), host=HOST_A)
    fold.view.node_down("n1")
    fold.view.node_up("n1")
    assert fold.view.apply_snapshot(snapshot(device("GPU-z"), host=HOST_B, epoch=E2))
    assert fold.record.state is NodeState.HEALTHY


async def test_the_view_is_bounded() -> None:
    fold = Fold(max_nodes=3)
    for name in ("n1", "n2", "n3"):
        assert fold.join(device(), node=name)
        fold.clock.now += 1
    assert not fold.join(device(), node="n4")
    assert fold.view.ignored == {"too_many": 1}
    for name in ("n2", "n1"):
        fold.view.node_down(name)
        fold.later(2)
    assert fold.join(device(), node="n4")
    assert list(fold.view.snapshot().nodes) == ["n1", "n3", "n4"]  # n2 was gone for longest


async def test_a_slow_consumer_of_changes_is_told_so() -> None:
    fold = Fold()
    slow = fold.view.changes(limit=2)
    for index in range(5):
        fold.join(device(), node=f"n{index}")
    said = [await anext(slow) for _ in range(3)]
    assert [change.kind for change in said] == [ChangeKind.NODE_JOINED, ChangeKind.DEVICE_ADDED, ChangeKind.MISSED]
    assert said[2].missed == 8
    fold.view.node_down("n1")
    assert (await anext(slow)).kind is ChangeKind.NODE_SUSPECT
    slow.close()
    with pytest.raises(StopAsyncIteration):
        await anext(slow)


async def test_a_snapshot_of_the_view_stays_as_it_was() -> None:
    fold = Fold()
    fold.join(device())
    before = fold.view.snapshot()
    fold.view.node_down("n1")
    assert before.nodes["n1"].state is NodeState.HEALTHY
    assert '"state":"healthy"' in before.model_dump_json()


async def test_what_moves_by_itself_is_marked_and_what_is_new_is_said() -> None:
    fold = Fold()
    fold.join(device(), gpu_discovery_timestamp="1", discovery_status="preview")
    changes = fold.view.changes()

    async def next_said() -> tuple[str, bool, str | None]:
        change = await anext(changes)
        return change.kind.value, change.minor, change.message

    moved = device(memory_available=1 << 30, memory_usable_bytes=1 << 30)
    fold.event(EventKind.DEVICE_UPDATED, subject="GPU-a", device=moved.model_dump(mode="json"), reason="whatever")
    assert await next_said() == ("device_updated", True, "memory_available, memory_usable_bytes")
    newer = moved.model_copy(update={"driver_version": "600.1", "memory_available": 2 << 30})
    fold.join(newer, gpu_discovery_timestamp="1", discovery_status="preview")
    assert await next_said() == ("device_updated", False, "memory_available, driver_version: 590.48 -> 600.1")
    fold.join(newer, gpu_discovery_timestamp="2", discovery_status="preview")
    assert await next_said() == ("node_updated", True, None)
    fold.join(newer, gpu_discovery_timestamp="3", discovery_status="complete")
    assert await next_said() == ("node_updated", False, "discovery: preview -> complete")


async def test_of_backends_only_another_answer_is_said() -> None:
    def report(status: Any, reason: ReasonCode | None = None, elapsed_ms: int = 1) -> BackendReport:
        return BackendReport(name="cuda", status=status, reason=reason, elapsed_ms=elapsed_ms)

    fold = Fold()
    fold.join(device(), reports=(report("ok"),))
    changes = fold.view.changes()
    fold.join(device(), reports=(report("ok", elapsed_ms=99),))
    assert (await anext(changes)).minor
    fold.join(device(), reports=(report("unavailable", ReasonCode.CRASHED),))
    said = await anext(changes)
    assert (said.minor, said.message) == (False, "backend cuda: unavailable (crashed), was ok")
    hidden = BackendReport(name="rocm", status="unavailable", reason=ReasonCode.NO_DRIVER)
    broken = BackendReport(name="vulkan", status="unavailable", reason=ReasonCode.CRASHED)
    fold.join(device(), reports=(report("unavailable", ReasonCode.CRASHED), hidden))
    assert (await anext(changes)).minor, "a first look that finds nothing of it"
    fold.join(device(), reports=(report("unavailable", ReasonCode.CRASHED), hidden, broken))
    assert (await anext(changes)).message == "backend vulkan: unavailable (crashed)"


async def test_that_a_node_drains_is_said_once_for_all_its_devices() -> None:
    fold = Fold()
    fold.join(device(), device("GPU-b", 1))
    changes = fold.view.changes()
    fold.join(device(), device("GPU-b", 1), draining=True)
    fold.join(device(), device("GPU-b", 1), draining=False)
    fold.join(device(), device("GPU-c", 2), draining=False)
    said = [await anext(changes) for _ in range(3)]
    assert [(each.kind.value, each.message) for each in said] == [
        ("node_updated", "draining: it takes no new placements"),
        ("node_updated", "it takes new placements again"),
        ("device_removed", "its node no longer lists it"),
    ]
    fold.join(device(), node="n2", draining=True)
    joined = [change async for change in _now(changes) if change.kind is ChangeKind.NODE_JOINED]
    assert [each.message for each in joined] == ["1 device, discovery not done yet, draining"]


async def _now(changes: Changes) -> AsyncIterator[Change]:
    changes.close()
    async for change in changes:
        yield change
