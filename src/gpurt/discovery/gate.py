"""What can be ruled out without loading a library or starting a process: a few look-ups, together under 5 ms.

The gate only ever rules out; a backend that passes it may still be absent. It is generous where in doubt: WSL has
no ``/dev/nvidiactl``, so a missing node says nothing about CUDA. A backend whose library is missing passes where its
sources may have devices to show (:mod:`gpurt.discovery.sight`): a card is listed, with its reason, also then.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gpurt.discovery.wire import Failure
from gpurt.errors import ReasonCode
from gpurt.remedies import NOT_ON_BUS, remedy, where_none_is_on_the_bus
from gpurt.sources.pci import AMD, BACKEND_VENDORS, INTEL, has_pci_vendor

_PLATFORMS: Final[Mapping[str, tuple[str, ...]]] = {
    # Where it can exist at all, as :func:`gpurt.platforms.current_platform` says; not listed: everywhere.
    "cuda": ("linux", "win32"),
    "rocm": ("linux", "win32"),
    "metal": ("darwin",),
    "directml": ("win32",),
}

_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    # Any of them will do. cuda: NVML alone shows cards that nothing here can use, and why.
    "cuda": ("pynvml", "cupy"),
    "rocm": ("cupy",),
    "vulkan": ("vulkan",),
    "opencl": ("pyopencl",),
    "metal": ("mlx",),
    "directml": ("onnxruntime",),
    "tflite": ("ai_edge_litert", "tflite_runtime", "tensorflow"),
}

_MANIFEST_VARIABLES: Final = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES")
_MANIFEST_PLACES: Final = (
    "usr/share",
    "usr/local/share",
    "etc",
    "etc/xdg",
    "usr/lib/x86_64-linux-gnu/GL",  # Flatpak
    "run/opengl-driver/share",  # NixOS
)
"""Relative to the root: where distributions have Vulkan's loader look."""


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return True  # already imported, and made by hand: such a module has no specification


def gate(
    name: str,
    *,
    platform: str,
    root: Path = Path("/"),
    has_module: Callable[[str], bool] = _has_module,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Failure | None:
    """Why the backend cannot possibly be used here, or None when only a probe can tell. Reads the file system.

    Args:
        platform: as :func:`gpurt.platforms.current_platform` says.
        root: where ``/dev``, ``/sys``, ``/etc`` and ``/usr`` are found.
        environ: the environment of the probe; says where else drivers are.
    """
    platforms = _PLATFORMS.get(name)
    if platforms is not None and platform not in platforms:
        text = f"{name} does not exist on {platform}, only on {' and '.join(platforms)}"
        return Failure(ReasonCode.WRONG_PLATFORM, text)
    # In WSL (/dev/dxg) the GPU is not on the bus.
    if name == "rocm" and not (root / "dev/dxg").exists() and has_pci_vendor(root, AMD) is False:
        return Failure(ReasonCode.NO_DEVICE, "there is no AMD device on the PCI bus")
    if _has_sources(name, platform, root):
        return None
    modules = _MODULES.get(name, ())
    if modules and not any(map(has_module, modules)):
        reason, text = ReasonCode.NO_LIBRARY, f"the Python package {modules[0]} is not installed"
        vendor = BACKEND_VENDORS.get(name)
        if vendor is not None and has_pci_vendor(root, vendor) is False:
            hint = where_none_is_on_the_bus(reason, remedy(reason, name, platform))
            return Failure(reason, f"{text}; {NOT_ON_BUS}", hint)
        return Failure(reason, text)
    if name == "vulkan" and platform == "linux" and not has_vulkan_driver(root, environ):
        text = "no Vulkan driver is installed: its loader finds no manifest (icd.d/*.json)"
        return Failure(ReasonCode.NO_DRIVER, text)
    return None


def _has_sources(name: str, platform: str, root: Path) -> bool:
    """Whether looking may show devices also where the backend cannot be opened."""
    match name:
        case "rocm":
            # A container may show the topology and not the bus.
            kernel = platform == "linux" and (root / "sys/class/kfd/kfd/topology/nodes").is_dir()
            return kernel or (platform == "linux" and has_pci_vendor(root, AMD, graphics=True) is True)
        case "vulkan":
            return platform == "linux" and has_pci_vendor(root, INTEL, graphics=True) is True
        case "metal":
            return platform == "darwin" and (root / "usr/sbin/system_profiler").exists()
        case "directml":
            return platform == "win32" and (_is_this_windows(root) or (root / "Windows/System32/dxgi.dll").exists())
        case _:
            return False


def has_vulkan_driver(root: Path, environ: Mapping[str, str]) -> bool:
    """Whether Vulkan's loader finds the manifest of a driver on Linux, in any of the places where it looks.

    Without one it shows nothing, and a process to ask it would be a waste.
    """
    if any(environ.get(variable) for variable in _MANIFEST_VARIABLES):
        return True
    data = environ.get("XDG_DATA_DIRS", "").split(":")
    home = environ.get("HOME", "")
    own = [environ.get("XDG_DATA_HOME", ""), f"{home}/.local/share" if home else "", f"{sys.prefix}/share", *data]
    places = [*_MANIFEST_PLACES, *(place.lstrip("/") for place in own if place)]
    return any(any((root / place / "vulkan/icd.d").glob("*.json")) for place in places)


def _is_this_windows(root: Path) -> bool:
    """Every Windows of today has DXGI, on whatever drive it is installed."""
    return sys.platform == "win32" and root == Path("/")
