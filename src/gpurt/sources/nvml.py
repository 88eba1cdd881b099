"""NVIDIA's management library through nvidia-ml-py: which GPUs there are, and how they are, without a CUDA context.

The library is initialised once per process however many sessions are open, and again in a forked child, which
inherits nothing usable. Calls block (microseconds on a healthy driver, without end on a hung one) and release
the GIL. All of this is thread-safe.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpurt.errors import BackendClosed, BackendUnavailable, DeviceLost, DeviceNotFound, ReasonCode
from gpurt.identity import normalize_pci_address
from gpurt.sources.nvml_device import (
    GPU_IS_LOST,
    NO_PERMISSION,
    FieldReader,
    NvmlDevice,
    NvmlPartition,
    describe_device,
    describe_error,
    error_code,
    error_state,
    read_telemetry,
)
from gpurt.types import Telemetry

__all__ = ["NvmlDevice", "NvmlPartition", "NvmlSession", "open_session"]

_log = logging.getLogger("gpurt.sources.nvml")

_INSTALL_HINT = "pip install nvidia-ml-py"

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
    12: (
        ReasonCode.NO_DRIVER,
        "libnvidia-ml not found: the NVIDIA driver is not installed",
        "install the NVIDIA driver; in a container, start it with the NVIDIA container toolkit (`--gpus all`)",
    ),
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


class _Library:
    """NVML, initialised in process ``pid``. Lives as long as a session or a running call refers to it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.references = 0
        self.nvml = _initialize()
        self.handles: dict[str, Any] = {}
        """Device handles by PCI address."""
        self.driver_version = FieldReader(self.nvml).text("driver_version", "nvmlSystemGetDriverVersion")


# Guards the reference counts, and initialisation so that it happens once; never held during other NVML calls,
# which may not return.
_lock = threading.Lock()
_library: _Library | None = None


def _forget_parent() -> None:
    global _lock, _library
    _lock = threading.Lock()  # another thread of the parent may have held it
    _library = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


def open_session() -> NvmlSession:
    """Open NVML, or share it if this process has it open.

    Raises:
        BackendUnavailable: with the reason code, NVML's own code in ``code``, and the remedy in ``hint``.
    """
    with _lock:
        return NvmlSession(_acquire())


class NvmlSession:
    """A reference to the process's NVML. Get one from :func:`open_session`; usable from any thread."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self._closed = False

    @property
    def driver_version(self) -> str | None:
        """As NVIDIA prints it, ``590.48.01``."""
        return self._library.driver_version

    def devices(self, root: Path = Path("/")) -> tuple[NvmlDevice, ...]:
        """Every GPU, in NVML's order. A GPU that fails is in the list, with its state and what is known of it.

        ``root`` is where the host's own figures are read from (:mod:`gpurt.sources.host`).

        Raises:
            BackendUnavailable: NVML gives access to none of the GPUs, so it cannot be said which there are.
            BackendClosed: after ``close``.
        """
        with self._use() as library:
            nvml = library.nvml
            try:
                count = int(nvml.nvmlDeviceGetCount())
            except Exception as exc:
                raise _unavailable(exc, "nvmlDeviceGetCount") from exc
            found: list[NvmlDevice] = []
            refused: list[Exception] = []
            for index in range(count):
                try:
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                except Exception as exc:  # one device's failure is that device's
                    found.append(NvmlDevice(index, state=error_state(exc), reason=describe_error(exc)))
                    if error_code(exc) != GPU_IS_LOST:
                        refused.append(exc)
                else:
                    found.append(describe_device(nvml, index, handle, root))
            if count and len(refused) == count:
                raise _unavailable(refused[0], "nvmlDeviceGetHandleByIndex") from refused[0]
            return tuple(found)

    def telemetry(self, pci_address: str, root: Path = Path("/")) -> Telemetry:
        """One reading of the GPU at a PCI address (any spelling). What cannot be read is None with its reason.

        Raises:
            DeviceNotFound: not an address, or no NVIDIA GPU there. DeviceLost: it has fallen off the bus.
            BackendClosed: after ``close``.
        """
        address = normalize_pci_address(pci_address)
        if address is None:
            raise DeviceNotFound(f"{pci_address!r} is not a PCI address", operation="NVML telemetry")
        with self._use() as library:
            fields = FieldReader(library.nvml)
            handle = library.handles.get(address)
            if handle is None:
                handle = fields.read("handle", "nvmlDeviceGetHandleByPciBusId", address.encode())
            if handle is None:
                return _without_handle(address, fields)
            reading = read_telemetry(fields, handle, root)
            if fields.lost is not None:
                library.handles.pop(address, None)
                raise _lost(address) from fields.lost
            library.handles[address] = handle
            return reading

    def close(self) -> None:
        """Drop this reference; the last one shuts NVML down, once no call runs any more. Idempotent."""
        with _lock:
            if not self._closed:
                self._closed = True
                _release(self._library)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _use(self) -> Generator[_Library]:
        """The library, kept open during one call even if the session is closed meanwhile."""
        with _lock:
            if self._closed:
                raise BackendClosed("the NVML session is closed", backend="nvml", hint="open a new session")
            if self._library.pid != os.getpid():
                self._library = _acquire()
            library = self._library
            library.references += 1
        try:
            yield library
        finally:
            with _lock:
                _release(library)


def _acquire() -> _Library:
    """The process's library with one more reference. The caller holds the lock."""
    global _library
    if _library is None:
        _library = _Library()
    _library.references += 1
    return _library


