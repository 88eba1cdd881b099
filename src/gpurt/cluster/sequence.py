"""The order of one node's events, as one receiver sees it. No I/O, no tasks; time comes in by argument.

Each position is let through once, in order. A hole is waited for, because the bus repairs most of them; one that
stays is closed by a snapshot of the node. Each call returns what to do now as a :class:`Step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, TypeVar

from gpurt.cluster.epoch import Epoch, Position

E = TypeVar("E")
S = TypeVar("S")

GAP_EVENTS: Final = 256
"""Events kept behind a hole."""
GAP_BYTES: Final = 4 << 20
"""The same in bytes of their messages: 16 of the largest. A node that sends holes must not fill a master's memory."""
GAP_WAIT_S: Final = 0.25
"""How long a hole may stay before a snapshot is asked for."""
RECOVERY_WAIT_S: Final = 1.5
"""How long a snapshot that is ahead of the events is held back after a reconnection, so that the bus can repeat
the events themselves: on zenoh they begin to come with the mark that follows the answer, or a heartbeat later."""


class Resync(StrEnum):
    """Why a snapshot of a node is needed."""

    JOINED = "joined"
    """Nothing is known of the node yet, or its liveliness token came (back)."""
    GAP = "gap"
    NEW_EPOCH = "new_epoch"
    """The node's process was started again."""
    OLD_EPOCH = "old_epoch"
    """An event of an earlier run: late, or of another process under the same name."""
    OVERFLOW = "overflow"
    NOTICE = "notice"
    """The node says that its news is too large for an event."""
    ANTI_ENTROPY = "anti_entropy"
    """The regular check."""


@dataclass(frozen=True, slots=True)
class Step(Generic[E, S]):
    """What to do, in this order: replace the state by ``snapshot``, apply ``events``, ask for a snapshot."""

    snapshot: S | None = None
    events: tuple[E, ...] = ()
    resync: Resync | None = None


@dataclass(slots=True)
class Counters:
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    """Events of an earlier epoch."""
    discarded: int = 0
    """Events behind a hole that did not fit."""
    foreign: int = 0
    """Events of a refused process under the same name."""
    superseded: int = 0
    """Events not applied one by one, because a snapshot contained them."""
    snapshots: int = 0
    """Snapshots applied."""


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[E]):
    """An event that cannot be applied yet, and how many bytes its message had."""

    event: E
    size: int


@dataclass(slots=True)
class _Held(Generic[S]):
    position: Position
    snapshot: S
    deadline: float


