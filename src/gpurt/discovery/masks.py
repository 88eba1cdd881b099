"""What the visibility variables say about the devices that one probe has sighted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpurt.discovery.sight_names import MANAGEMENT
from gpurt.discovery.wire import ProbeOutcome
from gpurt.types import GPUDevice
from gpurt.visibility.variables import VARIABLES

if TYPE_CHECKING:
    from gpurt.visibility.candidates import Candidate

_INTERFACES: Final[Mapping[str, str]] = {"cuda": "cuda", "rocm": "rocm", "vulkan": "vulkan", "opencl": "amd_opencl"}
"""What the resolver calls the interface of a backend."""

APPLIES_ITSELF: Final = frozenset({"cuda", "rocm"})
"""Backends whose libraries apply the variables of their vendor: what they show is visible, whatever we make of it."""


@dataclass(frozen=True, slots=True)
class Masks:
    """By ``device_id`` of sighted devices."""

    hidden: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hidden from everybody → the reason, in a sentence that names the variable."""
    hidden_here: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hidden from this backend alone."""
    uncertain: Mapping[str, str] = field(default_factory=dict[str, str])
    """Nobody can tell, but for the library itself."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Visible, but not to one process together with the others."""
    warnings: tuple[str, ...] = ()


def masks_of(name: str, outcome: ProbeOutcome, environ: Mapping[str, str], *, nvidia_present: bool = False) -> Masks:
    """The masks over the sighted devices of backend ``name``.

    Args:
        nvidia_present: the host has a device of NVIDIA's, which another backend shows.
    """
    sighted = outcome.sighted
    partitioned = any(card.identity is not None and card.identity.partition is not None for card in sighted)
    # Half of a quick answer is imports: only where they are needed.
    if not sighted or not (partitioned or any(variable in environ for variable in VARIABLES)):
        return Masks()
    from gpurt.visibility.resolver import resolve

    seen = resolve(environ, [_candidate(outcome, card) for card in sighted], nvidia_present=nvidia_present)
    interface = _INTERFACES.get(name, name)
    # Records of another source show the same card under another name.
    hidden = _of_all_sources(seen.hidden, sighted)
    order = seen.order.get(interface) if interface in APPLIES_ITSELF else None
    left_out: dict[str, str] = {}
    if order is not None:
        why = "another process can use it: CUDA shows one process one partition and nothing else"
        left_out = {device: why for device in seen.visible if device not in order}
    return Masks(hidden, dict(seen.hidden_from.get(interface, {})), seen.uncertain, left_out, seen.warnings)


def _candidate(outcome: ProbeOutcome, card: GPUDevice) -> Candidate:
    from gpurt.visibility.candidates import candidate_of

    about = outcome.about.get(card.device_id)
    if about is None:
        return candidate_of(card, numbered=card.backend_name in MANAGEMENT)
    return candidate_of(
        card,
        parent_uuid=about.parent_uuid,
        tiles=about.tiles,
        numbered=about.numbered,
        ordinals=about.ordinals,
    )


def _of_all_sources(hidden: Mapping[str, str], sighted: Sequence[GPUDevice]) -> dict[str, str]:
    known = dict(hidden)
    for card in sighted:
        if card.device_id in hidden:
            continue
        twin = next((other for other in sighted if other.device_id in hidden and same_card(card, other)), None)
        if twin is not None:
            known[card.device_id] = hidden[twin.device_id]
    return known


def same_card(device: GPUDevice, card: GPUDevice) -> bool:
    """Whether two records speak of the same card, or of the same partition of it."""
    a, b = device.identity, card.identity
    if a is None or b is None:
        return False
    if a.uuid and b.uuid and a.uuid == b.uuid:
        return True
    if a.pci_address is None or (a.pci_address, a.partition) != (b.pci_address, b.partition):
        return False
    # A vendor's UUID at the same address is another card's, or another partition's.
    return not (a.uuid and b.uuid and device.vendor == card.vendor == "nvidia")
