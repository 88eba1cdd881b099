"""Backends by name: built in, registered by code, or offered by other packages.

Names are looked up in this order: what :func:`register` was given, the built-in table, the entry points of group
``gpurt.backends``. A name costs nothing until it is used; only then is its module imported, on a lane of its own,
because an import of a vendor library takes a second and may hang.

What an entry point names is a callable without parameters that returns a :class:`~gpurt.backend.GPUBackend`, not
initialised, or a :class:`~gpurt.driver.Driver`. It may carry these attributes:

``api_version``
    Must equal :data:`gpurt.driver.API_VERSION` when present.
``platforms``
    Names of :func:`gpurt.platforms.current_platform` on which it works; all when absent.
``priority``
    Number; a higher one is tried first among the plug-ins of a host (default 0). They come after the backends
    that :data:`gpurt.platforms.PLATFORM_BACKEND_PRIORITY` lists, and before ``cpu``.
``install_hint``
    The command that installs what it needs, shown when it fails to load.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpurt.backend import GPUBackend
from gpurt.driver import API_VERSION, Driver
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.platforms import current_platform
from gpurt.printable import quoted
from gpurt.runtime.lane import Lane
from gpurt.runtime.turns import short_turns
from gpurt.settings import SelectionSettings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP: Final = "gpurt.backends"

BUILTIN_BACKENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # A table, not metadata: gpurt must work from a source tree that was never installed.
        "cpu": "gpurt.backends.cpu_backend:create",
        "cuda": "gpurt.backends.cuda_backend:create",
        "rocm": "gpurt.backends.rocm_backend:create",
        "metal": "gpurt.backends.metal_backend:create",
        "directml": "gpurt.backends.directml_backend:create",
        "vulkan": "gpurt.backends.vulkan_backend:create",
        "tflite": "gpurt.backends.tflite_gpu_backend:create",
        "opencl": "gpurt.backends.opencl_backend:create",
    }
)

_SIMULATED_HINT: Final = (
    "simulated devices are never chosen by name, lest they be taken for hardware; make them: "
    "async with gpurt.testing.create_simulated('h100x2') as backend"
)

BackendCreator = Callable[[], "GPUBackend | Driver"]

third_party_enabled: ContextVar[bool | None] = ContextVar("gpurt.third_party_enabled", default=None)
"""Whether entry points of other packages may be loaded in this context; None: as GPURT_PLUGINS of this process says,
which holds in a probe's process, too. The factory sets it from the environment that it was given; a context variable,
because the name alone passes through the factory's extension point."""

_log = logging.getLogger("gpurt.plugins")
_registered: dict[str, BackendCreator] = {}
_T = TypeVar("_T")


def check_name(name: object) -> str:
    """``name``, if it is a text.

    Raises:
        TypeError: it is not; the message says what is allowed.
    """
    if isinstance(name, str):
        return name
    raise TypeError(
        f"a backend is named by a text, such as {', '.join(map(repr, BUILTIN_BACKENDS))} or what a plug-in offers, "
        f"not by {quoted(repr(name))} of type {type(name).__name__}"
    )


def register(name: str, create: BackendCreator, *, replace: bool = False) -> None:
    """Make a backend known to this process under ``name``.

    Raises:
        ValueError: the name is taken and ``replace`` is not given, or it is not an identifier.
        TypeError: ``create`` cannot be called, or ``name`` is no text.
    """
    if not check_name(name).isidentifier() or name != name.lower():
        raise ValueError(f"backend name {name!r} must be a lower-case identifier")
    if not callable(create):
        raise TypeError(f"create must be callable without arguments, not {type(create).__name__}")
    if not replace and (name in _registered or name in BUILTIN_BACKENDS):
        raise ValueError(f"a backend named {name!r} exists already; pass replace=True to replace it")
    _registered[name] = create


def unregister(name: str) -> None:
    """Undo :func:`register`; a built-in backend of that name is back. Unknown names are ignored."""
    _registered.pop(name, None)


def known_names() -> tuple[str, ...]:
    """Every name that could be tried, sorted. Reads package metadata from disk: not on the event loop."""
    return tuple(sorted({*BUILTIN_BACKENDS, *_registered, *_entry_points()}))


async def create(name: str) -> GPUBackend:
    """A new, uninitialised backend of that name.

    Raises:
        BackendUnavailable: no such name, refused (``wrong_api``, ``wrong_platform``), or its module cannot be
            imported (``no_library``).
    """
    return await _on_lane(name, lambda: _create(name))


async def plugin_order(exclude: Iterable[str], deadline: float | None) -> tuple[str, ...]:
    """Names that are neither built in nor in ``exclude``, in the order in which to try them.

    Two or more have to be loaded, to know their priorities: at the same time, each on a lane of its own. What does
    not load within ``deadline`` seconds comes last.
    """
    skip = {*BUILTIN_BACKENDS, *exclude}
    names = [name for name in await _on_lane("names", known_names) if name not in skip]
    if len(names) < 2:
        return tuple(names)
    loads = {name: asyncio.ensure_future(_on_lane(name, lambda name=name: _priority(load(name)))) for name in names}
    try:
        await asyncio.wait(loads.values(), timeout=deadline)
    finally:
        for future in loads.values():
            future.cancel()
    return tuple(sorted(names, key=lambda name: (-_result_or_lowest(loads[name]), name)))