@dataclass(slots=True)
class NodeSequence(Generic[E, S]):
    """The sequence of one node: ``E`` are its events, ``S`` its snapshots.

    Args:
        clock: monotonic seconds.
    """

    clock: Callable[[], float]
    gap_events: int = GAP_EVENTS
    gap_bytes: int = GAP_BYTES
    gap_wait_s: float = GAP_WAIT_S
    recovery_wait_s: float = RECOVERY_WAIT_S
    position: Position | None = None
    """The last event that the state contains; None before the first snapshot."""
    counters: Counters = field(default_factory=Counters)
    _waiting: dict[Position, _Waiting[E]] = field(default_factory=dict[Position, _Waiting[E]])
    _gap_deadline: float | None = None
    _asked: bool = False
    """A snapshot has been asked for and has not come: one request, not one per event."""
    _held: _Held[S] | None = None
    _refused: tuple[Epoch, ...] = ()
    _doubted: frozenset[Epoch] = frozenset()
    """Other runs whose events were here when the question that is under way was put."""

    @property
    def deadline(self) -> float | None:
        """When ``expire`` must be called, on ``clock``; None: not before the next event."""
        if self._held is None:
            return self._gap_deadline
        held = self._held.deadline
        return held if self._gap_deadline is None else min(self._gap_deadline, held)

    def event(self, position: Position, event: E, size: int = 0) -> Step[E, S]:
        """An event has come, in a message of ``size`` bytes."""
        current = self.position
        if position.epoch in self._refused:
            self.counters.foreign += 1
            return Step()
        if current is None:
            return self._keep(position, _Waiting(event, size), Resync.JOINED)
        if position.epoch != current.epoch:
            # Kept also where the run is an earlier one by its number: a node that has lost its registry counts from 1
            # again, and only its answer tells it from a message that is late.
            older = position.epoch < current.epoch
            self.counters.stale += older
            return self._keep(position, _Waiting(event, size), _another_run(older))
        if position.seq <= current.seq or position in self._waiting:
            self.counters.duplicates += 1
            return Step()
        if position.seq == current.seq + 1:
            self.position = position
            self.counters.applied += 1
            if not self._waiting and self._held is None:
                self._gap_deadline = None
                return Step(events=(event,))
            return self._settle((event, *self._drain()))
        self._store(position, _Waiting(event, size))
        if self._gap_deadline is None:
            self._gap_deadline = self.clock() + self.gap_wait_s
        if self._is_full(size):
            return self._gap_stays()
        return Step()

    def question(self) -> None:
        """A snapshot is asked for now. A run that is not the one that answers has ended before it could: of it, nothing
        that is here already counts any more. What comes of another run from now on makes the next question."""
        self._doubted = frozenset(position.epoch for position in self._waiting)

    def snapshot(self, position: Position, snapshot: S, *, patient: bool = False) -> Step[E, S]:
        """A snapshot has come, from the only live process of that name: so its epoch is the present one, whatever
        the order of epochs says.

        With ``patient``, one that is ahead of the events of the same epoch is held back for a while, and dropped
        when the events themselves get there.
        """
        current = self.position
        self._asked = False
        ended, self._doubted = self._doubted - {position.epoch}, frozenset()
        if ended:
            self._waiting = {key: event for key, event in self._waiting.items() if key.epoch not in ended}
        if current is not None and current.epoch == position.epoch:
            if position.seq < current.seq:
                return self._settle(())  # taken before events that are applied already
            if patient and position.seq > current.seq:
                # A later one does not begin the wait again, or frequent checks would put it off for ever.
                deadline = self._held.deadline if self._held else self.clock() + self.recovery_wait_s
                self._held = _Held(position, snapshot, deadline)
                return Step()
        return self._replace(position, snapshot)

    def expire(self) -> Step[E, S]:
        """``deadline`` has come."""
        now = self.clock()
        held = self._held
        if held is not None and held.deadline <= now:
            return self._replace(held.position, held.snapshot)
        if self._gap_deadline is not None and self._gap_deadline <= now:
            return self._gap_stays()
        return Step()

    def another_token(self) -> None:
        """A process shows its token: a snapshot that is held back may be of the run before, and another one is asked
        for."""
        self._held = None

    def refuse(self, epoch: Epoch) -> None:
        """Ignore the events of this run: it is another process under the same name. Until its snapshot comes."""
        if epoch not in self._refused:
            self._refused = (*self._refused[-7:], epoch)
        for position in [position for position in self._waiting if position.epoch == epoch]:
            del self._waiting[position]
            self.counters.foreign += 1

    def _gap_stays(self) -> Step[E, S]:
        self._gap_deadline = None
        return self._ask(Resync.GAP)

    def _keep(self, position: Position, waiting: _Waiting[E], reason: Resync) -> Step[E, S]:
        """For after the snapshot that is about to be asked for."""
        self._store(position, waiting)
        return self._ask(reason)

    def _store(self, position: Position, waiting: _Waiting[E]) -> None:
        if position in self._waiting:
            self.counters.duplicates += 1
            return
        while self._waiting and self._is_full(waiting.size):
            # The oldest: a snapshot asked for from now on contains it.
            del self._waiting[min(self._waiting)]
            self.counters.discarded += 1
        self._waiting[position] = waiting

    def _is_full(self, size: int) -> bool:
        """There is no room for one more event of this size."""
        held = sum(each.size for each in self._waiting.values())
        return len(self._waiting) >= self.gap_events or held + size > self.gap_bytes

    def _ask(self, reason: Resync) -> Step[E, S]:
        if self._asked:
            return Step()
        self._asked = True
        return Step(resync=reason)

    def _replace(self, position: Position, snapshot: S) -> Step[E, S]:
        if self.position is not None and self.position.epoch == position.epoch:
            self.counters.superseded += position.seq - self.position.seq
        self.position = position
        self._refused = tuple(epoch for epoch in self._refused if epoch != position.epoch)
        self._held = None
        self.counters.snapshots += 1
        # Events of another run wait for that run's snapshot, which is asked for next.
        self._waiting = {
            key: event for key, event in self._waiting.items() if key.epoch != position.epoch or key.seq > position.seq
        }
        step = self._settle(self._drain())
        return Step(snapshot=snapshot, events=step.events, resync=step.resync)

    def _drain(self) -> tuple[E, ...]:
        assert self.position is not None
        ready: list[E] = []
        while (following := Position(self.position.epoch, self.position.seq + 1)) in self._waiting:
            ready.append(self._waiting.pop(following).event)
            self.position = following
        self.counters.applied += len(ready)
        return tuple(ready)

    def _settle(self, events: tuple[E, ...]) -> Step[E, S]:
        """The position has moved: what was waited for may be settled, or there is another hole."""
        assert self.position is not None
        if self._held is not None and self._held.position <= self.position:
            self._held = None
        self._gap_deadline = None
        resync = None
        if self._waiting:
            epochs = {position.epoch for position in self._waiting}
            if self.position.epoch in epochs:
                self._gap_deadline = self.clock() + self.gap_wait_s
            if others := epochs - {self.position.epoch}:
                resync = self._ask(_another_run(max(others) < self.position.epoch)).resync
        return Step(events=events, resync=resync)


def _another_run(older: bool) -> Resync:
    return Resync.OLD_EPOCH if older else Resync.NEW_EPOCH
