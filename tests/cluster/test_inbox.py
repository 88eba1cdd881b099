"""The way from a bus's thread to the loop: in a crowd, one wake-up is for many, and no node waits for another's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.cluster.bus import EventReceived, EventsDropped, HubAway, HubBack, NodeDown, NodeUp
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.inbox import CROWD, ITEM_BYTES, TURN_BYTES, WORDS, FairQueue, Inbox
from gpurt.cluster.log_limit import BURST, EVERY_S, TOGETHER, LimitedLog
from gpurt.cluster.readings_queue import AT_ONCE, PER_SECOND, ReadingsQueue
from gpurt.cluster.readings_queue import BURST as READINGS_BURST
from gpurt.cluster.reply_budget import SENDER_LARGEST, SENDER_REPLIES, ReplyBudget
from tests.cluster.support import FakeClock, until


class _Counting:
    """A loop that counts what wakes it from elsewhere."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.woken = 0

    def call_soon_threadsafe(self, call: Callable[[], object]) -> None:
        self.woken += 1
        self._loop.call_soon_threadsafe(call)


async def test_what_comes_while_a_crowd_is_dealt_with_wakes_nobody() -> None:
    loop = _Counting()
    inbox, taken, numbers = Inbox(cast("Any", loop)), list[int](), itertools.count()

    async def take() -> None:
        async for item in inbox:
            assert isinstance(item, EventReceived)
            taken.append(int(item.payload))
            if len(taken) % CROWD == 0 and len(taken) < 4 * CROWD:
                asyncio.get_running_loop().call_soon(post, CROWD)  # as soon as it waits for more

    def post(count: int) -> None:
        for number in itertools.islice(numbers, count):
            inbox.post(EventReceived("n1", b"%d" % number))

    taking = asyncio.create_task(take())
    await asyncio.sleep(0)
    post(CROWD)
    await until(lambda: len(taken) == 4 * CROWD)
    assert taken == list(range(4 * CROWD))
    assert loop.woken == 1
    post(1)  # alone, and not kept waiting
    await until(lambda: len(taken) == 4 * CROWD + 1)
    inbox.close()
    await taking


async def test_few_are_taken_without_a_wait() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    for number in range(CROWD - 1):
        inbox.post(EventReceived("n1", b"%d" % number))
    inbox.close()
    assert [cast("EventReceived", item).payload async for item in inbox] == [b"%d" % n for n in range(CROWD - 1)]


Put = tuple[str, int]
"""A node, and the bytes of what it sends."""


@given(st.lists(st.one_of(st.tuples(st.sampled_from("abcd"), st.integers(0, 300_000)), st.none()), max_size=200))
def test_each_node_has_its_order_and_its_turn(steps: list[Put | None]) -> None:
    """None takes one. What a node's item waits for is its own before it, and of each other node no more than one turn
    of bytes for each of its own, and the item that began a turn."""
    queue, number = FairQueue[tuple[str, int, int]](1 << 30, node_bytes=1 << 60, total_bytes=1 << 60), 0
    waiting: dict[str, deque[tuple[int, int]]] = {name: deque() for name in "abcd"}
    since: dict[int, dict[str, int]] = {}
    """For each item that waits: bytes of every node that were taken since it came."""
    before: dict[int, int] = {}
    """Bytes of its own node before it, itself included."""
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            name, size = step
            queue.put(name, (name, number, size), size)
            before[number] = sum(each + ITEM_BYTES for _, each in waiting[name]) + size + ITEM_BYTES
            waiting[name].append((number, size))
            since[number] = dict.fromkeys("abcd", 0)
            number += 1
            continue
        item = queue.take()
        if item is None:
            assert not any(waiting.values())
            continue
        name, which, size = item
        assert waiting[name].popleft() == (which, size)
        turns = before[which] // TURN_BYTES + 2 + sum(1 for each in before if each < which and each in since)
        for other, taken in since.pop(which).items():
            if other != name:
                assert taken <= turns * (TURN_BYTES + 300_000 + ITEM_BYTES)
        for counts in since.values():
            counts[name] += size + ITEM_BYTES
    assert queue.take() is None


@pytest.mark.parametrize("size", [0, 1000, 256 << 10])
def test_a_backlog_of_garbage_delays_no_other_node(size: int) -> None:
    queue = FairQueue[str](1 << 20, node_bytes=1 << 60, total_bytes=1 << 60)
    for _ in range(5000):
        queue.put("evil", "garbage", size)
    for number in range(100):
        queue.put("good", f"{number}", 1000)
    taken = [queue.take() for _ in range(202)]
    assert [item for item in taken if item != "garbage"] == [f"{number}" for number in range(100)]


def test_memory_is_bounded_by_node_and_together() -> None:
    queue = FairQueue[int](10, node_bytes=100_000, total_bytes=150_000)
    assert queue.admits("a", 1 << 30)  # the first of each, however large
    for number in range(9):
        assert queue.admits("a", 1000)
        queue.put("a", number, 1000)
    queue.put("a", 9, 0)
    assert not queue.admits("a", 0)  # items
    queue.put("b", 0, 90_000)
    assert not queue.admits("b", 10_000)  # bytes
    queue.put("c", 0, 60_000)
    assert queue.admits("d", 1)  # all together are beyond, and each has its share
    queue.put("d", 0, 30_000)
    assert not queue.admits("d", 10_000)
    while queue.take() is not None:
        pass
    assert queue.admits("a", 1000)
    assert queue.admits("b", 50_000)


