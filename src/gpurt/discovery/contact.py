"""The part of a probe that touches the backend's library: load, open, verify, close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from typing import Any

from gpurt.backend import GPUBackend
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.verify import verify_backend, verify_driver
from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.plugins import load

Emit = Callable[[ProbeLine], None]

_log = logging.getLogger("gpurt.discovery")


def contact(name: str, emit: Emit, verified: Set[str]) -> None:
    """Open one backend, verify its devices except those of ``verified``, and close it. Raises what its library does."""
    subject = _subject(load(name)())
    if isinstance(subject, Driver):
        _examine_driver(subject, emit, verified)
    else:
        asyncio.run(_examine_backend(subject, emit, verified))


def _subject(made: Any) -> Driver | GPUBackend:
    """The driver behind a backend where there is one: it can be examined without lanes and a loop."""
    driver = getattr(made, "driver", made)
    if isinstance(driver, Driver):
        return driver
    if isinstance(made, GPUBackend):
        return made
    raise BackendUnavailable(
        f"create() returned {type(made).__name__}, not a GPUBackend or a Driver", reason=ReasonCode.WRONG_API
    )


def _examine_driver(driver: Driver, emit: Emit, verified: Set[str]) -> None:
    devices = tuple(driver.open())
    try:
        emit(ProbeLine(stage="opened", devices=devices))
        after = verify_driver(
            driver, devices, already=verified, doing=lambda what: emit(ProbeLine(stage="doing", message=what))
        )
        emit(ProbeLine(stage="verified", devices=after))
    finally:
        _quietly(driver.close)


async def _examine_backend(backend: GPUBackend, emit: Emit, verified: Set[str]) -> None:
    try:
        await backend.initialize()
        devices = await backend.list_devices()
        emit(ProbeLine(stage="opened", devices=devices))
        emit(ProbeLine(stage="doing", message="verifying its devices"))
        emit(ProbeLine(stage="verified", devices=await verify_backend(backend, devices, already=verified)))
    finally:
        await backend.shutdown()


def _quietly(close: Callable[[], None]) -> None:
    # The answer is out already; a library that cannot close does not make the devices worse.
    try:
        close()
    except Exception as exc:
        _log.warning("closing the driver failed: %s: %s", type(exc).__name__, exc)
