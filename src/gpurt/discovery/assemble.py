"""A probe's outcome as a report and device records. Pure.

Two views of a backend's devices meet here: systems and their management libraries show every device of the machine,
the backend's own library those that it can use and may show. A device of both is one record; one that was only sighted
is listed as not usable, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpurt.discovery.masks import APPLIES_ITSELF, Masks, masks_of, same_card
from gpurt.discovery.sight_record import SOFTWARE_REASON
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import ReasonCode
from gpurt.remedies import NOT_MISSED, NOT_ON_BUS, remedy, where_none_is_on_the_bus
from gpurt.types import BackendReport, DeviceKind, DeviceState, GPUDevice

if TYPE_CHECKING:
    from gpurt.discovery.remembered import Remembered

__all__ = ["CONCLUSIVE", "BackendAnswer", "assemble", "is_conclusive", "same_card", "unavailable"]

CONCLUSIVE: Final = frozenset({ReasonCode.NO_DEVICE, ReasonCode.HIDDEN_BY_ENVIRONMENT})
"""Reasons that are successful enumerations: devices that are not among them are really not there."""

_LIBRARY_SIDE: Final = frozenset(
    {
        ReasonCode.NOT_RECORDED,
        ReasonCode.NO_LIBRARY,
        ReasonCode.NO_DRIVER,
        ReasonCode.ERROR,
        ReasonCode.NO_DEVICE,
    }
)
"""Reasons of a library that say less than what the system says."""

"""What nobody needs to mend on a machine that has no such device."""

_OWN_WORD: Final = frozenset({ReasonCode.NOT_RECORDED, ReasonCode.NO_LIBRARY, ReasonCode.NO_DRIVER})
"""Reasons that are the same for all devices: what is wrong with one of them comes first."""


_NO_HARDWARE: Final = "nothing, if this machine has no other device; else install the driver of its vendor"
"""Where programs are shown and no hardware: nothing is unplugged that would have to be seated."""


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


def is_conclusive(report: BackendReport) -> bool:
    """Whether devices that the backend does not show are not there: it has counted them, or the bus shows none of its
    vendor's."""
    gone = report.reason in (ReasonCode.NO_DRIVER, ReasonCode.NO_LIBRARY) and NOT_ON_BUS in report.message
    return report.status == "ok" or report.reason in CONCLUSIVE or gone


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
    name: str,
    outcome: ProbeOutcome,
    *,
    environ: Mapping[str, str],
    platform: str,
    on_bus: bool | None = None,
    nvidia_present: bool = False,
    by_name: bool = False,
) -> BackendAnswer:
    """Report and records of one backend.

    Args:
        by_name: somebody has asked for this backend, so that its software devices may be used.
        environ: the environment that the probe had.
        on_bus: whether the PCI bus shows a device of this backend's vendor; None when nobody knows.
        nvidia_present: the host has a device of NVIDIA's, so that its variables are not meant for other vendors'.
    """
    if outcome.verified is not None:
        driver_devices, failure = outcome.verified, None
    else:
        failure = outcome.failure or Failure(ReasonCode.ERROR, "the probe ended without an answer")
        driver_devices = tuple(_not_usable(device, failure) for device in outcome.opened)
    masks = masks_of(name, outcome, environ, nvidia_present=nvidia_present)
    joined, alone, twins = _join(driver_devices, outcome.sighted)
    lonely, hidden = _lonely(name, alone, masks, failure, driver_answered=outcome.verified is not None)
    if name not in APPLIES_ITSELF:
        for position, cards in twins.items():
            joined[position] = _hidden_if(masks, joined[position], cards)
            if any(card.device_id in masks.hidden for card in cards):
                hidden.add(joined[position].stable_id)
    if not by_name:
        joined = [_spared(each) for each in joined]
    devices = (*joined, *lonely)
    shown = [each for each in joined if (by_name or each.kind is not DeviceKind.SOFTWARE) and not _is_hidden(each)]
    if not shown:
        real = [each for each in devices if each.kind is not DeviceKind.SOFTWARE]
        software = [each for each in joined if each.kind is DeviceKind.SOFTWARE]
        failure = _why(
            name, outcome, failure, masks if real and all(map(_is_hidden, real)) else None, software, len(real)
        )
    notes = (*masks.warnings, outcome.note)
    if failure is None:
        message = f"{len(shown)} device{'s' * (len(shown) != 1)}"
        report = BackendReport(name=name, status="ok", message="; ".join(filter(None, (message, *notes))))
    else:
        if on_bus is False and failure.reason in NOT_MISSED and not outcome.sighted:
            hint = failure.hint or remedy(failure.reason, name, platform)
            message = f"{failure.message}; {NOT_ON_BUS}"
            failure = Failure(failure.reason, message, where_none_is_on_the_bus(failure.reason, hint))
        report = unavailable(name, failure, platform).report
        report = report.model_copy(update={"message": "; ".join(filter(None, (report.message, *notes)))})
    ids = tuple(device.device_id for device in devices)
    report = report.model_copy(update={"elapsed_ms": outcome.elapsed_ms, "device_ids": ids})
    return BackendAnswer(report, devices, frozenset(hidden))