def load(name: str) -> BackendCreator:
    """The callable behind a name, checked. Imports: call it on a lane.

    Raises:
        BackendUnavailable: as :func:`create`.
    """
    create = _registered.get(name)
    if create is None and name in BUILTIN_BACKENDS:
        module, _, attribute = BUILTIN_BACKENDS[name].partition(":")
        create = _import(name, lambda: getattr(importlib.import_module(module), attribute))
    elif create is None:
        points = _entry_points()
        if name not in points:
            known = ", ".join(known_names())
            hint = _SIMULATED_HINT if name == "simulated" else f"choose one of {known}"
            text = f"there is no backend named {quoted(name)}"
            if not _third_party():
                text = f"{text}; those of other packages are switched off by GPURT_PLUGINS"
            raise BackendUnavailable(text, hint=hint)
        create = _import(name, points[name].load)
    _check(name, create)
    return create


def _create(name: str) -> GPUBackend:
    create = load(name)
    try:
        made = _guarded(create)
    except ImportError as exc:
        raise BackendUnavailable(
            str(exc),
            backend=name,
            reason=ReasonCode.NO_LIBRARY,
            install_hint=getattr(create, "install_hint", None),
        ) from exc
    if isinstance(made, Driver):
        from gpurt.runtime.backend import DriverBackend  # most plug-ins bring a backend and need no shell

        return DriverBackend(made)
    # A plug-in is foreign code: what it returned need not be what its annotation promises.
    if not isinstance(made, GPUBackend):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendUnavailable(
            f"create() of backend {name!r} returned {type(made).__name__}, not a GPUBackend or a Driver",
            backend=name,
            reason=ReasonCode.WRONG_API,
        )
    return made


def _entry_points() -> dict[str, EntryPoint]:
    """Third-party entry points by name; empty when they are switched off."""
    from importlib import metadata  # 30 ms, which a process that uses a listed backend need not pay

    points: dict[str, EntryPoint] = {}
    if not _third_party():
        return points
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name in BUILTIN_BACKENDS:
            if point.value != BUILTIN_BACKENDS[point.name]:
                _log.warning("entry point %r is ignored: the built-in %s backend wins", point.value, point.name)
        elif point.name in points and points[point.name].value != point.value:
            _log.warning("two packages offer a backend named %r; %r is ignored", point.name, point.value)
        else:
            points[point.name] = point
    return points


def _third_party() -> bool:
    enabled = third_party_enabled.get()
    return SelectionSettings.from_environ(os.environ).plugins if enabled is None else enabled


def _import(name: str, load: Callable[[], Any]) -> Any:
    try:
        return _guarded(load)
    except ImportError as exc:
        raise BackendUnavailable(
            f"its module cannot be loaded: {exc}", backend=name, reason=ReasonCode.NO_LIBRARY
        ) from exc
    except AttributeError as exc:
        # Not a library that is missing: the entry point is wrong, or another module of that name was found.
        raise BackendUnavailable(f"its entry point does not lead to it: {exc}", backend=name) from exc


def _guarded(call: Callable[[], _T]) -> _T:
    """Some modules end the process when they dislike it; a plug-in must not be able to."""
    try:
        return call()
    except (SystemExit, StopIteration) as exc:
        raise ImportError(f"raised {exc!r}") from exc


def _check(name: str, create: Any) -> None:
    hint = getattr(create, "install_hint", None)
    if not callable(create):
        raise BackendUnavailable(
            f"its entry point names a {type(create).__name__}, which cannot be called",
            backend=name,
            reason=ReasonCode.WRONG_API,
        )
    version = getattr(create, "api_version", API_VERSION)
    if version != API_VERSION:
        raise BackendUnavailable(
            f"built for version {version} of gpurt's backend interface; this gpurt has version {API_VERSION}",
            backend=name,
            reason=ReasonCode.WRONG_API,
            install_hint=hint,
        )
    platforms = getattr(create, "platforms", None)
    here = current_platform()
    if platforms is not None and here not in platforms:
        raise BackendUnavailable(
            f"works on {', '.join(platforms)}, not on {here}", backend=name, reason=ReasonCode.WRONG_PLATFORM
        )


def _priority(create: Any) -> float:
    return float(getattr(create, "priority", 0))


def _result_or_lowest(load: asyncio.Future[float]) -> float:
    # A load that failed is reported when its turn comes, with its reason.
    if load.done() and not load.cancelled() and load.exception() is None:
        return load.result()
    return float("-inf")


async def _on_lane(name: str, call: Callable[[], _T]) -> _T:
    """Run a call that may import, on a thread that a hanging import can keep."""

    def loading() -> _T:
        with short_turns():
            return call()

    lane = Lane(f"gpurt:load:{name}")
    try:
        return await asyncio.wrap_future(lane.submit(loading))
    finally:
        lane.stop()
