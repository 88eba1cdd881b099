"""The bus inside one process: what a worker with its master embedded uses, and what tests use.

All participants live on one event loop. A subscriber holds a bounded number of events of each node; what does not fit
is dropped and announced to that subscriber alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from gpurt.cluster.bus import (
    MAX_STATE_BYTES,
    BusItem,
    CommandHandler,
    EventReceived,
    NodeDown,
    NodeUp,
    OnAsked,
    StateReply,
    TakeReadings,
)
from gpurt.cluster.envelope import MAX_EVENT_BYTES, check_size
from gpurt.cluster.errors import BusClosed, ClusterError, NoAnswer
from gpurt.cluster.inbox import Inbox
from gpurt.cluster.keys import ANY, check_name
from gpurt.cluster.readings import MAX_READINGS_BYTES

BUFFER_ITEMS: Final = 1024


class InProcessBus:
    """What the engines of one process share. Make one per cluster and give it to each engine.

    Args:
        buffer_items: events of one node that a subscriber may be behind.
    """

    def __init__(self, cluster: str = "default", *, buffer_items: int = BUFFER_ITEMS) -> None:
        self.cluster = check_name(cluster, "cluster")
        self.buffer_items = buffer_items
        self.members: list[InProcessEngine] = []
        self.subscriptions: list[InProcessSubscription] = []
        self.readers: list[TakeReadings] = []

    def deliver(self, item: BusItem) -> None:
        """Give ``item`` to every subscriber."""
        for subscription in self.subscriptions:
            subscription.post(item)


class InProcessSubscription(Inbox):
    """Fair between nodes and bounded for each, as the subscriptions of the other engines."""

    def __init__(self, buffer_items: int, on_close: Callable[[InProcessSubscription], None]) -> None:
        super().__init__(asyncio.get_running_loop(), buffer_items)
        self._on_close = on_close

    async def aclose(self) -> None:
        self._on_close(self)
        self.close()


class InProcessEngine:
    """One participant of an :class:`InProcessBus`."""

    def __init__(self, bus: InProcessBus) -> None:
        self._bus = bus
        self._started = False
        self._state: bytes | None = None
        self._on_command: CommandHandler | None = None
        self._on_asked: OnAsked | None = None
        self._subscriptions: list[InProcessSubscription] = []
        self._readers: list[TakeReadings] = []
        self.node: str | None = None
        self._since = 0.0
        self.on_return: Callable[[], None] | None = None
        """Never called: this bus is always there."""
        self.on_quiet: Callable[[], None] | None = None

    @property
    def cluster(self) -> str:
        return self._bus.cluster

    async def start(self) -> None:
        self._started = True

    async def close(self) -> None:
        self._disappear(left=False)
        for subscription in tuple(self._subscriptions):
            await subscription.aclose()
        for take in tuple(self._readers):
            self._stop_following(take)
        self._started = False

    async def join(
        self, node: str, state: bytes, on_command: CommandHandler | None = None, on_asked: OnAsked | None = None
    ) -> None:
        self._check_started()
        check_name(node, "node")
        check_size(state, f"state of node {node}", MAX_STATE_BYTES)
        if self.node is not None:
            raise ClusterError(f"already joined as node {self.node}")
        self.node, self._state, self._on_command, self._on_asked = node, state, on_command, on_asked
        self._since = time.monotonic()
        self._bus.members.append(self)
        self._bus.deliver(NodeUp(node))

    async def leave(self) -> None:
        self._disappear(left=True)

    def _disappear(self, *, left: bool) -> None:
        if self.node is None:
            return
        node, self.node, self._state = self.node, None, None
        self._on_command, self._on_asked = None, None
        self._bus.members.remove(self)
        if not any(member.node == node for member in self._bus.members):
            self._bus.deliver(NodeDown(node, left))

    async def set_state(self, state: bytes) -> None:
        check_size(state, f"state of node {self._joined()}", MAX_STATE_BYTES)
        self._state = state

    async def publish(self, payload: bytes) -> None:
        node = self._joined()
        check_size(payload, f"event of node {node}", MAX_EVENT_BYTES)
        self._bus.deliver(EventReceived(node, payload))

    async def publish_telemetry(self, payload: bytes) -> None:
        node = self._joined()
        check_size(payload, f"readings of node {node}", MAX_READINGS_BYTES)
        for take in tuple(self._bus.readers):
            take(node, payload)

    async def follow_telemetry(self, take: TakeReadings) -> Callable[[], Awaitable[None]]:
        self._check_started()
        self._readers.append(take)
        self._bus.readers.append(take)

        async def stop() -> None:
            self._stop_following(take)

        return stop

    async def subscribe(self) -> InProcessSubscription:
        self._check_started()
        subscription = InProcessSubscription(self._bus.buffer_items, self._unsubscribe)
        self._subscriptions.append(subscription)
        self._bus.subscriptions.append(subscription)
        for node in {member.node for member in self._bus.members if member.node}:
            subscription.post(NodeUp(node))
        return subscription

    async def snapshot(self, node: str, *, timeout: float = 2.0, quiet: bool = False) -> tuple[StateReply, ...]:
        self._check_started()
        if node != ANY:
            check_name(node, "node")
        replies: list[StateReply] = []
        for member in tuple(self._bus.members):
            if member.node is not None and member._state is not None and node in (ANY, member.node):
                held = max(0.0, time.monotonic() - member._since)
                replies.append(StateReply(member.node, member._state, held))
                notify = member.on_quiet if quiet else member._on_asked
                if notify is not None:
                    notify()
        return tuple(replies)

    async def command(self, node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        self._check_started()
        check_name(node, "node")
        handler = next((member._on_command for member in self._bus.members if member.node == node), None)
        if handler is None:
            raise NoAnswer(f"node {node} takes no commands here")
        try:
            async with asyncio.timeout(timeout):
                return await handler(payload)
        except TimeoutError as exc:
            raise NoAnswer(f"node {node} did not answer within {timeout:g} s") from exc
        except Exception as exc:
            raise ClusterError(f"node {node} answered: {exc}") from exc

    def _unsubscribe(self, subscription: InProcessSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._bus.subscriptions.remove(subscription)

    def _stop_following(self, take: TakeReadings) -> None:
        if take in self._readers:
            self._readers.remove(take)
            self._bus.readers.remove(take)

    def _check_started(self) -> None:
        if not self._started:
            raise BusClosed("the bus is not started", hint="await engine.start()")

    def _joined(self) -> str:
        self._check_started()
        if self.node is None:
            raise ClusterError("this engine has not joined as a node", hint="await engine.join(node, state)")
        return self.node
