"""GPUDiscoveryService: what accelerators there are, kept up to date."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import IntEnum
from types import TracebackType
from typing import Final, Self

from gpurt.backend import GPUBackend
from gpurt.discovery.assemble import BackendAnswer
from gpurt.discovery.deadlines import USUAL_S, deadline_for
from gpurt.discovery.events import EventType, carry_over, diff, settled
from gpurt.discovery.given import GivenBackend
from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.merge import merge
from gpurt.discovery.preview import Previews
from gpurt.discovery.probe import ChildProber
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.result import DiscoveryResult, summarize
from gpurt.discovery.singleflight import SingleFlight
from gpurt.discovery.subscription import Subscription
from gpurt.discovery.survey import Prober, Survey, backend_names
from gpurt.errors import BackendClosed
from gpurt.platforms import Platform, current_platform
from gpurt.settings import canonical_name

MINOR_EVENTS_S: Final = 10.0
"""Changes of free memory are said at most this often; everything else at once."""
SHUTDOWN_WAIT_S: Final = 0.9


class Care(IntEnum):
    """How thorough a look-up is."""

    POLL = 0
    """Leave backends alone whose back-off time has not passed."""
    ASK = 1
    """Ask every backend; believe what was verified before."""
    VERIFY = 2
    """Believe nothing."""


class GPUDiscoveryService:
    """Finds devices, remembers them, and tells what changed.

    ::

        async with GPUDiscoveryService() as service:
            result = await service.discover_all_devices()
            async for event in service.subscribe():
                ...

    Without a backend every backend of the platform is probed in a child process of its own, so that a driver that
    hangs or crashes costs its backend and nothing else. Nothing is imported, opened or bound to an event loop
    before the first call; after ``shutdown`` the service may be used again, also on another loop.

    Args:
        source: nothing; an initialised backend, whose devices are listed and verified through its own methods and
            which is never shut down here and of whose devices alone the registry is read; or the path of the
            registry file. Simulated devices have a place of their own there.
        registry_path: the registry file; None is ``registry.json`` in the user's state directory.
        backends: names of the backends to ask, instead of all of this platform, the preferred one first.
        probe_timeout: seconds for each probe; None is 10 or thrice the time of the last answer, at
            most 60, and 30 for a backend that the registry does not know.
        interval: seconds between two discoveries while somebody watches or subscribes.
        environ: the environment of the probes, in place of ``os.environ``.
        clock: seconds, monotonic.
        prober: in place of child processes.

    Raises:
        ValueError: two registry paths, no backend, or a time that is not positive.
    """

    def __init__(
        self,
        source: GPUBackend | str | os.PathLike[str] | None = None,
        *,
        registry_path: str | os.PathLike[str] | None = None,
        backends: Sequence[str] | None = None,
        probe_timeout: float | None = None,
        interval: float = 10.0,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        prober: Prober | None = None,
    ) -> None:
        if source is not None and not isinstance(source, GPUBackend):
            if registry_path is not None:
                raise ValueError("the registry path is given twice")
            registry_path = source
        if backends is not None and not backends:
            raise ValueError("backends must name at least one backend, or be None")
        for what, seconds in (("probe_timeout", probe_timeout), ("interval", interval)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{what} must be a positive number of seconds, not {seconds!r}")
        self._backends = None if backends is None else tuple(dict.fromkeys(map(canonical_name, backends)))
        self._probe_timeout = probe_timeout
        self._interval = interval
        self._environ = environ
        self._clock = clock
        self._platform: Platform = current_platform(environ=environ)
        self._given = GivenBackend(source, self._platform, clock) if isinstance(source, GPUBackend) else None
        self._survey = Survey(prober or ChildProber(), self._platform)
        self._memory = DiscoveryMemory(
            RegistryFile(registry_path), clock, given=self._given.devices if self._given else None
        )
        self._flight = SingleFlight[DiscoveryResult]()
        self._previews = Previews()
        self._subscriptions = weakref.WeakSet[Subscription]()
        self._stop: asyncio.Event | None = None
        self._last: DiscoveryResult | None = None
        self._last_at = 0.0
        self._told: DiscoveryResult | None = None
        """What subscribers know: the state against which the next events are taken."""
        self._memory_told_at: float | None = None
        self._probed_at: float | None = None

    async def discover_all_devices(
        self, refresh: bool = True, *, verify: bool = False, on_preview: Callable[[DiscoveryResult], None] | None = None
    ) -> DiscoveryResult:
        """Look up all devices now; callers at the same time share one look-up.

        Devices that passed verification before are not opened again while nothing that they rest on has changed
        (:mod:`gpurt.discovery.signature`): their health and memory are NVML's and the system's of now.

        Args:
            refresh: False gives the last result of this service if there is one.
            verify: forget what was verified before, open every driver and read back from every device.
            on_preview: called once at most, if this service has no result yet: with what the registry remembers
                (``stale``), else, as soon as devices are seen or after 0.8 s, with what is known while
                drivers are still being opened (``preview``).

        Ends within the probe timeout plus one second. Backends that fail are in ``reports``, not raised.
        Cancelling the last caller kills the probes.

        Raises:
            BackendClosed: ``shutdown`` was called meanwhile.
            GPUError: an environment variable has a value that is not allowed.
        """
        if not refresh and not verify and self._last is not None:
            return self._aged(self._last)
        care = Care.VERIFY if verify else Care.ASK
        with self._previews.wanted(on_preview):
            return await self._flight.run(lambda: self._discover(care), thorough=care)

    async def cached(self) -> DiscoveryResult | None:
        """What is known without looking: the last result, else the registry's, marked ``stale``; or None."""
        if self._last is not None:
            return self._aged(self._last)
        await self._memory.load()
        return self._memory.stale()

    async def watch(self, interval: float | None = None) -> AsyncIterator[DiscoveryResult]:
        """The result now, and again whenever it has changed. Ends at ``shutdown``.

        Args:
            interval: seconds between two look-ups; None is the service's. Backends that could not be used are
                asked less and less often, down to every five minutes.
        """
        period = self._period(interval)
        stop = self._stop = self._stop or asyncio.Event()
        known: DiscoveryResult | None = None
        while not stop.is_set():
            try:
                result = await self._poll()
            except BackendClosed:
                if stop.is_set():
                    return
                raise
            if known is None or diff(known, result):
                yield result
            known = settled(known, result)
            try:
                async with asyncio.timeout(period):
                    await stop.wait()
            except TimeoutError:
                continue

    def subscribe(self, interval: float | None = None, *, max_events: int = 1024) -> Subscription:
        """An async iterator of :class:`~gpurt.discovery.events.DeviceEvent`.

        Begins with a ``snapshot``: of what was known before (the registry's may be ``stale``), else of the first
        answer. Then come changes. A subscriber
        that leaves more than ``max_events`` unread gets a new snapshot instead of them.
        """
        if max_events < 1:
            raise ValueError(f"max_events must be positive, not {max_events}")
        period = self._period(interval)

        def seconds_to_poll() -> float:
            return 0.0 if self._probed_at is None else self._probed_at + period - self._clock()

        subscription = Subscription(self._poll, seconds_to_poll, lambda: self._told, max_events)
        if self._told is not None:
            subscription.publish((), since=self._told)
        self._subscriptions.add(subscription)
        return subscription

    async def shutdown(self) -> None:
        """Kill running probes and end all iterators. Idempotent; takes under one second."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        for subscription in tuple(self._subscriptions):
            subscription.close()
        self._subscriptions.clear()
        await self._flight.stop(SHUTDOWN_WAIT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _poll(self) -> DiscoveryResult:
        return await self._flight.run(lambda: self._discover(Care.POLL), thorough=Care.POLL)

    async def _discover(self, care: Care) -> DiscoveryResult:
        patient = care is Care.POLL
        try:
            await self._memory.load()
            if self._given is not None:
                if self._told is None:
                    self._previews.begin((self._given.name,), self._memory.stale())
                deadline = self._probe_timeout or USUAL_S
                answers = {self._given.name: await self._given.ask(deadline, self._env(), patient=patient)}
            else:
                answers = await self._ask_all(care)
        finally:
            self._previews.end()
            self._probed_at = self._clock()
        before = self._told or self._memory.remembered
        result = summarize(
            merge(
                [answer.devices for answer in answers.values()],
                priority=tuple(answers),
                hidden=frozenset[str]().union(*(answer.hidden for answer in answers.values())),
            ),
            [answer.report for answer in answers.values()],
            registry=str(self._memory.file.path),
        )
        result = carry_over(before, result)
        changed = self._tell(before, result)
        persisted = self._last.persisted if self._last else False
        if changed or not patient or not persisted or self._memory.unsaved:
            # Nobody who waits for the devices should be told late because a disk is slow: events are out already.
            persisted = await self._memory.store(result)
        measured = self._memory.topology(result.devices)
        result = result.model_copy(update={"persisted": persisted, "topology": measured})
        self._last, self._last_at = result, self._clock()
        return self._last

    async def _ask_all(self, care: Care) -> dict[str, BackendAnswer]:
        """Answers by backend, the preferred one first."""
        memory = self._memory
        names = self._backends or await backend_names(self._platform, self._env())
        if self._told is None:
            self._previews.begin(names, memory.stale())
        marks = await self._survey.marks(names)
        if care is Care.VERIFY:
            await memory.doubt(names)
        patient = care is Care.POLL
        waiting = {
            name: memory.answers[name]
            for name in names
            if patient and name in memory.answers and not memory.backoff.is_due(name, marks[name])
        }
        deadlines = {name: self._deadline(name) for name in names if name not in waiting}
        asked = await self._survey.ask(deadlines, self._env(), frozenset(memory.verified), memory.known, self._previews)
        memory.learn(asked, marks)
        return {name: waiting.get(name) or asked[name] for name in names}

    def _tell(self, before: DiscoveryResult | None, result: DiscoveryResult) -> bool:
        """Give subscribers the difference; whether there was one."""
        now = self._clock()
        hold = self._memory_told_at is not None and now - self._memory_told_at < MINOR_EVENTS_S
        events = diff(before, result, reason=self._memory.recovered_from)
        if hold:
            events = tuple(event for event in events if event.type is not EventType.MEMORY)
        elif any(event.type is EventType.MEMORY for event in events):
            self._memory_told_at = now
        self._told = settled(before, result, hold_memory=hold)
        for subscription in tuple(self._subscriptions):
            subscription.publish(events, since=before)
        return bool(events)

    def _deadline(self, name: str) -> float:
        if self._probe_timeout is not None:
            return self._probe_timeout
        known = self._memory.answers.get(name)
        return deadline_for(known.report if known else None)

    def _period(self, interval: float | None) -> float:
        period = self._interval if interval is None else interval
        if not period > 0:
            raise ValueError(f"interval must be a positive number of seconds, not {period!r}")
        return period

    def _env(self) -> Mapping[str, str]:
        return os.environ if self._environ is None else self._environ

    def _aged(self, result: DiscoveryResult) -> DiscoveryResult:
        return result.model_copy(update={"age_s": max(self._clock() - self._last_at, 0.0)})
