"""GPUDiscoveryService: what accelerators there are, kept up to date."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from gpurt.backend import GPUBackend
from gpurt.discovery.aliases import recognised
from gpurt.discovery.audience import Audience
from gpurt.discovery.budget import MemoryBudget
from gpurt.discovery.events import diff, settled
from gpurt.discovery.given import GivenBackend
from gpurt.discovery.health import DeviceHealth
from gpurt.discovery.lookup import Lookup
from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.merge import merge
from gpurt.discovery.pace import Care, Pace
from gpurt.discovery.patience import Patience
from gpurt.discovery.preview import Previews
from gpurt.discovery.probe import ChildProber
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.result import DiscoveryResult, summarize
from gpurt.discovery.singleflight import SingleFlight
from gpurt.discovery.standing import Standing
from gpurt.discovery.subscription import Subscription
from gpurt.discovery.survey import Prober, Survey
from gpurt.errors import BackendClosed
from gpurt.health.monitor import Transition
from gpurt.health.policy import HealthPolicy
from gpurt.hotchange import Cause, HotChangeWatcher
from gpurt.platforms import Platform, current_platform
from gpurt.settings import canonical_name
from gpurt.types import DeviceState

SHUTDOWN_WAIT_S: Final = 0.9

_log = logging.getLogger("gpurt.discovery")


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
        environ: the environment of the probes, in place of ``os.environ``; memory limits and what condemns a device
            are read from it, too.
        clock: seconds, monotonic.
        prober: in place of child processes.
        root: the directory under which ``/dev``, ``/proc``, ``/sys`` and ``/etc`` are found.

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
        root: Path = Path("/"),
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
        names = None if backends is None else tuple(dict.fromkeys(map(canonical_name, backends)))
        self._interval = interval
        self._environ = environ
        platform: Platform = current_platform(environ=environ)
        given = GivenBackend(source, platform, clock) if isinstance(source, GPUBackend) else None
        self.health = DeviceHealth(lambda: HealthPolicy.from_environ(self._env()), clock)
        """What is believed of devices beyond one look-up."""
        self._memory = DiscoveryMemory(
            RegistryFile(registry_path),
            clock,
            health=self.health,
            root=root,
            given=given.devices if given else None,
        )
        self._previews = Previews()
        self._lookup = Lookup(
            Survey(prober or ChildProber(), platform, root=root),
            self._memory,
            self._previews,
            platform,
            given=given,
            names=names,
            probe_timeout=probe_timeout,
            environ=self._env,
            root=root,
        )
        self._budget = MemoryBudget(root)
        self._pace = Pace(clock)
        self._reading = Patience(f"the registry {self._memory.file.path}")
        self._writing = Patience(f"the registry {self._memory.file.path}")
        self._watcher = HotChangeWatcher(self._changed, root=root, wanted=self._has_listeners)
        self._flight = SingleFlight[DiscoveryResult]()
        self._audience = Audience(clock)
        self._standing = Standing(self._memory, self.health, self._audience, clock)
        self._watching = 0
        self._stop: asyncio.Event | None = None

    async def discover_all_devices(
        self,
        refresh: bool = True,
        *,
        verify: bool = False,
        patient: bool = False,
        on_preview: Callable[[DiscoveryResult], None] | None = None,
    ) -> DiscoveryResult:
        """Look up all devices now; callers at the same time share one look-up.

        Devices that passed verification before are not opened again while nothing that they rest on has changed
        (:mod:`gpurt.discovery.signature`): their health and memory are NVML's and the system's of now.

        Args:
            refresh: False gives the last result of this service if there is one.
            verify: forget what was verified before, open every driver and read back from every device.
            patient: leave backends alone that could not be used a short time ago, as ``watch`` does; after a restart
                those that hung or crashed. For programs that are started again when they end.
            on_preview: called once at most, and never after this call has ended. Only if this service has no result
                yet: at once with what the registry remembers (``stale``). Where it remembers no device: with what is
                known while drivers are still being opened (``preview``), 0.05 s after the first card is seen that
                nobody has opened, else 0.8 s after the start. Not called at all where every backend has answered by
                then, as on a machine without a GPU: the result itself is there.

        Ends within the probe timeout plus one second, or plus twelve where the registry's disk does not answer.
        Backends that fail are in ``reports``, not raised. Cancelling the last caller kills the probes.

        Raises:
            BackendClosed: ``shutdown`` was called meanwhile.
            GPUError: an environment variable has a value that is not allowed.
        """
        if not refresh and not verify and (last := self._standing.last()) is not None:
            return last
        care = Care.VERIFY if verify else Care.POLL if patient else Care.ASK
        with self._previews.wanted(on_preview):
            return await self._flight.run(lambda: self._discover(care), thorough=care)

    async def cached(self) -> DiscoveryResult | None:
        """What is known without looking: the last result, else the registry's, marked ``stale``; or None."""
        if (last := self._standing.last()) is not None:
            return last
        await self.load()
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
        self._watching += 1
        try:
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
                if not stop.is_set():
                    await self._pace.rest(period)
        finally:
            self._watching -= 1

    def subscribe(self, interval: float | None = None, *, max_events: int = 1024) -> Subscription:
        """An async iterator of :class:`~gpurt.discovery.events.DeviceEvent`.

        Begins with a ``snapshot``: at once of what was known before (the registry's may be ``stale``), else of the
        first answer, and where that takes long, of a ``preview`` before it. Then come changes. A subscriber that
        leaves more than ``max_events`` unread gets a new snapshot instead of them.
        """
        if max_events < 1:
            raise ValueError(f"max_events must be positive, not {max_events}")
        period = self._period(interval)

        subscription = Subscription(
            self._poll, lambda: self._pace.seconds_left(period), lambda: self._audience.told, max_events
        )
        self._audience.add(subscription)
        return subscription

    async def load(self) -> None:
        """Read what the registry remembers, health included; does nothing when that has been done.

        Raises:
            GPUError: an environment variable has a value that is not allowed.
        """
        await self._reading.wait(self._memory.load)

    def look_soon(self, *, verify: bool = False) -> None:
        """Something has changed: whoever watches or subscribes looks up now instead of at the next interval.

        Args:
            verify: believe nothing that was verified before, as after the machine has slept.
        """
        self._pace.want(Care.VERIFY if verify else Care.ASK)
        self._audience.wake()

    async def read_measurements(self) -> None:
        """Read from the registry what was measured of devices and links meanwhile, and look up soon, which tells it."""
        await self.load()
        await self._reading.wait(self._memory.read_measurements)
        self.look_soon()

    def take_health(self, transition: Transition) -> None:
        """Tell subscribers at once what :attr:`health` has come to believe of a device. On the event loop."""
        self._standing.took_health(transition)
        if transition.state is not DeviceState.HEALTHY:
            # What else is wrong with it, and whether others are concerned, a look-up tells; it also writes the file.
            self.look_soon()

    async def shutdown(self) -> None:
        """Kill running probes and end all iterators. Idempotent; takes under one second."""
        began = time.monotonic()
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        self._watcher.close()
        self._pace.wake()
        self._audience.close()
        await self._flight.stop(SHUTDOWN_WAIT_S)
        self._reading.give_up()
        self._writing.give_up()
        try:
            async with asyncio.timeout(max(SHUTDOWN_WAIT_S - (time.monotonic() - began), 0.0)):
                await self._memory.save_health()
        except TimeoutError:
            _log.warning("the registry %s does not know the last changes of health", self._memory.file.path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _poll(self) -> DiscoveryResult:
        self._watcher.start()
        care = self._pace.care
        with self._previews.wanted(self._audience.preview):
            return await self._flight.run(lambda: self._discover(care), thorough=care)

    async def _discover(self, care: Care) -> DiscoveryResult:
        self._pace.begin(care)
        complete = False
        try:
            await self.load()
            answers = await self._lookup.ask(care, first=self._audience.told is None)
            merged = merge(
                [answer.devices for answer in answers.by_backend.values()],
                priority=tuple(answers.by_backend),
                hidden=frozenset[str]().union(*(answer.hidden for answer in answers.by_backend.values())),
            )
            known = self._standing.seen
            devices = await self._budget.apply(recognised(merged, known.devices if known else ()), self._env())
            devices = self._memory.with_speeds(devices)
            complete = True
        finally:
            self._previews.end()
            self._pace.ended(complete=complete)
        reports = [answer.report for answer in answers.by_backend.values()]
        seen = summarize(devices, reports, registry=str(self._memory.file.path))
        persisted = self._standing.persisted
        result, changed = self._standing.found(seen, answers.asked)
        if changed or care is not Care.POLL or not persisted or self._memory.unsaved:
            # Nobody who waits for the devices should be told late because a disk is slow: events are out already.
            persisted = await self._writing.wait(lambda: self._memory.store(result)) or False
        return self._standing.stored(persisted)

    def _changed(self, causes: frozenset[Cause]) -> None:
        self.look_soon(verify=Cause.RESUMED in causes)

    def _has_listeners(self) -> bool:
        return bool(self._watching or self._audience)

    def _period(self, interval: float | None) -> float:
        period = self._interval if interval is None else interval
        if not period > 0:
            raise ValueError(f"interval must be a positive number of seconds, not {period!r}")
        return period

    def _env(self) -> Mapping[str, str]:
        return os.environ if self._environ is None else self._environ
