"""What discovery found, as the candidates that visibility variables speak of. Pure.

Discovery has laid the masks over every device already, and says so in ``state_reason``. That is believed here: a record
does not tell whether its source counted all devices of the machine, so a number in a variable cannot be read again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpurt.errors import ReasonCode
from gpurt.types import DeviceKind, GPUDevice
from gpurt.visibility.candidates import Candidate, candidate_of
from gpurt.visibility.resolver import resolve
from gpurt.visibility.variables import CUDA_VISIBLE_DEVICES

MASKED_VENDORS: Final = frozenset({"nvidia", "amd", "intel"})
"""Those with variables of their own."""

_HIDDEN: Final = f"{ReasonCode.HIDDEN_BY_ENVIRONMENT.value}: "
_NAMES: Final = ("GPU-", "MIG-")
_OLD_MIG: Final = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/\d+/\d+", re.ASCII)
_ACCELERATORS: Final = frozenset({DeviceKind.GPU, DeviceKind.INTEGRATED_GPU, DeviceKind.ACCELERATOR})


def candidates_of(devices: Sequence[GPUDevice]) -> list[Candidate]:
    """The devices of the machine, by their place on the bus."""
    real = [device for device in devices if not device.simulated]
    return [_candidate(device, real) for device in sorted(real, key=_place)]


def hidden_among(
    devices: Sequence[GPUDevice], candidates: Sequence[Candidate], environ: Mapping[str, str]
) -> dict[str, str]:
    """Which of them ``environ`` hides, with the reason: what discovery said of variables that are still set, and what
    such a variable says of devices that discovery found without it."""
    hidden: dict[str, str] = {}
    for device in devices:
        reason = device.state_reason or ""
        if reason.startswith(_HIDDEN):
            why = reason.removeprefix(_HIDDEN)
            if why.partition(" ")[0] in environ:
                hidden[device.device_id] = why
    by_mask = resolve(environ, candidates).hidden
    known = {candidate.device_id: candidate for candidate in candidates}
    for device_id, why in by_mask.items():
        if device_id not in hidden and _is_news(known[device_id], candidates, hidden, environ, why.partition(" ")[0]):
            hidden[device_id] = why
    return hidden


def unmasked(devices: Sequence[GPUDevice], wanted: Sequence[str]) -> GPUDevice | None:
    """The first usable accelerator that is not wanted and that no variable hides."""
    return next(
        (
            device
            for device in devices
            if device.device_id not in wanted
            and device.usable
            and not device.simulated
            and device.kind in _ACCELERATORS
            and device.vendor not in MASKED_VENDORS
        ),
        None,
    )


def _is_news(
    candidate: Candidate,
    candidates: Sequence[Candidate],
    hidden: Mapping[str, str],
    environ: Mapping[str, str],
    variable: str,
) -> bool:
    """Whether a mask that discovery did not report on this device is a newer one, and not the one under which the
    device was found by a number that only its library can count."""
    value = environ.get(variable, "")
    if variable == CUDA_VISIBLE_DEVICES and value.startswith(_NAMES):
        # A partition is named by its card, too, which its record need not tell.
        return candidate.partition is None or candidate.parent_uuid is not None
    shown = [each for each in candidates if each.vendor == candidate.vendor and each.device_id not in hidden]
    named = [entry for entry in value.split(",") if entry.strip() and not entry.strip().startswith("-")]
    return len(shown) > len(named)


def _candidate(device: GPUDevice, others: Sequence[GPUDevice]) -> Candidate:
    identity = device.identity
    made = candidate_of(device, parent_uuid=_parent(device, others))
    if identity is None or identity.uuid is None or identity.uuid.startswith(_NAMES):
        return made
    # Vulkan's own UUID, or an adapter's number: no other interface answers to that.
    return replace(made, uuid=None)


def _parent(device: GPUDevice, others: Sequence[GPUDevice]) -> str | None:
    """UUID of the card of a partition: in the partition's own old-style name, or of the card at the same address."""
    identity = device.identity
    if identity is None or identity.partition is None:
        return None
    if (match := _OLD_MIG.fullmatch(identity.uuid or "")) is not None:
        return match[1]
    for other in others:
        card = other.identity
        if card is None or card.partition is not None or card.uuid is None or card.pci_address is None:
            continue
        if card.pci_address == identity.pci_address and card.uuid.startswith("GPU-"):
            return card.uuid
    return None


def _place(device: GPUDevice) -> str:
    """By the bus, as NVML and the kernel's drivers count."""
    return (device.identity.pci_address if device.identity else None) or "~"