def test_filled_by_one_thread_and_emptied_by_another_it_loses_nothing() -> None:
    queue, seen = FairQueue[int](1 << 30, node_bytes=1 << 60, total_bytes=1 << 60), list[int]()

    def fill() -> None:
        for number in range(30_000):
            queue.put(f"n{number % 7}", number, number % 4000)

    filling = threading.Thread(target=fill)
    filling.start()
    while filling.is_alive():
        if (item := queue.take()) is not None:
            seen.append(item)
    filling.join()
    seen.extend(iter(queue.take, None))
    for node in range(7):
        mine = [number for number in seen if number % 7 == node]
        assert mine == sorted(mine)
    assert len(set(seen)) == 30_000


async def test_words_at_full_speed_keep_no_event_waiting() -> None:
    inbox = Inbox(asyncio.get_running_loop(), 1)
    inbox.post(EventReceived("evil", b"1"))
    inbox.post(EventReceived("good", b"2"))
    events = 0
    for turn in range(2 * WORDS + 2):
        inbox.post(EventReceived("evil", b"dropped"))
        inbox.post(NodeUp("evil") if turn % 2 else NodeDown("evil"))
        events += isinstance(await anext(inbox), EventReceived)
    assert events == 2
    assert inbox.dropped >= 2 * WORDS


async def test_what_happens_to_the_hub_comes_before_the_words_on_each_node() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    for item in (NodeDown("n1"), NodeDown("n2"), EventReceived("n3", b"1"), HubAway(), NodeDown("n4")):
        inbox.post(item)
    assert await anext(inbox) == HubAway()
    inbox.post(HubBack())
    assert await anext(inbox) == HubBack()
    assert [await anext(inbox) for _ in range(2)] == [NodeDown("n1"), NodeDown("n2")]
    assert await anext(inbox) == EventReceived("n3", b"1"), "it has had its turn to wait"


async def test_a_flood_is_told_and_resynchronised() -> None:
    inbox = Inbox(asyncio.get_running_loop(), 4)
    for number in range(10):
        inbox.post(EventReceived("evil", b"%d" % number))
        inbox.post(EventReceived("good", b"%d" % number) if number < 3 else NodeUp("other"))
    inbox.close()
    items = [item async for item in inbox]
    assert items.count(EventsDropped("evil")) == 1
    assert EventsDropped("good") not in items
    assert [each.payload for each in items if isinstance(each, EventReceived) and each.node == "good"] == [
        b"0", b"1", b"2"
    ]  # fmt: skip


async def test_readings_have_a_budget_for_each_node() -> None:
    clock, taken = FakeClock(), list[tuple[str, bytes]]()
    queue = ReadingsQueue(asyncio.get_running_loop(), lambda node, payload: taken.append((node, payload)), clock=clock)

    def send(node: str, count: int) -> int:
        sent = 0
        for number in range(count):
            if queue.admits(node, 100):
                queue.put(node, b"%d" % number)
                sent += 1
        return sent

    sent = 0
    for _ in range(8):
        sent += send("evil", 1000)
        await until(lambda sent=sent: len(taken) == sent)
    assert sent == READINGS_BURST
    assert send("good", 5) == 5
    await until(lambda: len(taken) == sent + 5)
    assert queue.dropped == 8000 - READINGS_BURST
    clock.now += 1.0
    assert send("evil", 1000) == PER_SECOND
    assert not queue.admits("good", 1 << 20)
    queue.refuse(InvalidName("x"))


async def test_a_backlog_of_readings_lets_others_have_their_turn() -> None:
    taken = list[str]()
    queue = ReadingsQueue(asyncio.get_running_loop(), lambda node, _: taken.append(node), clock=FakeClock())
    for _ in range(100):
        queue.put("evil", b"")
    queue.put("good", b"")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert AT_ONCE <= len(taken) < 101
    assert "good" in taken[:4]


def test_a_question_has_a_budget_for_each_sender_and_for_all() -> None:
    budget = ReplyBudget(4 << 20)
    assert "limit" in str(budget.refuses("evil", 5 << 20))
    assert [budget.refuses("evil", 4 << 20) is None for _ in range(300)] == [True] * SENDER_LARGEST + [False] * 298
    assert budget.spent
    assert budget.refuses("good", 4 << 20) is None
    assert [budget.refuses("many", 1) is None for _ in range(20)] == [True] * SENDER_REPLIES + [False] * 12
    assert sum(budget.refuses(f"n{number}", 4 << 20) is None for number in range(300)) < 64


def test_lines_about_one_node_are_few_and_say_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    limited = LimitedLog(logging.getLogger("gpurt.test"), clock=clock)
    for _ in range(10_000):
        limited.warning("evil", "ignored: %s", "garbage")
    limited.warning("good", "ignored: %s", "one")
    assert len(caplog.records) == BURST + 1
    clock.now += EVERY_S
    limited.warning("evil", "ignored: %s", "garbage")
    assert caplog.records[-1].getMessage() == "ignored: garbage (and 9,995 more lines about evil since the last one)"
    for number in range(1000):
        limited.warning(f"n{number}", "ignored")
    assert len(caplog.records) <= BURST + 2 + TOGETHER
