"""Why each backend and each device is as it is, in a sentence each. Pure."""

from __future__ import annotations

import platform as host_platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpurt.discovery.preview import NOT_YET
from gpurt.discovery.report import shown_id
from gpurt.discovery.result import DiscoveryResult
from gpurt.doctor.explanation import Explanation
from gpurt.doctor.memory import explain_memory
from gpurt.doctor.visibility import explain_visibility, unset_command
from gpurt.errors import ReasonCode
from gpurt.recording.place import Place
from gpurt.remedies import remedy
from gpurt.types import BackendReport, DeviceKind, DeviceState, GPUDevice

_WORDS: Final[Mapping[ReasonCode, tuple[str, str]]] = {
    # status, and how the sentence begins
    ReasonCode.NO_LIBRARY: ("absent", "is absent because a library is missing"),
    ReasonCode.NO_DRIVER: ("absent", "is absent because its driver is not there"),
    ReasonCode.DRIVER_MISMATCH: ("failing", "cannot be used because library and kernel driver do not fit"),
    ReasonCode.NO_PERMISSION: ("inaccessible", "is there, but this process may not open it"),
    ReasonCode.HIDDEN_BY_ENVIRONMENT: ("hidden", "is hidden by the environment"),
    ReasonCode.NO_DEVICE: ("absent", "is absent because there is no such device"),
    ReasonCode.TIMEOUT: ("failing", "did not answer in time"),
    ReasonCode.CRASHED: ("failing", "crashed while it was asked"),
    ReasonCode.UNSUPPORTED_DEVICE: ("not usable", "cannot be used through this library"),
    ReasonCode.WRONG_API: ("failing", "was made for another version of gpurt"),
    ReasonCode.WRONG_PLATFORM: ("absent", "does not exist on this operating system"),
    ReasonCode.NOT_RECORDED: ("not recorded", "was not asked when this was recorded"),
    ReasonCode.ERROR: ("failing", "failed"),
}

_DEVICE_STATUSES: Final[Mapping[ReasonCode, str]] = {
    ReasonCode.NO_PERMISSION: "inaccessible",
    ReasonCode.NOT_RECORDED: "not recorded",
    ReasonCode.TIMEOUT: "failing",
    ReasonCode.CRASHED: "failing",
    ReasonCode.ERROR: "failing",
}
"""In one word; what is missing here is "not usable"."""

_STATES: Final[Mapping[DeviceState, tuple[str, str]]] = {
    DeviceState.DEGRADED: (
        "works, but should get no new work",
        "read the reason; where it asks for a reset: sudo nvidia-smi --gpu-reset, with no process on the device",
    ),
    DeviceState.SUSPECT: (
        "stopped answering and may be gone",
        "look again in a minute; if it stays so, see the kernel log: sudo dmesg | tail -50",
    ),
    DeviceState.UNRESPONSIVE: (
        "does not answer: a call of its driver hangs",
        "see the kernel log (sudo dmesg | tail -50); if the driver does not come back, reboot",
    ),
    DeviceState.LOST: (
        "is lost: it fell off the bus, or its context is poisoned",
        "reboot the machine; if it happens again, check its seating, power and cooling",
    ),
    DeviceState.REMOVED: ("is no longer there", "nothing, if it was removed on purpose; else check its seating"),
    DeviceState.UNKNOWN: ("is in a state that this version of gpurt does not know", "upgrade gpurt"),
}

_STATUSES: Final[Mapping[str, str]] = {
    "complete": "every backend gave a definite answer",
    "partial": "one backend or device failed, so there may be more than is shown",
    "stale": "this is remembered from an earlier look-up and was not looked up again",
    "preview": "some drivers are still being asked",
    "failed": "nothing that was asked can be used",
}


def explain(
    result: DiscoveryResult,
    environ: Mapping[str, str],
    platform: str,
    *,
    place: Place = Place(),  # noqa: B008  (frozen)
    recorded: str | None = None,
) -> tuple[Explanation, ...]:
    """Everything that a person may ask about ``result``, backends first.

    Args:
        environ: the environment that discovery had.
        platform: as :func:`gpurt.platforms.current_platform` says.
        place: where commands will be typed.
        recorded: where and when, for a result of a recording; None: it is of this machine.
    """
    hints = {(report.name, report.reason): report.hint for report in result.reports}
    return (
        *(_backend(report, platform, place) for report in result.reports),
        *(_device(device, hints, platform, environ, recorded=recorded is not None) for device in result.devices),
        *explain_memory(result.devices, environ, recorded=recorded is not None),
        *explain_visibility(result.devices, environ, platform, recorded=recorded is not None),
        *_host(result, platform, recorded),
    )


def _backend(report: BackendReport, platform: str, place: Place) -> Explanation:
    asked = f"; that took {report.elapsed_ms:.0f} ms" if report.elapsed_ms else ""
    if report.status == "ok":
        shown = _listed(report.device_ids) or "no device"
        extra = report.message.partition("; ")[2]
        text = f"{report.name} works and shows {shown}{f', but: {extra}' if extra else ''}{asked}."
        return Explanation("backend", report.name, "usable", text)
    reason = report.reason or ReasonCode.ERROR
    status, words = _WORDS[reason]
    shown = f"; it shows {_listed(report.device_ids)}" if report.device_ids else ""
    if reason is ReasonCode.NO_DEVICE and report.device_ids:
        status, words = "no hardware", "shows no hardware that could be used"
    text = f"{report.name} {words}: {report.message.rstrip('.')}{shown}{asked}."
    todo = report.hint or remedy(reason, report.name, platform)
    command = place.command(reason, report.name)
    if command is not None:
        todo = f"{todo}; here: {command}"
    return Explanation("backend", report.name, status, text, todo)


