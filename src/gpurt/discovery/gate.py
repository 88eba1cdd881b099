"""What can be ruled out without loading a library or starting a process: a few look-ups, together under 5 ms.

The gate only ever rules out; a backend that passes it may still be absent. It is generous where in doubt: WSL has
no ``/dev/nvidiactl``, so a missing node says nothing about CUDA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gpurt.backends.undriven import TITLES, refusal
from gpurt.discovery.wire import Failure
from gpurt.errors import ReasonCode
from gpurt.sources.pci import AMD, NVIDIA

_PLATFORMS: Final[Mapping[str, frozenset[str]]] = {
    "cuda": frozenset({"linux", "win32"}),
}

_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    # Any of them will do. cuda: NVML alone shows cards that nothing here can use, and why.
    "cuda": ("pynvml", "cupy"),
    "opencl": ("pyopencl",),
}

PCI_VENDORS: Final[Mapping[str, str]] = {"cuda": NVIDIA, "rocm": AMD}


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
    if name in TITLES:
        exc = refusal(name, platform=platform, root=root)
        return Failure(exc.reason, exc.message, exc.hint)
    platforms = _PLATFORMS.get(name)
    if platforms is not None and platform not in platforms:
        return Failure(ReasonCode.WRONG_PLATFORM, f"there is no {name} on {platform}")
    modules = _MODULES.get(name, ())
    if modules and not any(map(has_module, modules)):
        return Failure(ReasonCode.NO_LIBRARY, f"the Python package {modules[0]} is not installed")
    return None
