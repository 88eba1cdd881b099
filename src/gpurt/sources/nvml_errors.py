"""What NVML's return codes mean for the whole library, or for one GPU, as errors of gpurt.

Internal to :mod:`gpurt.sources.nvml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpurt.errors import BackendUnavailable, DeviceLost, DeviceNotFound, ReasonCode
from gpurt.sources.nvidia_traces import NO_NVIDIA_DRIVER
from gpurt.sources.nvml_fields import GPU_IS_LOST, NO_PERMISSION, FieldReader, error_code

_DEV: Final = Path("/dev")

_INVALID_ARGUMENT, _NOT_FOUND, _GPU_NOT_FOUND = 2, 6, 28  # nvmlReturn_t of nvml.h

_NO_DEVICE = (ReasonCode.NO_DEVICE, "the NVIDIA driver is loaded and finds no GPU", None)
_UNAVAILABLE: Mapping[int, tuple[ReasonCode, str, str | None]] = {
    NO_PERMISSION: (
        ReasonCode.NO_PERMISSION,
        "this process may not open the NVIDIA driver",
        "add the user to the group that owns /dev/nvidia*, usually video or render, and log in again",
    ),
    _NOT_FOUND: _NO_DEVICE,
    9: (
        ReasonCode.NO_DRIVER,
        "the NVIDIA kernel driver is not loaded",
        "run `sudo modprobe nvidia`, or reboot after installing the driver",
    ),
    12: NO_NVIDIA_DRIVER,
    GPU_IS_LOST: (ReasonCode.ERROR, "a GPU has fallen off the bus", "reboot the machine; see `dmesg | grep Xid`"),
    18: (
        ReasonCode.DRIVER_MISMATCH,
        "NVIDIA's library and kernel driver are of different versions, as after an upgrade",
        "reboot, or reload the kernel modules: `sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia`",
    ),
    _GPU_NOT_FOUND: _NO_DEVICE,
    999: (
        ReasonCode.ERROR,
        "the NVIDIA driver answers with an unknown error",
        "if this is a container, it lost its devices, as by `systemctl daemon-reload` on the host: re-create it",
    ),
}


def unavailable(exc: BaseException, operation: str) -> BackendUnavailable:
    """Why NVML cannot be used at all. Looks into ``/dev``: cards whose device nodes are there are not absent."""
    code = error_code(exc)
    reason, message, hint = _UNAVAILABLE.get(code or 0, (ReasonCode.ERROR, f"NVML failed: {exc}", None))
    if reason not in (ReasonCode.NO_DEVICE, ReasonCode.NO_PERMISSION) and (nodes := card_nodes(_DEV)):
        message += f", although the device nodes of its GPUs are there: {', '.join(nodes)}"
    return BackendUnavailable(message, reason=reason, backend="nvml", operation=operation, code=code, hint=hint)


def device_lost(address: str) -> DeviceLost:
    """The GPU at a PCI address does not answer any more."""
    return DeviceLost(
        f"the GPU at {address} has fallen off the bus",
        operation="NVML telemetry",
        code=GPU_IS_LOST,
        hint="reboot the machine; see `dmesg | grep Xid`",
    )


def reason_of_no_handle(address: str, fields: FieldReader) -> str:
    """Why every field of a GPU is unavailable whose handle could not be had.

    Raises:
        DeviceNotFound: no GPU there. DeviceLost: it has fallen off the bus.
    """
    if fields.lost is not None:
        raise device_lost(address) from fields.lost
    code = error_code(fields.error) if fields.error is not None else None
    if code in (_INVALID_ARGUMENT, _NOT_FOUND, _GPU_NOT_FOUND):
        raise DeviceNotFound(f"no NVIDIA GPU at {address}", operation="NVML telemetry", code=code) from fields.error
    return fields.unavailable["handle"]


def card_nodes(dev: Path) -> tuple[str, ...]:
    """Nodes of NVIDIA's cards in ``dev``, as ``/dev/nvidia0``. Opens none."""
    names = (node.name for node in dev.glob("nvidia[0-9]*"))
    numbers = sorted(int(name[6:]) for name in names if name[6:].isdecimal())
    return tuple(f"/dev/nvidia{number}" for number in numbers)
