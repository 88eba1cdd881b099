"""Asking every backend of this host at once. Each costs at most its own deadline, and none can harm another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from gpurt import plugins
from gpurt.discovery.assemble import BackendAnswer, assemble, unavailable
from gpurt.discovery.conversation import Sighted
from gpurt.discovery.gate import gate
from gpurt.discovery.in_place import InPlaceProber
from gpurt.discovery.probe import has_child_processes
from gpurt.discovery.remembered import Remembered, refreshed, worth_remembering
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import ReasonCode
from gpurt.platforms import PLATFORM_BACKEND_PRIORITY, Platform
from gpurt.runtime.lane import off_loop
from gpurt.settings import SelectionSettings
from gpurt.sources.pci import BACKEND_VENDORS, NVIDIA, has_pci_vendor
from gpurt.types import GPUDevice
from gpurt.visibility.variables import CUDA_VISIBLE_DEVICES

PLUGIN_LOAD_DEADLINE_S: Final = 5.0
"""Plug-ins are only loaded here to learn their priorities, and only where there are two or more."""

_log = logging.getLogger("gpurt.discovery")


class Prober(Protocol):
    """:class:`gpurt.discovery.probe.ChildProber`, or a stand-in."""

    async def probe(
        self,
        name: str,
        *,
        deadline: float,
        environ: Mapping[str, str],
        verified: Set[str] = frozenset(),
        known: Set[str] = frozenset(),
        on_sighted: Sighted | None = None,
    ) -> ProbeOutcome: ...


class Progress(Protocol):
    """Hears of a survey while it goes on, on its event loop."""

    def sighted(self, name: str, devices: Sequence[GPUDevice]) -> None: ...

    def answered(self, name: str, answer: BackendAnswer) -> None: ...


async def backend_names(platform: Platform, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Backends to ask on this platform: its priority list with plug-ins just before ``cpu``, and before them what
    GPURT_BACKEND names.

    Raises:
        GPUError: GPURT_PLUGINS has a value that is not allowed.
    """
    settings = SelectionSettings.from_environ(environ)
    listed = PLATFORM_BACKEND_PRIORITY[platform]
    if settings.backend is not None and settings.backend not in listed:
        listed = (settings.backend, *listed)
    token = plugins.third_party_enabled.set(settings.plugins)
    try:
        extra = await plugins.plugin_order(listed, PLUGIN_LOAD_DEADLINE_S)
    finally:
        plugins.third_party_enabled.reset(token)
    return (*(name for name in listed if name != "cpu"), *extra, "cpu")


