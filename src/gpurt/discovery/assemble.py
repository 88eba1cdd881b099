"""A probe's outcome as a report and device records. Pure.

Two views of NVIDIA's cards meet here: NVML shows every card of the machine, CUDA those that it can use and may
show. A card of both is one record; a card of NVML alone is listed as not usable, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpurt.discovery.reasons import remedy
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport, DeviceState, GPUDevice
from gpurt.visibility.variables import CUDA_VISIBLE_DEVICES

if TYPE_CHECKING:
    from gpurt.discovery.remembered import Remembered

CONCLUSIVE: Final = frozenset({ReasonCode.NO_DEVICE, ReasonCode.HIDDEN_BY_ENVIRONMENT})
"""Reasons that are successful enumerations: devices that are not among them are really not there."""

_LIBRARY_SIDE: Final = frozenset({ReasonCode.NO_LIBRARY, ReasonCode.NO_DRIVER, ReasonCode.ERROR, ReasonCode.NO_DEVICE})


@dataclass(frozen=True, slots=True)
class BackendAnswer:
    """What one backend contributes to a discovery."""

    report: BackendReport
    devices: tuple[GPUDevice, ...] = ()
    hidden: frozenset[str] = frozenset()
    """Stable ids of devices that the operator's visibility variable hides, whatever API shows them."""
    remember: Remembered | None = None
    """What may stand in for the next probe's answer. Replaces nothing: see :class:`DiscoveryMemory`."""
    unchanged: bool = False
    """The answer is a remembered one: the driver was not asked."""


def unavailable(name: str, failure: Failure, platform: str, *, elapsed_ms: float = 0.0) -> BackendAnswer:
    """The answer of a backend that has nothing to show."""
    return BackendAnswer(
        BackendReport(
            name=name,
            status="unavailable",
            reason=failure.reason,
            message=failure.message,
            hint=failure.hint or remedy(failure.reason, name, platform),
            elapsed_ms=elapsed_ms,
        )
    )


def assemble(
    name: str, outcome: ProbeOutcome, *, environ: Mapping[str, str], platform: str, on_bus: bool | None = None
) -> BackendAnswer:
    """Report and records of one backend.

    Args:
        environ: the environment that the probe had.
        on_bus: whether the PCI bus shows a device of this backend's vendor; None when nobody knows.
    """
    if outcome.verified is not None:
        driver_devices, failure = outcome.verified, None
    else:
        failure = outcome.failure or Failure(ReasonCode.ERROR, "the probe ended without an answer")
        driver_devices = tuple(_not_usable(device, failure) for device in outcome.opened)
    joined, alone = _join(driver_devices, outcome.sighted)
    masked, warning = _masked(outcome, alone, environ, driver_answered=outcome.verified is not None)
    lonely = [_hidden(device) if i in masked else _unseen(device, failure) for i, device in alone]
    devices = (*joined, *lonely)
    hidden = frozenset(device.stable_id for i, device in alone if i in masked)
    if not joined:
        failure = _why(outcome, failure, all_hidden=bool(alone) and len(hidden) == len(alone))
    if failure is None:
        message = f"{len(joined)} device{'s' * (len(joined) != 1)}"
        report = BackendReport(name=name, status="ok", message="; ".join(filter(None, (message, warning))))
    else:
        if failure.reason is ReasonCode.NO_DRIVER and on_bus is False:
            failure = Failure(failure.reason, f"{failure.message}; the PCI bus shows no such device", failure.hint)
        report = unavailable(name, failure, platform).report
        if warning:
            report = report.model_copy(update={"message": f"{report.message}; {warning}"})
    ids = tuple(device.device_id for device in devices)
    report = report.model_copy(update={"elapsed_ms": outcome.elapsed_ms, "device_ids": ids})
    return BackendAnswer(report, devices, hidden)


def _join(
    driver_devices: Sequence[GPUDevice], sighted: Sequence[GPUDevice]
) -> tuple[list[GPUDevice], list[tuple[int, GPUDevice]]]:
    """Driver records completed by what NVML says of the same card, and the cards that NVML alone shows."""
    joined = list(driver_devices)
    alone: list[tuple[int, GPUDevice]] = []
    for position, card in enumerate(sighted):
        match = next((i for i, device in enumerate(joined) if same_card(device, card)), None)
        if match is None:
            alone.append((position, card))
        else:
            joined[match] = _completed(joined[match], card)
    return joined, alone


