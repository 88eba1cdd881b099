"""One attempt to open one backend: its deadline, its answer, and the certainty that a failure is closed again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from gpurt.backend import GPUBackend
from gpurt.errors import BackendUnavailable, GPUError, ReasonCode
from gpurt.platforms import current_platform
from gpurt.remedies import NOT_MISSED, remedy, where_none_is_on_the_bus
from gpurt.runtime.lane import off_loop
from gpurt.sources.pci import BACKEND_VENDORS, has_pci_vendor
from gpurt.types import BackendReport, DeviceKind, DeviceState, GPUDevice

SHUTDOWN_TIMEOUT_S: Final = 2.0
"""What a refused backend gets to shut down in; one that hangs is left behind, as its contract allows."""
CANCEL_WAIT_S: Final = 0.5
"""How long a cancelled attempt waits for that. Then it goes on in the background: cancelling must be prompt."""
_MESSAGE_CHARS: Final = 400
"""Some libraries raise a page of advice; a report is one or two sentences."""

_log = logging.getLogger("gpurt.factory")
_closings: set[asyncio.Task[None]] = set()
"""Keeps background closings alive: the event loop holds its tasks weakly."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of it: an initialised ``backend`` with its ``devices``, or an ``error``."""

    report: BackendReport
    backend: GPUBackend | None = None
    devices: tuple[GPUDevice, ...] = ()
    error: Exception | None = None


async def attempt(
    name: str,
    create: Callable[[str], Awaitable[GPUBackend]],
    *,
    deadline: float | None,
    allow_software: bool = False,
) -> Attempt:
    """Create and initialise the backend ``name``; refuse it when it has no usable device.

    A refused backend has been shut down on return, unless it hangs: then that goes on in the background, as it
    does when this call is cancelled and the shutdown takes longer than ``CANCEL_WAIT_S``.

    Args:
        create: makes the backend, as :meth:`gpurt.factory.GPUBackendFactory._create_specific_backend`.
        deadline: seconds for import, initialisation and listing together; None waits without limit.
        allow_software: accept a backend that has software devices only.
    """
    started = time.perf_counter()
    opened: list[GPUBackend] = []
    # A task of its own, because a deadline must also hold against an initialize() that ignores cancellation.
    task = asyncio.create_task(_open(name, create, opened, allow_software), name=f"gpurt:open:{name}")
    try:
        await asyncio.wait({task}, timeout=deadline)
    except BaseException:
        # Also when the task was done already: asyncio drops the result, so nobody else would close it.
        with anyio.CancelScope(shield=True):
            await asyncio.wait({_close(task, opened)}, timeout=CANCEL_WAIT_S)
        raise
    elapsed_ms = (time.perf_counter() - started) * 1e3
    error: Exception
    if not task.done():
        _close(task, opened)
        error = BackendUnavailable(
            f"did not initialise within {deadline:g} s and was left behind",
            backend=name,
            reason=ReasonCode.TIMEOUT,
            hint="pass a longer deadline, or see whether the driver answers",
        )
        return Attempt(await _advised(_refusal(name, error, elapsed_ms)), error=error)
    if task.cancelled():
        error = GPUError("initialize() was cancelled from inside", backend=name)
    elif (failure := task.exception()) is None:
        backend, devices = task.result()
        ids = tuple(device.device_id for device in devices)
        report = BackendReport(name=name, status="ok", elapsed_ms=elapsed_ms, device_ids=ids)
        return Attempt(report, backend=backend, devices=devices)
    elif isinstance(failure, Exception):
        error = failure
    else:
        raise failure  # KeyboardInterrupt, SystemExit: not ours to turn into a report
    await close(task, opened)
    return Attempt(await _advised(_refusal(name, error, elapsed_ms)), error=error)


async def close(task: asyncio.Task[tuple[GPUBackend, tuple[GPUDevice, ...]]] | None, opened: list[GPUBackend]) -> None:
    """Shut down what an attempt opened. Cancelling this call does not cancel the shutdown."""
    await asyncio.wait({_close(task, opened)}, timeout=SHUTDOWN_TIMEOUT_S)