class Survey:
    """Gate and probes of one service.

    Args:
        prober: runs the probes that need a process of their own.
        root: where ``/dev`` and ``/sys`` are found.
    """

    def __init__(self, prober: Prober, platform: Platform, *, root: Path = Path("/")) -> None:
        self._prober = prober
        self._in_place = InPlaceProber()
        self._platform: Platform = platform
        self._root = root

    async def ask(
        self,
        deadlines: Mapping[str, float],
        environ: Mapping[str, str],
        verified: Set[str],
        remembered: Mapping[str, Sequence[Remembered]] = MappingProxyType({}),
        progress: Progress | None = None,
        by_name: Set[str] = frozenset(),
    ) -> dict[str, BackendAnswer]:
        """Ask the backends named in ``deadlines`` (seconds) at once; every one of them has an answer.

        Args:
            verified: keys of devices that need no verification.
            remembered: by backend, answers that still hold if their signature does.
            progress: told of what is known before all have answered.
            by_name: backends that somebody has asked for by name: their software devices may be used.
        """
        registered = _registered_names()
        refused = await off_loop(
            "gate", lambda: self._gate([name for name in deadlines if name not in registered], environ)
        )
        if progress is not None:
            for name in refused:
                progress.answered(name, unavailable(name, refused[name], self._platform))

        async def ask(name: str) -> BackendAnswer:
            known, here = remembered.get(name, ()), name in registered
            asked_for = name in by_name
            answer = await self._probe(name, deadlines[name], environ, verified, known, here, progress, asked_for)
            if progress is not None:
                progress.answered(name, answer)
            return answer

        async with asyncio.TaskGroup() as group:
            asked = {name: group.create_task(ask(name)) for name in deadlines if name not in refused}
        return {
            name: unavailable(name, refused[name], self._platform) if name in refused else asked[name].result()
            for name in deadlines
        }

    async def marks(self, names: Sequence[str]) -> dict[str, str]:
        """What is installed for each backend (:mod:`gpurt.discovery.installed`)."""

        def read() -> dict[str, str]:
            from gpurt.discovery.installed import installed_mark  # here, off the loop and beside the child's start

            return {name: installed_mark(name, root=self._root) for name in names}

        return await off_loop("installed", read)

    def _gate(self, names: Sequence[str], environ: Mapping[str, str]) -> dict[str, Failure]:
        found = ((name, gate(name, platform=self._platform, root=self._root, environ=environ)) for name in names)
        return {name: failure for name, failure in found if failure is not None}

    async def _probe(
        self,
        name: str,
        deadline: float,
        environ: Mapping[str, str],
        verified: Set[str],
        remembered: Sequence[Remembered],
        registered: bool,
        progress: Progress | None,
        by_name: bool,
    ) -> BackendAnswer:
        known = frozenset(each.signature for each in remembered)
        # The CPU backend has no vendor library that could hang or crash: a process for it would be a waste. What
        # code has registered in this process no other process knows.
        if name == "cpu" or registered or not has_child_processes(self._platform):
            outcome = await self._in_place.probe(name, deadline=deadline, verified=verified, known=known)
        else:
            see = None if progress is None else partial(progress.sighted, name)
            outcome = await self._prober.probe(
                name, deadline=deadline, environ=environ, verified=verified, known=known, on_sighted=see
            )
        unchanged = outcome.unchanged
        if unchanged:
            outcome = await _recall(name, outcome, remembered)
        on_bus = None
        if outcome.failure is not None:
            _log.info("backend %s: %s: %s", name, outcome.failure.reason, outcome.failure.message)
            on_bus = await self._has_vendor(BACKEND_VENDORS.get(name))
        # HIP obeys CUDA's variable, but where there is a card of NVIDIA's nobody has meant AMD's by it.
        ambiguous = name == "rocm" and CUDA_VISIBLE_DEVICES in environ and bool(outcome.sighted)
        nvidia = ambiguous and await self._has_vendor(NVIDIA) is True
        answer = assemble(
            name,
            outcome,
            environ=environ,
            platform=self._platform,
            on_bus=on_bus,
            nvidia_present=nvidia,
            by_name=by_name,
        )
        if unchanged:
            return replace(answer, unchanged=outcome.failure is None)
        return replace(answer, remember=worth_remembering(name, outcome, answer))

    async def _has_vendor(self, vendor: str | None) -> bool | None:
        """Whether the PCI bus shows a device of that vendor; None when nobody knows, or of no vendor."""
        if vendor is None:
            return None
        # In WSL the GPU is Windows', and on no bus.
        wsl = self._root / "dev/dxg"
        return await off_loop("pci", lambda: None if wsl.exists() else has_pci_vendor(self._root, vendor))


async def _recall(name: str, outcome: ProbeOutcome, remembered: Sequence[Remembered]) -> ProbeOutcome:
    """The outcome of a probe that found nothing changed: what was verified then, with the figures of now."""
    devices = next((each.devices for each in remembered if each.signature == outcome.signature), ())
    fresh = await off_loop("recall", lambda: refreshed(name, devices, outcome.sighted)) if devices else None
    if fresh is None:
        failure = Failure(ReasonCode.ERROR, "the probe found nothing changed, but nothing is known of before")
        return replace(outcome, unchanged=False, failure=failure)
    return replace(outcome, unchanged=False, verified=fresh)


def _registered_names() -> frozenset[str]:
    """Names that ``plugins.register`` was given, replaced built-in ones included."""
    return frozenset(plugins._registered)  # pyright: ignore[reportPrivateUsage]
