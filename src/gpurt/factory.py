"""Choosing a backend: by name, or the first of the platform's list that has a usable device.

Asking for a backend by name (argument, :meth:`~GPUBackendFactory.set_backend_override`, ``GPURT_BACKEND``, in this
order) gives that backend or raises :class:`~gpurt.errors.BackendUnavailable`; it never becomes another one
silently. Automatic choice tries the list of the platform, keeps a :class:`~gpurt.types.BackendReport` of every
refusal and ends at ``cpu``, unless ``GPURT_FALLBACK=0``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final

from gpurt import plugins
from gpurt.aggregates import get_peak_flops, get_total_gpu_memory
from gpurt.attempt import Attempt, attempt, close, message_of, reason_of
from gpurt.backend import GPUBackend
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.limits import MemoryLimit, limit_memory, memory_limit
from gpurt.platforms import PLATFORM_BACKEND_PRIORITY, Platform, current_platform
from gpurt.settings import SelectionSettings, canonical_name
from gpurt.types import BackendReport, GPUDevice

__all__ = [
    "DEFAULT_DEADLINE_S",
    "PLATFORM_BACKEND_PRIORITY",
    "GPUBackendFactory",
    "clear_backend_override",
    "create_backend",
    "detect_available_backends",
    "get_gpu_backend_info",
    "get_peak_flops",
    "get_total_gpu_memory",
    "last_reports",
    "register",
    "set_backend_override",
]

DEFAULT_DEADLINE_S: Final = 30.0
"""Seconds for one backend to import its library and initialise: a cold CUDA start has been seen to take over 10."""

_log = logging.getLogger("gpurt.factory")


class GPUBackendFactory:
    """Makes initialised backends. Nothing here belongs to an event loop; there is no instance.

    A subclass may override :meth:`_create_specific_backend` to know more names; most code calls :meth:`register`.
    """

    _override: ClassVar[str | None] = None
    _reports: ClassVar[tuple[BackendReport, ...]] = ()

    @classmethod
    async def create_backend(
        cls,
        name: str | None = None,
        *,
        candidates: Sequence[str] | None = None,
        fallback: bool | None = None,
        environ: Mapping[str, str] | None = None,
        deadline: float | None = DEFAULT_DEADLINE_S,
    ) -> GPUBackend:
        """An initialised backend with at least one usable device. The caller shuts it down.

        Args:
            name: this backend, or an error.
            candidates: automatic choice among these, in this order, instead of the platform's list and plug-ins.
            fallback: whether ``cpu`` may be what automatic choice ends at; None asks ``GPURT_FALLBACK``. True
                together with a name means: ``cpu`` when that backend is unavailable, with a warning in the log.
            environ: stands in for ``os.environ``. ``GPURT_MEMORY_LIMIT`` limits what may be allocated on each device.
            deadline: seconds for each backend; one that hangs is left behind and the next is tried.

        Cancelling closes what was opened.

        Raises:
            BackendUnavailable: that backend, or every candidate, refused; all reasons are in the message and in
                :meth:`last_reports`.
            GPUError: an environment variable has a value that is not allowed.
            TypeError: a name is no text, or ``candidates`` is one.
            ValueError: ``deadline`` is not positive.
        """
        if name is not None:
            plugins.check_name(name)
        if candidates is not None:
            if isinstance(candidates, str):
                raise TypeError(f"candidates must be a sequence of names, such as [{candidates!r}], not a text")
            candidates = [plugins.check_name(candidate) for candidate in candidates]
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline must be positive seconds or None, not {deadline!r}")
        env = os.environ if environ is None else environ
        settings = SelectionSettings.from_environ(env)
        search = _Search(cls, settings, deadline, memory_limit(env))
        chosen, source = cls._forced(name, settings)
        try:
            if chosen is not None:
                backend = await search.first([chosen], allow_software=True)
                if backend is None and fallback is True and chosen != "cpu":
                    _log.warning("%s is unavailable, falling back to cpu: %s", chosen, search.reports[-1].message)
                    backend = await search.first(["cpu"])
                if backend is None:
                    why = f"it was chosen by {source}, so nothing else was tried"
                    raise _unavailable(chosen, search.failures[0], why, search.reports[0].hint)
                return backend
            allow_cpu = settings.fallback if fallback is None else fallback
            if candidates is not None:
                names = [canonical_name(candidate) for candidate in candidates]
                backend = await search.first(names if allow_cpu else _without_cpu(names))
            else:
                backend = await search.automatic(current_platform(environ=env), allow_cpu)
            if backend is None:
                raise _nothing_left(search, allow_cpu)
            return backend
        finally:
            GPUBackendFactory._reports = tuple(search.reports)

    @classmethod
    async def _create_specific_backend(cls, name: str) -> GPUBackend:
        """Make the backend ``name``; it need not be initialised yet. The classic extension point.

        Raises:
            BackendUnavailable: no such name, or its code cannot be loaded.
        """
        return await plugins.create(name)

    @classmethod
    def set_backend_override(cls, name: str) -> None:
        """Make ``name`` the only choice of this process, until :meth:`clear_backend_override`.

        Whether it can be used is found out by :meth:`create_backend`.
        """
        if not plugins.check_name(name).strip():
            raise ValueError("the backend name is empty; clear_backend_override() restores automatic choice")
        GPUBackendFactory._override = canonical_name(name)

    @classmethod
    def clear_backend_override(cls) -> None:
        """Back to the environment's choice, or to automatic choice."""
        GPUBackendFactory._override = None

    @classmethod
    def register(cls, name: str, create: plugins.BackendCreator, *, replace: bool = False) -> None:
        """Make a backend known under ``name``: see :func:`gpurt.plugins.register`.

        It is tried just before ``cpu``, or where ``PLATFORM_BACKEND_PRIORITY`` lists it.
        """
        plugins.register(name, create, replace=replace)

    @classmethod
    def last_reports(cls) -> tuple[BackendReport, ...]:
        """What came of each backend tried by the latest ``create_backend`` or detection, in order of trial."""
        return GPUBackendFactory._reports

    @classmethod
    async def detect_available_backends(
        cls, *, environ: Mapping[str, str] | None = None, deadline: float | None = DEFAULT_DEADLINE_S
    ) -> list[str]:
        """Names of all backends of this platform that have a usable device, in order of preference, ``cpu`` last.

        Opens each in this process and shuts it down again, also when cancelled. A forced choice does not narrow
        the list.

        Raises:
            BackendUnavailable: not even ``cpu`` works, so the installation is broken.
        """
        return list(await cls.get_gpu_backend_info(environ=environ, deadline=deadline))

    @classmethod
    async def get_gpu_backend_info(
        cls, *, environ: Mapping[str, str] | None = None, deadline: float | None = DEFAULT_DEADLINE_S
    ) -> dict[str, list[GPUDevice]]:
        """The devices of every available backend, keyed and ordered as :meth:`detect_available_backends`.

        One physical device appears under each backend that shows it; discovery merges them.
        """
        env = os.environ if environ is None else environ
        search = _Search(cls, SelectionSettings.from_environ(env), deadline, memory_limit(env))
        info: dict[str, list[GPUDevice]] = {}
        try:
            before, after = _around_plugins(PLATFORM_BACKEND_PRIORITY[current_platform(environ=env)])
            extra = await search.plugin_order((*before, *after))
            for name in [*_without_cpu([*before, *extra, *after]), "cpu"]:
                result = await search.attempt(name)
                if result.backend is not None:
                    info[name] = list(result.devices)
                    await close(None, [result.backend])
        finally:
            GPUBackendFactory._reports = tuple(search.reports)
        if "cpu" not in info:
            why = "it is the last resort, so this installation is broken"
            raise _unavailable("cpu", search.failures[-1], why, search.reports[-1].hint)
        return info

    @classmethod
    def _forced(cls, name: str | None, settings: SelectionSettings) -> tuple[str | None, str]:
        if name is not None:
            return canonical_name(name), "the caller"
        if cls._override is not None:
            return cls._override, "set_backend_override()"
        return settings.backend, settings.backend_source or ""


