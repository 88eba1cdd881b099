"""Why ROCm cannot be used: what the kernel shows, and what HIP refuses with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, Final

from gpurt.backends.advice import DRIVER, PERMISSION
from gpurt.backends.cupy.rocm_cards import RocmCards
from gpurt.backends.cupy.runtime import ROCM_BUILD_HINT, ROCM_INSTALL_HINT
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.printable import quoted
from gpurt.sources.pci import AMD, has_pci_vendor
from gpurt.visibility.variables import CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES

# hipError_t, hip_runtime_api.h.
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100
_VARIABLES: Final = (ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)
_HINTS: Final[Mapping[ReasonCode, str]] = {
    ReasonCode.NO_PERMISSION: PERMISSION["rocm"],
    ReasonCode.NO_DRIVER: DRIVER["rocm"]["linux"],
}


def check_system(system: str) -> None:
    """Raise ``BackendUnavailable`` where there is no ROCm at all. ``system`` is as ``sys.platform``."""
    if system not in ("linux", "win32"):
        text = f"ROCm does not exist on {system}, only on Linux and Windows"
        raise _unavailable(text, ReasonCode.WRONG_PLATFORM)


def install_hint(system: str) -> str:
    """How CuPy for ROCm gets onto ``system``."""
    return ROCM_INSTALL_HINT if system == "linux" and platform.machine() == "x86_64" else ROCM_BUILD_HINT


def kernel_trouble(cards: RocmCards) -> BackendUnavailable | None:
    """What the kernel has against every library of ROCm's; None when it shows a GPU that may be used, or tells nothing
    (WSL, whose GPUs are Windows', or another system)."""
    inventory, root = cards.inventory, cards.root
    if inventory.devices:
        access = [card.access for card in inventory.devices]
        refused = [each for each in access if each.reason is not None]
        if len(refused) < len(access):
            return None
        return _unavailable(refused[0].message, refused[0].reason or ReasonCode.ERROR)
    if any(not each.why.startswith("a processor") for each in inventory.skipped):
        return _unavailable("amdgpu, the kernel's driver, drives none of AMD's devices here", ReasonCode.NO_DRIVER)
    if not (root / "dev/dxg").exists() and has_pci_vendor(root, AMD) is False:
        return _unavailable("the PCI bus shows no AMD GPU", ReasonCode.NO_DEVICE)
    return None


def not_counted(exc: Any, cards: RocmCards) -> BackendUnavailable:
    """What it means that HIP cannot count its devices, or counts none.

    Args:
        exc: CuPy's ``CUDARuntimeError``; None where HIP counts none.
    """
    status = _NO_DEVICE if exc is None else exc.status
    if status == _NO_DEVICE and cards.hidden and not cards.counted:
        masks = ", ".join(f"{name}={quoted(cards.environ[name])}" for name in _VARIABLES if name in cards.environ)
        hint = "unset the variable, or name devices that exist"
        return _unavailable(
            f"{masks} leaves no device of {cards.hidden}", ReasonCode.HIDDEN_BY_ENVIRONMENT, status, hint
        )
    trouble = kernel_trouble(cards)
    if trouble is not None:
        return _unavailable(f"HIP finds no usable device: {trouble.message}", trouble.reason, status)
    if status == _INSUFFICIENT_DRIVER:
        text = "the amdgpu kernel driver is too old for the installed ROCm"
        hint = "update amdgpu-dkms or the kernel, or install the ROCm and the CuPy that belong to the driver"
        return _unavailable(text, ReasonCode.DRIVER_MISMATCH, status, hint)
    if status != _NO_DEVICE:
        return _unavailable(str(exc), ReasonCode.ERROR, status)
    if cards.inventory.devices:
        kinds = ", ".join(sorted({card.gfx or card.name or "unknown" for card in cards.inventory.devices}))
        text = f"HIP shows none of the GPUs that the kernel has ({kinds})"
        hint = "install a ROCm and a CuPy that support them, or use them through Vulkan"
        return _unavailable(text, ReasonCode.UNSUPPORTED_DEVICE, status, hint)
    return _unavailable("HIP works and finds no device", ReasonCode.NO_DEVICE, status)


def _unavailable(text: str, reason: ReasonCode, code: int | None = None, hint: str | None = None) -> BackendUnavailable:
    return BackendUnavailable(text, reason=reason, backend="rocm", code=code, hint=hint or _HINTS.get(reason))
