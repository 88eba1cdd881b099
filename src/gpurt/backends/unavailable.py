"""Backends that gpurt knows and has no driver for yet: they refuse with a truthful reason and what to do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.sources.pci import AMD, has_pci_vendor
from gpurt.types import GPUDevice, Telemetry

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


class UnavailableDriver(Driver):
    """A driver whose ``open`` always refuses. Subclasses set ``name``, one of :data:`TITLES`."""

    def __init__(self, *, platform: str = sys.platform, root: Path = Path("/")) -> None:
        self._platform = platform
        self._root = root

    def open(self) -> Sequence[GPUDevice]:
        raise self._refusal()

    def _refusal(self) -> BackendUnavailable:
        return refusal(self.name, platform=self._platform, root=self._root)

    # Never reached, because nothing opens; they say the same if somebody does call them.

    def _refuse(self) -> NoReturn:
        raise self._refusal()

    def attach(self, index: int) -> None:
        self._refuse()

    def alloc(self, index: int, nbytes: int) -> Any:
        self._refuse()

    def free(self, index: int, mem: Any) -> None:
        self._refuse()

    def write(self, index: int, mem: Any, offset: int, src: memoryview) -> None:
        self._refuse()

    def read(self, index: int, mem: Any, offset: int, dst: memoryview) -> None:
        self._refuse()

    def copy(
        self, src_index: int, src: Any, src_offset: int, dst_index: int, dst: Any, dst_offset: int, nbytes: int
    ) -> None:
        self._refuse()

    def sync(self, index: int) -> None:
        self._refuse()

    def telemetry(self, index: int) -> Telemetry:
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""