class _Search:
    """Attempts in order, and what came of them."""

    def __init__(
        self,
        factory: type[GPUBackendFactory],
        settings: SelectionSettings,
        deadline: float | None,
        limit: MemoryLimit | None,
    ) -> None:
        self.reports: list[BackendReport] = []
        self.failures: list[Exception] = []
        self._factory = factory
        self._plugins = settings.plugins
        self._deadline = deadline
        self._memory_limit = limit

    async def automatic(self, platform: Platform, allow_cpu: bool) -> GPUBackend | None:
        before, after = _around_plugins(PLATFORM_BACKEND_PRIORITY[platform])
        backend = await self.first(before)
        if backend is None:
            # Only now: reading package metadata costs milliseconds, loading two plug-ins may cost seconds.
            backend = await self.first(await self.plugin_order((*before, *after)))
        if backend is None:
            backend = await self.first(after if allow_cpu else _without_cpu(after))
        return backend

    async def first(self, names: Iterable[str], *, allow_software: bool = False) -> GPUBackend | None:
        for name in names:
            result = await self.attempt(name, allow_software=allow_software)
            if result.backend is not None:
                return result.backend
        return None

    async def attempt(self, name: str, *, allow_software: bool = False) -> Attempt:
        result = await attempt(name, self._create, deadline=self._deadline, allow_software=allow_software)
        self.reports.append(result.report)
        if result.error is not None:
            self.failures.append(result.error)
            _log.info("backend %s refused (%s): %s", name, result.report.reason, result.report.message)
        else:
            _log.info("backend %s opened: %s", name, ", ".join(result.report.device_ids))
        return result

    async def plugin_order(self, exclude: Iterable[str]) -> tuple[str, ...]:
        token = plugins.third_party_enabled.set(self._plugins)
        try:
            return await plugins.plugin_order(exclude, self._deadline)
        finally:
            plugins.third_party_enabled.reset(token)

    async def _create(self, name: str) -> GPUBackend:
        plugins.third_party_enabled.set(self._plugins)  # for this attempt's task, which ends with it
        backend = await self._factory._create_specific_backend(name)  # pyright: ignore[reportPrivateUsage]
        limit_memory(backend, self._memory_limit)
        return backend


