"""What can be ruled out without loading a library or starting a process: a few look-ups, together under 5 ms.

The gate only ever rules out; a backend that passes it may still be absent. It is generous where in doubt: WSL has
no ``/dev/nvidiactl``, so a missing node says nothing about CUDA.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gpurt.discovery.wire import Failure
from gpurt.errors import ReasonCode

_PLATFORMS: Final[Mapping[str, frozenset[str]]] = {
    "cuda": frozenset({"linux", "win32"}),
    "rocm": frozenset({"linux", "win32"}),
    "metal": frozenset({"darwin"}),
    "directml": frozenset({"win32"}),
}

_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    # Any of them will do. cuda: NVML alone shows cards that nothing here can use, and why.
    "cuda": ("pynvml", "cupy"),
    "rocm": ("cupy",),
    "vulkan": ("vulkan",),
    "opencl": ("pyopencl",),
    "tflite": ("ai_edge_litert",),
}

PCI_VENDORS: Final[Mapping[str, str]] = {"cuda": "0x10de", "rocm": "0x1002"}


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def gate(
    name: str, *, platform: str, root: Path = Path("/"), has_module: Callable[[str], bool] = _has_module
) -> Failure | None:
    """Why the backend cannot possibly be used here, or None when only a probe can tell. Reads the file system.

    Args:
        platform: as :func:`gpurt.platforms.current_platform` says.
        root: where ``/dev`` and ``/sys`` are found.
    """
    platforms = _PLATFORMS.get(name)
    if platforms is not None and platform not in platforms:
        return Failure(ReasonCode.WRONG_PLATFORM, f"there is no {name} on {platform}")
    modules = _MODULES.get(name, ())
    if modules and not any(map(has_module, modules)):
        return Failure(ReasonCode.NO_LIBRARY, f"the Python package {modules[0]} is not installed")
    if name == "rocm" and platform == "linux" and not (root / "dev/dxg").exists():
        return _kfd(root)
    return None


def _kfd(root: Path) -> Failure | None:
    node = root / "dev/kfd"
    if not node.exists():
        if has_pci_vendor(root, PCI_VENDORS["rocm"]) is False:
            return Failure(ReasonCode.NO_DEVICE, "there is no AMD device on the PCI bus")
        return Failure(ReasonCode.NO_DRIVER, "/dev/kfd does not exist: the amdgpu kernel driver is not loaded")
    if not os.access(node, os.R_OK | os.W_OK):
        group = node.stat().st_gid
        return Failure(ReasonCode.NO_PERMISSION, f"/dev/kfd belongs to group {group}, of which this process is not")
    return None


def has_pci_vendor(root: Path, vendor: str) -> bool | None:
    """Whether the PCI bus shows a device of that vendor (``"0x10de"``); None where the bus cannot be read."""
    found = False
    for entry in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            if entry.read_text().strip() == vendor:
                return True
        except OSError:
            continue  # unplugged meanwhile
        found = True
    return False if found else None
