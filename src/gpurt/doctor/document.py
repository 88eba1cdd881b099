"""Everything that a bug report needs, as one JSON document in one file."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gpurt.discovery.result import DiscoveryResult
from gpurt.doctor.explain import explain
from gpurt.doctor.packages import packages
from gpurt.doctor.registry import registry_health
from gpurt.doctor.system import system
from gpurt.errors import GPUError
from gpurt.platforms import current_platform
from gpurt.recording.environment import allowed
from gpurt.recording.mask import Masker, host_masker
from gpurt.recording.place import place_of
from gpurt.runtime.lane import off_loop

SCHEMA_VERSION: Final = 1

Discover = Callable[[], Awaitable[DiscoveryResult]]


def default_name(now: datetime | None = None) -> str:
    """``gpurt-doctor-2026-11-28.json``, by the local date."""
    return f"gpurt-doctor-{now or datetime.now():%Y-%m-%d}.json"


async def examine_host(
    discover: Discover, *, environ: Mapping[str, str], registry: Path | None = None, root: Path = Path("/")
) -> dict[str, Any]:
    """The document, unmasked.

    Args:
        discover: looks up devices; what it raises is in the document, for that may be what the report is about.
        environ: of it only allow-listed variables are in the document.
        registry: the registry file; None is the usual one.
        root: where ``/proc``, ``/sys`` and ``/dev`` are found.
    """
    began = time.monotonic()
    result: DiscoveryResult | None = None
    failure: Exception | None = None
    try:
        result = await discover()
    except Exception as exc:
        failure = exc
    elapsed_ms = round((time.monotonic() - began) * 1000, 1)
    platform = current_platform(environ=environ)

    def read() -> dict[str, Any]:
        from gpurt import __version__  # read from the metadata of what is installed

        explained = () if result is None else explain(result, environ, platform, place=place_of(root))
        return {
            "gpurt": __version__,
            "discovery": _failed(failure) if result is None else result.document(),
            "explanations": [each.record() for each in explained],
            "system": system(root),
            "packages": packages(),
            "registry": registry_health(registry),
        }

    document: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "masked": False,
        "environment": allowed(environ),
        "timings_ms": {
            "discovery": elapsed_ms,
            "probes": {} if result is None else {report.name: report.elapsed_ms for report in result.reports},
        },
    }
    return document | await off_loop("doctor", read)


def _failed(exc: Exception | None) -> dict[str, Any]:
    lines = "".join(traceback.format_exception(exc)).splitlines()
    return {"error": f"{type(exc).__name__}: {exc}", "traceback": lines}


def masked(document: Mapping[str, Any], masker: Masker | None = None) -> dict[str, Any]:
    """``document`` with pseudonyms in place of what tells whose machine it is. Blocking.

    Args:
        masker: None is one that knows the names of this host and its user.
    """
    masker = masker or host_masker()
    # Versions of packages with four parts look like addresses; only what is a secret elsewhere is one there.
    masker.learn({key: value for key, value in document.items() if key != "packages"})
    return masker.mask({**document, "masked": True})


def check_new(path: Path) -> None:
    """
    Raises:
        GPUError: there is something of that name already, or no directory for it.
    """
    if os.path.lexists(path):
        raise GPUError(f"{path} exists already", hint="name another file, or remove it first")
    if not path.absolute().parent.is_dir():
        raise GPUError(f"the directory of {path} does not exist", hint=f"mkdir -p {path.absolute().parent}")


def write_new(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` to a new file that only its owner may read. Blocking.

    Raises:
        GPUError: there is something of that name already, or it cannot be written.
    """
    text = json.dumps(document, indent=1, allow_nan=False)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as exc:
        raise GPUError(f"{path} exists already", hint="name another file, or remove it first") from exc
    except OSError as exc:
        raise GPUError(f"{path} cannot be made: {exc.strerror}", hint="name a file in a directory of yours") from exc
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
