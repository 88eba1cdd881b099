"""A container that has lost its device nodes.

A container's right to open ``/dev/nvidia*`` can be taken back while it runs (``systemctl daemon-reload`` on the host
does it to containers that the container runtime has not told systemd everything about). The driver is loaded and the
cards are well, and nothing that the container itself can do brings the right back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

_PREFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda": ("dev/nvidia",),
    "rocm": ("dev/kfd", "dev/dri/renderD"),
    "vulkan": ("dev/dri/renderD", "dev/nvidia"),
    "opencl": ("dev/dri/renderD", "dev/nvidia"),
}
_DRIVERS: Final[Mapping[str, tuple[str, ...]]] = {
    "dev/nvidia": ("proc/driver/nvidia/version", "sys/module/nvidia"),
    "dev/kfd": ("sys/module/amdgpu",),
    "dev/dri/renderD": ("sys/module/amdgpu", "sys/module/i915", "sys/module/xe"),
}
_SAFE_TO_OPEN: Final = "dev/nvidiactl"
"""Of the driver, not of a card: opening it wakes nothing."""


def is_on_bus(pci_address: str, root: Path = Path("/")) -> bool:
    """Whether the kernel shows a PCI device at ``dddddddd:bb:dd.f``: containers see that of devices that they may not
    use. A device that was unplugged is not there. Blocking."""
    domain, _, rest = pci_address.partition(":")
    try:
        # sysfs prints domains with at least four digits.
        return (root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{rest}").exists()
    except (ValueError, OSError):
        return False


def open_and_close(path: Path) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))


def lost_nodes(
    backend: str, before: frozenset[str], root: Path = Path("/"), try_to_open: Callable[[Path], None] = open_and_close
) -> tuple[str, ...]:
    """Which nodes of ``backend`` were there and have gone, or may not be opened any more, although their driver is
    still loaded. Empty where the driver went too: then it was unloaded. Blocking.

    Args:
        before: nodes of the time when the backend worked, as in :attr:`gpurt.hotchange.marks.Marks.nodes`.
        try_to_open: raises OSError when a node cannot be opened.
    """
    lost: list[str] = []
    for prefix in _PREFIXES.get(backend, ()):
        if not any((root / file).exists() for file in _DRIVERS[prefix]):
            continue
        for node in sorted(node for node in before if node.startswith(prefix)):
            if _is_lost(root / node, node, try_to_open):
                lost.append(f"/{node}")
    return tuple(lost)


def _is_lost(path: Path, node: str, try_to_open: Callable[[Path], None]) -> bool:
    if not path.exists():
        return True
    if node != _SAFE_TO_OPEN:
        return False
    try:
        try_to_open(path)
    except PermissionError:
        return True
    except OSError:
        return False  # something else is wrong, and the driver tells what
    return False
