"""What one service holds to be true of its devices: what look-ups found, and what is believed beyond them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from gpurt.discovery.audience import Audience
from gpurt.discovery.events import EventType, carry_over
from gpurt.discovery.health import DeviceHealth
from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.result import DiscoveryResult, with_devices
from gpurt.discovery.unreached import unreached
from gpurt.health.monitor import Transition
from gpurt.types import DeviceState, GPUDevice

_SILENT: Final = frozenset({DeviceState.SUSPECT, DeviceState.UNRESPONSIVE})


class Standing:
    """The last result, and the telling of every change of it. On the event loop.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self, memory: DiscoveryMemory, health: DeviceHealth, audience: Audience, clock: Callable[[], float]
    ) -> None:
        self._memory, self._health, self._audience, self._clock = memory, health, audience, clock
        self._seen: DiscoveryResult | None = None
        """What look-ups found, before what is believed beyond them."""
        self._last: DiscoveryResult | None = None
        self._last_at = 0.0

    @property
    def seen(self) -> DiscoveryResult | None:
        """What look-ups found, of this process or an earlier one."""
        return self._seen or self._memory.remembered

    @property
    def persisted(self) -> bool:
        """Whether the registry has a result of this service."""
        return self._last is not None and self._last.persisted

    def last(self) -> DiscoveryResult | None:
        """The last result with its present age."""
        if self._last is None:
            return None
        return self._last.model_copy(update={"age_s": max(self._clock() - self._last_at, 0.0)})

    def found(self, seen: DiscoveryResult, asked: Iterable[str]) -> tuple[DiscoveryResult, bool]:
        """Take in what a look-up found when it asked these backends, and tell it; whether that was news."""
        before = self._audience.told or self._memory.remembered
        self._health.looked(seen.devices, asked)
        self._seen = carry_over(self.seen, seen)
        self._last_at = self._clock()
        # Before it is told: who hears of a change may ask for the whole.
        result = self._settle(self._seen, persisted=self.persisted)
        return result, self._tell(before, result, at_once=False)

    def stored(self, persisted: bool) -> DiscoveryResult:
        """The result of the last look-up, now that the registry has it or has not. Its devices may have become worse
        while the disk was slow."""
        assert self._seen is not None
        self._audience.stored(self._seen.timestamp, persisted=persisted)
        return self._settle(self._seen, persisted=persisted)

    def took_health(self, transition: Transition) -> None:
        """Tell what is now believed of a device. Before the first look-up there is nothing to tell."""
        self._health.changed(transition)
        if self._seen is not None:
            before = self._audience.told
            self._tell(before, self._settle(self._seen, persisted=self.persisted))

    def _settle(self, seen: DiscoveryResult, *, persisted: bool) -> DiscoveryResult:
        told = self._audience.told.devices if self._audience.told else ()
        believed = self._health.believed(seen.devices, told)
        pairs = zip(seen.devices, believed, strict=True)
        result = with_devices(seen, (_reached(was, now, seen.timestamp) for was, now in pairs))
        measured = self._memory.topology(result.devices)
        self._last = result.model_copy(update={"persisted": persisted, "topology": measured})
        return self._last

    def _tell(self, before: DiscoveryResult | None, result: DiscoveryResult, *, at_once: bool = True) -> bool:
        events = self._audience.tell(before, result, reason=self._memory.recovered_from, at_once=at_once)
        self._health.forget(
            event.stable_id for event in events if event.type is EventType.REMOVED and event.stable_id is not None
        )
        return bool(events)


def _reached(seen: GPUDevice, believed: GPUDevice, at: str) -> GPUDevice:
    """A device that is lost, or does not answer although the look-up had its answer, tells nothing of its memory."""
    if believed.state is DeviceState.LOST or (believed.state in _SILENT and believed.state is not seen.state):
        return unreached(believed, at)
    return believed
