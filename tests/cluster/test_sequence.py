"""Order, duplicates, holes and restarts of one node's events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.sequence import NodeSequence, Resync, Step
from tests.cluster.support import E1, E2, FakeClock


class Tape:
    """Feeds a sequence and keeps what was let through."""

    def __init__(self, **options: float) -> None:
        self.clock = FakeClock()
        self.sequence: NodeSequence[str, str] = NodeSequence(clock=self.clock, **options)  # type: ignore[arg-type]
        self.applied: list[str] = []
        self.asked: list[Resync] = []

    def event(self, seq: int, epoch: Epoch = E1, size: int = 0) -> None:
        self._take(self.sequence.event(Position(epoch, seq), f"{epoch.counter}.{seq}", size))

    def snapshot(self, seq: int, epoch: Epoch = E1, *, patient: bool = False) -> None:
        self._take(self.sequence.snapshot(Position(epoch, seq), f"snapshot {epoch.counter}.{seq}", patient=patient))

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.sequence.deadline is not None and self.sequence.deadline <= self.clock.now:
            self._take(self.sequence.expire())

    def _take(self, step: Step[str, str]) -> None:
        if step.snapshot is not None:
            self.applied.append(step.snapshot)
        self.applied += step.events
        if step.resync is not None:
            self.asked.append(step.resync)


@given(
    events=st.lists(st.tuples(st.sampled_from([E1, E2]), st.integers(2, 40), st.integers(0, 120)), max_size=60),
    gap_events=st.integers(1, 20),
)
def test_what_waits_behind_a_hole_is_bounded_in_events_and_bytes(
    events: list[tuple[Epoch, int, int]], gap_events: int
) -> None:
    tape = Tape(gap_events=gap_events, gap_bytes=200)
    tape.snapshot(0)
    for epoch, seq, size in events:
        tape.event(seq, epoch, size)
        waiting = tape.sequence._waiting  # pyright: ignore[reportPrivateUsage]
        assert len(waiting) <= gap_events
        assert sum(each.size for each in waiting.values()) <= 200
        if tape.sequence.counters.discarded:
            assert tape.asked, "what was let go of is in a snapshot, which was asked for"
    # One that was asked for repairs it, whatever was let go of.
    tape.snapshot(50)
    assert tape.applied[-1] == "snapshot 1.50"
    tape.event(51, size=150)
    assert tape.applied[-1] == "1.51"


@pytest.fixture
def tape() -> Tape:
    tape = Tape()
    tape.snapshot(0)
    tape.applied.clear()
    return tape


def test_replayed_events_are_applied_once(tape: Tape) -> None:
    for seq in (1, 2, 3, 2, 3, 4):
        tape.event(seq)
    assert tape.applied == ["1.1", "1.2", "1.3", "1.4"]
    assert tape.sequence.counters.duplicates == 2
    assert tape.asked == []


def test_a_hole_that_the_bus_fills_needs_no_snapshot(tape: Tape) -> None:
    for seq in (1, 2, 5, 6, 6, 3, 4):
        tape.event(seq)
    assert tape.applied == [f"1.{seq}" for seq in range(1, 7)]
    assert tape.sequence.deadline is None
    tape.later(60)
    assert tape.asked == []


def test_a_hole_that_stays_is_closed_by_a_snapshot_which_is_asked_for_once(tape: Tape) -> None:
    for seq in (1, 2, 5):
        tape.event(seq)
    tape.later(0.24)
    assert tape.asked == []
    tape.later(0.02)
    assert tape.asked == [Resync.GAP]
    tape.event(6)
    tape.event(8)
    tape.later(10)
    assert tape.asked == [Resync.GAP]
    tape.snapshot(5)
    assert tape.applied == ["1.1", "1.2", "snapshot 1.5", "1.6"]
    # 7 is still missing: that is another hole.
    tape.later(0.26)
    assert tape.asked == [Resync.GAP, Resync.GAP]
    tape.event(7)
    assert tape.applied[-2:] == ["1.7", "1.8"]


def test_a_snapshot_that_does_not_close_the_hole_is_followed_by_another_question(tape: Tape) -> None:
    tape.event(1)
    tape.event(4)
    tape.later(0.26)
    tape.snapshot(0)
    assert tape.applied == ["1.1"]
    tape.later(0.26)
    assert tape.asked == [Resync.GAP, Resync.GAP]


def test_what_waits_behind_a_hole_is_bounded(tape: Tape) -> None:
    for seq in range(2, 2002):
        tape.event(seq)
    assert tape.asked == [Resync.GAP]  # at 256 events, before the time is over
    assert tape.sequence.counters.discarded == 2000 - 256
    tape.snapshot(2001)
    tape.event(2002)
    assert tape.applied == ["snapshot 1.2001", "1.2002"]


def test_a_restarted_node_begins_again_with_its_snapshot(tape: Tape) -> None:
    for seq in range(1, 10):
        tape.event(seq)
    tape.event(1, E2)
    assert tape.asked == [Resync.NEW_EPOCH]
    tape.event(10)
    tape.event(2, E2)
    tape.snapshot(1, E2)
    tape.event(11)
    assert tape.applied[9:] == ["1.10", "snapshot 2.1", "2.2"]
    assert tape.sequence.counters.stale == 1


def test_before_the_first_snapshot_events_wait(tape: Tape) -> None:
    tape = Tape()
    tape.event(8)
    tape.event(9)
    assert (tape.applied, tape.asked) == ([], [Resync.JOINED])
    tape.snapshot(8)
    assert tape.applied == ["snapshot 1.8", "1.9"]


def test_a_snapshot_older_than_the_events_is_ignored(tape: Tape) -> None:
    tape.event(1)
    tape.event(2)
    tape.snapshot(1)
    assert tape.applied == ["1.1", "1.2"]


def test_after_a_reconnection_the_events_themselves_have_time_to_come(tape: Tape) -> None:
    tape.event(1)
    tape.snapshot(4, patient=True)
    for seq in (2, 3, 4):
        tape.event(seq)
    tape.later(60)
    assert tape.applied == ["1.1", "1.2", "1.3", "1.4"]
    assert tape.sequence.counters.superseded == 0


def test_after_a_reconnection_the_snapshot_is_taken_when_they_do_not_come(tape: Tape) -> None:
    tape.event(1)
    tape.snapshot(4, patient=True)
    tape.event(2)
    tape.later(1.4)
    assert tape.applied == ["1.1", "1.2"]
    tape.later(0.2)
    assert tape.applied == ["1.1", "1.2", "snapshot 1.4"]
    assert tape.sequence.counters.superseded == 2


def test_frequent_checks_do_not_put_a_snapshot_off(tape: Tape) -> None:
    tape.event(1)
    for _ in range(4):
        tape.snapshot(4, patient=True)
        tape.later(0.4)
    assert tape.applied == ["1.1", "snapshot 1.4"]


def test_a_live_process_is_believed_even_with_an_earlier_epoch(tape: Tape) -> None:
    """Its registry was lost, so it counts from 1 again. Who answers is alive; who is alive is right."""
    tape.snapshot(3, E2)
    tape.event(1, E1)
    assert tape.asked == [Resync.OLD_EPOCH]
    tape.event(2, E1)
    assert tape.asked == [Resync.OLD_EPOCH]
    tape.snapshot(2, E1)
    tape.event(3, E1)
    assert tape.applied == ["snapshot 2.3", "snapshot 1.2", "1.3"]


def test_events_of_a_refused_process_are_ignored_until_it_is_the_only_one(tape: Tape) -> None:
    tape.event(1, E2)
    assert tape.asked == [Resync.NEW_EPOCH]
    tape.snapshot(0, E1)
    tape.sequence.refuse(E2)
    asked = len(tape.asked)
    for seq in range(2, 50):
        tape.event(seq, E2)
    tape.event(1)
    assert len(tape.asked) == asked
    assert tape.applied[-1] == "1.1"
    assert tape.sequence.counters.foreign == 49
    tape.snapshot(49, E2)
    tape.event(50, E2)
    assert tape.applied[-2:] == ["snapshot 2.49", "2.50"]


@pytest.mark.parametrize("seed", range(30))
def test_any_disorder_ends_in_the_same_state(seed: int) -> None:
    """The state is the highest number applied; snapshots are true. Whatever is lost, repeated or late, it converges,
    and no number is ever applied twice or out of order."""
    rng = random.Random(seed)
    tape = Tape()
    tape.snapshot(0)
    published = 0
    pending: list[int] = []
    while published < 400 or pending:
        if published < 400 and rng.random() < 0.6:
            published += 1
            if rng.random() < 0.9:
                pending += [published] * rng.choice((1, 1, 1, 2))
        elif pending:
            tape.event(pending.pop(min(len(pending) - 1, int(rng.expovariate(0.5)))))
        tape.later(rng.random() * 0.02)
        if tape.asked:
            tape.asked.clear()
            tape.snapshot(published, patient=rng.random() < 0.3)
    tape.snapshot(published)
    assert tape.sequence.position == Position(E1, 400)
    numbers = [int(item.rpartition(".")[2]) for item in tape.applied]
    assert numbers == sorted(numbers)
    events = [item for item in tape.applied if not item.startswith("snapshot")]
    assert len(events) == len(set(events))
