"""The registry, events, identity of nodes, clocks. Names carry the case."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import time
from pathlib import Path

import pytest

from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.sequence import NodeSequence, Resync, Step
from gpurt.cluster.view import MasterView
from gpurt.discovery.events import EventType
from gpurt.discovery.line import ProbeLine
from gpurt.errors import ReasonCode
from tests.cases.rig import Said, outcome, uuid, working
from tests.cluster.support import E1, E2, HOST_A, HOST_B, FakeClock, device, snapshot


async def machine(path: Path, *numbers: int) -> Said:
    """Cards of these numbers, counted from 0 in this order."""
    return Said(cuda=await asyncio.to_thread(working, path.parent, *numbers))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


@pytest.mark.parametrize("part", [0.6, 0.0])
async def test_reg_1_a_truncated_file_is_put_aside(path: Path, part: float, caplog: pytest.LogCaptureFixture) -> None:
    said = await machine(path, 0, 1)
    await said.discover(path)
    whole = path.read_bytes()
    evidence = whole[: int(len(whole) * part)]
    path.write_bytes(evidence)
    with caplog.at_level(logging.WARNING):
        result = await said.discover(path)
    assert {d.stable_id for d in result.devices} >= {uuid(0), uuid(1)}
    assert result.persisted
    (aside,) = path.parent.glob("registry.json.corrupt-*")
    assert aside.read_bytes() == evidence
    assert len([record for record in caplog.records if "corrupt" in record.getMessage()]) == 1
    assert json.loads(path.read_text())["devices"]


async def test_reg_3_a_corrupt_registry_is_one_snapshot(path: Path) -> None:
    said = await machine(path, 0, 1, 2, 3)
    await said.discover(path)
    for copy in path.parent.glob("registry.json*"):
        copy.write_bytes(b"{" * 50)
    async with said.service(path) as service:
        subscription = service.subscribe(1000)
        await service.discover_all_devices()
        await service.discover_all_devices()
        await service.shutdown()
        events = [event async for event in subscription]
    assert [event.type for event in events] == [EventType.SNAPSHOT]
    assert (events[0].reason or "").startswith("recovered")
    assert events[0].snapshot is not None
    assert {uuid(n) for n in range(4)} <= {each.stable_id for each in events[0].snapshot.devices}


async def test_reg_4_permuted_numbers_are_the_same_cards(path: Path) -> None:
    before = await (await machine(path, 0, 1)).discover(path)
    said = await machine(path, 1, 0)
    async with said.service(path) as service:
        subscription = service.subscribe(1000)
        after = await service.discover_all_devices()
        await service.shutdown()
        events = [event async for event in subscription]
    assert [d.stable_id for d in before.devices[:2]] == [uuid(0), uuid(1)]
    assert {d.stable_id: d.device_id for d in after.devices[:2]} == {uuid(1): "cuda:0", uuid(0): "cuda:1"}
    assert not {EventType.ADDED, EventType.REMOVED} & {event.type for event in events}
    # What is remembered of a card is remembered under its UUID, never under a number of one day.
    stored = json.loads(path.read_text())
    assert {each["identity"]["key"] for each in stored["devices"]} >= {uuid(0), uuid(1)}
    assert stored["verified"]
    assert not any(key.startswith("cuda:") for key in stored["verified"])


async def test_reg_4_a_card_whose_uuid_is_not_told_today_is_the_same_card(path: Path) -> None:
    """NVML is gone or broken while CUDA works, in the same process and after a restart."""
    said = await machine(path, 0, 1)
    by_cuda = said.outcomes["cuda"].verified
    assert by_cuda is not None
    async with said.service(path) as service:
        subscription = service.subscribe(1000)
        await service.discover_all_devices()
        mute = ProbeLine(stage="sighted", reason=ReasonCode.DRIVER_MISMATCH, message="versions differ")
        said.outcomes["cuda"] = outcome(mute, ProbeLine(stage="verified", devices=by_cuda))
        again = await service.discover_all_devices()
        await service.shutdown()
        events = [event async for event in subscription]
    after_restart = await said.discover(path)
    for result in (again, after_restart):
        assert [(d.stable_id, d.usable) for d in result.devices[:2]] == [(uuid(0), True), (uuid(1), True)]
    assert not {EventType.ADDED, EventType.REMOVED} & {event.type for event in events}
    # Another card in that slot is another card.
    other = by_cuda[0].model_copy(update={"name": "NVIDIA L40S"})
    said.outcomes["cuda"] = outcome(mute, ProbeLine(stage="verified", devices=(other, by_cuda[1])))
    changed = await said.discover(path)
    assert [d.stable_id for d in changed.devices[:2]] == ["pci:00000000:01:00.0", uuid(1)]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
async def test_reg_5_discovery_answers_although_nothing_can_be_saved(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    result = await (await machine(path, 0)).discover(path)
    assert (result.backend_name, result.persisted) == ("cuda", False)


class Tape:
    """Feeds a node's events in any order and keeps what was let through."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.sequence: NodeSequence[str, str] = NodeSequence(clock=self.clock)
        self.applied: list[str] = []
        self.asked: list[Resync] = []
        self.snapshot(0)
        self.applied.clear()

    def events(self, *numbers: int, epoch: Epoch = E1) -> None:
        for seq in numbers:
            self._take(self.sequence.event(Position(epoch, seq), f"{epoch.counter}.{seq}"))

    def snapshot(self, seq: int, epoch: Epoch = E1) -> None:
        self._take(self.sequence.snapshot(Position(epoch, seq), f"snapshot {epoch.counter}.{seq}"))

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.sequence.deadline is not None and self.sequence.deadline <= self.clock.now:
            self._take(self.sequence.expire())

    def _take(self, step: Step[str, str]) -> None:
        self.applied += [step.snapshot] * (step.snapshot is not None) + list(step.events)
        self.asked += [step.resync] * (step.resync is not None)


