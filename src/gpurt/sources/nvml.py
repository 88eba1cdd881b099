"""NVIDIA's management library through nvidia-ml-py: which GPUs there are, and how they are, without a CUDA context.

The library is initialised once per process however many sessions are open, and again in a forked child, which
inherits nothing usable. Calls block (microseconds on a healthy driver, without end on a hung one) and release
the GIL. All of this is thread-safe.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from gpurt.errors import BackendClosed, BackendUnavailable, DeviceNotFound, ReasonCode
from gpurt.identity import normalize_pci_address, normalize_uuid
from gpurt.sources.condition import DeviceCondition
from gpurt.sources.nvml_condition import NvmlProcesses, read_condition, read_processes
from gpurt.sources.nvml_device import (
    NvmlDevice,
    NvmlPartition,
    describe_device,
    describe_error,
    error_state,
    read_telemetry,
)
from gpurt.sources.nvml_errors import device_lost, reason_of_no_handle, unavailable
from gpurt.sources.nvml_fields import GPU_IS_LOST, FieldReader, error_code
from gpurt.sources.parallel import ask_each
from gpurt.types import Telemetry

__all__ = ["NvmlDevice", "NvmlPartition", "NvmlSession", "open_session"]

_Answer = TypeVar("_Answer")

_log = logging.getLogger("gpurt.sources.nvml")

_INSTALL_HINT = "pip install nvidia-ml-py"

_MAX_DEVICES = 1024
"""More than a host can have: a larger count is not one, and must not be counted to."""

_METRICS = tuple(name for name in Telemetry.model_fields if name != "unavailable")
_CONDITIONS = tuple(field.name for field in dataclass_fields(DeviceCondition) if field.name != "unavailable")


class _Library:
    """NVML, initialised in process ``pid``. Lives as long as a session or a running call refers to it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.references = 0
        self.nvml = _initialize()
        self.handles: dict[str, Any] = {}
        """Device handles by PCI address."""
        self.mig_modes: dict[str, bool] = {}
        """Whether MIG is on, by UUID. Asked once: CUDA, too, sees a change of it in new processes only."""
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
                raise unavailable(exc, "nvmlDeviceGetCount") from exc
            if not 0 <= count <= _MAX_DEVICES:
                raise BackendUnavailable(
                    f"NVML counts {count} GPUs",
                    backend="nvml",
                    operation="nvmlDeviceGetCount",
                    hint="reboot the machine",
                )
            refused: dict[int, Exception] = {}

            def describe(index: int) -> NvmlDevice:
                try:
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                except Exception as exc:  # one device's failure is that device's
                    if error_code(exc) != GPU_IS_LOST:
                        refused[index] = exc
                    return NvmlDevice(index, state=error_state(exc), reason=describe_error(exc))
                return describe_device(nvml, index, handle, root, library.mig_modes)

            found = ask_each(describe, range(count))
            if count and len(refused) == count:
                raise unavailable(refused[0], "nvmlDeviceGetHandleByIndex") from refused[0]
            return tuple(found)

    def telemetry(self, pci_address: str, root: Path = Path("/")) -> Telemetry:
        """One reading of the GPU at a PCI address (any spelling), or, where a GPU has none, of a UUID. What cannot be
        read is None with its reason.

        Raises:
            DeviceNotFound: neither of them, or no NVIDIA GPU there. DeviceLost: it has fallen off the bus.
            BackendClosed: after ``close``.
        """
        return self._ask(
            pci_address,
            lambda fields, handle: read_telemetry(fields, handle, root),
            lambda reason: Telemetry(unavailable=dict.fromkeys(_METRICS, reason)),
        )

    def condition(self, pci_address: str) -> DeviceCondition:
        """ECC errors, remapped rows, throttling, recovery action and PCIe link of one GPU; raises as ``telemetry``."""
        return self._ask(
            pci_address, read_condition, lambda reason: DeviceCondition(unavailable=dict.fromkeys(_CONDITIONS, reason))
        )

    def processes(self, pci_address: str) -> NvmlProcesses:
        """The compute processes on one GPU; raises as ``telemetry``."""
        return self._ask(pci_address, read_processes, lambda reason: NvmlProcesses(None, reason))

    def _ask(
        self, pci_address: str, read: Callable[[FieldReader, Any], _Answer], nothing: Callable[[str], _Answer]
    ) -> _Answer:
        """What ``read`` makes of one GPU's handle, or ``nothing`` with the reason why there is no handle."""
        address, uuid = normalize_pci_address(pci_address), None
        if address is None:
            uuid = address = normalize_uuid(pci_address) if "-" in pci_address else None
        if address is None:
            raise DeviceNotFound(f"{pci_address!r} is neither a PCI address nor a UUID", operation="NVML telemetry")
        with self._use() as library:
            fields = FieldReader(library.nvml)
            handle = library.handles.get(address)
            if handle is None and uuid is None:
                handle = fields.read("handle", "nvmlDeviceGetHandleByPciBusId", address.encode())
            elif handle is None:
                handle = _handle_of_uuid(fields, uuid)
            if handle is None:
                return nothing(reason_of_no_handle(address, fields))
            reading = read(fields, handle)
            if fields.lost is not None:
                library.handles.pop(address, None)
                raise device_lost(address) from fields.lost
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


def _handle_of_uuid(fields: FieldReader, uuid: str | None) -> Any:
    """By comparing: NVML's own look-up wants the UUID as each driver writes it."""
    for index in range(fields.number("handle", 0, _MAX_DEVICES, "nvmlDeviceGetCount") or 0):
        handle = fields.read("handle", "nvmlDeviceGetHandleByIndex", index)
        if handle is not None and normalize_uuid(fields.text("handle", "nvmlDeviceGetUUID", handle)) == uuid:
            fields.unavailable.pop("handle", None)
            return handle
    if fields.lost is None and "handle" not in fields.unavailable:
        raise DeviceNotFound(f"no NVIDIA GPU has the UUID {uuid}", operation="NVML telemetry")
    return None


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
        raise unavailable(exc, "nvmlInit") from exc
    return nvml


def _distribution() -> str:
    from importlib.metadata import packages_distributions

    return " ".join(sorted(set(packages_distributions().get("pynvml", ())))) or "pynvml"