def _join(
    driver_devices: Sequence[GPUDevice], sighted: Sequence[GPUDevice]
) -> tuple[list[GPUDevice], list[GPUDevice], dict[int, list[GPUDevice]]]:
    """Driver records completed by what was sighted of the same devices, what was sighted alone, and by position of a
    driver record what was sighted of it."""
    joined = list(driver_devices)
    alone: list[GPUDevice] = []
    twins: dict[int, list[GPUDevice]] = {}
    for card in sighted:
        match = next((i for i, device in enumerate(joined) if _is_same(device, card)), None)
        if match is None:
            alone.append(card)
        else:
            joined[match] = _completed(joined[match], card)
            twins.setdefault(match, []).append(card)
    return joined, alone, twins


def _is_same(device: GPUDevice, card: GPUDevice) -> bool:
    # A device without identity is known by its number where driver and source count alike.
    return same_card(device, card) or (device.device_id, device.name) == (card.device_id, card.name)


def _hidden_if(masks: Masks, device: GPUDevice, cards: Sequence[GPUDevice]) -> GPUDevice:
    """A driver's record, not usable where the environment hides it and the driver does not know."""
    for card in cards:
        why = masks.hidden.get(card.device_id) or masks.hidden_here.get(card.device_id)
        if why is not None:
            return _hidden(device, why)
    return device


def _lonely(
    name: str, alone: Sequence[GPUDevice], masks: Masks, failure: Failure | None, *, driver_answered: bool
) -> tuple[list[GPUDevice], set[str]]:
    """Records that were sighted alone, with the reason, and the stable ids of those hidden from everybody."""
    records: list[GPUDevice] = []
    hidden: set[str] = set()
    for card in alone:
        why = masks.hidden.get(card.device_id)
        if why is None and driver_answered and name in APPLIES_ITSELF and card.device_id in masks.uncertain:
            why = f"{name} does not show it, as the environment wants it"
        if why is not None:
            hidden.add(card.stable_id)
        why = why or masks.hidden_here.get(card.device_id)
        if why is not None:
            records.append(_hidden(card, why))
        elif failure is None and card.device_id in masks.left_out and not card.state_reason:
            records.append(card.model_copy(update={"state_reason": masks.left_out[card.device_id]}))
        else:
            records.append(_unseen(name, card, failure))
    return records, hidden


def _completed(device: GPUDevice, card: GPUDevice) -> GPUDevice:
    fields = ("compute_capability", "memory_bytes", "memory_available", "driver_version", "numa_node")
    update = {field: getattr(card, field) for field in fields if getattr(device, field) is None}
    if device.identity is None or not device.identity.stable or (device.identity.uuid is None and card.identity):
        update["identity"] = card.identity
    if card.state is not DeviceState.HEALTHY:
        # The management library knows of lost cards and of rows that wait to be remapped; a read-back does not.
        update |= {"state": card.state, "state_reason": card.state_reason, "usable": False}
    return device.model_copy(update=update) if update else device