def test_evt_1_replayed_events_are_applied_once() -> None:
    tape = Tape()
    tape.events(1, 2, 3, 2, 3, 4)
    assert tape.applied == ["1.1", "1.2", "1.3", "1.4"]


def test_evt_2_events_behind_a_hole_wait_for_it() -> None:
    tape = Tape()
    tape.events(1, 2, 5, 6, 3, 4)
    assert tape.applied == [f"1.{seq}" for seq in range(1, 7)]
    assert tape.asked == []
    # A hole that nobody fills: the whole state is asked for, and what waited behind it is not lost.
    tape.events(8, 9)
    for _ in range(20):
        tape.later(1.0)
    assert tape.asked
    assert set(tape.asked) == {Resync.GAP}
    tape.snapshot(8)
    assert tape.applied[6:] == ["snapshot 1.8", "1.9"]


def test_evt_3_a_new_epoch_is_not_old() -> None:
    tape = Tape()
    tape.events(*range(1, 10))
    tape.events(1, epoch=E2)
    assert tape.asked == [Resync.NEW_EPOCH]
    tape.snapshot(1, epoch=E2)
    tape.events(10, 11)
    assert tape.applied == [*(f"1.{seq}" for seq in range(1, 10)), "snapshot 2.1"]


def test_id_1_two_machines_of_one_name_are_a_conflict() -> None:
    view = MasterView(clock=FakeClock())
    view.node_up("n1")
    view.node_up("n2")
    assert view.apply_snapshot(snapshot(device("GPU-a"), host=HOST_A))
    assert not view.apply_snapshot(snapshot(device("GPU-z"), host=HOST_B, epoch=E2))
    record, conflict = view.node("n1"), view.conflict("n1")
    assert record is not None
    assert conflict is not None
    assert list(record.devices) == ["GPU-a"]
    assert conflict.refused_devices == ("GPU-z",)
    for word in ("n1", HOST_A.hostname, HOST_B.hostname, "another name"):
        assert word in conflict.message
    # Device ids are those of one node: the same id on another node is another device.
    assert view.apply_snapshot(snapshot(device("GPU-a"), node="n2", host=HOST_B))
    assert set(view.snapshot().available_devices) == {("n1", "GPU-a"), ("n2", "GPU-a")}


async def test_clk_1_a_clock_that_is_set_ages_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, wall = 100.0, time.time()
    monkeypatch.setattr(time, "time", lambda: wall)
    async with (await machine(path, 0)).service(path, clock=lambda: now) as service:
        await service.discover_all_devices()
        now, wall = now + 1.0, wall + 3600.0
        cached = await service.discover_all_devices(refresh=False)
        assert (cached.age_s, cached.discovery_status) == (1.0, "complete")
        again = await service.discover_all_devices()
        assert all(each.usable for each in again.devices)
