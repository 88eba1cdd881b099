"""``CUDA_VISIBLE_DEVICES`` over NVIDIA's devices and their partitions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from gpurt.visibility.candidates import Candidate
from gpurt.visibility.lists import Chosen, Named, cuda_list
from gpurt.visibility.outcome import Outcome
from gpurt.visibility.variables import CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES

PCI_BUS_ID: Final = "PCI_BUS_ID"
_NUMBER: Final = re.compile(r"\s*\+?[0-9]")
"""What the first entry of a list of numbers begins with. ``-1`` is none: it ends the list."""


def resolve_nvidia(environ: Mapping[str, str], candidates: Sequence[Candidate]) -> Outcome:
    """Which of NVIDIA's candidates CUDA may use, and which of them one process sees in which order."""
    if not candidates:
        return Outcome()
    cards, counted = _in_cuda_order(physical(candidates), environ)
    value = environ.get(CUDA_VISIBLE_DEVICES)
    if value is None:
        chosen, warning = [part for card in cards for part in card], None
        hidden: list[Candidate] = []
    else:
        parts = [part for card in cards for part in card]
        picked = cuda_list(CUDA_VISIBLE_DEVICES, value, len(cards), _names(cards, parts))
        if picked.by_index and picked.order and not counted:
            return _uncertain(picked, parts, everything=len(picked.order) == len(cards))
        chosen, warning = _picked(picked, cards, parts), picked.warning
        hidden = [part for part in parts if part not in chosen]
    why = f"{CUDA_VISIBLE_DEVICES} does not name it"
    shown, note = _one_process(chosen)
    return Outcome(
        visible=tuple(part.device_id for part in chosen),
        hidden={part.device_id: why for part in hidden},
        # Without the variable nobody can tell in which order CUDA counts devices of different models.
        order={"cuda": shown} if counted or value is not None else {},
        warnings=tuple(filter(None, (warning, note))),
    )


def resolve_nvidia_names(environ: Mapping[str, str], candidates: Sequence[Candidate]) -> Outcome:
    """The same for devices that another interface shows, in an order of its own: numbers say nothing about them."""
    value = environ.get(CUDA_VISIBLE_DEVICES)
    everything = tuple(candidate.device_id for candidate in candidates)
    if value is None or not candidates or _NUMBER.match(value):
        return Outcome(visible=everything)
    why = f"{CUDA_VISIBLE_DEVICES} does not name it"
    if not value.startswith(("GPU-", "MIG-")):
        return Outcome(hidden=dict.fromkeys(everything, why))
    # Two drivers of one interface may both show a card.
    uuids = list(dict.fromkeys(candidate.uuid for candidate in candidates if candidate.uuid is not None))
    names = [Named(position, (uuid,)) for position, uuid in enumerate(uuids)]
    chosen = {uuids[position] for position in cuda_list(CUDA_VISIBLE_DEVICES, value, 0, names).order}
    return Outcome(
        visible=tuple(candidate.device_id for candidate in candidates if candidate.uuid in chosen),
        hidden={c.device_id: why for c in candidates if c.uuid is not None and c.uuid not in chosen},
        uncertain={
            candidate.device_id: f"{CUDA_VISIBLE_DEVICES} names devices by UUID, which nothing tells of this one"
            for candidate in candidates
            if candidate.uuid is None
        },
    )


def physical(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Cards in their given order, each with its partitions or itself."""
    cards: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        card = candidate.device_id
        if candidate.partition is not None:
            card = candidate.parent_uuid or candidate.pci_address or card
        cards.setdefault(card, []).append(candidate)
    return list(cards.values())


def by_pci(cards: Sequence[list[Candidate]]) -> list[list[Candidate]]:
    """Cards by PCI address, where all have one; NVML gives them in that order anyway."""
    if any(card[0].pci_address is None for card in cards):
        return list(cards)
    return sorted(cards, key=lambda card: card[0].pci_address or "")


def _in_cuda_order(cards: list[list[Candidate]], environ: Mapping[str, str]) -> tuple[list[list[Candidate]], bool]:
    """Cards as CUDA counts them, and whether that is known: it puts the fastest first by rules of its own."""
    if environ.get(CUDA_DEVICE_ORDER) != PCI_BUS_ID:
        ordinals = [card[0].ordinals.get("cuda") for card in cards]
        if None not in ordinals and len(set(ordinals)) == len(ordinals):
            return sorted(cards, key=lambda card: card[0].ordinals["cuda"]), True
        models = {card[0].model for card in cards}
        if len(cards) > 1 and (len(models) > 1 or None in models):
            return by_pci(cards), False
    return by_pci(cards), True


def _names(cards: Sequence[list[Candidate]], parts: Sequence[Candidate]) -> list[Named]:
    """Cards have the positions from 0, partitions those after the last card."""
    named: list[Named] = []
    for position, card in enumerate(cards):
        uuid = card[0].parent_uuid if card[0].partition is not None else card[0].uuid
        if uuid is not None:
            named.append(Named(position, (uuid,)))
    for number, part in enumerate(parts):
        if part.partition is None:
            continue
        old = f"MIG-{part.parent_uuid}/{part.partition}" if part.parent_uuid else None
        names = tuple(name for name in (part.uuid, old) if name is not None)
        if names:
            named.append(Named(len(cards) + number, names))
    return named


def _picked(picked: Chosen, cards: Sequence[list[Candidate]], parts: Sequence[Candidate]) -> list[Candidate]:
    chosen: list[Candidate] = []
    for position in picked.order:
        chosen.extend(cards[position] if position < len(cards) else [parts[position - len(cards)]])
    return chosen


def _one_process(chosen: Sequence[Candidate]) -> tuple[tuple[str, ...], str | None]:
    """What CUDA shows of the chosen ones: one MIG device and nothing else, if there is any (MIG User Guide)."""
    partitions = [part for part in chosen if part.partition is not None]
    if not partitions or len(chosen) == 1:
        return tuple(part.device_id for part in chosen), None
    rest = len(chosen) - 1
    note = f"CUDA shows one process one MIG device and nothing else: {rest} more can be used by other processes"
    return (partitions[0].device_id,), note


def _uncertain(picked: Chosen, parts: Sequence[Candidate], *, everything: bool) -> Outcome:
    why = (
        f"{CUDA_VISIBLE_DEVICES} counts devices as CUDA does, the fastest first; without {CUDA_DEVICE_ORDER}="
        f"{PCI_BUS_ID} nobody can tell which they are, so name them by UUID"
    )
    warnings = (picked.warning,) if picked.warning else ()
    if everything:
        return Outcome(visible=tuple(part.device_id for part in parts), warnings=warnings)
    return Outcome(uncertain={part.device_id: why for part in parts}, warnings=warnings)
