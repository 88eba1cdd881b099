"""The PCI bus as Linux shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

NVIDIA: Final = "0x10de"
AMD: Final = "0x1002"


def has_pci_vendor(root: Path, vendor: str) -> bool | None:
    """Whether the PCI bus shows a device of that vendor (``"0x10de"``); None where the bus cannot be read.

    Blocking, about a millisecond. ``root`` is where ``/sys`` is found.
    """
    found = False
    for entry in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            if entry.read_text().strip() == vendor:
                return True
        except OSError:
            continue  # unplugged meanwhile
        found = True
    return False if found else None
