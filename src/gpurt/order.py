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

from gpurt.job import Job
from gpurt.lane import Lane


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

    ``attached`` has the devices that the lane's thread has been attached to.
    """

    __slots__ = ("attached", "held", "lane", "max_pending", "pending")

    def __init__(self, lane: Lane, max_pending: int) -> None:
        self.lane = lane
        self.attached: set[int] = set()
        self.max_pending = max_pending
        self.pending = 0
        self.held: deque[Job] = deque()


class Order:
    """Admission of jobs to lanes. ``submit`` is called by users, ``done`` by every lane after every job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
            if not job.blockers and not self._send(job):
                self._complete(job)

    def done(self, job: Job) -> None:
        """Lane thread: ``job`` has left the driver, or was skipped. Sends what waited for it."""
        with self._lock:
            queue = job.queue
            assert queue is not None
            if queue.held or job.dependents is not None:
                self._complete(job)
            else:  # nearly always
                job.complete = True
                del self._outstanding[job]
                queue.pending -= 1
            if self._on_idle is not None and not self._outstanding:
                on_idle, self._on_idle = self._on_idle, None
                on_idle()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call back once when nothing is outstanding; at once if so now, else on a lane's thread. One at a time."""
        with self._lock:
            if self._outstanding:
                self._on_idle = callback
            else:
                callback()

    def close(self) -> None:
        """Send nothing more: what still comes up is skipped, as if dropped. For lanes that are left behind."""
        with self._lock:
            self._closed = True

    def outstanding(self, device_index: int | None = None) -> list[Job]:
        """Jobs submitted and not complete, in submission order; of one device or of all."""
        with self._lock:
            return [job for job in self._outstanding if device_index is None or device_index in job.device_indexes]

    @staticmethod
    def _wait(job: Job, other: Job) -> None:
        """``job`` after ``other``, which is not complete. Said twice it is waited for twice, which is the same."""
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
                completed.extend(other for other in dependents if other.unblock() and not self._send(other))

    def _send(self, job: Job) -> bool:
        """False: the job is skipped, and thereby complete."""
        queue = job.queue
        assert queue is not None
        job.sent = True
        if queue.held or queue.pending >= queue.max_pending:
            queue.held.append(job)
            return True
        return self._put(job, queue)

    def _put(self, job: Job, queue: Queue) -> bool:
        queue.pending += 1
        if self._closed:
            return False
        try:
            queue.lane.put(job)
        except Exception as exc:  # the lane's thread cannot be started: this call fails, others are not held up
            job.fail(exc)
            job.announce()
            return False
        return True