def _release(library: _Library) -> None:
    """Give one reference back. The caller holds the lock."""
    global _library
    if library.pid != os.getpid():
        return  # the parent's: it is not initialised here, and not ours to shut down
    library.references -= 1
    if library.references:
        return
    _library = None
    try:
        library.nvml.nvmlShutdown()
    except Exception as exc:  # closing must not fail, and nothing depends on it
        _log.warning("nvmlShutdown failed: %s", exc)


def _initialize() -> Any:
    """The ``pynvml`` module, initialised."""
    try:
        nvml: Any = import_module("pynvml")
    except Exception as exc:
        # Not only ImportError: old distributions under this name raise whatever Python 2 code raises today.
        message = f"Python package nvidia-ml-py cannot be imported: {exc}"
        raise BackendUnavailable(
            message, reason=ReasonCode.NO_LIBRARY, install_hint=_INSTALL_HINT, backend="nvml"
        ) from exc
    if not hasattr(nvml, "nvmlInit"):
        raise BackendUnavailable(
            f"the module pynvml at {getattr(nvml, '__file__', '?')} is not nvidia-ml-py",
            reason=ReasonCode.NO_LIBRARY,
            install_hint=f"pip uninstall {_distribution()} && {_INSTALL_HINT}",
            backend="nvml",
        )
    if not hasattr(nvml, "nvmlMemory_v2"):
        _log.warning(
            "module pynvml comes from %s, which cannot tell used from reserved memory; run `pip uninstall %s && %s`",
            *(_distribution(), _distribution(), _INSTALL_HINT),
        )
    try:
        nvml.nvmlInit()
    except Exception as exc:
        raise _unavailable(exc, "nvmlInit") from exc
    return nvml


def _distribution() -> str:
    from importlib.metadata import packages_distributions

    return " ".join(sorted(set(packages_distributions().get("pynvml", ())))) or "pynvml"


def _unavailable(exc: BaseException, operation: str) -> BackendUnavailable:
    code = error_code(exc)
    reason, message, hint = _UNAVAILABLE.get(code or 0, (ReasonCode.ERROR, f"NVML failed: {exc}", None))
    return BackendUnavailable(message, reason=reason, backend="nvml", operation=operation, code=code, hint=hint)


def _lost(address: str) -> DeviceLost:
    return DeviceLost(
        f"the GPU at {address} has fallen off the bus",
        operation="NVML telemetry",
        code=GPU_IS_LOST,
        hint="reboot the machine; see `dmesg | grep Xid`",
    )


def _without_handle(address: str, fields: FieldReader) -> Telemetry:
    if fields.lost is not None:
        raise _lost(address) from fields.lost
    code = error_code(fields.error) if fields.error is not None else None
    if code in (_INVALID_ARGUMENT, _NOT_FOUND, _GPU_NOT_FOUND):
        raise DeviceNotFound(f"no NVIDIA GPU at {address}", operation="NVML telemetry", code=code) from fields.error
    metrics = [name for name in Telemetry.model_fields if name != "unavailable"]
    return Telemetry(unavailable=dict.fromkeys(metrics, fields.unavailable["handle"]))
