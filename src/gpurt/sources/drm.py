"""Graphics cards as Linux shows them: ``/sys/class/drm``, and what of the PCI bus has no entry there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpurt.identity import normalize_pci_address
from gpurt.sources.sysfs import Skipped, link_name, numbered, parse_number, read

_CARDS: Final = "sys/class/drm"
# PCI base classes: display controllers, and processing accelerators, which cards without outputs call themselves.
_CLASSES: Final = (0x03, 0x12)


@dataclass(frozen=True, slots=True)
class DrmCard:
    """One ``/sys/class/drm/card<number>`` of a PCI device."""

    number: int
    card: Path
    """The card's directory."""
    device: Path
    """The PCI device's directory."""
    pci_address: str | None
    driver: str | None
    device_id: int | None
    revision: int | None
    render_minor: int | None
    """128 and up: ``/dev/dri/renderD<minor>``."""
    suspended: bool
    """Powered down by runtime power management: reading its sensors would wake it."""


def drm_cards(root: Path, vendor: int) -> tuple[list[DrmCard], list[Skipped]]:
    """Cards of one PCI vendor by number, and the cards whose vendor cannot be read. Blocking.

    Cards that are no PCI devices (virtual displays, partitions of another card) are none of anybody's.
    """
    entries, reason = numbered(root / _CARDS, "card")
    skipped = [] if reason in (None, "unsupported") else [Skipped(f"/{_CARDS}", f"cannot be listed: {reason}")]
    cards: list[DrmCard] = []
    for number, _ in entries:
        card = drm_card(root, vendor, number)
        if isinstance(card, Skipped):
            skipped.append(card)
        elif card is not None:
            cards.append(card)
    return cards, skipped


def drm_card(root: Path, vendor: int, number: int) -> DrmCard | Skipped | None:
    """The card of that number if it is one of that PCI vendor; why it cannot be told; None for any other."""
    card = root / _CARDS / f"card{number}"
    text, reason = read(card / "device/vendor")
    if text is None:
        if reason == "unsupported":
            return None
        return Skipped(f"/{_CARDS}/card{number}", f"its vendor cannot be read: {reason}")
    found = parse_number(text)
    if found is None:
        return Skipped(f"/{_CARDS}/card{number}", f"its vendor is no number: {text[:20]!r}")
    return _card(number, card, card / "device") if found == vendor else None


def unclaimed(root: Path, vendor: int, claimed: Iterable[str | None]) -> list[Skipped]:
    """Display and accelerator devices of a vendor on the PCI bus that none of the ``claimed`` addresses names."""
    known = set(claimed)
    found: list[Skipped] = []
    base = root / "sys/bus/pci/devices"
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return found  # no PCI bus, or none that this container shows
    for name in names:
        if parse_number(read(base / name / "vendor")[0] or "") != vendor:
            continue
        code = parse_number(read(base / name / "class")[0] or "")
        if code is None or code >> 16 not in _CLASSES:
            continue
        address = normalize_pci_address(name)
        if address in known:
            continue
        driver = link_name(base / name / "driver") or _uevent(base / name).get("DRIVER")
        bound = f"bound to {driver}, which makes no graphics device of it" if driver else "no driver is bound to it"
        found.append(Skipped(address or name, f"it is on the PCI bus, and {bound}"))
    return found


def _card(number: int, card: Path, device: Path) -> DrmCard:
    event = _uevent(device)
    # A recorded tree may have directories where /sys has links: the kernel's own text is looked at first.
    address = normalize_pci_address(event.get("PCI_SLOT_NAME")) or normalize_pci_address(link_name(device))
    minors, _ = numbered(device / "drm", "renderD")
    return DrmCard(
        number=number,
        card=card,
        device=device,
        pci_address=address,
        driver=event.get("DRIVER") or link_name(device / "driver"),
        device_id=_identifier(device / "device", 0xFFFF),
        revision=_identifier(device / "revision", 0xFF),
        render_minor=minors[0][0] if minors else None,
        suspended=read(device / "power/runtime_status")[0] in ("suspended", "suspending"),
    )


def _identifier(path: Path, highest: int) -> int | None:
    number = parse_number(read(path)[0] or "")
    return number if number is not None and 0 <= number <= highest else None


def _uevent(device: Path) -> dict[str, str]:
    lines = (read(device / "uevent")[0] or "").splitlines()
    return {key: value for key, equals, value in (line.partition("=") for line in lines) if equals}
