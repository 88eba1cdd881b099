"""Why CUDA cannot be used: what its runtime refuses with, and what NVML has to say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.printable import quoted
from gpurt.sources import nvml

# cudaError_t, driver_types.h.
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100
_REFUSALS: Final[Mapping[int, tuple[ReasonCode, str | None]]] = {
    46: (ReasonCode.ERROR, "another process has the GPU in exclusive mode: stop it, or `nvidia-smi -c 0`"),
    802: (ReasonCode.NO_DRIVER, "start the fabric manager: `sudo systemctl start nvidia-fabricmanager`"),
    803: (ReasonCode.DRIVER_MISMATCH, "reboot, or reload the kernel modules"),
    804: (ReasonCode.DRIVER_MISMATCH, "remove the cuda-compat package, which this GPU does not support"),
}


def driver_trouble() -> BackendUnavailable | None:
    """What NVML has against the driver; None when it shows devices, or cannot be asked. Opens and closes NVML."""
    try:
        session = nvml.open_session()
        try:
            cards = session.devices()
        finally:
            session.close()
    except BackendUnavailable as trouble:
        return None if trouble.reason is ReasonCode.NO_LIBRARY else trouble
    return None if cards else _unavailable("the NVIDIA driver shows no device", ReasonCode.NO_DEVICE, None, None)


def not_counted(
    exc: Any,
    driver_version: Callable[[], str | None],
    environ: Mapping[str, str],
    trouble: BackendUnavailable | None,
    cards: int,
) -> BackendUnavailable:
    """What it means that CUDA cannot count its devices.

    Args:
        exc: CuPy's ``CUDARuntimeError``.
        driver_version: tells it; None where CUDA finds no driver.
        trouble: what NVML had to say if it could not be asked.
        cards: how many NVML shows.
    """
    if exc.status == _NO_DEVICE:
        return no_device(environ, trouble, cards)
    if exc.status != _INSUFFICIENT_DRIVER:
        reason, hint = _REFUSALS.get(exc.status, (ReasonCode.ERROR, trouble.hint if trouble else None))
        return _unavailable(str(exc), reason, exc.status, hint)
    # Of a driver that is absent, too old, mismatched or closed to us, CUDA says "insufficient" alike.
    if trouble is None and (version := driver_version()) is not None:
        text = f"the NVIDIA driver {version} is too old for the installed CuPy"
        hint = "update the NVIDIA driver, or install the CuPy of its CUDA version (cupy-cuda12x for CUDA 12)"
        return _unavailable(text, ReasonCode.DRIVER_MISMATCH, exc.status, hint)
    if trouble is None:
        text = "the NVIDIA driver works, but its CUDA library (libcuda) is not there"
        hint = "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; otherwise reinstall the driver"
        return _unavailable(text, ReasonCode.DRIVER_MISMATCH, exc.status, hint)
    text = f"CUDA finds no usable driver; NVML: {trouble.message}"
    if trouble.reason in (ReasonCode.NO_DRIVER, ReasonCode.DRIVER_MISMATCH, ReasonCode.NO_PERMISSION):
        return _unavailable(text, trouble.reason, exc.status, trouble.hint)
    return _unavailable(text, ReasonCode.NO_DRIVER, exc.status, "install the NVIDIA driver")


def no_device(environ: Mapping[str, str], trouble: BackendUnavailable | None, cards: int) -> BackendUnavailable:
    """What it means that CUDA counts no device. The arguments are those of :func:`not_counted`."""
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None and (cards or trouble):
        text = f"CUDA_VISIBLE_DEVICES={quoted(mask)} leaves no device" + (f" of {cards}" if cards else "")
        hint = "unset CUDA_VISIBLE_DEVICES, or name devices that exist"
        return _unavailable(text, ReasonCode.HIDDEN_BY_ENVIRONMENT, _NO_DEVICE, hint)
    return _unavailable("CUDA works and finds no device", ReasonCode.NO_DEVICE, _NO_DEVICE, None)


def _unavailable(text: str, reason: ReasonCode, code: int | None, hint: str | None) -> BackendUnavailable:
    return BackendUnavailable(text, reason=reason, backend="cuda", code=code, hint=hint)
