"""What every engine must do: one suite over all of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gpurt.cluster.bus import (
    MAX_STATE_BYTES,
    BusItem,
    EventEngine,
    EventReceived,
    EventsDropped,
    NodeDown,
    NodeUp,
    StateReply,
    Subscription,
)
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.envelope import MAX_EVENT_BYTES, Envelope, EventKind
from gpurt.cluster.errors import BusClosed, ClusterError, InvalidName, MalformedEvent, NoAnswer
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.readings import MAX_READINGS_BYTES
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from tests.cluster.conftest import BUSES, Bus
from tests.cluster.support import E2, HOST_B, device, event_bytes, snapshot, until


async def take(subscription: Subscription, count: int) -> list[BusItem]:
    async with asyncio.timeout(10):
        return [await anext(subscription) for _ in range(count)]


def state(seq: int = 0, **fields: object) -> bytes:
    return encode_snapshot(snapshot(device(), seq=seq, **fields))  # type: ignore[arg-type]


async def tell(engine: EventEngine, seq: int, **fields: object) -> None:
    """The state, then the event, as a publisher does."""
    await engine.set_state(state(seq))
    await engine.publish(event_bytes(seq, **fields))  # type: ignore[arg-type]


class Watch:
    def __init__(self, observer: ClusterObserver, view: MasterView, seen: list[Envelope]) -> None:
        self.observer = observer
        self.view = view
        self.seen = seen

    @property
    def seq(self) -> int | None:
        record = self.view.node("n1")
        return record and record.seq


@asynccontextmanager
async def watching(engine: EventEngine, **options: float) -> AsyncIterator[Watch]:
    seen: list[Envelope] = []
    view = MasterView()
    observer = ClusterObserver(engine, view, on_event=seen.append, **options)
    ready = asyncio.Event()
    task = asyncio.create_task(observer.run(ready.set))
    await ready.wait()
    try:
        yield Watch(observer, view, seen)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


# The engine


async def test_events_arrive_once_and_in_order(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    subscription = await observer.subscribe()
    await node.join("n1", b"state")
    assert await take(subscription, 1) == [NodeUp("n1")]
    sending = asyncio.gather(*(node.publish(b"%d" % seq) for seq in range(500)))
    received = await take(subscription, 500)
    await sending
    assert received == [EventReceived("n1", b"%d" % seq) for seq in range(500)]


async def test_membership(bus: Bus) -> None:
    first, second, observer = await bus.node(), await bus.node(), await bus.observer()
    await first.join("n1", b"")
    subscription = await observer.subscribe()
    assert await take(subscription, 1) == [NodeUp("n1")]
    await second.join("n2", b"")
    assert await take(subscription, 1) == [NodeUp("n2")]
    await first.leave()
    assert await take(subscription, 1) == [NodeDown("n1", left=True)]
    await second.close()
    assert await take(subscription, 1) == [NodeDown("n2")]
    await first.join("n1", b"")
    assert await take(subscription, 1) == [NodeUp("n1")]


async def test_snapshots_are_of_the_moment(bus: Bus) -> None:
    first, second, observer = await bus.node(), await bus.node(), await bus.observer()
    assert await observer.snapshot("n1") == ()
    await first.join("n1", b"one")
    await second.join("n2", b"two")
    subscription = await observer.subscribe()
    await take(subscription, 2)
    assert await observer.snapshot("n1") == (StateReply("n1", b"one"),)
    await first.set_state(b"three")
    replies = await observer.snapshot("*")
    assert sorted((reply.node, reply.payload) for reply in replies) == [("n1", b"three"), ("n2", b"two")]
    await first.leave()
    assert await observer.snapshot("n1") == ()
    # A node may ask as well: that is how it learns that its name is taken.
    assert await first.snapshot("n2") == (StateReply("n2", b"two"),)


async def test_too_slow_a_subscriber_is_told_and_blocks_nobody(small_bus: Bus) -> None:
    node, observer = await small_bus.node(), await small_bus.observer()
    subscription = await observer.subscribe()
    await node.join("n1", b"")
    await take(subscription, 1)
    for seq in range(200):
        await node.publish(b"%d" % seq)
    await until(lambda: subscription.dropped == 200 - 64, "the overflow")
    items = await take(subscription, 65)
    assert items[0] == EventsDropped("n1")
    assert items[1:] == [EventReceived("n1", b"%d" % seq) for seq in range(64)]
    await node.publish(b"after")
    assert await take(subscription, 1) == [EventReceived("n1", b"after")]


async def test_commands(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()

    async def handle(payload: bytes) -> bytes:
        if payload == b"fail":
            raise ValueError("no such device")
        if payload == b"hang":
            await asyncio.Event().wait()
        return payload.upper()

    await node.join("n1", b"", handle)
    subscription = await observer.subscribe()
    await take(subscription, 1)
    assert await observer.command("n1", b"hello") == b"HELLO"
    with pytest.raises(ClusterError, match="no such device"):
        await observer.command("n1", b"fail")
    with pytest.raises(NoAnswer, match=r"within 0\.2 s"):
        await observer.command("n1", b"hang", timeout=0.2)
    with pytest.raises(NoAnswer):
        await observer.command("nobody", b"hello", timeout=0.2)


async def test_sizes_and_names_are_checked_before_anything_is_sent(bus: Bus) -> None:
    node = await bus.node()
    with pytest.raises(InvalidName, match="node name"):
        await node.join("N 1", b"")
    with pytest.raises(MalformedEvent, match=str(MAX_STATE_BYTES)):
        await node.join("n1", bytes(MAX_STATE_BYTES + 1))
    await node.join("n1", b"")
    with pytest.raises(MalformedEvent, match=str(MAX_EVENT_BYTES)):
        await node.publish(bytes(MAX_EVENT_BYTES + 1))
    with pytest.raises(MalformedEvent, match=str(MAX_STATE_BYTES)):
        await node.set_state(bytes(MAX_STATE_BYTES + 1))
    with pytest.raises(InvalidName):
        await node.snapshot("a/b")
    with pytest.raises(ClusterError, match="already joined"):
        await node.join("n2", b"")


async def test_outside_start_and_close_the_bus_is_closed(bus: Bus) -> None:
    engine = await bus.node()
    await engine.join("n1", b"")
    subscription = await engine.subscribe()
    waiting = asyncio.create_task(take(subscription, 5))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    for call in (
        engine.join("n1", b""),
        engine.publish(b""),
        engine.set_state(b""),
        engine.subscribe(),
        engine.snapshot("n1"),
        engine.command("n1", b""),
    ):
        with pytest.raises(BusClosed, match="start"):
            await call
    await engine.leave()
    await engine.start()
    await engine.join("n1", b"")
    with pytest.raises(ClusterError, match="already joined"):
        await engine.join("n1", b"")
    await engine.leave()
    with pytest.raises(ClusterError, match="not joined"):
        await engine.publish(b"")


async def test_a_cancelled_publish_goes_out_and_a_cancelled_wait_loses_nothing(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    subscription = await observer.subscribe()
    await node.join("n1", b"")
    await take(subscription, 1)
    for _ in range(3):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(subscription)
    sending = asyncio.create_task(node.publish(b"one"))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await node.publish(b"two")
    assert await take(subscription, 2) == [EventReceived("n1", b"one"), EventReceived("n1", b"two")]


async def test_an_ended_subscription_costs_nothing_and_others_go_on(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    first, second = await observer.subscribe(), await observer.subscribe()
    await first.aclose()
    await first.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(first)
    await node.join("n1", b"")
    assert await take(second, 1) == [NodeUp("n1")]


async def test_a_state_and_an_event_of_the_largest_size_arrive_whole(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    whole, event = random.Random(1).randbytes(MAX_STATE_BYTES), random.Random(2).randbytes(MAX_EVENT_BYTES)
    subscription = await observer.subscribe()
    await node.join("n1", whole)
    assert await take(subscription, 1) == [NodeUp("n1")]
    assert await observer.snapshot("n1", timeout=10) == (StateReply("n1", whole),)
    await node.publish(event)
    assert await take(subscription, 1) == [EventReceived("n1", event)]


async def test_readings_reach_who_follows_them_until_it_ends(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    heard: list[tuple[str, bytes]] = []
    stop = await observer.follow_telemetry(lambda name, payload: heard.append((name, payload)))
    await node.join("n1", b"")
    async with asyncio.timeout(10):
        while not heard:  # the way to the observer may not be known yet, and nobody repeats readings
            await node.publish_telemetry(b"one")
            await asyncio.sleep(0.01)
    assert set(heard) == {("n1", b"one")}
    with pytest.raises(MalformedEvent, match=str(MAX_READINGS_BYTES)):
        await node.publish_telemetry(bytes(MAX_READINGS_BYTES + 1))
    await stop()
    await stop()


# The observer over it


async def test_a_late_joiner_has_the_snapshot_within_a_second(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    await node.join("n1", state())
    for seq in range(1, 51):
        await tell(node, seq)
    start = time.monotonic()
    async with watching(observer) as watch:
        await until(lambda: watch.seq == 50, "the snapshot")
        assert time.monotonic() - start < 1.0
        assert list(watch.view.snapshot().available_devices) == [("n1", "GPU-a")]
        await tell(node, 51)
        await until(lambda: watch.seq == 51)


async def test_every_event_is_seen_once_and_in_order(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    async with watching(observer) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        for seq in range(1, 301):
            await tell(node, seq)
        await until(lambda: watch.seq == 300)
        assert [event.position.seq for event in watch.seen] == list(range(1, 301))
        assert watch.observer.resyncs == {"joined": 1}


async def test_duplicates_on_the_bus_are_not_seen(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    async with watching(observer) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        for seq in (1, 2, 3, 2, 3, 4):
            await tell(node, seq)
        await until(lambda: watch.seq == 4)
        assert [event.position.seq for event in watch.seen] == [1, 2, 3, 4]
        assert watch.observer.counters("n1").duplicates == 2


async def test_a_hole_is_closed_by_a_snapshot(bus: Bus) -> None:
    node, observer = await bus.node(), await bus.observer()
    async with watching(observer) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        await tell(node, 1)
        await tell(node, 4)
        await until(lambda: watch.seq == 4)
        assert watch.observer.resyncs["gap"] == 1
        await tell(node, 5)
        await until(lambda: watch.seq == 5)
        assert [event.position.seq for event in watch.seen] == [1, 5]


async def test_after_an_overflow_the_state_is_right(small_bus: Bus) -> None:
    node, observer = await small_bus.node(), await small_bus.observer()
    async with watching(observer) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        await node.set_state(state(2000))
        sending = [asyncio.create_task(node.publish(event_bytes(seq))) for seq in range(1, 2001)]
        async with asyncio.timeout(10):
            while not small_bus.dropped():
                await asyncio.sleep(0)
                until_then = time.monotonic() + 0.1
                while not small_bus.dropped() and time.monotonic() < until_then:
                    pass  # the loop is too busy to read
        await asyncio.gather(*sending)
        await until(lambda: watch.seq == 2000, "the snapshot")
        assert watch.observer.dropped >= 1
        assert watch.observer.resyncs["overflow"] >= 1
        numbers = [event.position.seq for event in watch.seen]
        assert numbers == sorted(set(numbers))


async def test_rubbish_is_counted_and_the_sequence_is_kept(bus: Bus) -> None:
    observer, node = await bus.observer(), await bus.node()
    async with watching(observer) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        await tell(node, 1)
        await bus.inject("n1", b"rubbish")
        await bus.inject("n1", event_bytes(2, node="n2"))
        await bus.inject("n1", bytes(MAX_EVENT_BYTES + 1))
        await tell(node, 2, kind="com.example.unknown.v7")
        await tell(node, 3, kind=EventKind.DEVICE_ADDED, subject="GPU-b", data={"device": {"name": 7}})
        await tell(node, 4)
        await until(lambda: watch.seq == 4)
        assert watch.observer.rejected == {"malformed": 2, "oversized": 1}
        assert watch.view.ignored == {"malformed": 1, "unknown_type": 3}
        assert [event.position.seq for event in watch.seen] == [1, 2, 3, 4]
        assert watch.observer.resyncs == {"joined": 1}


async def test_an_event_lost_to_rubbish_is_made_up_for(bus: Bus) -> None:
    observer, node = await bus.observer(), await bus.node()
    async with watching(observer) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        await node.set_state(state(1))
        await bus.inject("n1", b"what should have been event 1")
        await tell(node, 2)
        await until(lambda: watch.seq == 2)
        assert watch.observer.resyncs["gap"] == 1


async def test_a_malformed_snapshot_is_asked_for_again(bus: Bus) -> None:
    observer, node = await bus.observer(), await bus.node()
    async with watching(observer) as watch:
        await node.join("n1", b"{}")
        await until(lambda: watch.observer.rejected["malformed_snapshot"] == 2)
        assert watch.view.node("n1") is None
        await node.set_state(state(3))
        await until(lambda: watch.seq == 3)


async def test_snapshots_that_race_with_events_lose_and_repeat_nothing(bus: Bus) -> None:
    """Observers join all the time, and ask again and again, while events go out."""
    node = await bus.node()
    await node.join("n1", state())
    told = 0

    async def publish() -> None:
        nonlocal told
        for told in range(1, 301):
            await tell(node, told)
            await asyncio.sleep(0.002)

    async def watch_from_here(engine: EventEngine) -> None:
        async with watching(engine, resync_interval_s=0.02) as watch:
            await until(lambda: watch.seq == 300, "the last event")
            numbers = [event.position.seq for event in watch.seen]
            assert numbers == sorted(set(numbers))
            # Behind the first snapshot, an event is applied or contained in a later one.
            counters = watch.observer.counters("n1")
            assert counters.applied == len(numbers)
            assert watch.view.snapshot().nodes["n1"].seq == 300

    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(publish())
        for number in range(5):
            engine = await bus.observer()
            group.create_task(watch_from_here(engine))
            await until(lambda number=number: told >= 40 * number or publishing.done())


async def test_a_restarted_node_is_followed_into_its_new_epoch(bus: Bus) -> None:
    observer, node = await bus.observer(), await bus.node()
    async with watching(observer) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        await tell(node, 1)
        await until(lambda: watch.seq == 1)
        await node.close()
        await until(lambda: watch.view.node("n1").state is NodeState.SUSPECT)
        await node.start()
        await node.join("n1", state(7, epoch=E2))
        await until(lambda: watch.seq == 7)
        await node.publish(event_bytes(8, epoch=E2))
        await until(lambda: watch.seq == 8)
        record = watch.view.node("n1")
        assert record is not None
        assert (record.state, record.epoch) == (NodeState.HEALTHY, str(E2))


async def test_a_lost_last_event_is_found_by_the_regular_check(bus: Bus) -> None:
    observer, node = await bus.observer(), await bus.node()
    async with watching(observer, resync_interval_s=0.2) as watch:
        await node.join("n1", state())
        await until(lambda: watch.seq == 0)
        await node.set_state(state(1))  # and no event
        await until(lambda: watch.seq == 1)
        assert watch.observer.resyncs["anti_entropy"] >= 1


async def test_two_live_processes_with_one_name_are_reported_until_one_ends(bus: Bus) -> None:
    observer, first, second = await bus.observer(), await bus.node(), await bus.node()
    async with watching(observer, resync_interval_s=0.2) as watch:
        changes = watch.view.changes()
        await first.join("n1", state())
        await until(lambda: watch.seq == 0)
        await second.join("n1", encode_snapshot(snapshot(device("GPU-z"), host=HOST_B, epoch=E2)))
        await second.publish(event_bytes(1, epoch=E2))
        await until(lambda: watch.view.conflict("n1"), "the conflict")
        await tell(first, 1)
        await until(lambda: watch.seq == 1)
        assert list(watch.view.snapshot().devices) == [("n1", "GPU-a")]
        await first.close()
        await until(lambda: not watch.view.conflict("n1"), "the end of the conflict")
        await until(lambda: list(watch.view.snapshot().devices) == [("n1", "GPU-z")])
        changes.close()
        kinds = [change.kind async for change in changes]
        assert kinds.count(ChangeKind.CONFLICT) == 1
        assert kinds.count(ChangeKind.CONFLICT_OVER) == 1


async def test_an_engine_closed_under_the_observer_ends_it(bus: Bus) -> None:
    observer, node = await bus.observer(), await bus.node()
    watch = ClusterObserver(observer, MasterView())
    ready = asyncio.Event()
    task = asyncio.create_task(watch.run(ready.set))
    await ready.wait()
    await node.join("n1", b"malformed, so that it is asked again and again")
    await until(lambda: watch.rejected["malformed_snapshot"])
    await observer.close()
    async with asyncio.timeout(5):
        await task


@pytest.mark.parametrize("name", BUSES)
def test_an_engine_may_be_used_on_one_loop_after_another(name: str) -> None:
    made = BUSES[name](False)

    async def use() -> None:
        node, observer = await made.node(), await made.observer()
        subscription = await observer.subscribe()
        await node.join("n1", b"")
        assert await take(subscription, 1) == [NodeUp("n1")]
        await made.aclose()

    for _ in range(3):
        asyncio.run(use())
