"""What ``discover`` refuses or warns of before it looks: paths that can be no file, variables that do nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from gpurt.errors import GPUError
from gpurt.printable import printable

_log = logging.getLogger("gpurt.discovery")


def check_registry(text: str) -> None:
    """Refuse what can never be a file. A directory that does not exist yet is made, but none above it.

    Raises:
        GPUError: it is no path, or a directory, or has none to be in.
    """
    if not text.strip() or "\0" in text:
        raise GPUError(f"--registry {text!r} is not a path", hint="name a file")
    path = Path(text)
    if path.is_dir():
        raise GPUError(f"--registry {text} is a directory", hint=f"name a file, e.g. {path / 'registry.json'}")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise GPUError(f"--registry {text}: {existing} is not a directory", hint="name a file in a directory")
    directory = path.absolute().parent
    if not directory.parent.is_dir():
        raise GPUError(
            f"--registry {text}: the directory {directory.parent} does not exist", hint=f"mkdir -p {directory}"
        )


def warn_of_unknown_choice() -> None:
    """Discovery asks every backend whatever GPURT_BACKEND says; what comes after it would fail."""
    from gpurt.settings import SelectionSettings

    settings = SelectionSettings.from_environ(os.environ)
    if settings.backend is None:
        return
    from gpurt.plugins import known_names  # half of a quick answer is imports: only where it is needed

    known = known_names()
    if settings.backend not in known:
        _log.warning(
            "%s names no backend, so create_backend() will fail; choose one of %s",
            printable(settings.backend_source or ""),
            ", ".join(known),
        )


def warn_of_unknown_variables() -> None:
    """A limit with a letter missing in its name is no limit, and nobody would notice."""
    from gpurt.doctor.variables import unknown_variables

    for name, meant in unknown_variables(os.environ).items():
        if meant is not None:
            _log.warning("%s is no variable of gpurt's and does nothing; %s is one", name, meant)


def check_variables_beside_a_recording() -> None:
    """They do nothing there, so nobody would notice that one of them cannot be understood, or is not used.

    Raises:
        GPUError: one has a value that is not allowed.
    """
    from gpurt.health.policy import THERMAL_VARIABLE, XIDS_VARIABLE, HealthPolicy
    from gpurt.settings import SelectionSettings
    from gpurt.usable_memory import LIMIT_VARIABLE, RESERVE_VARIABLE, MemorySettings

    for settings in (MemorySettings, HealthPolicy, SelectionSettings):
        settings.from_environ(os.environ)
    for name in (LIMIT_VARIABLE, RESERVE_VARIABLE, THERMAL_VARIABLE, XIDS_VARIABLE):
        if os.environ.get(name):
            _log.warning("%s is set here and does nothing: of a recording its own environment counts", name)