def _around_plugins(listed: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is tried before the plug-ins, and what after: they go just before ``cpu``."""
    split = listed.index("cpu") if "cpu" in listed else len(listed)
    return list(listed[:split]), list(listed[split:])


def _without_cpu(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != "cpu"]


def _unavailable(name: str, error: Exception, consequence: str, hint: str | None) -> BackendUnavailable:
    failure = BackendUnavailable(
        f"{message_of(error)}; {consequence}",
        backend=name,
        reason=reason_of(error),
        install_hint=getattr(error, "install_hint", None),
        hint=hint,
        code=getattr(error, "code", None),
    )
    failure.__cause__ = error
    return failure


def _nothing_left(search: _Search, allow_cpu: bool) -> BackendUnavailable:
    tried = "; ".join(f"{report.name} ({report.reason}): {report.message}" for report in search.reports)
    hints = [report.hint for report in search.reports if report.hint]
    if not allow_cpu:
        hints.append("allow the CPU by GPURT_FALLBACK=1 or fallback=True")
    reasons = {report.reason for report in search.reports}
    failure = BackendUnavailable(
        f"no backend can be used: {tried or 'there was no candidate'}",
        reason=next(iter(reasons)) or ReasonCode.ERROR if len(reasons) == 1 else ReasonCode.ERROR,
        hint="; ".join(hints) or None,
    )
    if search.failures:
        failure.__cause__ = ExceptionGroup("what each backend said", search.failures)
    return failure


create_backend = GPUBackendFactory.create_backend
set_backend_override = GPUBackendFactory.set_backend_override
clear_backend_override = GPUBackendFactory.clear_backend_override
register = GPUBackendFactory.register
last_reports = GPUBackendFactory.last_reports
detect_available_backends = GPUBackendFactory.detect_available_backends
get_gpu_backend_info = GPUBackendFactory.get_gpu_backend_info
