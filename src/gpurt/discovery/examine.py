"""What a probe does with one backend: look, and where that does not answer it, open, verify, close.

Blocking; runs in a child process or on a lane. Nothing here is asynchronous and nothing here has a deadline: whoever
calls it can be killed, or is waited for by somebody who need not wait. What looking does not need is imported after
looking: where the answer is known, a probe should cost little more than the start of an interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from dataclasses import dataclass

from gpurt.discovery.line import ProbeLine
from gpurt.discovery.sight import LOADS_DRIVERS, steps
from gpurt.errors import BackendUnavailable, ReasonCode

Emit = Callable[[ProbeLine], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller knows of before."""

    verified: Set[str] = frozenset()
    """Keys of devices that need no verification (:func:`gpurt.discovery.verify.verification_key`)."""
    known: Set[str] = frozenset()
    """Signatures whose answers the caller has: with one of them the driver is not opened."""


def examine(
    name: str,
    emit: Emit,
    request: Callable[[], Request],
    *,
    before_opening: Callable[[], None] = lambda: None,
    may_die: bool = True,
) -> None:
    """Find out everything about one backend, and tell ``emit`` each step as soon as it is known.

    The last line but for the closing is ``verified``, ``unchanged`` or ``failed``; nothing that a library raises
    escapes. ``request`` is called after looking: it may have to wait for the caller.

    Args:
        before_opening: called before the backend's own library is loaded.
        may_die: this process is here for the probe alone. Else nothing is looked at that loads drivers for it.
    """
    try:
        signature = _look(name, emit, may_die=may_die)
        asked = request()
        emit(ProbeLine(stage="doing", message=f"loading backend {name}", signature=signature))
        if signature in asked.known:
            emit(ProbeLine(stage="unchanged"))
            return
        before_opening()
        from gpurt.discovery.contact import contact

        contact(name, emit, asked.verified)
    except BackendUnavailable as exc:
        emit(ProbeLine(stage="failed", reason=exc.reason, message=exc.message, hint=exc.hint))
    except ImportError as exc:
        emit(ProbeLine(stage="failed", reason=ReasonCode.NO_LIBRARY, message=_said(exc)))
    except Exception as exc:
        emit(ProbeLine(stage="failed", reason=ReasonCode.ERROR, message=_said(exc)))


def _look(name: str, emit: Emit, *, may_die: bool) -> str | None:
    """What can be seen without the backend's library, and what the answer rests on."""
    if name == "cpu":
        from gpurt.discovery.signature import cpu_signature

        return cpu_signature()
    if name in LOADS_DRIVERS and not may_die:
        return None
    signature: str | None = None
    for line in steps(name, environ=os.environ):
        emit(line)
        if line.stage == "sighted":
            signature = line.signature
    return signature


def _said(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
