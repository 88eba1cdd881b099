"""What a backend's own driver said when it was recorded: ``drivers.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import GPUError, ReasonCode
from gpurt.printable import printable
from gpurt.sources.recorded import MAX_DEVICES
from gpurt.types import BackendReport, GPUDevice

NOT_RECORDED: Final = "the recording has no answer"
"""How the message begins of a backend whose driver nobody asked when the recording was made."""


_NO_SIZE: Final = 1 << 60
"""Bytes: more than any device has."""
_LONGEST_NAME: Final = 1024
_AGAIN: Final = "record again, or repair the file"


class RecordedFailure(BaseModel):
    """A :class:`~gpurt.discovery.wire.Failure`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: ReasonCode
    message: str
    hint: str | None = None


class DriverAnswer(BaseModel):
    """One backend's. Exactly one of ``verified`` and ``failure`` is set."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    opened: tuple[GPUDevice, ...] = ()
    verified: tuple[GPUDevice, ...] | None = None
    failure: RecordedFailure | None = None
    elapsed_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    sighted: bool = True
    """Whether it was looked for devices at all; where something ruled the backend out before, it was not."""


def answers_of(outcomes: Mapping[str, ProbeOutcome], result: DiscoveryResult) -> dict[str, DriverAnswer]:
    """The answer of every backend of ``result``.

    Args:
        outcomes: of the backends that were probed in a process of their own; of the others the result tells.
    """
    return {
        report.name: _of_outcome(outcomes[report.name])
        if report.name in outcomes
        else _of_report(report, tuple(device for device in result.devices if device.backend == report.name))
        for report in result.reports
    }


def read_answers(content: Mapping[str, Any]) -> dict[str, DriverAnswer]:
    """The content of the file.

    Raises:
        GPUError: an answer cannot be understood.
    """
    try:
        answers = {name: DriverAnswer.model_validate(value) for name, value in content.items()}
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise GPUError(f"drivers.json cannot be understood: {printable(where)}: {first['msg']}") from exc
    for name, answer in answers.items():
        where = f"drivers.json: {printable(name)}"
        check_devices(answer.opened, where)
        check_devices(answer.verified or (), where)
    return answers


def check_devices(devices: Sequence[GPUDevice], where: str) -> None:
    """
    Raises:
        GPUError: there are more of them than any host has, or one is larger than any device, has more free than it
            has, or a name that is a book.
    """
    if len(devices) > MAX_DEVICES:
        raise GPUError(f"{where}: there are {len(devices)} devices; at most {MAX_DEVICES} are read", hint=_AGAIN)
    for device in devices:
        who = f"{where}: {printable(device.device_id)}"
        total, free = device.memory_bytes, device.memory_available
        for size in (total, free, device.memory_usable_bytes):
            if size is not None and not 0 <= size < _NO_SIZE:
                raise GPUError(f"{who}: {size} bytes is no size of a device's memory", hint=_AGAIN)
        if total is not None and free is not None and free > total:
            raise GPUError(f"{who}: of {total} bytes {free} are free", hint=_AGAIN)
        for name in ("name", "device_id", "vendor", "backend", "backend_name", "driver_version", "compute_capability"):
            if len(getattr(device, name) or "") > _LONGEST_NAME:
                raise GPUError(f"{who}: its {name} has more than {_LONGEST_NAME} characters", hint=_AGAIN)


def _of_outcome(outcome: ProbeOutcome) -> DriverAnswer:
    failure = outcome.failure
    return DriverAnswer(
        opened=outcome.opened,
        verified=outcome.verified,
        failure=None if failure is None else _failure(failure),
        elapsed_ms=outcome.elapsed_ms,
    )


def _of_report(report: BackendReport, devices: tuple[GPUDevice, ...]) -> DriverAnswer:
    if report.status == "ok":
        return DriverAnswer(verified=devices, elapsed_ms=report.elapsed_ms)
    reason = report.reason or ReasonCode.ERROR
    failure = RecordedFailure(reason=reason, message=report.message, hint=report.hint)
    return DriverAnswer(failure=failure, elapsed_ms=report.elapsed_ms, sighted=False)


def _failure(failure: Failure) -> RecordedFailure:
    return RecordedFailure(reason=failure.reason, message=failure.message, hint=failure.hint)
