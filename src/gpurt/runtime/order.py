"""Order: which job may go to its lane now.

Effects on one allocation happen in submission order, although its jobs may belong to different lanes (a write,
a read and a free each have their own). No lane thread ever waits for another: a job whose allocation still has
work on another lane is *parked* here and sent when that work completes. Work on the same lane needs no parking,
since a lane is first in first out.

A dropped job keeps its place in the chain until its turn comes, so that what was submitted after it cannot
overtake what was submitted before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection

from gpurt.driver import Driver
from gpurt.errors import BackendClosed
from gpurt.runtime.job import Job, Report
from gpurt.runtime.lane import Lane
from gpurt.runtime.turns import short_turns


class Chain:
    """The jobs of one allocation, as far as order needs them: the last one submitted."""

    __slots__ = ("tail",)

    def __init__(self) -> None:
        self.tail: Job | None = None

    @property
    def idle(self) -> bool:
        """Nothing submitted on the allocation is outstanding."""
        return self.tail is None or self.tail.complete


class Queue:
    """A lane and its bound: at most ``max_pending`` jobs are in the lane, later ones are held back in order.

    Args:
        driver: to whose devices the lane's thread is attached when they are first used.
        report: takes errors of jobs whose callers are gone.
        holds: the lane keeps results of short calls back for a while.
    """

    __slots__ = ("_driver", "attached", "held", "holds", "lane", "max_pending", "pending", "report")

    def __init__(self, driver: Driver, lane: Lane, max_pending: int, report: Report, *, holds: bool = False) -> None:
        self._driver = driver
        self.lane = lane
        self.attached: set[int] = set()
        self.max_pending = max_pending
        self.pending = 0
        self.held: deque[Job] = deque()
        self.holds = holds
        self.report = report

    def attach(self, index: int) -> None:
        """Lane thread: prepare it for a device. Only a device whose ``attach`` has returned counts as attached."""
        with short_turns():
            self._driver.attach(index)
        self.attached.add(index)

    def detach(self) -> None:
        """Lane thread: undo every attachment. Failures are reported."""
        while self.attached:
            try:
                self._driver.detach(self.attached.pop())
            except BaseException as exc:
                self.report(exc)


class Order:
    """Admission of jobs to lanes. ``submit`` is called by users, ``done`` by every lane after every job.

    Args:
        deliver: called with a job that ends without having run, on the thread that finds out.
    """

    def __init__(self, deliver: Callable[[Job], None]) -> None:
        self._lock = threading.Lock()
        self._deliver = deliver
        # dict as an ordered set: a device's outstanding jobs in submission order
        self._outstanding: dict[Job, None] = {}
        self._closed = False
        self._on_idle: Callable[[], None] | None = None

    def submit(
        self, job: Job, queue: Queue, chains: Collection[Chain] = (), after_devices: Collection[int] = ()
    ) -> None:
        """Take ``job``'s place in the order and send it as soon as nothing before it is in its way.

        Args:
            chains: the allocations that the job touches.
            after_devices: devices all of whose outstanding jobs must complete first.
        """
        job.queue = queue
        with self._lock:
            if after_devices:
                devices = frozenset(after_devices)
                for other in self._outstanding:
                    if not devices.isdisjoint(other.device_indexes):
                        self._wait(job, other)
            for chain in chains:
                tail, chain.tail = chain.tail, job
                if tail is not None and not tail.complete:
                    self._wait(job, tail)
            self._outstanding[job] = None
            if job.blockers:
                return
            if queue.pending < queue.max_pending and not queue.held and queue.lane.started and not self._closed:
                # Nearly always. A lane that is stopped says that it has not started, and the slow way fails the job.
                job.sent = True
                queue.pending += 1
                queue.lane.post(job)
            elif not self._send(job):
                self._complete(job)

    def done(self, job: Job) -> None:
        """Lane thread: ``job`` has left the driver, or was skipped. Sends what waited for it."""
        queue = job.queue
        if queue is None:  # it was posted to its lane past the order
            return
        with self._lock:
            if queue.held or job.dependents is not None:
                self._complete(job)
            else:  # nearly always
                job.complete = True
                del self._outstanding[job]
                queue.pending -= 1
            if self._on_idle is None or self._outstanding:
                return
            on_idle, self._on_idle = self._on_idle, None
        on_idle()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call back once when nothing is outstanding; at once if so now, else on a lane's thread. One at a time."""
        with self._lock:
            if self._outstanding:
                self._on_idle = callback
                return
        callback()

    def close(self) -> None:
        """Send nothing more: what still comes up fails. Afterwards lanes may be stopped."""
        with self._lock:
            self._closed = True

    def outstanding(self, device_index: int | None = None) -> list[Job]:
        """Jobs submitted and not complete, in submission order; of one device or of all."""
        with self._lock:
            return [job for job in self._outstanding if device_index is None or device_index in job.device_indexes]

    @staticmethod
    def _wait(job: Job, other: Job) -> None:
        """``job`` after ``other``, which is not complete."""
        if other.sent and other.queue is job.queue:
            return
        if other.dependents is None:
            other.dependents = []
        other.dependents.append(job)
        job.blockers += 1

    def _complete(self, job: Job) -> None:
        completed = [job]
        while completed:
            job = completed.pop()
            job.complete = True
            self._outstanding.pop(job, None)
            queue = job.queue
            assert queue is not None
            queue.pending -= 1
            if queue.held and not self._put(held := queue.held.popleft(), queue):
                completed.append(held)
            if job.dependents is not None:
                dependents, job.dependents = job.dependents, None
                for other in dependents:
                    other.blockers -= 1
                    if not other.blockers and not self._send(other):
                        completed.append(other)

    def _send(self, job: Job) -> bool:
        """False: the job has failed, and is thereby complete."""
        queue = job.queue
        assert queue is not None
        job.sent = True
        if queue.held or queue.pending >= queue.max_pending:
            queue.held.append(job)
            return True
        return self._put(job, queue)

    def _put(self, job: Job, queue: Queue) -> bool:
        queue.pending += 1
        try:
            if self._closed:
                raise BackendClosed("the backend was shut down")
            queue.lane.put(job)
        except Exception as exc:  # the lane's thread cannot be started: this call fails, others are not held up
            job.fail(exc)
            self._deliver(job)
            return False
        return True
