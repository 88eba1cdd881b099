"""Whether anything on a Linux host hints at an NVIDIA device or driver. A process to ask for one costs 0.3 s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gpurt.errors import ReasonCode
from gpurt.sources.pci import NVIDIA, has_pci_vendor

NO_NVIDIA_DRIVER: Final = (
    ReasonCode.NO_DRIVER,
    "libnvidia-ml not found: the NVIDIA driver is not installed",
    "install the NVIDIA driver; in a container, start it with the NVIDIA container toolkit (`--gpus all`)",
)
"""Reason, message and remedy, also of NVML's own code for it."""

_LIBRARIES: Final = ("libnvidia-ml.so", "libcuda.so")
_PLACES: Final = (
    "proc/driver/nvidia",
    "sys/module/nvidia",
    "dev/nvidiactl",
    "dev/dxg",  # WSL: no device is on the bus
    "dev/nvhost-ctrl",  # Jetson, likewise
    "dev/nvmap",
    "etc/nv_tegra_release",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",  # NixOS
)
_CACHE: Final = "etc/ld.so.cache"
_USUAL: Final = ("usr/lib64", "usr/lib", "lib64", "lib", "usr/local/nvidia/lib64", "usr/local/nvidia/lib")
"""Looked at where the loader has no cache, as with musl; NVIDIA's containers use the last two."""


def has_nvidia_traces(root: Path, environ: Mapping[str, str]) -> bool:
    """False only where there is no device on the bus, no device node, no kernel module and no library to load.

    Blocking, two milliseconds. ``root`` is where the file tree is; ``environ`` says where else the loader looks.
    """
    if any((root / place).exists() for place in _PLACES):
        return True
    if has_pci_vendor(root, NVIDIA) is True:
        return True
    return _is_in_cache(root) or any(map(_has_library, _directories(root, environ)))


def _is_in_cache(root: Path) -> bool:
    try:
        cache = (root / _CACHE).read_bytes()
    except OSError:
        return False
    return any(name.encode() in cache for name in _LIBRARIES)


def _directories(root: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    for place in environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":"):
        yield root / place.lstrip("/") if place.startswith("/") else Path(place or ".")
    yield from (root / place for place in _USUAL)


def _has_library(directory: Path) -> bool:
    return any((directory / f"{name}{end}").exists() for name in _LIBRARIES for end in (".1", ""))