_Hints = Mapping[tuple[str, ReasonCode | None], str | None]


def _device(
    device: GPUDevice, hints: _Hints, platform: str, environ: Mapping[str, str], *, recorded: bool
) -> Explanation:
    who = f"{shown_id(device, recorded)}, {device.name} ({device.stable_id})"
    status, what, todo = _condition(device, hints, platform, environ)
    notes = list(_notes(device))
    text = f"{who} {what}{''.join(f'; {note}' for note in notes)}."
    return Explanation("device", device.device_id, status, text, todo)


def _condition(
    device: GPUDevice, hints: _Hints, platform: str, environ: Mapping[str, str]
) -> tuple[str, str, str | None]:
    """Status, the sentence's middle, and what to do."""
    why = (device.state_reason or "").rstrip(".")
    code, message = _split(why)
    # What the backend's own report says to do knows more than the code does.
    helps = "" if code is None else hints.get((device.backend, code)) or remedy(code, device.backend, platform)
    if device.kind is DeviceKind.SOFTWARE and not device.usable and code is not ReasonCode.HIDDEN_BY_ENVIRONMENT:
        return _software(device, hints)
    if device.state is not DeviceState.HEALTHY and device.state in _STATES and code is not ReasonCode.NOT_RECORDED:
        words, todo = _STATES[device.state]
        if code is not None:
            todo = f"{helps}; {todo}"
        usable = "" if device.usable else ", and nothing may be placed on it"
        return device.state.value, f"{words}{usable}: {why or 'no reason was told'}", todo
    if device.usable:
        return "usable", f"is usable{f', but: {why}' if why else ''}", None
    if code is ReasonCode.HIDDEN_BY_ENVIRONMENT:
        variable = message.split(" ", 1)[0]
        command = unset_command(variable, platform) if variable in environ else f"change {variable}"
        return "hidden", f"is hidden: {message}", f"{command}, or add {device.stable_id} to it"
    if code is not None:
        status = _DEVICE_STATUSES.get(code, "not usable")
        return status, f"is there, but cannot be used: {message}", helps
    if why == NOT_YET:
        return "not usable", f"is {why}", "wait for the result"
    why = why or f"{device.backend_name} shows it, and no driver has opened it"
    return "not usable", f"cannot be used: {why}", f"see what is said of backend {device.backend}"


def _software(device: GPUDevice, hints: _Hints) -> tuple[str, str, str]:
    """Naming its backend helps only where that backend opens such devices."""
    if (device.backend, ReasonCode.NOT_RECORDED) in hints:
        todo = remedy(ReasonCode.NOT_RECORDED, device.backend, "")
        return "not usable", "is a program, no hardware; its backend was not asked when this was recorded", todo
    if _split(device.state_reason or "")[0] is ReasonCode.NO_LIBRARY:
        what = "is a program, no hardware, and the library that would use it is not installed"
        return "not usable", what, "nothing: it computes on the processor, which backend cpu does, too"
    todo = f"name its backend to use it all the same: GPURT_BACKEND={device.backend}"
    return "not usable", f"is a program, no hardware: {device.state_reason or 'it is used only when asked for'}", todo


def _split(reason: str) -> tuple[ReasonCode | None, str]:
    """``"no_permission: text"`` as code and text."""
    head, colon, rest = reason.partition(": ")
    if colon and head in ReasonCode.__members__.values():
        return ReasonCode(head), rest
    return None, reason


def _notes(device: GPUDevice) -> Iterator[str]:
    if device.simulated:
        yield "it is simulated, no hardware"
    if device.identity is None or not device.identity.stable:
        yield "it has no identity of its own, so after a restart nobody can tell that it is the same one"
    if device.identity is not None and device.identity.partition is not None:
        yield f"it is partition {device.identity.partition} of a device"
    if len(device.backends) > 1:
        yield f"{_listed(device.backends)} all show it, and it is counted once"


def _host(result: DiscoveryResult, platform: str, recorded: str | None) -> Iterator[Explanation]:
    status = result.discovery_status
    why, todo = _STATUSES[status], "see what is said above of each backend and device"
    unasked = [report.name for report in result.reports if report.reason is ReasonCode.NOT_RECORDED]
    processor = any(report.name == "cpu" for report in result.reports)
    if unasked:
        without = "" if processor else ", and of the processor there is nothing"
        why = f"the recording has no answer of the driver of {_listed(unasked)}{without}"
    elif status == "failed":
        why += ", not even the processor" if processor else "; the processor was not asked"
    text = f"The status of this look-up is {status}: {why}."
    yield Explanation("host", "discovery", status, text, None if status == "complete" or unasked else todo)
    if result.pending:
        yield Explanation("host", "discovery", "pending", f"Not asked to the end yet: {_listed(result.pending)}.")
    if recorded is not None:
        text = f"Everything here is recorded ({recorded}): nothing of it says anything about this machine."
        yield Explanation("host", "recording", "recorded", text)
        yield Explanation("host", "platform", platform, f"The recorded machine ran {platform}.")
        return
    if result.registry is not None:
        if result.persisted:
            text = f"The registry {result.registry} remembers this result."
            yield Explanation("host", "registry", "saved", text)
        else:
            text = f"The registry {result.registry} does NOT hold this result: it could not be written."
            todo = "see to it that its directory can be made and written, or name another file with --registry"
            yield Explanation("host", "registry", "not saved", text, todo)
    text = f"gpurt takes this machine for {platform}; Python {host_platform.python_version()}."
    yield Explanation("host", "platform", platform, text)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
