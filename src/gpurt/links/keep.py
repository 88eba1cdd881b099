"""Measured links in the registry file, read and written off the event loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from gpurt.errors import GPUError
from gpurt.registry.measured import MeasuredFile
from gpurt.registry.records import Link
from gpurt.runtime.lane import off_loop

_log = logging.getLogger("gpurt.links")


async def kept_links(registry_path: str | os.PathLike[str] | None = None) -> tuple[Link, ...]:
    """Every link that was measured on this host, the newest first; those of simulated devices come last.

    Devices that are not there any more are among them. Empty also where the file cannot be read, which is logged.
    """
    return await off_loop("links", lambda: MeasuredFile(registry_path).links())


async def keep_links(links: Iterable[Link], registry_path: str | os.PathLike[str] | None = None) -> bool:
    """Write links to the registry file; each replaces the last measurement of its ordered pair.

    False where that is not possible, which is logged and no error. Cancelled, it returns at once and is done or not.
    """
    measured = tuple(links)
    if not measured:
        return True
    try:
        await off_loop("links", lambda: MeasuredFile(registry_path).keep_links(measured))
    except (OSError, GPUError) as exc:
        _log.warning("the measured links are not kept: %s", exc)
        return False
    return True