def same_card(device: GPUDevice, card: GPUDevice) -> bool:
    """Whether a record of CUDA and one of NVML speak of the same card, or the same partition of it."""
    a, b = device.identity, card.identity
    if a is None or b is None:
        return False
    if a.uuid and b.uuid:
        return a.uuid == b.uuid
    return a.pci_address is not None and (a.pci_address, a.partition) == (b.pci_address, b.partition)


def _completed(device: GPUDevice, card: GPUDevice) -> GPUDevice:
    fields = ("compute_capability", "memory_bytes", "memory_available", "driver_version", "numa_node")
    update = {field: getattr(card, field) for field in fields if getattr(device, field) is None}
    if device.identity is None or not device.identity.stable or (device.identity.uuid is None and card.identity):
        update["identity"] = card.identity
    if card.state is not DeviceState.HEALTHY:
        # The management library knows of lost cards and of rows that wait to be remapped; a read-back does not.
        update |= {"state": card.state, "state_reason": card.state_reason, "usable": False}
    return device.model_copy(update=update) if update else device


def _masked(
    outcome: ProbeOutcome, alone: Sequence[tuple[int, GPUDevice]], environ: Mapping[str, str], *, driver_answered: bool
) -> tuple[frozenset[int], str | None]:
    """Positions among the sighted cards that the visibility variable hides, and a warning about its value."""
    if CUDA_VISIBLE_DEVICES not in environ or not outcome.sighted:
        return frozenset(), None
    from gpurt.visibility.candidates import candidate_of
    from gpurt.visibility.resolve import resolve  # half of a quick answer is imports: only where it is needed

    visibility = resolve(environ, [candidate_of(card) for card in outcome.sighted])
    warning = "; ".join(visibility.warnings) or None
    if driver_answered:
        # CUDA itself has applied the variable: it shows what is visible.
        return frozenset(position for position, _ in alone), warning
    return frozenset(position for position, card in alone if card.device_id in visibility.hidden), warning


def _why(outcome: ProbeOutcome, failure: Failure | None, *, all_hidden: bool) -> Failure:
    """The reason that helps most, of what the library, NVML and the environment say."""
    if all_hidden:
        text = f"{CUDA_VISIBLE_DEVICES} hides every one of {len(outcome.sighted)} devices"
        return Failure(ReasonCode.HIDDEN_BY_ENVIRONMENT, text)
    if failure is None:
        return Failure(ReasonCode.NO_DEVICE, "the library works and shows no device")
    nvml = outcome.sighting_failure
    if nvml is None or nvml.reason is ReasonCode.NO_LIBRARY or failure.reason not in _LIBRARY_SIDE:
        return failure
    if failure.reason is nvml.reason and nvml.message in failure.message:
        return failure  # the driver has asked NVML, too
    # Without the kernel driver no library helps: say that first, and the library's own trouble second.
    hint = "; ".join(dict.fromkeys(filter(None, (nvml.hint, failure.hint))))
    return Failure(nvml.reason, f"{nvml.message}; {failure.message}", hint or None)


def _hidden(card: GPUDevice) -> GPUDevice:
    reason = f"{ReasonCode.HIDDEN_BY_ENVIRONMENT}: {CUDA_VISIBLE_DEVICES} does not name it"
    return card.model_copy(update={"usable": False, "state_reason": reason})


def _unseen(card: GPUDevice, failure: Failure | None) -> GPUDevice:
    if failure is not None:
        return _not_usable(card, failure)
    if card.state_reason:
        return card
    return card.model_copy(update={"state_reason": f"{ReasonCode.UNSUPPORTED_DEVICE}: CUDA does not show it"})


def _not_usable(device: GPUDevice, failure: Failure) -> GPUDevice:
    state = device.state
    if state is DeviceState.HEALTHY and failure.reason is ReasonCode.TIMEOUT:
        state = DeviceState.UNRESPONSIVE
    elif state is DeviceState.HEALTHY and failure.reason is ReasonCode.CRASHED:
        state = DeviceState.SUSPECT
    reason = device.state_reason if state is DeviceState.LOST else f"{failure.reason}: {failure.message}"
    return device.model_copy(update={"usable": False, "state": state, "state_reason": reason})
