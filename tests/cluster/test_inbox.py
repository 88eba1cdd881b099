"""The way from a bus's thread to the loop: in a crowd, one wake-up is for many."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

from gpurt.cluster.bus import EventReceived
from gpurt.cluster.inbox import CROWD, Inbox
from tests.cluster.support import until


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
