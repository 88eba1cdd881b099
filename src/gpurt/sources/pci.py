"""The PCI bus as Linux shows it, and the vendors on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

NVIDIA: Final = "0x10de"
AMD: Final = "0x1002"
INTEL: Final = "0x8086"

VENDORS: Final[Mapping[int, str]] = {
    0x1002: "amd",
    0x1010: "imagination",
    0x106B: "apple",
    0x10DE: "nvidia",
    0x13B5: "arm",
    0x1414: "microsoft",
    0x5143: "qualcomm",
    0x8086: "intel",
    0x10005: "mesa",  # not of the bus: Khronos gives numbers from 0x10000 on to those who have none
}
"""Numbers of vendors, as on the bus and in Vulkan, DXGI and OpenCL, and what gpurt calls them."""

BACKEND_VENDORS: Final[Mapping[str, str]] = {"cuda": NVIDIA, "rocm": AMD}
"""Whose devices a backend needs, where it needs somebody's."""

_GRAPHICS: Final = ("0x03", "0x12")
"""Base classes: display controllers, and processing accelerators, which cards without outputs call themselves."""


def has_pci_vendor(root: Path, vendor: str, *, graphics: bool = False) -> bool | None:
    """Whether the PCI bus shows a device of that vendor (``"0x10de"``); None where the bus cannot be read.

    Blocking, about a millisecond. ``root`` is where ``/sys`` is found.

    Args:
        graphics: count graphics cards and accelerators only.
    """
    found = False
    for device, text in _vendors(root):
        found = True
        if text == vendor and (not graphics or _first_line(device / "class").startswith(_GRAPHICS)):
            return True
    return False if found else None


def _vendors(root: Path) -> Iterator[tuple[Path, str]]:
    for entry in (root / "sys/bus/pci/devices").glob("*/vendor"):
        text = _first_line(entry)
        if text:  # else unplugged meanwhile
            yield entry.parent, text


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
