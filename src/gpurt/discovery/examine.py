"""What a probe does with one backend: look, open, verify, close. Blocking; runs in a child process or on a lane.

Nothing here is asynchronous and nothing here has a deadline: whoever calls it can be killed, or is waited for by
somebody who need not wait.
"""

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


def examine(name: str, emit: Emit, *, verified: Set[str] = frozenset(), known: Set[str] = frozenset()) -> None:
    """Find out everything about one backend, and tell ``emit`` each step as soon as it is known.

    The last line but for the closing is ``verified``, ``unchanged`` or ``failed``; nothing that a library raises
    escapes.

    Args:
        verified: keys of devices that need no verification (:func:`gpurt.discovery.verify.verification_key`).
        known: signatures whose answers the caller has: with one of them the driver is not opened.
    """
    try:
        signature: str | None = None
        if name == "cuda":
            from gpurt.discovery.nvidia import sight_nvidia

            emit(ProbeLine(stage="doing", message="asking NVML"))
            sighted = sight_nvidia()
            emit(sighted)
            signature = sighted.signature
        elif name == "cpu":
            signature = _cpu_signature()
        emit(ProbeLine(stage="doing", message=f"loading backend {name}", signature=signature))
        if signature in known:
            emit(ProbeLine(stage="unchanged"))
            return
        subject = _subject(load(name)())
        if isinstance(subject, Driver):
            _examine_driver(subject, emit, verified)
        else:
            asyncio.run(_examine_backend(subject, emit, verified))
    except BackendUnavailable as exc:
        emit(ProbeLine(stage="failed", reason=exc.reason, message=exc.message, hint=exc.hint))
    except ImportError as exc:
        emit(ProbeLine(stage="failed", reason=ReasonCode.NO_LIBRARY, message=_said(exc)))
    except Exception as exc:
        emit(ProbeLine(stage="failed", reason=ReasonCode.ERROR, message=_said(exc)))


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
        _log.warning("closing the driver failed: %s", _said(exc))


def _said(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
