"""Order: chains, parking, bounds; checked against a plain model with random schedules."""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.runtime.job import Call, Job
from gpurt.runtime.order import Chain, Order, Queue


class ManualLane:
    """A lane without a thread: the test decides when its next job runs."""

    def __init__(self, *, started: bool = True) -> None:
        self.jobs: list[Job] = []
        self.started = started
        self.post = self.jobs.append

    def put(self, job: Job) -> None:
        self.started = True
        self.jobs.append(job)

    def step(self, order: Order) -> None:
        job = self.jobs.pop(0)
        job.run()
        order.done(job)


def queue_of(lane: ManualLane, bound: int) -> Queue:
    return Queue(None, lane, bound, lambda error: None)  # type: ignore[arg-type]


def make(order: Order, seen: list[Any], label: Any, queue: Queue, *chains: Chain, device: int = 0, **more: Any) -> Job:
    job = Call(lambda _: seen.append(label))
    job.device_indexes = (device,)
    order.submit(job, queue, chains=chains, **more)
    return job


def test_work_on_another_lane_parks_and_same_lane_does_not() -> None:
    order, seen, chain = Order(lambda job: None), [], Chain()
    write, read = ManualLane(), ManualLane()
    writes, reads = queue_of(write, 10), queue_of(read, 10)
    make(order, seen, "w1", writes, chain)
    make(order, seen, "w2", writes, chain)
    make(order, seen, "r", reads, chain)
    assert (len(write.jobs), len(read.jobs)) == (2, 0)
    write.step(order)
    assert not read.jobs
    write.step(order)
    read.step(order)
    assert seen == ["w1", "w2", "r"]


def test_a_dropped_job_keeps_its_place() -> None:
    order, seen, chain = Order(lambda job: None), [], Chain()
    first, second, third = ManualLane(), ManualLane(), ManualLane()
    make(order, seen, "w1", queue_of(first, 9), chain)
    dropped = make(order, seen, "r", queue_of(second, 9), chain)
    make(order, seen, "w2", queue_of(third, 9), chain)
    dropped.abandon()
    assert not third.jobs
    first.step(order)
    second.step(order)
    third.step(order)
    assert seen == ["w1", "w2"]


def test_synchronize_waits_for_its_device_only() -> None:
    order, seen = Order(lambda job: None), []
    busy, other, sync = ManualLane(), ManualLane(), ManualLane()
    make(order, seen, "a", queue_of(busy, 9), Chain(), device=0)
    make(order, seen, "b", queue_of(other, 9), Chain(), device=1)
    make(order, seen, "sync", queue_of(sync, 9), device=0, after_devices=(0,))
    assert not sync.jobs
    busy.step(order)
    sync.step(order)
    assert seen == ["a", "sync"]
    assert [job.device_indexes for job in order.outstanding()] == [(1,)]


def test_the_bound_holds_and_keeps_order() -> None:
    order, seen, lane = Order(lambda job: None), [], ManualLane()
    queue = queue_of(lane, 3)
    for number in range(20):
        make(order, seen, number, queue, Chain())
    assert len(lane.jobs) == 3
    while lane.jobs:
        assert len(lane.jobs) <= 3
        lane.step(order)
    assert seen == list(range(20))
    assert not order.outstanding()


def test_after_close_nothing_is_sent_and_everything_completes() -> None:
    order, seen, chain = Order(lambda job: None), [], Chain()
    hung, other = ManualLane(), ManualLane()
    make(order, seen, "hung", queue_of(hung, 9), chain)
    for number in range(2000):  # deep chains must not recurse
        make(order, seen, number, queue_of(other, 1), chain)
    idle = threading.Event()
    order.close()
    order.when_idle(idle.set)
    assert not idle.is_set()
    hung.step(order)
    assert idle.is_set()
    assert seen == ["hung"]
    assert not other.jobs


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 3), max_size=2)), max_size=40),
    drops=st.sets(st.integers(0, 39), max_size=10),
    schedule=st.lists(st.integers(0, 2), max_size=200),
    bound=st.integers(1, 4),
)
def test_each_chain_sees_submission_order(
    jobs: list[tuple[int, set[int]]], drops: set[int], schedule: list[int], bound: int
) -> None:
    order, lanes, chains = Order(lambda job: None), [ManualLane() for _ in range(3)], [Chain() for _ in range(4)]
    queues = [queue_of(lane, bound) for lane in lanes]
    seen: list[int] = []
    made = [make(order, seen, n, queues[lane], *(chains[c] for c in on)) for n, (lane, on) in enumerate(jobs)]
    for number in drops:
        if number < len(made):
            made[number].abandon()
    steps = iter([*schedule, *(n % 3 for n in range(3 * len(jobs) + 3))])
    for choice in steps:
        if lanes[choice].jobs:
            lanes[choice].step(order)
    assert not order.outstanding()
    kept = [n for n in range(len(jobs)) if n not in drops]
    assert sorted(seen) == kept
    for chain in range(4):
        assert [n for n in seen if chain in jobs[n][1]] == [n for n in kept if chain in jobs[n][1]]