def _why(
    name: str,
    outcome: ProbeOutcome,
    failure: Failure | None,
    hiding: Masks | None,
    software: Sequence[GPUDevice],
    count: int,
) -> Failure:
    """The reason that helps most, of what the library, the system and the environment say.

    Args:
        hiding: the masks, where they hide all of ``count`` sighted devices.
        software: what the driver shows; no hardware is among it.
    """
    if hiding is not None:
        first = next(iter((*hiding.hidden.values(), *hiding.hidden_here.values())), "the environment hides it")
        variable = first.partition(" ")[0]
        text = f"{variable} hides every one of {count} devices"
        return Failure(ReasonCode.HIDDEN_BY_ENVIRONMENT, text)
    if failure is None:
        if software:
            names = ", ".join(device.name for device in software)
            hint = f"{_NO_HARDWARE}; to compute on the processor through it all the same: GPURT_BACKEND={name}"
            return Failure(ReasonCode.NO_DEVICE, f"the library shows software adapters alone: {names}", hint)
        return Failure(ReasonCode.NO_DEVICE, "the library works and shows no device")
    seen = outcome.sighting_failure
    if seen is None or seen.reason is ReasonCode.NO_LIBRARY or failure.reason not in _LIBRARY_SIDE:
        if failure.reason is ReasonCode.NO_LIBRARY and count:
            what = f"{count} device{'s' * (count != 1)} cannot be used without it"
            return replace(failure, message=f"{failure.message}; {what}")
        return failure
    if failure.reason is seen.reason and seen.message in failure.message:
        return failure  # the driver has asked the same source, too
    # Without the kernel driver no library helps: say that first, and the library's own trouble second.
    only_software = bool(outcome.sighted) and not count
    hints = (_NO_HARDWARE if only_software and seen.reason is ReasonCode.NO_DEVICE else seen.hint, failure.hint)
    hint = "; ".join(dict.fromkeys(filter(None, hints)))
    return Failure(seen.reason, f"{seen.message}; {failure.message}", hint or None)


def _spared(device: GPUDevice) -> GPUDevice:
    """``device``, not usable where it is a program that computes on the processor."""
    if device.kind is not DeviceKind.SOFTWARE or not device.usable:
        return device
    return device.model_copy(update={"usable": False, "state_reason": device.state_reason or SOFTWARE_REASON})


def _hidden(card: GPUDevice, why: str) -> GPUDevice:
    return card.model_copy(update={"usable": False, "state_reason": f"{ReasonCode.HIDDEN_BY_ENVIRONMENT}: {why}"})


def _is_hidden(device: GPUDevice) -> bool:
    return (device.state_reason or "").startswith(ReasonCode.HIDDEN_BY_ENVIRONMENT.value)


def _unseen(name: str, card: GPUDevice, failure: Failure | None) -> GPUDevice:
    if failure is not None:
        return _not_usable(card, failure)
    if card.state_reason:
        return card
    library = {"cuda": "CUDA"}.get(name, f"the library of backend {name}")
    return card.model_copy(update={"state_reason": f"{ReasonCode.UNSUPPORTED_DEVICE}: {library} does not show it"})


def _not_usable(device: GPUDevice, failure: Failure) -> GPUDevice:
    state = device.state
    if state is DeviceState.HEALTHY and failure.reason is ReasonCode.TIMEOUT:
        state = DeviceState.UNRESPONSIVE
    elif state is DeviceState.HEALTHY and failure.reason is ReasonCode.CRASHED:
        state = DeviceState.SUSPECT
    elif state is DeviceState.HEALTHY and failure.reason is ReasonCode.NOT_RECORDED:
        state = DeviceState.UNKNOWN
    own = device.state_reason
    reason = f"{failure.reason}: {failure.message}"
    software = device.kind is DeviceKind.SOFTWARE
    if software and failure.reason is ReasonCode.NO_LIBRARY:
        reason = f"{failure.reason}: software adapter, and {failure.message}"  # asking for it by name would not help
    elif own and (software or state in (DeviceState.LOST, DeviceState.DEGRADED)):
        reason = own
    elif own and failure.reason in _OWN_WORD:
        reason = f"{own}; {failure.message}"
    return device.model_copy(update={"usable": False, "state": state, "state_reason": reason})
