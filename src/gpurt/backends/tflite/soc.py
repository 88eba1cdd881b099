"""What the operating system calls the chip whose GPU TFLite uses: TFLite itself names no device."""

from __future__ import annotations

import platform as python_platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from gpurt.platforms import Platform
from gpurt.sources.sysfs import read

_UNNAMED: Final = "TFLite GPU"
_FILES: Final = ("vendor/build.prop", "system/build.prop", "odm/build.prop", "default.prop")
_PROPERTY_BYTES: Final = 92  # PROP_VALUE_MAX, sys/system_properties.h

_VENDORS: Final = {
    # ro.soc.manufacturer, as it is found on devices.
    "qti": "qualcomm",
    "qualcomm": "qualcomm",
    "mediatek": "mediatek",
    "samsung": "samsung",
    "google": "google",
    "hisilicon": "hisilicon",
    "unisoc": "unisoc",
    "spreadtrum": "unisoc",
    "nvidia": "nvidia",
    "rockchip": "rockchip",
}


class Chip(NamedTuple):
    name: str
    vendor: str
    """As in :class:`gpurt.types.GPUDevice`: ``unknown`` where nobody tells."""


def chip(platform: Platform, root: Path, machine: str | None = None) -> Chip:
    """Name and vendor of the chip, or ``TFLite GPU`` of ``unknown``. Reads files.

    Args:
        root: where ``vendor/build.prop`` and others are found; only ``/`` also asks the C library.
        machine: what ``platform.machine()`` says: ``iPhone14,2`` on iOS.
    """
    if platform == "android":
        return _android(_properties(root) if root != Path("/") else _getprop(_properties(root)))
    machine = machine or python_platform.machine()
    if platform == "ios":
        return Chip(f"Apple GPU ({machine})" if machine else "Apple GPU", "apple")
    if platform == "darwin" and machine == "arm64":
        return Chip("Apple GPU", "apple")
    return Chip(_UNNAMED, "unknown")


def has_gpu_node(root: Path) -> bool:
    """Whether Linux shows this process the node of any GPU: without one, what computes is software."""
    patterns = ("dri/renderD*", "nvidia[0-9]*", "dxg", "kgsl-3d0", "mali[0-9]*", "nvhost-gpu", "nvmap")
    return any(next((root / "dev").glob(pattern), None) is not None for pattern in patterns)


def _android(get: Callable[[str], str | None]) -> Chip:
    maker = get("ro.soc.manufacturer") or ""
    model = get("ro.soc.model") or get("ro.hardware.chipname") or get("ro.board.platform") or ""
    vendor = _VENDORS.get(maker.lower(), "unknown")
    shown = vendor.capitalize() if vendor != "unknown" else maker
    name = " ".join(filter(None, (shown, model)))
    return Chip(f"{name} GPU" if name else _UNNAMED, vendor)


def _properties(root: Path) -> Callable[[str], str | None]:
    lines: Iterable[str] = (line for name in _FILES for line in (read(root / name)[0] or "").splitlines())
    found: dict[str, str] = {}
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and value.strip():
            found.setdefault(key.strip(), value.strip())
    return found.get


def _getprop(otherwise: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Properties as Android's C library tells them, which apps may ask; most may not read the files."""
    import ctypes

    try:
        ask = ctypes.CDLL(None).__system_property_get
    except (AttributeError, OSError, TypeError):  # not Android's C library
        return otherwise

    def get(name: str) -> str | None:
        value = ctypes.create_string_buffer(_PROPERTY_BYTES)
        ask(name.encode(), value)
        return value.value.decode(errors="replace").strip() or otherwise(name)

    return get