async def _open(
    name: str, create: Callable[[str], Awaitable[GPUBackend]], opened: list[GPUBackend], allow_software: bool
) -> tuple[GPUBackend, tuple[GPUDevice, ...]]:
    try:
        backend = await create(name)
        opened.append(backend)
        await backend.initialize()
        devices = await backend.list_devices()
    except SystemExit as exc:
        # Some libraries end the process when they dislike it. Out of a task it would stop the event loop at once.
        raise BackendUnavailable(f"tried to end this process: {exc!r}", backend=name) from exc
    if not any(_is_usable(device, allow_software) for device in devices):
        software = bool(devices) and all(device.kind is DeviceKind.SOFTWARE for device in devices)
        hint = f'name it to use it all the same: create_backend("{name}"), GPURT_BACKEND={name}' if software else None
        raise BackendUnavailable(_why_none(devices), backend=name, reason=ReasonCode.NO_DEVICE, hint=hint)
    return backend, devices


def _is_usable(device: GPUDevice, allow_software: bool) -> bool:
    if not device.usable or device.state in (DeviceState.LOST, DeviceState.REMOVED):
        return False
    return allow_software or device.kind is not DeviceKind.SOFTWARE


def _why_none(devices: tuple[GPUDevice, ...]) -> str:
    if not devices:
        return "it works, and has no device"
    reasons = [
        f"{device.device_id} {device.name}: {device.state_reason or device.state}"
        if device.kind is not DeviceKind.SOFTWARE
        else f"{device.device_id} {device.name}: a software device, which is used only when asked for by name"
        for device in devices
    ]
    return "none of its devices can be used: " + "; ".join(reasons)


def _close(
    task: asyncio.Task[tuple[GPUBackend, tuple[GPUDevice, ...]]] | None, opened: list[GPUBackend]
) -> asyncio.Task[None]:
    closing = asyncio.create_task(_shut_down(task, opened), name="gpurt:close")
    _closings.add(closing)
    closing.add_done_callback(_closings.discard)
    return closing


async def _shut_down(
    task: asyncio.Task[tuple[GPUBackend, tuple[GPUDevice, ...]]] | None, opened: list[GPUBackend]
) -> None:
    if task is not None:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=SHUTDOWN_TIMEOUT_S)
        if task.done() and not task.cancelled():
            task.exception()  # mark it as seen: the caller is gone, or has it in the report
    for backend in opened:
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S + 1):
                await backend.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        except Exception:
            _log.warning("backend %s did not shut down cleanly", getattr(backend, "name", backend), exc_info=True)


def _refusal(name: str, error: Exception, elapsed_ms: float) -> BackendReport:
    return BackendReport(
        name=name,
        status="unavailable",
        reason=reason_of(error),
        message=message_of(error),
        elapsed_ms=elapsed_ms,
        hint=getattr(error, "hint", None),
    )


async def _advised(report: BackendReport) -> BackendReport:
    """``report`` with what to do about it: the same that discovery says."""
    if report.reason is None:
        return report
    hint = report.hint or remedy(report.reason, report.name, current_platform())
    vendor = BACKEND_VENDORS.get(report.name)
    if vendor is not None and report.reason in NOT_MISSED:
        on_bus = await off_loop("pci", lambda: has_pci_vendor(Path("/"), vendor))
        if on_bus is False:
            hint = where_none_is_on_the_bus(report.reason, hint)
    return report.model_copy(update={"hint": hint})


def reason_of(error: Exception) -> ReasonCode:
    """The reason code for whatever an attempt raised."""
    match error:
        case BackendUnavailable():
            return error.reason
        case ImportError():
            return ReasonCode.NO_LIBRARY
        case PermissionError():
            return ReasonCode.NO_PERMISSION
        case TimeoutError():
            return ReasonCode.TIMEOUT
        case _:
            return ReasonCode.ERROR


def message_of(error: Exception) -> str:
    """What it said, short and on one line."""
    text = error.message if isinstance(error, GPUError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 1] + "…"
