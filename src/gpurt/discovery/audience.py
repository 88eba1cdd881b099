"""Who is told what changed, and what they know already."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

from gpurt.discovery.events import DeviceEvent, EventType, diff, settled
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.subscription import Subscription

MINOR_EVENTS_S: Final = 10.0
"""Changes of free memory are said at most this often; everything else at once."""


class Audience:
    """The subscribers of one service; on its event loop. One that nobody holds any more is forgotten.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._subscriptions = weakref.WeakSet[Subscription]()
        self.told: DiscoveryResult | None = None
        """The state against which the next events are taken."""
        self._memory_told_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    def add(self, subscription: Subscription) -> None:
        """One that knows nothing yet: it begins with what was told last."""
        if self.told is not None:
            subscription.publish((), since=self.told)
        self._subscriptions.add(subscription)

    def tell(
        self,
        before: DiscoveryResult | None,
        result: DiscoveryResult,
        *,
        reason: str | None = None,
        at_once: bool = True,
    ) -> tuple[DeviceEvent, ...]:
        """Give everybody the difference; returns it. ``reason`` is that of a first snapshot, ``at_once`` as of
        :meth:`Subscription.publish`."""
        now = self._clock()
        hold = self._memory_told_at is not None and now - self._memory_told_at < MINOR_EVENTS_S
        events = diff(before, result, reason=reason)
        if hold:
            events = tuple(event for event in events if event.type is not EventType.MEMORY)
        elif any(event.type is EventType.MEMORY for event in events):
            self._memory_told_at = now
        self.told = settled(before, result, hold_memory=hold)
        for subscription in tuple(self._subscriptions):
            subscription.publish(events, since=before, at_once=at_once)
        return events

    def stored(self, timestamp: str, *, persisted: bool) -> None:
        """The registry has the look-up of ``timestamp``, or has not: who has not read yet hears that."""
        if self.told is not None and self.told.timestamp == timestamp:
            self.told = self.told.model_copy(update={"persisted": persisted})
        for subscription in tuple(self._subscriptions):
            subscription.stored(timestamp, persisted=persisted)

    def preview(self, result: DiscoveryResult) -> None:
        """Those who know nothing yet need not wait for the slowest backend."""
        for subscription in tuple(self._subscriptions):
            subscription.publish((), since=result)

    def wake(self) -> None:
        """A look-up is due."""
        for subscription in tuple(self._subscriptions):
            subscription.wake()

    def close(self) -> None:
        """End every iteration after what is queued."""
        for subscription in tuple(self._subscriptions):
            subscription.close()
        self._subscriptions.clear()
