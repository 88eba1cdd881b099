"""Which backends gpurt knows and has no driver for yet, and why each cannot be used here. Imports next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.sources.pci import AMD, has_pci_vendor

TITLES: Final[Mapping[str, str]] = {
    "rocm": "ROCm",
    "vulkan": "Vulkan",
    "tflite": "TFLite GPU",
    "metal": "Metal",
    "directml": "DirectML",
}
"""The backends without a driver, and what people call them."""

_PLATFORMS: Final[Mapping[str, tuple[str, ...]]] = {
    # Where it can exist at all, as sys.platform says; not listed: everywhere.
    "rocm": ("linux", "win32"),
    "metal": ("darwin", "ios"),
    "directml": ("win32",),
}


def refusal(name: str, *, platform: str = sys.platform, root: Path = Path("/")) -> BackendUnavailable:
    """Why backend ``name`` of :data:`TITLES` cannot be used. Reads the file system, imports nothing.

    There is no install command in it: no library helps while gpurt has no driver that would use it.
    """
    title = TITLES[name]
    missing = f"this version of gpurt has no {title} driver yet"
    platforms = _PLATFORMS.get(name, ())
    if platforms and platform not in platforms:
        text = f"{title} does not exist on {platform}, only on {' and '.join(platforms)}"
        return BackendUnavailable(text, reason=ReasonCode.WRONG_PLATFORM, backend=name)
    # In WSL (/dev/dxg) the GPU is not on the bus.
    if name == "rocm" and not (root / "dev/dxg").exists() and has_pci_vendor(root, AMD) is False:
        text = f"there is no AMD device on the PCI bus; {missing}"
        return BackendUnavailable(text, reason=ReasonCode.NO_DEVICE, backend=name)
    return BackendUnavailable(missing, reason=ReasonCode.NOT_IMPLEMENTED, backend=name)
