"""Routes: which lane a call takes, and what it finds there.

It follows from the driver's ``threading`` capability: one thread for everything, one per device, or one per device and
purpose. Lanes are made when they are first needed; each attaches its thread to a device before the first call for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Literal

from gpurt.activity import LaneActivity
from gpurt.driver import Driver
from gpurt.job import Job
from gpurt.lane import HOLD_S, Lane
from gpurt.order import Queue
from gpurt.turns import short_turns

QueueName = Literal["control", "telemetry", "memory", "h2d", "d2h", "small", "peer", "compute", "compile", "sync"]
"""What a call is for. Each is a lane of its own where the driver allows it: both copy directions then run at once, a
small copy, an allocation or a reading never waits behind a large load, and no copy behind a compiler."""

CONTROL: Final = -1
"""Stands for the library itself where a device index is expected: opening and closing have a hang clock too."""


class Routes:
    """The lanes of one driver. Used on the event loop's thread.

    Args:
        driver: asked for ``threading``, ``attach`` and ``detach``.
        max_pending: jobs in one lane at a time.
        on_done: what a lane calls after each job.
        on_error: gets what ``detach`` raises, on a lane's thread.
        clock: the lanes' hang clock.
    """

    def __init__(
        self,
        driver: Driver,
        max_pending: int,
        *,
        on_done: Callable[[Job], None],
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._max_pending = max_pending
        self._on_done = on_done
        self._on_error = on_error
        self._clock = clock
        self._queues: dict[tuple[int, str], Queue] = {}
        self._known: dict[tuple[int | None, QueueName], Queue] = {}
        """What ``queue`` has answered: its callers ask for the same few all the time."""

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._queues.values())

    def activity(self, now: float) -> list[LaneActivity]:
        """What each lane is doing at ``now``, a time of the lanes' clock. Lanes run on meanwhile: it is a glance."""
        found: list[LaneActivity] = []
        for queue in self._queues.values():
            since, name = queue.lane.running_since, queue.lane.name.removeprefix("gpurt:")
            running_s = None if since is None else max(0.0, now - since)
            found.append(LaneActivity(name, queue.pending, len(queue.held), running_s))
        return found

    def queue(self, index: int | None, name: QueueName) -> Queue:
        """Where a call for a device goes, or with None one for the library itself."""
        return self._known.get((index, name)) or self._find(index, name)

    def attaching(self, index: int, queue: Queue, call: Callable[[Job], Any]) -> Callable[[Job], Any]:
        """``call``, after the attachment that it still needs on this lane."""
        return partial(self._attach, index, queue.attached, call)

    def detach(self, queue: Queue) -> None:
        """On the queue's thread: undo every attachment."""
        while queue.attached:
            try:
                self._driver.detach(queue.attached.pop())
            except Exception as exc:
                self._on_error(exc)

    def _find(self, index: int | None, name: QueueName) -> Queue:
        mode = self._driver.capabilities.threading
        if mode == "backend":
            key = (CONTROL, "all")
        elif index is None:
            key = (CONTROL, "control")
        elif mode == "device":
            key = (index, "telemetry" if name == "telemetry" else "main")
        else:
            key = (index, name)
        queue = self._queues.get(key) or self._make(key)
        self._queues[key] = self._known[index, name] = queue
        return queue

    def _make(self, key: tuple[int, str]) -> Queue:
        parts = [str(part) for part in key if part not in (CONTROL, "all")]
        lane = Lane(
            ":".join(["gpurt", self._driver.name, *parts]),
            on_done=self._on_done,
            on_stop=lambda: self.detach(queue),
            clock=self._clock,
            hold_s=HOLD_S if key[1] == "small" else 0.0,
        )
        queue = Queue(lane, self._max_pending)
        return queue

    def _attach(self, index: int, attached: set[int], call: Callable[[Job], Any], job: Job) -> Any:
        # Looked at again: several calls may have been submitted before the first of them ran.
        if index not in attached:
            with short_turns():
                self._driver.attach(index)
            attached.add(index)
        return call(job)
