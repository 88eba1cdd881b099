"""Why OpenCL cannot be used here, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpurt.backends.advice import DRIVER, INSTALL
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.sources.device_nodes import check_node, may_open
from gpurt.sources.opencl_properties import OpenClInventory
from gpurt.sources.table import Absence

_ORDINAL: Final = "GPU_DEVICE_ORDINAL"
_NODES: Final = ("dev/dri/renderD*", "dev/kfd")


def absent(absence: Absence, platform: str) -> BackendUnavailable:
    """OpenCL could not be asked: no package, or no driver."""
    if absence.reason is ReasonCode.NO_LIBRARY:
        return _unavailable(absence.message, absence.reason, install_hint=INSTALL["opencl"])
    if absence.reason is ReasonCode.NO_DRIVER:
        return _unavailable(absence.message, absence.reason, hint=DRIVER["opencl"].get(platform))
    return _unavailable(absence.message, absence.reason)


def nothing_usable(
    inventory: OpenClInventory,
    platforms: Sequence[Mapping[str, Any]],
    *,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    may: Callable[[Path], bool] = may_open,
) -> BackendUnavailable:
    """OpenCL answers and has no device that can be opened. Looks at the device nodes below ``root``.

    Args:
        platforms: those of the table that ``inventory`` was read from.
        may: whether this process may open a node.
    """
    if inventory.devices:
        names = ", ".join(device.name or "a device without a name" for device in inventory.devices)
        return _unavailable(
            f"their driver says that they are not available now: {names}", ReasonCode.UNSUPPORTED_DEVICE
        )
    mask = environ.get(_ORDINAL)
    if mask and any(_is_amd(platform) for platform in platforms):
        text = f"AMD's OpenCL shows no device, and {_ORDINAL} is set to {mask!r}"
        hint = f"unset {_ORDINAL}, or name devices that exist"
        return _unavailable(text, ReasonCode.HIDDEN_BY_ENVIRONMENT, hint=hint)
    closed = _closed(root, may)
    if closed:
        # Drivers pass over what they cannot open, and then there seems to be nothing.
        hint = (
            "sudo usermod -aG render,video $USER and log in again; in a container --device /dev/dri --device /dev/kfd"
        )
        return _unavailable(f"OpenCL shows no device; {closed}", ReasonCode.NO_PERMISSION, hint=hint)
    if inventory.skipped:
        text = "; ".join(f"{each.where}: {each.why}" for each in inventory.skipped)
        return _unavailable(text, ReasonCode.ERROR)
    return _unavailable("an OpenCL driver is installed and shows no device", ReasonCode.NO_DEVICE)


def _is_amd(platform: Mapping[str, Any]) -> bool:
    return str(platform.get("vendor")).startswith(("Advanced Micro Devices", "AMD"))


def _closed(root: Path, may: Callable[[Path], bool]) -> str:
    names = sorted(str(path.relative_to(root)) for pattern in _NODES for path in root.glob(pattern))
    accesses = [check_node(root, name, may) for name in names]
    return "; ".join(access.message for access in accesses if access.reason is ReasonCode.NO_PERMISSION)


def _unavailable(text: str, reason: ReasonCode, **advice: str | None) -> BackendUnavailable:
    return BackendUnavailable(text, reason=reason, backend="opencl", **advice)
